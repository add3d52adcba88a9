"""The command `document`: whole texts, sentence by sentence, with their layout kept."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from tqdm import tqdm

from ..documents import (
    SUFFIXES,
    Document,
    Piece,
    PlainFile,
    RewriteOptions,
    Rewritten,
    lines,
    read_file,
)
from ..errors import count, option
from ..files import LineFile, is_special, json_line, json_object, write_whole
from ..tokenizers import open_input
from . import terminal
from .options import DecoderOptions, in_output, with_base, with_options
from .review import print_change, review
from .terminal import note, one_line

SHOWN = 40  # characters of a piece that was kept, and of the output that was refused
LISTED = 10  # such pieces on a terminal
STATS = ("emitted", "rounds", "drafted", "accepted", "seconds")
STDOUT = "/dev/stdout"
PARTIAL = ".partial.jsonl"
KEPT = ("line", "start", "output", "reason", "refused", "retried")  # of a piece

Header = dict[str, Any]


@dataclass(frozen=True)
class OutputOptions:
    """Where the texts and their differences go, and what becomes of what is there."""

    output: str | None = in_output(
        None, "File to write; of several files, the folder to write them into.",
        shown="standard output",
    )  # fmt: skip
    in_place: bool = in_output(False, "Write each file in its own place.")
    backup: bool = in_output(False, "With --in-place, keep the old file beside it, as FILE.bak.")
    check: bool = in_output(
        False, "Write nothing, and end with exit code 1 if a file would be changed."
    )
    review: bool = in_output(
        False, "Ask for each change, and for each that was held back, whether to make it."
    )
    diff: str | None = in_output(
        None, "Also show what changed: html writes a page, terminal prints lines."
    )
    diff_output: str | None = in_output(
        None, "Page to write with --diff html.", shown="OUTPUT.diff.html"
    )
    resume: bool = in_output(False, "Continue a stopped run, keeping the pieces that it did.")
    force: bool = in_output(
        False,
        "Replace OUTPUT, pages and backups; without --resume, drop the pieces of a stopped run.",
    )
    json: bool = in_output(
        False,
        "Print one JSON object for each file: all pieces that were kept or tried again, what they "
        "would have become and why, and the text if there is no OUTPUT.",
    )

    def __post_init__(self) -> None:
        places = {"--output": self.output is not None, "--in-place": self.in_place,
                  "--check": self.check}  # fmt: skip
        given = [name for name, is_set in places.items() if is_set]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} say where the text goes: give one of them")
        if self.backup and not self.in_place:
            raise ValueError("--backup keeps what --in-place replaces: give both, or neither")
        if self.check and (self.review or self.diff == "html"):
            raise ValueError("--check writes nothing: leave out --review and --diff html")
        if self.output in ("-", STDOUT):
            vars(self).update(output=None)
        if self.resume and self.output is None and not self.in_place:
            raise ValueError("--resume continues a file: give its name with --output")
        if self.diff not in (None, "html", "terminal"):
            raise ValueError(f"--diff is {self.diff!r}, expected html or terminal")
        if self.diff != "html" and self.diff_output is not None:
            raise ValueError("--diff-output names a page: use it with --diff html")
        if self.review and not all(map(terminal.is_terminal, (sys.stdin, sys.stdout))):
            raise ValueError(
                "--review asks on a terminal, and standard input or output is none: give --output"
            )


@dataclass(frozen=True)
class Target:
    """A file to read, and what is written for it."""

    source: str
    output: str | None  # None for standard output, or if nothing is written
    page: str | None
    data: bytes  # of the source

    @property
    def key(self) -> str:
        return digest(self.data)

    @property
    def name(self) -> str:
        return "standard input" if self.source == "-" else self.source


@with_options(changes={"task": None})
def document(
    ctx: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Text, Markdown or subtitles in UTF-8, or documents of Word; folders, for all "
            f"files in them that end in {', '.join(SUFFIXES)}; - is standard input.",
        ),
    ],
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = option(
        None, "Pieces to decode side by side.", shown="16, or 1 with --steady"
    ),
    options: DecoderOptions,
) -> None:
    """Rewrite texts of any length, for example to correct or translate them.

    Only sentences change: blank lines, indentation, line ends, list markers and code stay as they
    are; without --to, headings, labels and tables as well. So do sentences that the model cannot
    read or whose outputs lost something; they are listed at the end.
    """
    if options.truncate:
        raise ValueError("--truncate would lose a part of the text: leave it out")
    job = partial_file_of(sources, files)
    targets = find_targets(sources, files)
    several = len(targets) > 1
    forms = [read_file(each.data, each.name) for each in targets]
    if not several and not forms[0].text:
        raise ValueError(f"{targets[0].name} is empty: give some text")
    decoder = with_base(ctx, options).load()
    Document(decoder, "", wanted).rewrite(batch_size=batch_size)  # checks the options
    kept = None
    if job:
        given = options.keywords | {"dtype": options.dtype, "to": decoder.languages, "from_": None}
        given |= {"prefix": decoder.prefix, "trained_length": decoder.trained_length}
        header = {
            "model": [decoder.model.fingerprint, decoder.draft and decoder.draft.fingerprint],
            "set of options": asdict(wanted) | given,
        }
        kept = PartialFile(job, json_object(json_line(header)), files)
    changed = False
    with kept or nullcontext():
        for target, form in zip(targets, forms, strict=True):
            if kept and kept.is_done(target):
                note(f"{target.name}: done in an earlier run")
                continue
            whole = Document(decoder, form.text, wanted, form.breaks)
            pieces, seconds = _decoded(whole, kept, batch_size, target)
            quits = False
            if files.review:
                pieces, quits = review(pieces, partial(_where, target, form, several))
            result = whole.result(pieces, seconds)
            changed |= result.text != result.source
            data = target.data if result.text == result.source else form.rewritten(result.text)
            if not files.check:
                _write_all(target, data, result, files, kept)
            _report(target, form, result, files, several=several)
            if quits:
                break
    terminal.give_tips()
    if files.check and changed:
        raise typer.Exit(terminal.FAILED)


def partial_file_of(sources: Sequence[str], files: OutputOptions) -> Path | None:
    """Return where pieces are kept: beside the output, or in a folder that is changed in place."""
    name = sources[0] if files.in_place else files.output
    if not name or (is_special(name) and not Path(name).is_dir()):
        if files.resume and name:
            raise ValueError(f"--resume continues a file, which {name} is not: leave it out")
        return None
    inside = files.in_place and Path(name).is_dir()
    found = Path(f"{Path(name).resolve()}{'/' * inside}{PARTIAL}")
    if found.exists() and found.stat().st_size and not (files.resume or files.force):
        raise ValueError(
            f"{found} holds the pieces of an earlier run: use --resume to continue after them, or "
            "--force to start over"
        )
    return found


def find_targets(sources: Sequence[str], files: OutputOptions) -> list[Target]:
    """Find and read all files; refuse what cannot be read, or written where it is to go."""
    found: list[tuple[str, str]] = []  # a file, and its name below the folder that was given
    for source in sources:
        if not source or not Path(source).is_dir():
            found.append((source, Path(source).name))
            continue
        paths = [path for path in sorted(Path(source).rglob("*")) if path.is_file()]
        paths = [path for path in paths if "/." not in f"/{path.relative_to(source)}"]
        inner = [path for path in paths if path.suffix.lower() in SUFFIXES]
        if not inner:
            raise ValueError(
                f"{source} is a folder without documents: give one with files that end in "
                f"{', '.join(SUFFIXES)}"
            )
        found += [(str(path), str(path.relative_to(source))) for path in inner]
    output = files.output
    several = len(found) > 1 or any(source and Path(source).is_dir() for source in sources)
    if several and output is None and not (files.in_place or files.check):
        raise ValueError(
            f"{count(len(found), 'file')} cannot go to standard output: give --output FOLDER, "
            "--in-place or --check"
        )
    if several and files.diff_output:
        raise ValueError("--diff-output names one page, and there are several files: leave it out")
    targets: dict[str, Target] = {}
    for source, name in found:
        place = output
        if output and (several or Path(output).is_dir()):
            place = str(Path(output) / name)
        if files.in_place:
            if source == "-":
                raise ValueError("standard input has no place to write to: leave out --in-place")
            place = source
        if (key := os.path.realpath(place or source)) in targets:
            raise ValueError(f"{place or source} would be written twice: give each file once")
        page = _page(place, files)
        with open_input(source) as stream:
            data, force = stream.read(), files.force or files.resume
            for written in (None if files.in_place else place, page):
                if written is not None:
                    check_target(written, stream, force=force, parents=place != output)
            if files.backup:  # of a run that goes on, `_write_all` looks at them
                check_target(f"{source}.bak", stream, force=force)
            targets[key] = Target(source, place, page, data)
    return [*targets.values()]


def _decoded(
    whole: Document, kept: PartialFile | None, batch_size: int | None, target: Target
) -> tuple[list[Piece], float]:
    """Decode all pieces that are left, and keep each as it is done; return the seconds, too."""
    done: dict[int, Piece] = {}
    for record in kept.earlier.get(target.key, ()) if kept else ():
        source = whole.text[record["start"] : record["end"]]
        done[record["start"]] = Piece(source=source, **{name: record[name] for name in KEPT})
    began = time.perf_counter()
    pieces = [*done.values()]
    with tqdm(
        total=len(whole), initial=len(done), unit=" pieces", desc=target.source, disable=None
    ) as bar:
        for piece in whole.rewrite(batch_size=batch_size, done=done):
            pieces.append(piece)
            if kept:
                record = {name: getattr(piece, name) for name in KEPT}
                end = piece.start + len(piece.source)
                kept.append({"file": target.key, "end": end} | record)
            bar.update()
    return pieces, time.perf_counter() - began


def _page(output: str | None, files: OutputOptions) -> str | None:
    if files.diff != "html":
        return None
    if files.diff_output is None and (output is None or is_special(output)):
        raise ValueError("--diff html writes a page: give its name with --diff-output")
    page = files.diff_output if files.diff_output is not None else f"{output}.diff.html"
    names = page, output or STDOUT  # which need not exist yet
    is_same = len({*map(os.path.realpath, names)}) == 1
    if is_same or (all(map(os.path.exists, names)) and os.path.samefile(*names)):
        raise ValueError(f"{page} is the output itself: give another name with --diff-output")
    return page


def _write_all(
    target: Target, data: bytes, result: Rewritten, files: OutputOptions, kept: PartialFile | None
) -> None:
    """Write what belongs to a file; the record that it is done comes first, see `is_done`."""
    output, page = target.output, target.page
    for name in filter(None, (output, page)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    if kept:
        kept.append({"file": target.key, "done": digest(data)})
    if page is not None:
        title = f"Changes in {target.source if target.source != '-' else 'the text'}"
        _write(result.to_html(title).encode(), page)
    if files.backup and output is not None and data != target.data:
        old = Path(f"{output}.bak")
        if not files.force and old.exists() and old.read_bytes() != target.data:
            raise ValueError(f"{old} exists: use --force to replace it, or rename it")
        _write(target.data, str(old))
    stays = files.in_place and data == target.data
    if not stays and (output is not None or not files.json):
        _write(data, output)


def _write(data: bytes, output: str | None) -> None:
    """Write a file as a whole, or to standard output or what is no plain file."""
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    elif is_special(output):
        Path(output).write_bytes(data)
    else:
        write_whole(output, data)


def _where(target: Target, form: PlainFile, several: bool, line: int) -> str:
    return f"{target.name}, " * several + f"{form.unit} {form.number(line)}"


def _report(
    target: Target, form: PlainFile, result: Rewritten, files: OutputOptions, *, several: bool
) -> None:
    """Say what became of a file."""
    where, prefix = partial(_where, target, form, several), f"{target.name}: " * several
    if files.json:
        is_shown = target.output is None and not files.check
        record = {"file": target.source} | _record(result, form)
        _write(json_line(record | ({"text": result.text} if is_shown else {})), None)
    if files.diff == "terminal":
        out = terminal.console(stderr=target.output is None and not files.check or files.json)
        pairs = zip(lines(result.source), lines(result.text), strict=True)
        for number, (before, after) in enumerate(pairs, 1):
            if before != after:
                shown = f"{target.name}:" * several + f"{form.number(number):5}"
                print_change(out, shown, before, after)
    if not files.json:
        listed = [piece for piece in result.pieces if piece.reason is not None]
        most = LISTED if terminal.is_terminal(sys.stderr) else None
        for piece in listed[:most]:
            note(f"{where(piece.line)} {_kept(piece)}")
        if most is not None and len(listed) > most:
            note(f"{len(listed) - most:,} more kept; use --json to list all of them")
        for said in form.not_kept():
            note(prefix + said)
    counts = [getattr(result.stats, name) for name in STATS]
    rates = terminal.rates(*counts) if result.stats.rounds else []
    note(f"{prefix}[{', '.join([result.summary(), *rates])}]")


def _kept(piece: Piece) -> str:
    """Return what is said of an output that was not used, where it would have changed first."""
    texts = [one_line(text) for text in (piece.source, piece.refused) if text is not None]
    same = len(commonprefix(texts)) if len(texts) > 1 else 0
    start = max(0, same - SHOWN // 2)
    parts = [text[start : start + SHOWN] + "..." * (len(text) > start + SHOWN) for text in texts]
    shown = " -> ".join("..." * (start > 0) + part for part in parts)
    what = f"decoded again {piece.retried}" if piece.retried else "kept"
    return f"{what}, {one_line(piece.reason or '')}: {shown}"


def _record(done: Rewritten, form: PlainFile) -> dict[str, Any]:
    """Return what `--json` prints besides the text."""

    def told(piece: Piece) -> dict[str, Any]:
        names = ("reason", "source", "refused")
        place = {form.unit: form.number(piece.line)}
        return place | {name: getattr(piece, name) for name in names}

    return {
        "pieces": len(done.pieces),
        "changed": sum(piece.status == "changed" for piece in done.pieces),
        "kept": [told(piece) for piece in done.kept],
        "retried": [told(piece) for piece in done.pieces if piece.retried],
        "not_kept": form.not_kept(),
        "stats": {name: getattr(done.stats, name) for name in STATS},
    }


def check_target(name: str, stream: BinaryIO, *, force: bool, parents: bool = False) -> None:
    """Refuse to write a file over the input, or without `force` over anything else.

    Its folder must exist, unless its `parents` may be made.
    """
    if not name:
        raise ValueError(f"the output must be the name of a file, got {name!r}")
    try:
        found = os.stat(name)
    except FileNotFoundError:
        if not parents:
            Path(name).resolve().parent.stat()
        return
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{name} is a folder, expected the name of a file to write")
    if not stat.S_ISREG(found.st_mode):
        return
    if os.path.samestat(found, os.fstat(stream.fileno())):
        raise ValueError(f"the output {name} is the input itself: give another name")
    if not force:
        raise ValueError(f"{name} exists: use --force to replace it, or give another name")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class PartialFile(LineFile):
    """The pieces done so far, a line of JSON each, in NAME.partial.jsonl, see `partial_file_of`.

    There is one for all files of a run. A file is done if it has the digest that was kept before it
    was written, so that it need not be known which was last when the run was killed.

    It is removed when the block (`with`) is done, or ends before any piece was kept; otherwise it
    stays, and a note says so. Pieces of an earlier run are dropped with `force`, and otherwise
    taken over; a file with another `header` is refused, whose names are words for a message.
    """

    def __init__(self, path: Path, header: Header, files: OutputOptions) -> None:
        self.path = path
        super().__init__(path, ", or give another --output")
        self._header, self._files = header, files
        self.earlier: dict[str, list[Header]] = {}  # pieces of an earlier run, by file
        self.count = 0  # pieces in the file
        self._done: set[str] = set()  # digests of what was written

    def is_done(self, target: Target) -> bool:
        """Whether an earlier run has written a file; refuse to replace another one."""
        if target.output is None or not os.path.isfile(target.output):
            return False
        found = Path(target.output).read_bytes()
        if digest(found) in self._done:
            return True
        if not (self._files.force or self._files.in_place):
            raise ValueError(
                f"{target.output} exists: use --force to replace it, or give another name"
            )
        return False

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
        if self._files.force and not self._files.resume:
            self.cut(0)
        lines = self.lines()
        first = next(lines, b"")
        found, end = json_object(first), len(first)
        for name, value in self._header.items():
            if first and found.get(name) != value:
                raise ValueError(
                    f"{self.path} is from a run with another {name}: use the same as that run, or "
                    "--force without --resume to start over"
                )
        for raw in takewhile(lambda raw: raw.endswith(b"\n"), lines):
            record = json_object(raw)
            if record.keys() == {"file", "end", *KEPT}:
                self.earlier.setdefault(record["file"], []).append(record)
                self.count += 1
            elif record.keys() == {"file", "done"}:
                self._done.add(record["done"])
            else:
                raise ValueError(
                    f"{self.path} holds a line that is not a piece: use --force without --resume "
                    "to start over"
                )
            end += len(raw)
        self.cut(end)

    def append(self, piece: Header) -> None:
        with terminal.signals_held():
            self.append_bytes(json_line(piece))
            self.count += "start" in piece

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self.count:
            self.path.unlink(missing_ok=True)
        else:
            done = count(self.count, "piece")
            note(f"the work so far ({done}) is kept; --resume continues from there")
        super().__exit__(kind)
