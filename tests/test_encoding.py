"""Prompts on their way to the model: what they may be, and how long."""

import pickle
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.tokenizers import ByteTokenizer, PromptEncoder, PromptTooLong
from speculative_t5.tokenizers.prompts import keep_beginning

import numpy as np
import pytest
from checkpoints import refused
from conftest import POSITIONS, tiny_causal, tiny_model

LIMIT = 512  # of a T5 whose config says nothing else


def decoder(tokenizer: Any = None, **options: Any) -> SpeculativeDecoder:
    """A tiny T5 that reads bytes."""
    tokenizer = tokenizer or ByteTokenizer(Path("absent"))
    return SpeculativeDecoder(tiny_model(vocab_size=384), None, tokenizer, **options)


TOO_LONG = f"the prompt has {LIMIT + 1} tokens, more than the 512"


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ("", "the prompt is empty"),
        ("x" * LIMIT, TOO_LONG),
        ([5] * LIMIT + [1], TOO_LONG),
        ([5] * LIMIT + [384], TOO_LONG),  # not all of so many are looked at
        ([5, 384], "from 0 to 383, got 384"),
        (None, "got None"),
        (b"x", "got b'x'"),
        (np.array(5), "got array(5)"),
        (7, "got 7"),
        (["a"], "got a list that holds 'a'"),
        ([3.5], "got a list that holds 3.5"),
        ({}, "got {}"),
    ],
)
def test_the_index_of_a_bad_prompt_is_named(bad: Any, found: str) -> None:
    engine = decoder()
    with refused("^(?!at index)", found):
        engine.generate(bad, max_tokens=2)
    with refused("^(?!at index)", found):
        next(engine.stream(bad, max_tokens=2))
    with refused("^at index 1, ", found):
        engine.generate_batch([[3, 1], bad], max_tokens=2)
    with refused("^at index 7, ", found):
        list(engine.iter_batch([(0, [3, 1]), (7, bad)], max_tokens=2))


def test_a_longer_prompt_may_be_allowed_or_cut() -> None:
    text = "ab" * 300
    whole, cut = decoder(max_source_length=601), decoder(truncate=True)
    assert len(whole.fit(text).ids) == 601 and whole.fit(text).cut == 0
    expected = whole.encode(text)[: LIMIT - 1] + [1]
    assert cut.fit(text).ids == expected and cut.fit(text).cut == 601 - LIMIT
    generated = [engine.generate(text, max_tokens=4) for engine in (whole, cut)]
    assert generated[1].tokens == whole.generate(expected, max_tokens=4).tokens
    with refused("601 tokens, more than the 600 that max_source_length allows"):
        decoder(max_source_length=600).generate(text)


def test_a_text_that_cannot_fit_is_not_even_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has many callers, and a text of megabytes takes seconds."""
    most = 64 * LIMIT
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [5, 1])
    assert decoder().fit("x" * most).ids == [5, 1]
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    found = f"the prompt has {most + 1} characters, and 512 tokens is all"
    with refused("truncate to cut it", found):
        decoder().fit("x" * (most + 1))


def test_what_is_too_long_is_told_apart_from_what_to_do() -> None:
    with pytest.raises(PromptTooLong) as refusal:
        decoder(max_source_length=8).generate("one: two: three")
    refusal.value.put_before("at index 3, ")
    for error in (refusal.value, pickle.loads(pickle.dumps(refusal.value))):
        found = (
            "at index 3, the prompt has 16 tokens, more than the 8 that max_source_length allows"
        )
        assert error.found == found
        assert str(error).startswith(f"{found}: use rewrite to split it, truncate to cut it")


def test_cutting_keeps_the_part_that_matters_most() -> None:
    assert keep_beginning([5, 6, 7, 8, 1], 3, special={1}) == [5, 6, 1]
    assert keep_beginning([2, 5, 6, 7, 8], 3, special={1, 2}) == [2, 5, 6]


def test_a_decoder_only_model_reads_no_more_than_its_context() -> None:
    with refused(f"at most {POSITIONS}, all that the model reads, got"):
        SpeculativeDecoder(tiny_causal("qwen3"), max_source_length=POSITIONS + 1)
    with refused("^(?!.*max_source_length).*split it", f"{POSITIONS + 1} tokens, more than the"):
        SpeculativeDecoder(tiny_causal("qwen3")).generate([2] * (POSITIONS + 1))
    with refused("truncate cuts a prompt's end, which a decoder-only model goes on from"):
        SpeculativeDecoder(tiny_causal("qwen3"), truncate=True)


class Prefixed(ByteTokenizer):
    """A tokenizer as `load` returns it, from a folder that names a prefix."""

    prefix = "do: "


@pytest.mark.parametrize(("given", "used"), [(None, "do: "), ("", ""), ("sum up: ",) * 2])
def test_a_prefix_goes_before_text_that_lacks_it(given: str | None, used: str) -> None:
    tokenizer = Prefixed(Path("absent"))
    engine = decoder(tokenizer, prefix=given)
    assert engine.prefix == used
    assert engine.encode("text") == tokenizer.encode(used + "text")
    assert engine.encode(used + "text") == tokenizer.encode(used + "text"), "it is there already"
    assert engine.encode([5, 1]) == [5, 1], "ids get none"
    with refused("the prompt is empty"):
        engine.encode(" ")
    length = len(used.encode())
    assert len(engine.fit("-" * (LIMIT - 1 - length)).ids) == LIMIT
    with refused(f"the prompt has {LIMIT + 1} tokens"):
        engine.generate("-" * (LIMIT - length))


def test_bad_options_are_refused() -> None:
    for length in (1, 0, -3, 2.5, "9"):
        with refused("max_source_length must be an integer of at least 2, got"):
            decoder(max_source_length=length)
    for prefix in (3, b"do", ["do"]):
        with refused("prefix must be a string or None, got"):
            decoder(prefix=prefix)


def test_other_things_than_lists_of_prompts_are_refused() -> None:
    engine = decoder()
    for prompts in ("text", b"text", None, 3, {}):
        for generate in (engine.generate_batch, engine.iter_batch):
            with refused("^prompts must be a list of them, got "):
                generate(prompts)  # type: ignore[operator]
    for pairs in (["a"], [3], [(0, "a", "b")]):
        with refused("an index with its prompt, as enumerate"):
            list(engine.iter_batch(pairs))  # type: ignore[arg-type]
    assert engine.encode(np.array([3, 1])) == engine.encode((3, 1)) == [3, 1]  # type: ignore


def test_characters_that_the_vocabulary_lacks_are_found(lacking: Path) -> None:
    encoder = PromptEncoder(*load(lacking))
    found = encoder.fit("He \u2603 go \u4e16\u754c home \u2603.")
    assert found.unknown == "\u2603\u4e16\u754c"
    assert encoder.fit([5, 2, 1]).unknown == "", "ids have no characters"
    assert decoder().fit("\u2603").unknown == "", "bytes have them all"


def test_what_is_wrong_with_a_long_prompt_is_known_without_advice() -> None:
    with pytest.raises(PromptTooLong) as refusal:
        decoder(max_source_length=3).generate_batch(["long"])
    for error in (refusal.value, pickle.loads(pickle.dumps(refusal.value))):
        found = "at index 0, the prompt has 5 tokens, more than the 3 that max_source_length allows"
        assert error.found == found
        assert str(error).startswith(f"{found}: use rewrite to split it")
