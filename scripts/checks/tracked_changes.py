"""Let LibreOffice accept and reject our tracked changes of documents of Word.

    python scripts/checks/tracked_changes.py --cases FOLDER     # of .docx, beside random ones
    python scripts/checks/tracked_changes.py --count 200 --seed 7

Each document is written with tracked changes. All accepted, LibreOffice is to show what it shows of
the document that is written without tracking; all rejected, what it shows of the original. Changes
of others are accepted or rejected in all of them. `libreoffice_text.py` talks to LibreOffice.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

from speculative_t5.documents import FormatOptions, read_file

import typer
from random_documents import edited
from random_word import docx
from random_words import Words

READER = Path(__file__).with_name("libreoffice_text.py")
# LibreOffice 7.4 computes conditions itself, neither accepts nor rejects changes of texts in
# controls and of words that have readings, loses words when an end of a field is deleted, and
# crashes where a page ends within a paragraph and a link behind that begins with a deletion.
OTHERWISE_SHOWN = re.compile(
    rb"<w:sdt>|<w:ruby>|>IF<|>I</w:instrText>| w:instr=.IF|<w:del [^>]*><w:r><w:fldChar"
    rb'|(?s:w:type="page".*(?:HYPERLINK|<w:hyperlink))'
)
SECONDS = 30  # that LibreOffice may take for a document
TRACKED = FormatOptions(track_changes="Ann")


def _documents(cases: Path | None, seeds: range) -> Iterator[tuple[str, bytes, str]]:
    """Yield names, documents, and other texts of them."""
    for path in sorted(cases.glob("*.docx")) if cases else ():
        data = path.read_bytes()
        lines = read_file(data, path.name).text.split("\n")
        yield path.name, data, "\n".join(map(_corrected, lines))
    for seed in seeds:
        words = Words(random.Random(seed))
        data = docx(words)
        if any(OTHERWISE_SHOWN.search(part) for part in _files(data)):
            continue
        text = read_file(data, "a.docx").text
        yield f"seed {seed}", data, edited(text, words, only_replace=False, changes_all=False)


def _files(data: bytes) -> Iterator[bytes]:
    with ZipFile(io.BytesIO(data)) as package:
        yield from map(package.read, package.namelist())


def _corrected(line: str) -> str:
    """Return a line in which words change at their ends and within, some go, and some come."""
    changes = (" have ", " has "), ("a apple", "an apple"), (" go ", " goes "), (" are ", " ")
    for wrong, right in (*changes, (" the ", " this old "), (".", " now.")):
        line = line.replace(wrong, right)
    return line


class Reader:
    """What LibreOffice shows of documents; it is started again when it has crashed."""

    def __init__(self, office_python: str) -> None:
        self._command = [office_python, str(READER)]
        self._process: subprocess.Popen[str] | None = None

    def shown(self, path: Path, decision: str) -> list[str] | None:
        """Return the paragraphs of a document, None if it cannot be opened."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # so that it is ended with all that it has started
            )
        process = self._process
        assert process.stdin and process.stdout
        timer = threading.Timer(SECONDS, self.end)
        timer.start()
        process.stdin.write(json.dumps([str(path), decision]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        timer.cancel()
        if not line:
            self.end()
            return None
        found: list[str] | None = json.loads(line)
        return found

    def end(self) -> None:
        """End LibreOffice."""
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _faults(name: str, data: bytes, text: str, reader: Reader) -> Iterator[str]:
    """Say what LibreOffice shows otherwise of a document with another text."""
    written = {
        "before": data,
        "direct": read_file(data, "a.docx").rewritten(text),
        "tracked": read_file(data, "a.docx", None, TRACKED).rewritten(text),
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder, f"{kind}.docx") for kind in written}
        for kind, made in written.items():
            paths[kind].write_bytes(made)
        before = reader.shown(paths["before"], "reject")
        if before is None:
            print(f"{name}: LibreOffice does not open the original", flush=True)
            return
        if reader.shown(paths["direct"], "leave") is None:
            yield "LibreOffice does not open it"
        rejected = reader.shown(paths["tracked"], "reject")
        if rejected != before:
            yield f"rejected, it is\n  {rejected}, and not\n  {before}"
        direct = reader.shown(paths["direct"], "accept")
        accepted = reader.shown(paths["tracked"], "accept")
        if accepted != direct:
            yield f"accepted, it is\n  {accepted}, and not\n  {direct}"


def main(
    cases: Annotated[Path | None, typer.Option(help="A folder of documents.")] = None,
    count: Annotated[int, typer.Option(min=0, help="Random documents.")] = 50,
    seed: Annotated[int, typer.Option(help="That of the first.")] = 0,
    office_python: Annotated[str, typer.Option(help="A Python that has uno.")] = "/usr/bin/python3",
) -> None:
    """Accept and reject tracked changes by LibreOffice, and report what it then shows."""
    documents = [*_documents(cases, range(seed, seed + count))]
    reader, wrong = Reader(office_python), 0
    for document in documents:
        for fault in _faults(*document, reader):
            wrong += 1
            print(f"{document[0]}: {fault}", flush=True)
    reader.end()
    print(f"{len(documents):,} documents, {wrong} faults")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
