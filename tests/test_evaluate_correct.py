"""How corrections are counted where there is one right answer."""

from __future__ import annotations

import pytest
from evaluate_correct import corrections, corrections_line


def test_corrections_are_told_by_their_place_and_words() -> None:
    assert corrections("He go at home now.", "He goes home now.") == {(1, 3, ("goes",))}
    assert corrections("It is late.", "It is late.") == set()
    assert corrections("I go to school", "I go to the school.") == {(3, 4, ("the", "school."))}


def test_precision_counts_twice_as_much_as_recall() -> None:
    texts = ["a x c d", "a x c y", "a b", "a b"]
    outputs = ["a b c d", "a z c y", "a b", "a c"]
    references = ["a b c d", "a b c d", "a b", "a b"]
    line = corrections_line(texts, outputs, references)
    # Three were made, one of them right; three were wanted.
    assert "precision 33.3%, recall 33.3%, F0.5 33.3%; 1 of 2 right texts unchanged" in line
    line = corrections_line(texts, ["a b c d", *texts[1:]], references)
    assert "precision 100.0%, recall 33.3%, F0.5 71.4%; 2 of 2 right" in line


@pytest.mark.parametrize("texts", [[], ["a b"]])
def test_text_without_errors_has_a_line_too(texts: list[str]) -> None:
    line = corrections_line(texts, texts, texts)
    assert f"F0.5 0.0%; {len(texts)} of {len(texts)} right" in line
