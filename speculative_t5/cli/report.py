"""What `document` says of each file: what changed, what was kept and why, and what was written."""

from __future__ import annotations

import sys
from functools import partial
from os.path import commonprefix
from typing import Any

from ..documents import Document, Piece, PlainFile, Rewritten, lines
from ..errors import count
from ..files import json_line
from . import terminal
from .review import print_change
from .targets import OutputOptions, Target
from .terminal import note, one_line

SHOWN = 40  # characters of a piece that was kept, and of the output that was refused
LISTED = 10  # such pieces on a terminal
STATS = ("emitted", "rounds", "drafted", "accepted", "seconds")
UNITS = {"sentence": "sentence", "paragraph": "paragraph", "tokens": "passage"}
WIDTH = 80  # columns of a terminal, which the last line does not exceed


def where(target: Target, form: PlainFile, several: bool, line: int) -> str:
    return f"{target.name}, " * several + f"{form.unit} {form.number(line)}"


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
    place = partial(where, target, form, several)
    if files.json:
        is_shown = target.output is None and not files.check
        record = {"file": target.source} | _record(result, form)
        sys.stdout.buffer.write(json_line(record | ({"text": result.text} if is_shown else {})))
        sys.stdout.buffer.flush()
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
            note(f"{place(piece.line)} {_kept(piece)}")
        if most is not None and len(listed) > most:
            note(f"{len(listed) - most:,} more kept; use --json to list all of them")
        for said in form.not_kept():
            note(f"{target.name}: " * several + said)
    if written:
        note(f"wrote {' and '.join(map(one_line, written))}")
    last = summary(result, UNITS[str(whole.options.by)], would=files.check)
    note(named(target.name, last) if several else last)


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
    room = WIDTH - len(said) - 2
    name = one_line(name)
    end = name[len(name) - max(0, room - 3) :]
    return f"{name if len(name) <= room else f'...{end}'}: {said}"


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
