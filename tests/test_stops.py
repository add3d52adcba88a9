"""Stop strings and stop ids: the same text and reason wherever tokens and rounds end."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.generation.outputs import StoppedText
from speculative_t5.tokenizers import pieces

import pytest
from conftest import EOS, tiny_pair


def by_definition(text: str, stops: list[str]) -> str | None:
    """Return the text before the stop string that ends first; None if there is none."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


WORDS = ["", "", "a", "b", "ab", "ba", "c", "abc", "cb", "aca", "bb", "cc", "ac", "bc", "cab"]


class Letters:
    """A tokenizer whose ids are one to three letters long, so that stops cross their borders."""

    vocabulary: Any = None

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self.words = words

    def encode(self, text: str) -> list[int]:
        return [*(self.words.index(letter) for letter in text), EOS]

    def decode(self, ids: Any) -> str:
        return "".join(self.words[i] for i in ids)


STOPS = [["ab"], ["bc", "abc"], ["abab"], ["b", "abc"], ["aab", "ba"], ["bcd", "c"], ["aaa", "ca"]]


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_a_text_is_cut_alike_however_it_comes_in_pieces(stops: list[str]) -> None:
    rng = random.Random(0)
    for letters in itertools.product("abc", repeat=6):
        text = "".join(letters)
        cuts = sorted(rng.sample(range(1, 6), rng.randrange(4)))
        parts = [text[i:j] for i, j in itertools.pairwise([0, *cuts, 6])]
        parts.insert(rng.randrange(len(parts) + 1), "")
        found = StoppedText(Letters(parts), stops)
        shown = ""
        for part in range(len(parts)):
            shown += found.add(part)
            expected = by_definition(text, stops)
            assert (text if expected is None else expected).startswith(shown)
        shown += found.finish()
        assert found.stopped == (expected is not None)
        assert shown == (text if expected is None else expected), (text, parts)


def test_only_text_that_may_begin_a_stop_string_is_held_back() -> None:
    found = StoppedText(Letters(["xE", "N", "xEND", "y"]), ["END"])
    assert [found.add(part) for part in range(4)] == ["x", "", "ENx", ""]
    assert found.stopped and found.finish() == ""


@pytest.fixture(scope="module", params=["t5", "qwen3"])
def decoders(request: Any) -> dict[str, SpeculativeDecoder]:
    seed = {"t5": 3, "qwen3": 9}[request.param]
    target, draft = tiny_pair(request.param, vocab_size=15, layers=2, seed=seed)
    tokenizer: Any = Letters()
    return {
        "plain": SpeculativeDecoder(target, None, tokenizer),
        "model": SpeculativeDecoder(target, draft, tokenizer, num_draft=4),
        "both": SpeculativeDecoder(target, draft, tokenizer, num_draft=4, lookup=True),
    }


PROMPTS = [[6, 2, 3, EOS], [4, 4, 8, 9, EOS], [2, EOS], [9, 13, 5, EOS], [7, 3, 3, 11, 2, EOS]]


@pytest.mark.parametrize("where", [(3, 5), (4, 8), (6, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_outputs_end_before_the_first_stop_string(
    decoders: dict[str, SpeculativeDecoder], where: tuple[int, int], temperature: float
) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": 5}
    reasons = set()
    texts = [decoders["plain"].generate(prompt, **options).text for prompt in PROMPTS[:2]]
    stops = [text[slice(*where)] for text in texts]
    for decoder in decoders.values():
        whole = decoder.generate_batch(PROMPTS, **options)
        found = decoder.generate_batch(PROMPTS, stop=stops, batch_size=2, **options)
        for before, out in zip(whole, found, strict=True):
            expected = by_definition(before.text, stops)
            stopped = expected is not None
            assert out.text == (expected if stopped else before.text)
            assert "".join(out.pieces) == out.text
            assert out.finish_reason == ("stop" if stopped else before.finish_reason)
            assert out.tokens == before.tokens[: len(out.tokens)]
            spelled = Letters().decode(out.tokens)
            assert not stopped or by_definition(spelled, stops) == expected
            assert not stopped or by_definition(Letters().decode(out.tokens[:-1]), stops) is None
            assert len(list(out.stats.origins())) == out.stats.emitted
            reasons.add(out.finish_reason)
    assert "stop" in reasons


@pytest.mark.parametrize("where", [(3, 5), (4, 8), (6, 7)])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_streams_end_as_outputs_do(
    decoders: dict[str, SpeculativeDecoder], where: tuple[int, int], temperature: float
) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": temperature, "seed": 5}
    texts = [decoders["plain"].generate(prompt, **options).text for prompt in PROMPTS[:2]]
    stops = [text[slice(*where)] for text in texts]
    for decoder in decoders.values():
        out = decoder.generate(PROMPTS[0], stop=stops, **options)
        chunks = list(decoder.stream(PROMPTS[0], stop=stops, **options))
        assert "".join(chunk.text for chunk in chunks) == out.text
        assert chunks[-1].finish_reason == out.finish_reason
        assert [t for chunk in chunks for t in chunk.tokens] == out.tokens
        origins = [origin for chunk in chunks for origin in chunk.origins]
        assert origins == [token.origin for token in out.trace]


def test_stop_ids_end_an_output_as_eos_does(decoders: dict[str, SpeculativeDecoder]) -> None:
    reasons = []
    first = decoders["plain"].generate(PROMPTS[0], max_tokens=20).tokens
    ids = [first[4], first[7]]
    for prompt in PROMPTS:
        whole = decoders["plain"].generate(prompt, max_tokens=20)
        wanted = [token for token in whole.tokens if token in ids]
        for decoder in decoders.values():
            out = decoder.generate(prompt, max_tokens=20, stop_token_ids=ids)
            reasons.append(out.finish_reason)
            if wanted:
                count = whole.tokens.index(wanted[0])
                assert (out.tokens, out.finish_reason) == (whole.tokens[:count], "stop")
                assert out.stats.emitted == count + 1
                *_, last = decoder.stream(prompt, max_tokens=20, stop_token_ids=ids)
                assert last.end_id == wanted[0]
            else:
                assert out.tokens == whole.tokens
    assert "stop" in reasons


def test_min_tokens_puts_off_stops(decoders: dict[str, SpeculativeDecoder]) -> None:
    for decoder, prompt in itertools.product(decoders.values(), PROMPTS):
        out = decoder.generate(
            prompt, max_tokens=20, min_tokens=6, stop="b", stop_token_ids=[6, 9, 12]
        )
        assert len(out.tokens) >= 6
        assert not {6, 9, 12}.intersection(out.tokens[:6])


def test_a_stop_string_counts_from_a_number_of_tokens_on() -> None:
    def text(letters: str, min_tokens: int = 0) -> tuple[str, ...]:
        ids = Letters().encode(letters)[:-1]
        return pieces(ids, StoppedText(Letters(), ["ab"], min_tokens), end=True)

    found = ["".join(text(letters, least)) for letters, least in (("abcabc", 3), ("abcabc", 2))]
    assert found == ["abc", ""] and "".join(text("abc", 9)) == "abc"
    assert text("caca") == ("c", "", "ac", "a") and text("") == ()
    search = StoppedText(Letters(), ["bca"])
    assert search([2, 3]) is None and search([2, 13, 9]) == 3, "which completes it"
