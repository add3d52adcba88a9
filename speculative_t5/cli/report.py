"""What `document` says of each file: what changed, what was kept and why, and what was written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ..documents import Document, Piece, PlainFile, Rewritten, lines
from ..errors import count
from ..files import json_line
from . import terminal
from .review import print_change
from .targets import OutputOptions, Target
from .terminal import note, one_line

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_CHARACTERS = 40  # characters of a piece that was kept, and of the output that was refused
MOST_LISTED = 10  # such pieces on a terminal
STATS_OF_TEXTS = ("emitted", "rounds", "drafted", "accepted", "seconds")
PIECE_UNITS = {"sentence": "sentence", "paragraph": "paragraph", "tokens": "passage"}
LINE_WIDTH = 80  # columns of a terminal, which the last line does not exceed


def where(target: Target, form: PlainFile, several: bool, line: int) -> str:
    """Say where a line is; of several files, in which."""
    place = form.place(line)
    return f"{target.name}, {place}" if several else place


def report(
    target: Target,
    form: PlainFile,
    whole: Document,
    result: Rewritten,
    files: OutputOptions,
    written: list[str],
    *,
    several: bool,
) -> None:
    """Say what became of a file, and which files were `written` for it."""
    text_is_shown = target.output is None and not files.check
    if files.json:
        record = {"file": target.source or None} | _record(result, form)
        if text_is_shown:
            record["text"] = result.text
        sys.stdout.buffer.write(json_line(record))
        sys.stdout.buffer.flush()
    if files.diff == "terminal":
        out = terminal.console(stderr=text_is_shown or files.json)
        _print_changes(out, target, form, result, several=several)
    if not files.json:
        list_kept(result.pieces, partial(where, target, form, several))
        for said in form.not_kept():
            note(f"{target.name}: {said}" if several else said)
    if written:
        note(f"wrote {' and '.join(map(one_line, written))}")
    last = summary(result, PIECE_UNITS[str(whole.options.by)], would=files.check)
    note(named(target.name, last) if several else last)


def _print_changes(
    out: Console, target: Target, form: PlainFile, result: Rewritten, *, several: bool
) -> None:
    """Print the lines that changed, with their numbers."""
    pairs = zip(lines(result.source), lines(result.text), strict=True)
    for number, (before, after) in enumerate(pairs, 1):
        if before != after:
            shown = f"{form.number(number):5}"
            if form.place(number) != f"{form.unit} {form.number(number)}":
                shown = form.place(number)
            print_change(out, f"{target.name}:{shown}" if several else shown, before, after)


def list_kept(pieces: Iterable[Piece], place: Callable[[int], str]) -> None:
    """List the outputs that were not used, a few on a terminal; `place` names that of a line."""
    listed = [piece for piece in pieces if piece.reason is not None]
    most = MOST_LISTED if terminal.is_terminal(sys.stderr) else None
    for piece in listed[:most]:
        note(f"{place(piece.line)} {_kept(piece)}")
    if most is not None and len(listed) > most:
        note(f"{len(listed) - most:,} more kept; use --json to list all of them")


def summary(result: Rewritten, unit: str, *, would: bool) -> str:
    """Return what became of the sentences of a file, or `would`, in few words."""
    if not result.pieces:
        return f"no {unit}s found: nothing to change"
    changed = sum(piece.status == "changed" for piece in result.pieces)
    verb = "would change" if would else "changed"
    parts = [f"{changed:,} of {count(len(result.pieces), unit)} {verb}"]
    if result.kept:
        parts.append(f"{len(result.kept):,} left as is")
    took = f"; {result.stats.seconds:.1f} s" if result.stats.rounds else ""
    return ", ".join(parts) + took


def named(name: str, said: str) -> str:
    """Put the name of a file before what is said of it, shortened to fit a line."""
    room = LINE_WIDTH - len(said) - 2
    name = one_line(name)
    end = name[len(name) - max(0, room - 3) :]
    return f"{name if len(name) <= room else f'...{end}'}: {said}"


def _kept(piece: Piece) -> str:
    """Return what is said of an output that was not used, where it would have changed first."""
    texts = [one_line(text) for text in (piece.source, piece.refused) if text is not None]
    same = len(commonprefix(texts)) if len(texts) > 1 else 0
    start = max(0, same - SHOWN_CHARACTERS // 2)
    shown = " -> ".join(_excerpt(text, start) for text in texts)
    what = "changed in part" if piece.output != piece.source else "kept"
    what = f"decoded again {piece.retried}" if piece.retried else what
    return f"{what}, {one_line(piece.reason or '')}: {shown}"


def _excerpt(text: str, start: int) -> str:
    """Return a few characters of a text, with dots where it goes on."""
    end = start + SHOWN_CHARACTERS
    before, after = "..." if start > 0 else "", "..." if len(text) > end else ""
    return f"{before}{text[start:end]}{after}"


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
        "stats": {name: getattr(done.stats, name) for name in STATS_OF_TEXTS},
    }
