"""Suggestions one by one on a terminal, as `git add -p` shows changes: take, leave or edit each."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..documents import Document, Piece, changes, lines
from . import terminal
from .terminal import note

if TYPE_CHECKING:
    from rich.console import Console

QUESTION = "Make this change [y,n,e,a,q,?]? "
HELP = (
    "y - make this change\n"
    "n - leave the text as it is\n"
    "e - edit the new text\n"
    "a - make this change and all others, except those that were held back\n"
    "q - leave this text and all that follows as it is, also in further files\n"
    "? - show this list"
)


def review(
    whole: Document, pieces: Mapping[int, Piece], where: Callable[[int], str]
) -> tuple[dict[int, Piece], bool]:
    """Ask for each suggestion; return the pieces as they were chosen, and whether to quit.

    Suggestions are the changed pieces, and the outputs that were held back. `where` says where a
    line is.
    """
    chosen, every, quits = dict(pieces), False, False
    out = terminal.console(stderr=True)
    for number in range(len(whole)):
        piece = chosen[number]
        held_back = piece.status == "kept"
        wanted = piece.refused if held_back else piece.output
        if wanted is None or wanted == piece.source or (every and held_back):
            continue
        made = piece
        if held_back:
            made = replace(piece, output=wanted, reason=None, refused=None)
        left = piece if held_back else replace(piece, output=piece.source, reason=None)
        if quits:
            chosen[number] = left
        elif not every:
            out.print(f"{where(piece.line)}: held back, {piece.reason}" if held_back
                      else where(piece.line), markup=False)  # fmt: skip
            print_change(out, "", piece.source, made.output)
            answer = _answer()
            if answer == "e":
                text = edited(" ".join(made.output.split()))
                made = replace(made, output=whole.laid_out(number, text) or text)
            every, quits = answer == "a", answer == "q"
            chosen[number] = left if answer in ("n", "q") else made
    return chosen, quits


def _answer() -> str:
    while True:
        try:
            answer = input(QUESTION).strip().lower()[:1]
        except EOFError:
            note("")
            return "q"
        if answer and answer in "yneaq":
            return answer
        note(HELP)


def edited(text: str) -> str:
    """Return what a person makes of a text; the line editor begins with it, where there is one."""
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
