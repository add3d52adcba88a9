"""Pages that show what changed in a text."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, fromstring

from speculative_t5.documents import Rewritten, changes, lines, rewrite
from speculative_t5.documents.comparison import CONTEXT

import pytest
from pieces import Scripted

FAR = "\n" * 12
TEXT = f'<b>He</b> go & "see" them.\n\n{FAR}She <i>\u2603</i> go.{FAR}He stay.\n'


@pytest.fixture(scope="module")
def done() -> Rewritten:
    decoder = Scripted(lambda text: text.replace("go", "goes"))
    return rewrite(decoder, TEXT)  # type: ignore[arg-type]


def table(done: Rewritten) -> Element:
    """Parse the table, all of whose tags have to be closed."""
    found = fromstring(f"<body>{done._repr_html_()}</body>").find("table")
    assert found is not None
    return found


def rows(done: Rewritten) -> list[tuple[str | None, list[str]]]:
    """Class and text of each row's cells."""
    return [
        (row.get("class"), ["".join(cell.itertext()) for cell in row.iter("td")])
        for row in table(done).iter("tr")
        if row.find("td") is not None
    ]


def test_changes_join_to_both_lines() -> None:
    before, after = "He go home, now.", "He goes home now!"
    found = list(changes(before, after))
    assert "".join(old for old, _ in found) == before
    assert "".join(new for _, new in found) == after
    assert ("go", "goes") in found and ("He ", "He ") in found
    assert lines("a\r\nb\rc\n") == ["a", "b", "c", ""]


def test_lines_stand_side_by_side(done: Rewritten) -> None:
    shown = rows(done)
    assert shown[0] == (
        "changed", ["1", '<b>He</b> go & "see" them.', "1", '<b>He</b> goes & "see" them.'],
    )  # fmt: skip
    (kept,) = [row for row in shown if row[0] == "kept"]
    assert kept[1][1] == "She <i>\u2603</i> go."
    assert kept[1][3] == kept[1][1] + "kept: the model's vocabulary lacks \u2603"
    far = [cells[0] for kind, cells in shown if kind == "far"]
    total = len(lines(TEXT)) - (1 + CONTEXT) - (1 + 2 * CONTEXT)
    assert sum(int(re.findall(r"^\d+", text)[0]) for text in far) == total and len(far) == 2


def test_what_changed_is_marked(done: Rewritten) -> None:
    marked = [(mark.tag, mark.text) for mark in table(done).iter() if mark.tag in ("ins", "del")]
    assert marked == [("del", "go"), ("ins", "goes")]


def test_the_page_is_whole_and_loads_nothing(done: Rewritten) -> None:
    page = done.to_html("<Changes> & more")
    assert page.startswith("<!DOCTYPE html>") and done._repr_html_() in page
    assert "<title>&lt;Changes&gt; &amp; more</title>" in page
    assert "color-scheme:light dark" in page
    assert not re.search(r"<script|https?:|url\(|@import|<b>|<i>", page)
