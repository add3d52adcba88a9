"""What the judge of correction models counts, and the texts that it judges by."""

from __future__ import annotations

from pathlib import Path

import pytest
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
