"""Rewrite real pages of HTML, and see whether they are still the same pages.

    python scripts/checks/rendered_pages.py PAGE.html ...

Each page is read with its attributes and rewritten in three ways: with the same text, with the
letters of each word reversed, and with every fifth word replaced and put back. An independent
parser, Python's, must find the same tags in the same order. Where the text is the same in the end,
and nothing is said of marks, Chromium must draw the same picture before and after. A change of code
is left out and must be said. Exits with status 1 if something differs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

from speculative_t5.documents import FormatOptions, PlainFile, read_file

import typer
from file_structures import Structure
from reversed_files import reversed_words

BROWSER_SECONDS = 120
FEW_LINES = 5  # of which all may be out of sight
_ANY_WORD = re.compile(r"\w+")


def read_page(data: bytes) -> PlainFile:
    """Read a page with its attributes."""
    return read_file(data, "page.html", None, FormatOptions(attributes=True))


def put_back(data: bytes) -> tuple[bytes, list[str]]:
    """Replace every fifth word of a page, put all back, and return what was said of that."""
    page, count = read_page(data), 0

    def replace(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"{found[0]}q" if count % 5 == 0 else found[0]

    changed = page.rewritten(_ANY_WORD.sub(replace, page.text))
    again = read_page(changed)
    return again.rewritten(page.text), page.not_kept() + again.not_kept()


def screenshot(data: bytes, browser: str) -> bytes:
    """Return the picture that a browser draws of a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_bytes(data)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=2000"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # nothing is loaded from elsewhere
        command += ["--window-size=1000,3000", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=BROWSER_SECONDS)
        return picture.read_bytes()


def faults_of_texts(page: PlainFile, wanted: str, got: str, refused: set[str]) -> list[str]:
    """Return what is wrong with the text of a page that is read again.

    A line that is not the one that was wanted has to be in a line of the file that was said to have
    kept something, and there have to be no more such lines than were kept.
    """
    texts = got.split("\n"), wanted.split("\n")
    if len(texts[0]) != len(texts[1]):
        return [f"reversed: {len(texts[1])} lines became {len(texts[0])}"]
    pairs = enumerate(zip(*texts, strict=True), 1)
    others = [number for number, (new, old) in pairs if new.split() != old.split()]
    faults = {str(page.number(number)) for number in others} - refused
    if faults:
        return [f"reversed: other lines, of which nothing is said: {faults}"]
    if len(others) > len(page._refused):  # type: ignore[attr-defined]
        return [f"reversed: {len(others)} other lines, of which fewer were refused"]
    return []


def faults_of_page(data: bytes, browser: str) -> tuple[list[str], str]:
    """Return what is wrong with a page that is rewritten, and what there is to know of it."""
    faults, page = [], read_page(data)
    reverse = reversed_words(page.text)
    began = time.perf_counter()
    made = {"same": read_page(data).rewritten(page.text), "reversed": page.rewritten(reverse)}
    seconds = time.perf_counter() - began
    made["put back"], said = put_back(data)
    before = Structure(data.decode()).found
    faults += [
        f"{way}: other tags" for way, new in made.items() if Structure(new.decode()).found != before
    ]
    if made["same"] != data:
        faults.append("same: other bytes")
    refused = {re.sub(r"\D*(\d+).*", r"\1", each) for each in page.not_kept() if "left out" in each}
    faults += faults_of_texts(page, reverse, read_page(made["reversed"]).text, refused)
    picture = screenshot(data, browser)
    if screenshot(made["put back"], browser) != picture and not said:
        faults.append("put back: another picture")
    if page.text.count("\n") > FEW_LINES and screenshot(made["reversed"], browser) == picture:
        faults.append("reversed: the same picture, so that pictures show nothing")
    estimates = sum("estimates" in said for said in page.not_kept())
    back = "same bytes" if made["put back"] == data else "other bytes"
    more = f"{len(refused)} left out, put back {back}, {seconds:.2f} s"
    known = f"{len(data):,} bytes, {len(before):,} tags, {page.text.count(chr(10)) + 1:,} lines"
    return (
        faults,
        f"{known}, {estimates} estimates, {more}",
    )


def main(
    pages: Annotated[list[Path], typer.Argument(help="Pages in UTF-8.")],
    browser: Annotated[str, typer.Option(help="Chromium.")] = "chromium",
) -> None:
    """Rewrite pages, and report what else has changed."""
    wrong = 0
    for path in pages:
        faults, known = faults_of_page(path.read_bytes(), browser)
        wrong += len(faults)
        print(f"{path}: {known}: {'; '.join(faults) or 'right'}", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
