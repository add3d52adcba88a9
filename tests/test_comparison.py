"""Pages that show what changed in a text."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

from speculative_t5.documents import Rewritten, changes, lines, rewrite
from speculative_t5.documents.comparison import CONTEXT

import pytest
from pieces import Scripted

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
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


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_both_columns(done: Rewritten, dark: bool, tmp_path: Path) -> None:
    """The text that it lays out is that of the table; the page is dark where the user asks."""
    page = tmp_path / "page.html"
    probe = (
        "<script>addEventListener('load', () => {"
        "const boxes = [...document.querySelectorAll('tbody tr.changed td')]"
        ".map(cell => cell.getBoundingClientRect());"
        "const ink = getComputedStyle(document.body).color;"
        "document.title = [boxes.map(box => Math.round(box.left)),"
        " boxes.map(box => Math.round(box.width)), ink].join('|')})</script>"
    )
    page.write_text(done.to_html().replace("</body>", f"{probe}</body>"), encoding="utf-8")
    assert BROWSER is not None
    shown = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,600",
         f"--user-data-dir={tmp_path}/home", *(["--blink-settings=preferredColorScheme=0"] * dark),
         "--dump-dom", page.as_uri()],
        check=True, capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    found = re.search(r"<title>([\d,]+)\|([\d,]+)\|(.*?)</title>", shown)
    assert found is not None, shown
    left, width = ([int(n) for n in found[i].split(",")] for i in (1, 2))
    assert left == sorted(left) and len(left) == 4
    assert abs(width[1] - width[3]) <= 1 and width[1] > 300, "both texts have the same room"
    assert found[3] == ("rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)")
