"""The command `correct`: a text that is typed, or files."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..documents import RewriteOptions
from ..options import option
from . import terminal
from .document import rewrite_all
from .options import DecoderOptions, with_options
from .targets import OutputOptions, text_of

TEXT_OR_FILES = (
    "A text, or the names of files and folders; - is standard input. What is read of each kind of "
    "file is in docs/documents.md."
)


@with_options(changes={"task": None, "to": None, "from_": None})
def correct(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT_OR_FILES...", help=TEXT_OR_FILES)
    ] = None,
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = option(
        None, "Pieces to decode side by side.", shown="16, or 1 with --steady"
    ),
    options: DecoderOptions,
) -> None:
    """Correct a text or files.

    Of files, only sentences change. A correction that looks wrong, or of which the model is not
    sure, is not made; it is listed at the end. --no-guard makes all.
    """
    sources = given(words, "correct")
    rewrite_all(ctx, sources, text_of(sources), files, wanted, batch_size, options)


def given(words: list[str] | None, command: str) -> list[str]:
    """Return what was given to a command: standard input if that is no terminal, else an error."""
    if words:
        return words
    if terminal.is_terminal(sys.stdin):
        raise ValueError(
            f"{command} was given nothing: give a text in quotation marks, or names of files"
        )
    return ["-"]
