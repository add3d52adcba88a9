"""Prompts on their way to the model: what they may be, and how long."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.tokenizers import ByteTokenizer
from speculative_t5.tokenizers.encoding import PromptEncoder, keep_beginning, keep_end

import numpy as np
import pytest
from conftest import POSITIONS, REPOSITORY, edit_json, tiny_causal, tiny_model
from messages import check_message

LIMIT = 512  # of a T5 whose config says nothing else


def decoder(**options: Any) -> SpeculativeDecoder:
    """A tiny T5 that reads bytes."""
    model = tiny_model(vocab_size=384)
    return SpeculativeDecoder(model, None, ByteTokenizer(Path("absent")), **options)


def ways(prompt: Any, **options: Any) -> list[Any]:
    """Every way to generate, each for this prompt."""
    engine = decoder(**options)
    return [
        lambda: engine.generate(prompt, max_tokens=2),
        lambda: next(engine.stream(prompt, max_tokens=2)),
        lambda: engine.generate_batch([[3, 1], prompt], max_tokens=2),
        lambda: list(engine.iter_batch(enumerate([[3, 1], prompt]), max_tokens=2)),
    ]


@pytest.mark.parametrize("prompt", ["x" * LIMIT, [5] * LIMIT + [1]], ids=["text", "ids"])
def test_a_prompt_that_is_too_long_is_refused(prompt: Any) -> None:
    for generate in ways(prompt):
        with pytest.raises(ValueError, match="--truncate") as caught:
            generate()
        check_message(str(caught.value), f"the prompt has {LIMIT + 1} tokens, more than the 512")
    for generate in ways(prompt[1:]):
        generate()


def test_a_longer_prompt_may_be_allowed_or_cut_on_purpose() -> None:
    text = "ab" * 300
    whole, cut = decoder(max_source_length=601), decoder(truncate=True)
    assert len(whole.fit(text).ids) == 601 and whole.fit(text).cut == 0
    expected = whole.encode(text)[: LIMIT - 1] + [1]
    assert cut.fit(text).ids == expected and cut.fit(text).cut == 601 - LIMIT
    generated = [engine.generate(text, max_tokens=4) for engine in (whole, cut)]
    assert generated[1].tokens == whole.generate(expected, max_tokens=4).tokens
    with pytest.raises(
        ValueError, match="601 tokens, more than the 600 that max_source_length allows"
    ):
        decoder(max_source_length=600).generate(text)


def test_a_prompt_is_cut_where_its_model_needs_it_least() -> None:
    assert keep_beginning([5, 6, 7, 8, 1], 3) == [5, 6, 1]
    assert keep_end([0, 5, 6, 7, 8], 3, special={0}) == [0, 7, 8]
    assert keep_end([0, 5, 6], 1, special={0}) == [6]
    ids = [2, 3, 4] * POSITIONS
    engine = SpeculativeDecoder(tiny_causal("qwen3"), truncate=True)
    assert engine.fit(ids, max_tokens=11).ids == ids[-POSITIONS + 10 :], "room for the output"
    assert len(engine.fit(ids, max_tokens=10**6).ids) == POSITIONS // 2


def test_only_a_t5_can_read_more_than_it_was_made_for() -> None:
    with pytest.raises(ValueError, match=f"at most {POSITIONS}, all that the model reads, got"):
        SpeculativeDecoder(tiny_causal("qwen3"), max_source_length=POSITIONS + 1)
    with pytest.raises(ValueError) as caught:
        SpeculativeDecoder(tiny_causal("qwen3")).generate([2] * (POSITIONS + 1))
    check_message(str(caught.value), f"{POSITIONS + 1} tokens, more than the {POSITIONS}")
    assert "max_source_length" not in str(caught.value) and "split it" in str(caught.value)


class Prefixed(ByteTokenizer):
    """A tokenizer as `load` gives it, from a folder that names a prefix."""

    prefix = "do: "


@pytest.mark.parametrize(
    ("given", "used"), [(None, "do: "), ("", ""), ("sum up: ", "sum up: "), ("x", "x")]
)
def test_a_prefix_goes_before_text_that_lacks_it(given: str | None, used: str) -> None:
    tokenizer = Prefixed(Path("absent"))
    engine = SpeculativeDecoder(tiny_model(vocab_size=384), None, tokenizer, prefix=given)
    assert engine.prefix == used
    assert engine.encode("text") == tokenizer.encode(used + "text")
    assert engine.encode(used + "text") == tokenizer.encode(used + "text"), "it is there already"
    assert engine.encode([5, 1]) == [5, 1], "ids are left alone"
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.encode(" ")


def test_a_prefix_counts_as_a_part_of_the_prompt() -> None:
    engine = decoder(prefix="do: ")
    assert len(engine.fit("x" * (LIMIT - 5)).ids) == LIMIT
    with pytest.raises(ValueError, match=f"the prompt has {LIMIT + 1} tokens"):
        engine.generate("x" * (LIMIT - 4))
    assert decoder().prefix == "", "a tokenizer that names none has none"


@pytest.mark.parametrize("prefix", [3, b"do", ["do"]])
def test_a_prefix_is_text(prefix: Any) -> None:
    with pytest.raises(ValueError, match="prefix must be a string or None, got") as caught:
        decoder(prefix=prefix)
    check_message(str(caught.value))


def test_a_folder_names_the_prefix(tmp_path: Path) -> None:
    for name in ("correct-base", "correct-small"):
        shutil.copytree(REPOSITORY / "weights" / name, tmp_path / name)
    engine = SpeculativeDecoder.from_pretrained(
        tmp_path / "correct-base", tmp_path / "correct-small"
    )
    with_it = engine.generate("correct: He go home.")
    assert engine.generate("He go home.").tokens == with_it.tokens
    bare = SpeculativeDecoder.from_pretrained(tmp_path / "correct-base", prefix="")
    assert bare.generate("correct: He go home.").tokens == with_it.tokens
    assert bare.encode("He go home.") == bare.tokenizer.encode("He go home.")  # type: ignore
    for wrong in (3, ["correct: "], True):
        edit_json(tmp_path / "correct-base" / "config.json", prefix=wrong)
        with pytest.raises(ValueError, match="expected a string") as caught:
            load(tmp_path / "correct-base")
        check_message(str(caught.value), "prefix in ")
    edit_json(tmp_path / "correct-base" / "config.json", prefix=None)
    assert load(tmp_path / "correct-base")[1].prefix == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_source_length", [1, 0, -3, 2.5, "9"])
def test_max_source_is_an_integer(max_source_length: Any) -> None:
    with pytest.raises(ValueError, match="max_source_length must be an integer of at least 2, got"):
        decoder(max_source_length=max_source_length)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (None, "None"),
        (b"x", "b'x' (bytes)"),
        (np.array(5), "array(5) (ndarray)"),
        (7, "7 (int)"),
        (["a"], "a list that holds 'a' (str)"),
        ([3, None], "a list that holds None"),
        ([3.5], "a list that holds 3.5 (float)"),
        ({"role": "user", "content": "x"}, "{'role': 'user', 'content': 'x'} (dict)"),
    ],
)
def test_what_is_not_a_prompt_is_refused_in_one_line(prompt: Any, found: str) -> None:
    for generate in ways(prompt):
        with pytest.raises(ValueError) as caught:
            generate()
        assert str(caught.value).startswith("a prompt must be text, a list of ids or a list of mes")
        assert str(caught.value).endswith(f"got {found}")


@pytest.mark.parametrize("prompts", ["text", b"text", None, 3, {}])
def test_what_is_not_a_list_of_prompts_is_refused_in_one_line(prompts: Any) -> None:
    for generate in (decoder().generate_batch, decoder().iter_batch):
        with pytest.raises(ValueError, match="^prompts must be a list of them, got ") as caught:
            generate(prompts)
        check_message(str(caught.value))


def test_iter_batch_takes_pairs() -> None:
    for prompts in (["a"], [3], [(0, "a", "b")]):
        with pytest.raises(ValueError, match="an index with its prompt, as enumerate") as caught:
            list(decoder().iter_batch(prompts))  # type: ignore[arg-type]
        check_message(str(caught.value))


def test_ids_may_be_numbers_of_any_kind() -> None:
    engine = decoder()
    assert engine.encode(np.array([3, 1])) == engine.encode((3, 1)) == [3, 1]  # type: ignore


def test_characters_that_the_vocabulary_lacks_are_found() -> None:
    model, tokenizer = load(REPOSITORY / "weights" / "correct-base")
    encoder = PromptEncoder(model, tokenizer)
    found = encoder.fit("correct: He \u2603 go \u4e16\u754c home \u2603.", 9)
    assert found.unknown == "\u2603\u4e16\u754c"
    assert encoder.fit("He go home.", 9).unknown == ""
    assert encoder.fit([5, 2, 1], 9).unknown == "", "ids have no characters"
    assert PromptEncoder(tiny_model(vocab_size=384), ByteTokenizer(Path("absent"))).fit(
        "\u2603", 9
    ).unknown == ""  # fmt: skip
