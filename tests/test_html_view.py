"""The view of notebooks: as HTML, and as a browser draws it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

from speculative_t5.decoding.results import Stats
from speculative_t5.generation.html_view import STYLES
from speculative_t5.generation.outputs import Generation

import numpy as np
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DONE = Generation(
    'He <b>is</b> & "was"\nhere.', [5, 6, 7, 8, 9, 10, 11, 12], "eos",
    Stats((3, 3, 3), (3, 3, 3), (1, 3, 2), emitted=9, seconds=0.5),
    ("He", " <b>", "is", "</b>", " &", ' "was"', "\nhere", "."),
    tuple((0.5, 0.25) for _ in range(8)),
)  # fmt: skip


class Reader(HTMLParser):
    """Texts by class, hovers, and whether all tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.tokens: list[tuple[str | None, str]] = []
        self.hovers: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.open.append((tag, values.get("class")))
        if "title" in values:
            self.hovers.append(values["title"] or "")
            self.tokens.append((values.get("class"), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, kind = self.open[-1]
        if tag == "span" and kind and not self.tokens[-1][1]:
            self.tokens[-1] = (kind, data)
        if tag == "title":
            self.titles.append(data)


def read(done: Generation) -> Reader:
    reader = Reader()
    reader.feed(done._repr_html_())
    reader.close()
    assert reader.open == []
    return reader


def test_each_token_is_shaded_by_its_origin() -> None:
    found = read(DONE)
    assert found.tokens == [
        ("accepted", "He"), ("recovered", " <b>"),
        ("accepted", "is"), ("accepted", "</b>"), ("accepted", " &"), ("bonus", ' "was"'),
        ("accepted", "\nhere"), ("accepted", "."),
    ]  # fmt: skip


def test_the_hover_tells_round_and_probabilities() -> None:
    hovers = read(DONE).hovers
    assert hovers[1] == "round 1: recovered\nid 6\np = 0.5, q = 0.25"
    assert "probabilities=True" not in DONE._repr_html_()
    bare = Generation(DONE.text, DONE.tokens, "eos", DONE.stats, DONE.pieces)
    assert read(bare).hovers[1] == "round 1: recovered\nid 6"
    assert "probabilities=True" in bare._repr_html_()


def test_long_outputs_make_no_long_pages() -> None:
    count = 10_000
    stats = Stats((4,) * 2000, (4,) * 2000, (4,) * 2000, emitted=count, seconds=9.0)
    long = Generation("a" * count, [5] * count, "length", stats, ("a",) * count)
    assert len(long._repr_html_()) < 110 * count


def test_the_chart_has_a_bar_for_each_round() -> None:
    assert read(DONE).titles == [
        "round 1: 1 of 3 drafted tokens accepted",
        "round 2: 3 of 3 drafted tokens accepted",
        "round 3: 2 of 3 drafted tokens accepted",
    ]
    regular = Generation("a", [5], "length", Stats((0,), (0,), (0,), 1, 0.1), ("a",))
    assert "<svg" not in regular._repr_html_()


def test_without_a_tokenizer_ids_are_shown() -> None:
    bare = Generation("", [5, 6], "length", Stats((1,), (1,), (1,), 2, 0.1))
    assert [text.strip() for _, text in read(bare).tokens] == ["5", "6"]


def test_nothing_comes_from_elsewhere() -> None:
    assert not re.search(r"<script|https?:|url\(|@import", DONE._repr_html_())


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no browser is installed")
    return found


def in_browser(page: str, folder: Path, *options: str) -> str:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/home",
         "--window-size=800,400", "--virtual-time-budget=2000", *options, path.as_uri()],
        capture_output=True, timeout=120, check=True, text=True,
    )  # fmt: skip
    return done.stdout


MEASURE = """
<pre id="found"></pre><script>
const spans = [...document.querySelectorAll("span[title]")].map(s => ({
  kind: s.className, text: s.textContent, width: s.getBoundingClientRect().width,
  colour: getComputedStyle(s).backgroundColor, line: getComputedStyle(s).borderBottomStyle}));
const bars = [...document.querySelectorAll("rect")].map(b => b.getBoundingClientRect().height);
const text = document.querySelector(".speculative-t5 > div").innerText;
document.getElementById("found").textContent = JSON.stringify({spans, bars, text});
</script>"""


def test_a_browser_draws_it(tmp_path: Path) -> None:
    out = in_browser(f"<body>{DONE._repr_html_()}{MEASURE}</body>", tmp_path, "--dump-dom")
    match = re.search(r'<pre id="found">(.*?)</pre>', out, re.DOTALL)
    assert match
    found = json.loads(html.unescape(match[1]))
    assert found["text"] == DONE.text
    assert all(span["width"] > 0 for span in found["spans"])
    colours = {span["kind"]: (span["colour"], span["line"]) for span in found["spans"]}
    assert colours == {
        "accepted": ("rgba(46, 160, 67, 0.28)", "none"),
        "recovered": ("rgba(219, 109, 40, 0.38)", "solid"),
        "bonus": ("rgba(56, 139, 253, 0.3)", "dotted"),
    }
    drafted, accepted = found["bars"][::2], found["bars"][1::2]
    assert drafted == [60, 60, 60] and accepted == [20, 60, 40]


def test_a_screenshot_shows_all_three_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    page = f'<body style="background:#fff">{DONE._repr_html_()}</body>'
    in_browser(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    pixels = (imread(tmp_path / "page.png")[..., :3] * 255).round().reshape(-1, 3).tolist()
    seen = {tuple(map(int, pixel)) for pixel in pixels}
    for kind in ("accepted", "recovered", "bonus"):
        *colour, alpha = map(float, re.findall(r"[0-9.]+", STYLES[kind])[:4])
        on_white = [alpha * part + (1 - alpha) * 255 for part in colour]
        assert any(np.allclose(on_white, pixel, atol=1.5) for pixel in seen), kind
