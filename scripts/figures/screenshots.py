"""Make the pictures of an output as a notebook and as a terminal show it.

    python scripts/figures/screenshots.py

Writes docs/images/notebook.png and docs/images/terminal.png. Needs Chromium or Chrome, and the
extra `plot`.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.bench.estimate import speedup
from speculative_t5.cli.view import legend, shaded

import numpy as np
import typer
from matplotlib.image import imread, imsave
from rich.console import Console
from rich.terminal_theme import MONOKAI

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MARGIN = 12  # pixels below the picture
PROMPT = (
    "correct: my sister have never been too paris. Its very expensive and she dont has many money."
)
COMMAND = f'$ python -m speculative_t5 --show-drafts --prompt \\\n  "{PROMPT}"'
SVG = """<svg viewBox="0 0 {terminal_width} {terminal_height}" width="100%"
 xmlns="http://www.w3.org/2000/svg"><style>
.{unique_id}-matrix {{font-family: 'DejaVu Sans Mono', monospace; font-size: {char_height}px;
 line-height: {line_height}px}} {styles}</style>
<rect fill="#0c0c0c" width="{terminal_width}" height="{terminal_height}"/>
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></svg>"""


def main(
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("docs/images"),
) -> None:
    decoder = SpeculativeDecoder.from_pretrained("correct-base", "correct-small", num_draft=5)
    for _ in range(2):  # the first use of everything is slower
        done = decoder.generate(PROMPT, probabilities=True)
    estimated = speedup(decoder, PROMPT, done.stats)
    capture(notebook(done), folder / "notebook.png", width=780)
    capture(terminal(done, estimated), folder / "terminal.png", width=1050)


def notebook(done: Generation) -> str:
    return f'<body style="background:#fff;font-family:sans-serif">{done._repr_html_()}</body>'


def terminal(done: Generation, estimated: float | None) -> str:
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, width=110, highlight=False
    )
    console.print(
        COMMAND, legend(), shaded(done), done.stats.summary(estimated), sep="\n", markup=False
    )
    picture = console.export_svg(theme=MONOKAI, code_format=SVG)
    return f'<body style="margin:0;background:#0c0c0c">{picture}</body>'


def capture(page: str, path: Path, *, width: int) -> None:
    """Let a browser draw a page, and cut off the empty part below it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise typer.BadParameter(f"no browser found: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as work:
        source, picture = Path(work) / "page.html", Path(work) / "page.png"
        source.write_text(f'<meta charset="utf-8">{page}', encoding="utf-8")
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={work}/home", f"--window-size={width},600",
             "--force-device-scale-factor=1.5", f"--screenshot={picture}", source.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip
        pixels = imread(picture)
    filled = np.flatnonzero((pixels != pixels[-1, -1]).any(axis=(1, 2)))
    imsave(path, pixels[: filled[-1] + MARGIN])


if __name__ == "__main__":
    typer.run(main)
