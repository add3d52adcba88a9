"""The command `correct`: a text that is typed, or files."""

from __future__ import annotations

import typer

from ..documents import RewriteOptions
from .document import ROWS_OPTION, TextOrFiles, rewrite_all
from .options import DecoderOptions, with_options
from .targets import OutputOptions, given_words, text_of


@with_options(changes={"task": None, "to": None, "from_": None})
def correct(
    ctx: typer.Context,
    words: TextOrFiles = None,
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = ROWS_OPTION,
    options: DecoderOptions,
) -> None:
    """Correct a text or files.

    Of files, only sentences change. A correction that looks wrong, or of which the model is not
    sure, is not made; it is listed at the end. --no-guard makes all.
    """
    sources = given_words(words, "correct")
    rewrite_all(ctx, sources, text_of(sources), files, wanted, batch_size, options)
