"""The command `translate`: a text that is typed, or files."""

from __future__ import annotations

from dataclasses import replace

import typer

from ..checkpoints import ModelFolder, model_folders
from ..documents import RewriteOptions
from ..tokenizers import Languages, read_languages
from .document import ROWS_OPTION, TextOrFiles, rewrite_all
from .options import DecoderOptions, is_given, with_options
from .targets import OutputOptions, given_words, text_of
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
    words: TextOrFiles = None,
    *,
    files: OutputOptions,
    wanted: RewriteOptions,
    batch_size: int | None = ROWS_OPTION,
    options: DecoderOptions,
) -> None:
    """Translate a text or files.

    --to names the language. Words that are headings, labels or cells of tables are translated, too;
    code and addresses stay. What looks wrong is tried again, then left as it was, and listed.
    """
    if options.to is None:
        raise ValueError("translate needs a language: give --to, such as --to German")
    sources = given_words(words, "translate")
    text = text_of(sources)
    if not (is_given(ctx, "model") or options.adapter):
        options = replace(options, model=translator(options.to, options.from_))
        note(f"with {options.name}")
    rewrite_all(ctx, sources, text, files, wanted, batch_size, options)


def translator(to: str, from_: str | None) -> str:
    """Return the first model on this machine that translates to a language.

    Raises:
        ValueError: If there is none; if some translate, with what the first of them lacks.
    """
    refused: ValueError | None = None
    for path in model_folders():
        languages = _languages_of(ModelFolder(path))
        if languages.prefixes:
            try:
                languages.pair(to, from_)
                return str(path)
            except ValueError as error:
                refused = refused or error
    if refused:
        raise refused
    raise ValueError(
        f"no model on this machine translates to {to!r}: give one with --model, such as "
        f"{ADVISED_MODEL}"
    )


def _languages_of(folder: ModelFolder) -> Languages:
    """Return the languages that a model translates, none if it cannot be told."""
    if folder.kind == "t5-draft" or folder.is_encoder:
        return Languages()
    try:
        return read_languages(folder.config, folder.tokenizer().vocabulary)
    except ValueError:  # it is no whole model, and another one may do
        return Languages()
