"""Correct and translate real files, and see whether anything but words changes.

    python scripts/checks/real_documents.py FOLDER

Test files of other packages are such files: python -m pip download --no-binary :all: --no-deps
python-docx markdown-it-py webvtt-py srt pysubs2 nbformat. Every file of the folder whose format is
read goes the whole way of the command `document`, with a decoder that reverses the letters of
words: of every fifth for a correction, of all for a translation. Other parsers then have to find
the same tags, times, styles, targets and parts, and the same letters. LibreOffice has to open what
became of documents of Word, and to show the same letters; pages go through rendered_pages.py. All
that differs, and every exception but a refusal, is a fault, and the exit status is 1.
"""

from __future__ import annotations

import subprocess
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from speculative_t5.documents import FormatOptions, format_of, is_document

import typer
from file_structures import PARSERS, Found
from rendered_pages import faults_of_page
from reversed_files import Pass, reversing_pass

OFFICE_SECONDS = 900
OFFICE_FILES = 50  # that are opened at a time
OPTIONS = FormatOptions(attributes=True)


@dataclass
class Row:
    """What became of the files of a format."""

    files: int = 0
    refused: int = 0
    read: int = 0
    changed: int = 0
    same: int = 0
    said: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def letters(text: str) -> Counter[str]:
    """Count the characters of a text, spaces left out."""
    return Counter("".join(text.split()))


def difference(before: Found, after: Found, *, has_same_letters: bool) -> str | None:
    """Say what differs first between two structures, if anything does."""
    if len(before[0]) != len(after[0]):
        kinds = [Counter(map(repr, found[0])) for found in (before, after)]
        lost, new = ([*(kinds[i] - kinds[1 - i])][:2] for i in (0, 1))
        return f"{len(before[0])} became {len(after[0])}, lost {lost}, new {new}"[:600]
    for old, new in zip(before[0], after[0], strict=True):
        if old != new:
            return _first_difference(old, new)
    if len(before[1]) != len(after[1]):
        return "other texts"
    for old_text, new_text in zip(before[1], after[1], strict=True):
        counts = letters(old_text), letters(new_text)
        if has_same_letters and counts[0] != counts[1]:
            lost, new = ("".join((counts[i] - counts[1 - i]).elements())[:60] for i in (0, 1))
            return f"letters lost {lost!r}, new {new!r}, in {old_text[:200]!r}"
    return None


def _first_difference(old: object, new: object) -> str:
    if isinstance(old, tuple) and isinstance(new, tuple) and isinstance(old[-1], list):
        pairs = zip(old[-1], new[-1], strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), (old, new))
        return f"in {str(old[0])[:80]}: {str(first[0])[:250]} became {str(first[1])[:250]}"
    return f"{str(old)[:250]} became {str(new)[:250]}"


def _without_emphasis(tokens: list[object]) -> list[object]:
    names = ("em_open", "em_close", "strong_open", "strong_close")
    return [each for each in tokens if not (isinstance(each, tuple) and each[0] in names)]


def kinds_of(said: list[str]) -> Counter[str]:
    """Return what was said of places, without their numbers."""
    return Counter("".join(c for c in each if not c.isdigit())[:70] for each in said)


def tried(path: Path, translates: bool, row: Row) -> tuple[Pass | None, list[str]]:
    """Return what became of a file, and what is wrong with that."""
    form = format_of(path.name)
    row.files += 1
    try:
        made = reversing_pass(path.read_bytes(), path.name, translates=translates, options=OPTIONS)
    except ValueError as error:
        row.refused += 1
        lines = [*filter(None, traceback.format_exc().splitlines())]
        is_refusal = type(error) is ValueError and str(error).count("\n") == 0
        print(f"{path}: refused: {error}")
        return None, [] if is_refusal else lines[-2:]
    except Exception:  # each is a fault of the reader, to be listed with all others
        return None, [" | ".join(traceback.format_exc().splitlines()[-3:])]
    row.read += made.read
    row.changed += made.changed
    row.said += kinds_of(made.said)
    row.seconds += made.seconds
    parse = PARSERS.get(form)
    if parse is None:
        return made, []
    parsed = parse(made.before), parse(made.after)
    fault = difference(*parsed, has_same_letters=form != "po")
    if fault and form == "md" and any("emphasis" in each for each in made.said):
        # Emphasis of words that have gone goes with them, which is said.
        less = [(_without_emphasis(found), texts) for found, texts in parsed]
        fault = difference(*less, has_same_letters=False)
    row.same += fault is None
    return made, [fault] if fault else []


