"""The command `document`: a whole text, sentence by sentence, with its layout kept."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from tqdm import tqdm

from ..documents import Document, Piece, RewriteOptions, Rewritten, changes, lines
from ..errors import count, decoded, option
from ..files import LineFile, is_special, json_line, json_object, write_whole
from ..tokenizers import open_input
from . import terminal
from .options import DecoderOptions, in_output, with_base, with_options
from .terminal import note, one_line

SHOWN = 40  # characters of a piece that was kept, and of the output that was refused
LISTED = 10  # such pieces on a terminal
STATS = ("emitted", "rounds", "drafted", "accepted", "seconds")
STDOUT = "/dev/stdout"
SUFFIX = ".partial.jsonl"

Header = dict[str, Any]


@dataclass(frozen=True)
class OutputOptions:
    """Where the text and its differences go, and what becomes of what is there."""

    output: str | None = in_output(None, "File to write.", shown="standard output")
    diff: str | None = in_output(
        None, "Also show what changed: html writes a page, terminal prints lines."
    )
    diff_output: str | None = in_output(
        None, "Page to write with --diff html.", shown="OUTPUT.diff.html"
    )
    resume: bool = in_output(False, "Continue a stopped run, keeping the pieces that it did.")
    force: bool = in_output(
        False,
        "Replace OUTPUT and the page; without --resume, drop the pieces of a stopped run.",
    )
    json: bool = in_output(
        False,
        "Print one JSON object at the end: all pieces that were kept, what they would have become "
        "and why they were kept, and the text if there is no OUTPUT.",
    )


@with_options(changes={"task": None})
def document(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="Text in UTF-8; - is standard input.")
    ],
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = option(
        None, "Pieces to decode side by side.", shown="16, or 1 with --steady"
    ),
    options: DecoderOptions,
) -> None:
    """Rewrite a text of any length, for example to correct it; only its sentences change.

    Blank lines, indentation, line ends, headings, list markers, tables and code stay as they are.
    So do sentences that the model cannot read or whose outputs lost something; they are listed at
    the end.
    """
    output = None if files.output in ("-", STDOUT) else files.output
    is_file = output is not None and not is_special(output)
    page = _page(output, files)
    if files.resume and output is None:
        raise ValueError("--resume continues a file: give its name with --output")
    if options.truncate:
        raise ValueError("--truncate would lose a part of the text: leave it out")
    with open_input(source) as stream:
        for name in (output, page):
            if name is not None:
                check_target(name, stream, force=files.force)
        if files.resume and not is_file:
            raise ValueError(f"--resume continues a file, which {output} is not: leave it out")
        name = "standard input" if source == "-" else source
        text = decoded(stream.read(), name)
    if not text:
        raise ValueError(f"{name} is empty: give some text")
    decoder = with_base(ctx, options).load()
    whole = Document(decoder, text, wanted)
    whole.rewrite(batch_size=batch_size)  # checks the options
    kept = None
    if output is not None and is_file:
        given = options.keywords | {"dtype": options.dtype, "to": None, "from_": None}
        given |= {"prefix": decoder.prefix, "trained_length": decoder.trained_length}
        header = {
            "text": hashlib.sha256(text.encode()).hexdigest(),
            "model": [decoder.model.fingerprint, decoder.draft and decoder.draft.fingerprint],
            "set of options": asdict(whole.options) | given,
        }
        kept = PartialFile(output, header, resume=files.resume, force=files.force)
    with kept or nullcontext():
        result = _decoded(whole, kept, batch_size)
        if output is not None or not files.json:
            _write(result.text.encode(), output)
        if files.json:
            record = _record(result) | ({"text": result.text} if output is None else {})
            _write(json_line(record), None)
    if page is not None:
        title = f"Changes in {source if source != '-' else 'the text'}"
        _write(result.to_html(title).encode(), page)
    if files.diff == "terminal":
        _print_changes(result, stderr=output is None or files.json)
    if not files.json:
        listed = result.kept[: LISTED if terminal.is_terminal(sys.stderr) else None]
        for each in listed:
            note(_kept(each))
        if more := len(result.kept) - len(listed):
            note(f"{more:,} more kept; use --json to list all of them")
    counts = [getattr(result.stats, name) for name in STATS]
    rates = terminal.rates(*counts) if result.stats.rounds else []
    note(f"[{', '.join([result.summary(), *rates])}]")
    terminal.give_tips()


def _decoded(whole: Document, kept: PartialFile | None, batch_size: int | None) -> Rewritten:
    """Decode all pieces that are left, and keep each as it is done."""
    pieces: dict[int, Piece] = {}
    for number, earlier in kept.earlier.items() if kept else ():
        if number in range(len(whole)):
            kept_as = {name: earlier.get(name) for name in ("refused", "retried")}
            pieces[number] = whole.piece(number, earlier["output"], earlier["reason"], **kept_as)
    began = time.perf_counter()
    with tqdm(total=len(whole), initial=len(pieces), unit=" pieces", disable=None) as bar:
        for number, piece in whole.rewrite(batch_size=batch_size, skip=pieces):
            pieces[number] = piece
            if kept:
                names = ("output", "reason", "refused", "retried")
                kept.append({"piece": number} | {name: getattr(piece, name) for name in names})
            bar.update()
    return whole.result(pieces, time.perf_counter() - began)


def _page(output: str | None, files: OutputOptions) -> str | None:
    if files.diff not in (None, "html", "terminal"):
        raise ValueError(f"--diff is {files.diff!r}, expected html or terminal")
    if files.diff != "html":
        if files.diff_output is not None:
            raise ValueError("--diff-output names a page: use it with --diff html")
        return None
    if files.diff_output is None and (output is None or is_special(output)):
        raise ValueError("--diff html writes a page: give its name with --diff-output")
    page = files.diff_output if files.diff_output is not None else f"{output}.diff.html"
    names = page, output or STDOUT  # which need not exist yet
    is_same = len({*map(os.path.realpath, names)}) == 1
    if is_same or (all(map(os.path.exists, names)) and os.path.samefile(*names)):
        raise ValueError(f"{page} is the output itself: give another name with --diff-output")
    return page


def _write(data: bytes, output: str | None) -> None:
    """Write a file as a whole, or to standard output or what is no plain file."""
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    elif is_special(output):
        Path(output).write_bytes(data)
    else:
        write_whole(output, data)


def _print_changes(done: Rewritten, *, stderr: bool) -> None:
    """Print the lines that changed, with what went in red and what came in green."""
    from rich.text import Text

    out = terminal.console(stderr=stderr)
    pairs = zip(lines(done.source), lines(done.text), strict=True)
    for number, (before, after) in enumerate(pairs, 1):
        if before == after:
            continue
        for sign, side, style in (("-", 0, "bold red"), ("+", 1, "bold green")):
            line = Text(f"{number:5} {sign} ", style="dim")
            for change in changes(before, after):
                same = change[0] == change[1]
                line.append(
                    terminal.visible(change[side]), "not dim" if same else f"not dim {style}"
                )
            out.print(line)


def _kept(piece: Piece) -> str:
    """Return the line about a piece that was kept, where it would have changed first."""
    texts = [one_line(text) for text in (piece.source, piece.refused) if text is not None]
    same = len(commonprefix(texts)) if len(texts) > 1 else 0
    start = max(0, same - SHOWN // 2)
    parts = [text[start : start + SHOWN] + "..." * (len(text) > start + SHOWN) for text in texts]
    shown = " -> ".join("..." * (start > 0) + part for part in parts)
    return f"line {piece.line} kept, {one_line(piece.reason or '')}: {shown}"


def _record(done: Rewritten) -> dict[str, Any]:
    """Return what `--json` prints besides the text."""
    names = ("line", "reason", "source", "refused")
    return {
        "pieces": len(done.pieces),
        "changed": sum(piece.status == "changed" for piece in done.pieces),
        "kept": [{name: getattr(piece, name) for name in names} for piece in done.kept],
        "stats": {name: getattr(done.stats, name) for name in STATS},
    }


def check_target(name: str, stream: BinaryIO, *, force: bool) -> None:
    """Refuse to write a file over the input, or without `force` over anything else."""
    if not name:
        raise ValueError(f"the output must be the name of a file, got {name!r}")
    try:
        found = os.stat(name)
    except FileNotFoundError:
        Path(name).resolve().parent.stat()  # which has to exist
        return
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{name} is a folder, expected the name of a file to write")
    if not stat.S_ISREG(found.st_mode):
        return
    if os.path.samestat(found, os.fstat(stream.fileno())):
        raise ValueError(f"the output {name} is the input itself: give another name")
    if not force:
        raise ValueError(f"{name} exists: use --force to replace it, or give another name")


class PartialFile(LineFile):
    """The pieces done so far, a line of JSON each, in NAME.partial.jsonl beside the output.

    It is removed when the block (`with`) is done, or ends before any piece was kept; otherwise it
    stays, and a note says so. Pieces of an earlier run are kept with `resume`, dropped with
    `force`, and otherwise refused, as is a file with another `header`, whose names are words for a
    message.
    """

    def __init__(self, name: str, header: Header, *, resume: bool, force: bool) -> None:
        self.path = Path(str(Path(name).resolve()) + SUFFIX)
        super().__init__(self.path, ", or give another --output")
        self._header, self._resume, self._force = header, resume, force
        self.earlier: dict[int, Header] = {}  # pieces of an earlier run
        self.count = 0  # pieces in the file

    def opened(self) -> None:
        """Take over the pieces of an earlier run, or write the first line."""
        try:
            self._take_over()
            if not self.size:
                self.append_bytes(json_line(self._header))
        finally:
            if not self.size:
                self.path.unlink(missing_ok=True)

    def _take_over(self) -> None:
        if self._force and not self._resume:
            self.cut(0)
        lines = self.lines()
        first = next(lines, b"")
        if first and not self._resume:
            raise ValueError(
                f"{self.path} holds the pieces of an earlier run: use --resume to continue after "
                "them, or --force to start over"
            )
        found, end = json_object(first), len(first)
        for name, value in self._header.items():
            if first and found.get(name) != value:
                raise ValueError(
                    f"{self.path} is from a run with another {name}: use the same as that run, or "
                    "--force without --resume to start over"
                )
        for raw in takewhile(lambda raw: raw.endswith(b"\n"), lines):
            piece = json_object(raw)
            number = piece.get("piece")
            if not isinstance(number, int) or not {"output", "reason"} <= piece.keys():
                raise ValueError(
                    f"{self.path} holds a line that is not a piece: use --force without --resume "
                    "to start over"
                )
            self.earlier[number] = piece
            end += len(raw)
        self.cut(end)
        self.count = len(self.earlier)

    def append(self, piece: Header) -> None:
        with terminal.signals_held():
            self.append_bytes(json_line(piece))
            self.count += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self.count:
            self.path.unlink(missing_ok=True)
        else:
            done = count(self.count, "piece")
            note(f"the work so far ({done}) is kept; --resume continues from there")
        super().__exit__(kind)
