"""The command line's `repl`: prompts and options one after another."""

from __future__ import annotations

import sys
from typing import Annotated, cast

import typer

from ..generation import SpeculativeDecoder, VerifyRule
from .options import (
    DEFAULT_MODEL,
    OUTPUT,
    Chat,
    Delta,
    DraftLength,
    DraftModel,
    DraftVocab,
    Dtype,
    Lookup,
    MaxNgram,
    MaxSource,
    MaxTokens,
    MinNgram,
    Model,
    Prefix,
    Seed,
    Temperature,
    TopK,
    TopP,
    Truncate,
    Verify,
    draft_length,
    draft_of,
    make_decoder,
)
from .terminal import SOME_FAILED, failure, is_terminal, note, printable


def repl(
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    chat: Chat = False,
    prefix: Prefix = None,
    max_source_length: MaxSource = None,
    truncate: Truncate = False,
    dtype: Dtype = None,
    num_draft: DraftLength = "5",
    lookup: Lookup = False,
    min_ngram: MinNgram = 1,
    max_ngram: MaxNgram = 8,
    delta: Delta = 0.0,
    verify: Verify = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = 0,
    draft_vocab: DraftVocab = None,
    show_drafts: Annotated[
        bool,
        typer.Option(
            help="On a terminal, colour tokens by where they came from.", rich_help_panel=OUTPUT
        ),
    ] = True,
) -> None:
    """Try prompts and options one after another, on models that are loaded once.

    Each line is a prompt, or a command that begins with a slash; /help lists them. At a terminal
    exit, quit and help alone do without the slash.
    """
    from .conversation import Repl, Settings, typed_lines

    first = make_decoder(
        model, draft_model, lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram,
        num_draft=num_draft, delta=delta, verify=verify, regular_decode=False,
        draft_vocab=draft_vocab, chat=chat, prefix=prefix, max_source_length=max_source_length,
        truncate=truncate, dtype=dtype,
    )  # fmt: skip
    settings = Settings(
        num_draft, delta, verify, temperature, top_k, top_p, max_tokens, seed, show_drafts,
        first.prefix,
    )  # fmt: skip
    lookup = lookup or draft_model == "lookup"

    def load(wanted: Settings) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            first.model, first.draft, first.tokenizer,
            num_draft=draft_length(wanted.num_draft, "num_draft"), delta=wanted.delta,
            verify=cast(VerifyRule, wanted.verify), lookup=lookup, min_ngram=min_ngram,
            max_ngram=max_ngram, draft_vocab=draft_vocab, chat=chat, prefix=wanted.prefix,
            max_source_length=max_source_length, truncate=truncate,
        )  # fmt: skip

    interactive, failed = is_terminal(sys.stdin), False
    session = Repl(load, settings, typed=interactive)
    if interactive:
        draft = draft_of(model, draft_model)
        note(f"{model}{f', {draft} drafts' if draft else ''}; prefix {first.prefix!r}; /help lists "
             "the commands, Ctrl-D leaves")  # fmt: skip
    for line in typed_lines():
        try:
            if not session.handle(line):
                break
        except ValueError as error:
            failed = True
            note(f"error: {printable(str(error))}")
        except (RuntimeError, MemoryError) as error:
            failed = True
            note(f"error: {printable(failure(error))}")
        except KeyboardInterrupt:
            if not interactive:
                raise
            note("stopped")
    if failed and not interactive:  # a person has seen it
        raise typer.Exit(SOME_FAILED)