def shown_by_office(files: dict[str, bytes], office: str) -> dict[str, str | None]:
    """Return what LibreOffice shows of documents of Word; None of those that it does not open."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, data in files.items():
            (place / f"{name}.docx").write_bytes(data)
        command = [office, "--headless", f"-env:UserInstallation={place.as_uri()}/profile"]
        command += ["--convert-to", "txt:Text (encoded):UTF8", "--outdir", folder]
        command += [str(place / f"{name}.docx") for name in files]
        subprocess.run(command, check=True, capture_output=True, timeout=OFFICE_SECONDS)
        made = {name: place / f"{name}.txt" for name in files}
        return {
            name: path.read_text(encoding="utf-8") if path.exists() else None
            for name, path in made.items()
        }


def faults_by_office(passes: dict[str, Pass], office: str) -> list[tuple[str, str]]:
    """Return the documents that LibreOffice does not open, or of which it shows other letters."""
    datas = [*dict.fromkeys(each for made in passes.values() for each in (made.before, made.after))]
    shown: dict[bytes, str | None] = {}
    for start in range(0, len(datas), OFFICE_FILES):
        some = datas[start : start + OFFICE_FILES]
        texts = shown_by_office({f"{i}": data for i, data in enumerate(some)}, office)
        shown |= zip(some, texts.values(), strict=True)
    faults = []
    for name, made in passes.items():
        before, after = shown[made.before], shown[made.after]
        if before is None:
            print(f"{name}: LibreOffice does not open it as it was")
        elif after is None:
            faults.append((name, "LibreOffice does not open it"))
        elif letters(before) != letters(after):
            lost, new = (letters(before) - letters(after)), letters(after) - letters(before)
            faults.append((name, f"LibreOffice shows other letters: {lost}, {new}"[:300]))
    return faults


def main(
    folder: Annotated[Path, typer.Argument(help="Files, at any depth.")],
    office: Annotated[str, typer.Option(help="LibreOffice; '' for none.")] = "soffice",
    browser: Annotated[str, typer.Option(help="Chromium; '' for none.")] = "chromium",
) -> None:
    """Correct and translate files, and print what became of them by format."""
    rows: dict[tuple[str, str], Row] = {}
    passes: dict[str, Pass] = {}
    faults: list[tuple[str, str]] = []
    for path in sorted(folder.rglob("*")):
        if not (path.is_file() and is_document(path.name)):
            continue
        form = format_of(path.name)
        for way in ("corrected", "translated"):
            row = rows.setdefault((form, way), Row())
            made, found = tried(path, way == "translated", row)
            faults += [(f"{path}, {way}", fault) for fault in found]
            if made and form == "docx":
                passes[f"{path}, {way}"] = made
        if browser and form == "html":
            found, _ = faults_of_page(path.read_bytes(), browser)
            faults += [(str(path), fault) for fault in found]
    if office and passes:
        faults += faults_by_office(passes, office)
    print("| format | way | files | refused | lines | changed | structure same | said | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (form, way), row in sorted(rows.items()):
        said = "; ".join(f"{count} {what.strip()}" for what, count in row.said.most_common(4))
        cells = [form, way, row.files, row.refused, row.read, row.changed, row.same, said]
        print(f"| {' | '.join(map(str, cells))} | {row.seconds:.1f} |")
    for name, fault in faults:
        print(f"{name}: {fault}")
    print(f"{len(faults)} faults")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    typer.run(main)
