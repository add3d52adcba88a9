"""Suggestions one by one on a terminal, as `git add -p` shows changes: take, leave or edit each."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..documents import Piece, arranged, changes, lines
from . import terminal
from .terminal import note

if TYPE_CHECKING:
    from rich.console import Console

CHANGE_QUESTION = "Make this change [y,n,e,a,q,?]? "
ANSWERS_HELP = (
    "y - make this change",
    "n - leave the text as it is",
    "e - edit the new text",
    "a - make this change and all others, except those that were held back",
    "q - leave this text and all that follows as it is; further files are not written",
    "? - show this list",
)


def review(pieces: Iterable[Piece], where: Callable[[int], str]) -> tuple[list[Piece], bool]:
    """Ask for each suggestion; return the pieces as they were chosen, and whether to quit.

    Suggestions are the changed pieces, and the outputs that were held back. `where` says where a
    line is.
    """
    chosen, every, quits = list[Piece](), False, False
    out = terminal.console(stderr=True)
    for piece in sorted(pieces, key=lambda piece: piece.start):
        taken = piece
        for made, left, held_back in _suggestions(piece):
            if every and held_back:
                continue
            answer = "q" if quits else "a"
            if not (quits or every):
                place = where(piece.line)
                shown = f"{place}: held back, {piece.reason}" if held_back else place
                out.print(shown, markup=False)
                print_change(out, "", taken.output if held_back else piece.source, made.output)
                answer = _ask()
                every, quits = answer == "a", answer == "q"
            taken = left(taken) if answer in ("n", "q") else made
            if answer == "e":
                taken = replace(made, output=edited(made.output))
        chosen.append(taken)
    return chosen, quits


def _suggestions(piece: Piece) -> Iterator[tuple[Piece, Callable[[Piece], Piece], bool]]:
    """Yield what a piece may become, what it is otherwise, and whether that was held back."""
    if piece.status == "changed":
        yield piece, lambda _: replace(piece, output=piece.source, reason=None), False
    if piece.reason and piece.retried is None and piece.refused not in (None, piece.source):
        yield replace(piece, output=piece.refused, reason=None, refused=None), lambda it: it, True


def _ask() -> str:
    while True:
        try:
            answer = input(CHANGE_QUESTION).strip().lower()[:1]
        except EOFError:
            note("")
            return "q"
        if answer and answer in "yneaq":
            return answer
        for line in ANSWERS_HELP:
            note(line)


def edited(output: str) -> str:
    """Return what a person makes of an output, in its layout.

    The line editor begins with its words, where there is one.
    """
    parts = re.split(r"(\s*[\r\n]+[>\s]*|\s+)", output)  # words and what is between them
    words, gaps = parts[::2], parts[1::2]
    while True:
        new = typed(" ".join(words)).split()
        if found := arranged(words, gaps, new) if new else None:
            return found
        note("the text has fewer words than lines: give at least one for each line")


def typed(text: str) -> str:
    try:
        import readline
    except ImportError:  # not every Python has it
        note(text)
        return input("Type the new text: ") or text
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input("Edit: ") or text
    finally:
        readline.set_startup_hook(None)


def print_change(out: "Console", label: str, before: str, after: str) -> None:
    """Print the lines of two texts, with what went in red and what came in green."""
    from rich.text import Text

    for old, new in zip(lines(before), lines(after), strict=True):
        for sign, side, style in (("-", 0, "bold red"), ("+", 1, "bold green")):
            line = Text(f"{label} {sign} " if label else f"{sign} ", style="dim")
            for change in changes(old, new):
                same = change[0] == change[1]
                shown = terminal.visible(change[side])
                line.append(shown, "not dim" if same else f"not dim {style}")
            out.print(line)
