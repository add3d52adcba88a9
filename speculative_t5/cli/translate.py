"""The command `translate`: a text that is typed, or files."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..checkpoints import ModelFolder, model_folders
from ..documents import RewriteOptions
from ..options import option
from ..tokenizers import read_languages
from .correct import TEXT_OR_FILES, given
from .document import rewrite_all
from .options import DecoderOptions, is_given, with_options
from .targets import OutputOptions, text_of
from .terminal import note

ADVISED_MODEL = "google/madlad400-3b-mt"


@with_options(
    changes={
        "task": None,
        "model": {"show_default": "the first on this machine that translates to it"},
    }
)
def translate(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT_OR_FILES...", help=TEXT_OR_FILES)
    ] = None,
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = option(
        None, "Passages to decode side by side.", shown="16, or 1 with --steady"
    ),
    options: DecoderOptions,
) -> None:
    """Translate a text or files.

    --to names the language. Words that are headings, labels or cells of tables are translated, too;
    code and addresses stay. What looks wrong is tried again, then left as it was, and listed.
    """
    if options.to is None:
        raise ValueError("translate needs a language: give --to, such as --to German")
    sources = given(words, "translate")
    text = text_of(sources)
    if not (is_given(ctx, "model") or options.adapter):
        options = replace(options, model=translator(options.to, options.from_))
        note(f"with {options.name}")
    rewrite_all(ctx, sources, text, files, wanted, batch_size, options)


def translator(to: str, from_: str | None) -> str:
    """Return the first model on this machine that translates to a language.

    Raises:
        ValueError: If there is none.
    """
    for path in model_folders():
        folder = ModelFolder(path)
        if folder.kind == "t5-draft" or folder.is_encoder:
            continue
        try:
            read_languages(folder.config, folder.tokenizer().vocabulary).pair(to, from_)
        except ValueError:  # it does not translate to this language, or is no whole model
            continue
        return str(path)
    raise ValueError(
        f"no model on this machine translates to {to!r}: give one with --model, such as "
        f"{ADVISED_MODEL}"
    )
