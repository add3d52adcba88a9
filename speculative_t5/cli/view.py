"""Outputs on a terminal: tokens coloured by where they came from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from ..decoding import Origin
from ..generation import MEANINGS, Chunk, Generation
from .terminal import NOTHING, print_stream, visible

# Weight and underlines tell them apart without colour, too.
STYLES: dict[Origin, str] = {
    "accepted": "green",
    "recovered": "bold yellow",
    "bonus": "underline cyan",
    "regular": "",
}


def console(*, stderr: bool = False) -> Console:
    """Make a console; it is plain if its stream is not a terminal or NO_COLOR is set."""
    return Console(
        file=sys.stderr if stderr else sys.stdout, highlight=False, emoji=False, soft_wrap=True
    )


def show(chunks: Iterable[Chunk], *, drafts: bool) -> Chunk:
    """Print a stream as it comes: the text alone, or on a terminal coloured by drafts.

    Returns:
        The last chunk.
    """
    out, last = console(), NOTHING
    if not out.is_terminal:
        return print_stream(chunks)
    if drafts:
        console(stderr=True).print(legend())
    try:
        for chunk in chunks:
            last = chunk
            out.print(shaded(chunk) if drafts else Text(visible(chunk.text)), end="")
    finally:
        out.print()
    return last


def shaded(shown: Chunk | Generation) -> Text:
    """Colour the text of an output or of a part of it."""
    if isinstance(shown, Chunk):
        origins: Sequence[Origin] = shown.origins
    else:
        origins = [token.origin for token in shown.trace]
    text = Text()
    for i, piece in enumerate(shown.pieces):
        # After its last token, an output may end with characters that were held back.
        style = STYLES[origins[i]] if i < len(origins) else ""
        word = visible(piece).lstrip(" ")
        text.append(" " * (len(piece) - len(word)))  # only words are underlined
        text.append(word, style)
    return text


def legend() -> Text:
    """Return one line that explains the colours."""
    text = Text()
    for kind in ("accepted", "recovered", "bonus"):
        text.append("   " if text else "").append(kind, STYLES[kind]).append(f" {MEANINGS[kind]}")
    return text
