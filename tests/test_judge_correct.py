"""What is counted of correction models' outputs, and the texts that they are judged by."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluate_correct import corrections, corrections_line
from judge_correct import LEARNERS, Judged, listing, read_pairs, summary
from messages import check_message


def test_texts_are_counted_by_what_became_of_them() -> None:
    judged = [
        Judged("He go home.", "He goes home.", "He goes home."),
        Judged("He go at home.", "He goes home.", "He go home."),
        Judged("He go home.", "He goes home.", "He go home."),
        Judged("He go home.", "He goes home.", "He gone home."),
        Judged("He go home.", "He goes home.", "She go to home."),
        Judged("It is late.", "It is late.", "It is late."),
        Judged("It is 9:30.", "It is 9:30.", "It is 9."),
    ]
    assert summary(judged) == [
        "5 texts with errors: 1 corrected exactly; 2 improved, 1 unchanged, "
        "1 as wrong in another way, 1 worse",
        "  wrong words: 6 before, 6 after",
        "2 right ones: 1 unchanged, 1 wrong words after",
    ]
    assert listing(judged[4:]) == [
        "", "   text  He go home.", "   good  He goes home.", "1 > 3  She go to home.",
        "", "   good  It is 9:30.", "0 > 1  It is 9.",
    ]  # fmt: skip


def test_a_hundred_texts_have_errors_and_fifty_have_none() -> None:
    pairs = read_pairs(LEARNERS)
    assert sum(text != correction for text, correction in pairs) == 100
    assert sum(text == correction for text, correction in pairs) == 50
    assert len(set(pairs)) == 150


def test_a_line_without_a_correction_is_named(tmp_path: Path) -> None:
    (tmp_path / "texts.tsv").write_text("a\ta\nb\n")
    with pytest.raises(ValueError, match="line 2") as info:
        read_pairs(tmp_path / "texts.tsv")
    check_message(str(info.value), "0 tabs")


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
