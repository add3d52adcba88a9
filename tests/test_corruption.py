"""The rules that damage sentences, and the measures of the correction task."""

from __future__ import annotations

import random

import corruption
import pytest


@pytest.mark.parametrize(
    ("rule", "words", "expected"),
    [
        ("drop_stop", "It is late.", {"It is late"}),
        ("drop_stop", "It is late", {None}),
        ("drop_capital", "Tom likes Mary.", {"tom likes Mary.", "Tom likes mary."}),
        ("drop_apostrophe", "It's late, isn't it?", {"Its late, isn't it?", "It's late, isnt it?"}),
        ("drop_word", "He went to the sea.", {"He went the sea.", "He went to sea."}),
        ("double_word", "Tom ran.", {"Tom tom ran."}),
        ("slip", "I do.", {None}),
    ],
)
def test_rules(rule: str, words: str, expected: set[str | None]) -> None:
    found = [getattr(corruption, rule)(words.split(), random.Random(i)) for i in range(20)]
    assert {out and " ".join(out) for out in found} == expected


@pytest.mark.parametrize(("words", "errors"), [("a b c", 0), ("a x c", 1), ("a a b c", 1), ("", 3)])
def test_word_errors_is_the_edit_distance(words: str, errors: int) -> None:
    assert corruption.word_errors(words, "a b c") == errors


def test_split_is_fixed() -> None:
    out = [i for i in range(20_000) if corruption.held_out(f"sentence {i}")]
    assert len(out) / 20_000 == pytest.approx(0.02, abs=0.004)
    assert out[:7] == [108, 124, 152, 203, 220, 237, 248]
