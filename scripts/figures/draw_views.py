"""Draw the pictures of what people see, and check that they see it today.

    python scripts/figures/draw_views.py                   # draws all
    python scripts/figures/draw_views.py terminal          # draws one
    python scripts/figures/draw_views.py --check           # compares, and draws none

Each picture is a PNG that holds the text in it as its Description. Drawing needs Chromium and
Playwright (`pip install playwright`), and so does comparing the server's page.
"""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from io import BytesIO, StringIO
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import SpeculativeDecoder

import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PROMPT = (
    "correct: my sister have never been too paris. Its very expensive and she dont has many money."
)
NUM_DRAFT = 5  # auto would go by the times of this machine
COLUMNS = 100
SECONDS = 60  # to wait for anything
RUNS = 5  # of which the picture shows the fastest
SPEED = re.compile(r"[\d,]+ tok/s")
# What is another each time: speeds, and the last digit of probabilities, by what shares a batch.
MEASURED = re.compile(rf"{SPEED.pattern}|\d+\.\d %")
DOCUMENT = (
    "my sister have never been too paris. She would like to going there next summer, but she "
    "havent enough money. Can you recomend a cheap hotel near of the station?\n\n"
    "When I will finish my studies, I want travel around the world. He suggested me to begin in "
    "Asia, where the live is cheap and the people is friendly."
)
PAGE = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; display: inline-block;
padding: 10px; {style} }} pre {{ margin: 0; font: 15px/1.3 "DejaVu Sans Mono", monospace; }}
</style>{body}"""


@dataclass(frozen=True)
class View:
    """What a person sees: its text, its HTML if a browser has not shown it yet, or its picture."""

    text: str
    html: str = ""
    picture: bytes = b""


def same(text: str, other: str) -> bool:
    """Whether two texts are the same but for what is measured and the number of blanks."""
    plain = (" ".join(MEASURED.sub("N", each).split()) for each in (text, other))
    return next(plain) == next(plain)


def terminal() -> View:
    """The default command on a terminal, with its drafts in colours."""
    command = ["--show-drafts", "--num-draft", str(NUM_DRAFT), "--prompt", PROMPT]
    shown = max((on_terminal(command) for _ in range(RUNS)), key=speed)
    typed = f"$ python -m speculative_t5 {shlex.join(command[:-1])} \\\n    {json.dumps(PROMPT)}\n"
    out = Console(record=True, file=StringIO(), width=COLUMNS, color_system="truecolor")
    text = Text(typed) + Text.from_ansi(shown.strip())
    out.print(text, soft_wrap=True, highlight=False)
    code = out.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    dark = "background: #0c0c0c; color: #e5e5e5;"
    return View(text.plain, PAGE.format(style=dark, body=brighter(code)))


def brighter(code: str) -> str:
    """Put the colours of a dark terminal in place of those for a white page."""
    for before, after in (("#008000", "#8ae234"), ("#808000", "#ffa033"), ("#008080", "#4fd3e0")):
        code = code.replace(before, after)
    return code


def speed(shown: str) -> int:
    found = SPEED.search(shown)
    return int(found[0].split()[0].replace(",", "")) if found else 0


def on_terminal(command: list[str]) -> str:
    """Return what a command writes to a terminal, with its escapes."""
    end, other = pty.openpty()
    bare = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    size = {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "SPECULATIVE_T5_TIPS": "0"}
    with subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *command],
        cwd=ROOT,
        env=bare | size,
        stdin=other,
        stdout=other,
        stderr=other,
    ) as process:
        os.close(other)
        shown = b"".join(iter(lambda: _read(end), b""))
    os.close(end)
    if process.returncode:
        raise SystemExit(f"error: the command failed: {shown.decode()}")
    return shown.decode().replace("\r\n", "\n")


def _read(end: int) -> bytes:
    try:
        return os.read(end, 65536)
    except OSError:  # what Linux says when the other side is closed
        return b""


def notebook() -> View:
    """An output as a notebook shows it."""
    decoder = SpeculativeDecoder.from_pretrained(
        "correct-base", "correct-small", num_draft=NUM_DRAFT, dtype="float32"
    )
    outputs = [decoder.generate(PROMPT) for _ in range(RUNS)]
    shown = max(outputs, key=lambda each: each.stats.tokens_per_second)._repr_html_()
    style = "width: 960px; font-family: sans-serif;"
    return View(text_of(shown), PAGE.format(style=style, body=shown))


class _Texts(HTMLParser):
    """Collects what a browser would show: no styles, and blocks apart."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden = tag == "style"
        if tag == "div":
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def text_of(source: str) -> str:
    parser = _Texts()
    parser.feed(source)
    return "".join(parser.parts).strip()


def server() -> View:
    """The server's page after a text was corrected."""
    with serving() as address, browser() as chromium, chromium.new_page() as page:
        page.set_default_timeout(1000 * SECONDS)
        page.set_viewport_size({"width": 1000, "height": 1120})
        page.goto(address)
        page.get_by_label("Text", exact=True).fill(DOCUMENT)
        page.get_by_role("button", name="Correct", exact=True).click()
        page.get_by_text("Done: ").wait_for()
        return View(page.inner_text("body"), picture=page.screenshot())


@contextmanager
def serving() -> Iterator[str]:
    """Start a server on a free port; yield its address."""
    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = None
            while found is None and (line := process.stdout.readline()):
                found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found is None:
                raise SystemExit("error: the server did not start: run it by hand to see why")
            yield found[0]
        finally:
            process.terminate()


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


VIEWS: dict[str, Callable[[], View]] = {
    "terminal": terminal,
    "notebook": notebook,
    "server": server,
}


def stored(name: str) -> str:
    """Return the text that a picture in docs/images holds."""
    with Image.open(IMAGES / f"{name}.png") as image:
        return str(image.info.get("Description", ""))


def draw(name: str, view: View) -> None:
    """Write a picture of a view, with its text."""
    picture = view.picture
    if view.html:
        with browser() as chromium, chromium.new_page(device_scale_factor=1.6) as page:
            page.set_content(view.html)
            picture = page.locator("body").screenshot()
    about = PngInfo()
    about.add_itxt("Description", view.text)
    with Image.open(BytesIO(picture)) as image:
        image.save(IMAGES / f"{name}.png", pnginfo=about, optimize=True)
    print(f"wrote {IMAGES / name}.png")


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(VIEWS)}.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare, and draw nothing.")] = False,
) -> None:
    """Draw pictures of what people see, or compare them with what people see today."""
    old = []
    for name in names or VIEWS:
        if name not in VIEWS:
            raise typer.BadParameter(f"there is no picture {name!r}: use {', '.join(VIEWS)}")
        view = VIEWS[name]()
        if not check:
            draw(name, view)
        elif not same(view.text, stored(name)):
            old.append(name)
            print(f"{name}.png shows\n{stored(name)}\n\nand today there is\n{view.text}\n")
    if old:
        raise SystemExit(
            f"error: draw them again: python scripts/figures/draw_views.py {' '.join(old)}"
        )


if __name__ == "__main__":
    typer.run(main)
