"""Options that several commands have, and the decoder that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from .decoder import NumDraft, SpeculativeDecoder, VerifyRule

DEFAULT_MODEL, DEFAULT_DRAFT = "correct-base", "correct-small"

Model = Annotated[str, typer.Option(help="Target: a folder, or a name under weights/.")]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help=f"Draft: a folder or a name, with the target's tokenizer; or lookup, to copy from "
        f"the prompt with no model. [default: {DEFAULT_DRAFT} for {DEFAULT_MODEL}, else none]",
        show_default=False,
    ),
]
Lookup = Annotated[
    bool, typer.Option("--lookup", help="Lookups after the draft model's tokens, too.")
]
MinNgram = Annotated[int, typer.Option(help="Fewest last tokens that a lookup must find again.")]
MaxNgram = Annotated[
    int, typer.Option(help="Longest match that a lookup tells from a shorter one.")
]
DraftLength = Annotated[str, typer.Option(help="Tokens to draft for each target pass; or auto.")]
Delta = Annotated[
    float,
    typer.Option(help="Lenience from 0 to 1; above 0 the output is no longer the target's."),
]
Verify = Annotated[
    str,
    typer.Option(help="Rule for drafts when drawing: token, block (accepts more), or auto."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above it, draw.")]
TopK = Annotated[int, typer.Option(help="Draw from the k most probable tokens; 0 is all.")]
TopP = Annotated[
    float, typer.Option(help="Then from the most probable that reach this sum; 1 is all.")
]
MaxTokens = Annotated[int, typer.Option(help="Upper bound on tokens, EOS included.")]
DraftVocab = Annotated[
    int | None,
    typer.Option(
        help="Let the draft propose the first so many ids only, which costs less. [default: all]",
        show_default=False,
    ),
]
RegularDecode = Annotated[
    bool, typer.Option("--regular-decode", help="Decode with the target alone.")
]


def make_decoder(
    model: str,
    draft_model: str | None,
    *,
    lookup: bool,
    min_ngram: int,
    max_ngram: int,
    num_draft: str,
    delta: float,
    verify: str,
    regular_decode: bool,
    draft_vocab: int | None,
) -> SpeculativeDecoder:
    """Load the models that a command was asked to use."""
    draft_model = draft_of(model, draft_model)
    if regular_decode:
        draft_model, lookup = None, False
    return SpeculativeDecoder.from_pretrained(
        model, draft_model, num_draft=_num_draft(num_draft), delta=delta,
        verify=cast(VerifyRule, verify), lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram,
        draft_vocab=draft_vocab,
    )  # fmt: skip


def draft_of(model: str, draft_model: str | None) -> str | None:
    """The draft to use with a target: the one asked for, else the shipped target's own."""
    if draft_model is None and Path(model).name == DEFAULT_MODEL:
        return DEFAULT_DRAFT
    return draft_model


def _num_draft(text: str) -> NumDraft:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"--num-draft must be an integer of at least 1 or auto, got {text!r}"
        ) from None


def check_utf8(option: str, text: str) -> None:
    """Refuse an argument that holds bytes of no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF  # how Python passes on what it cannot decode
        raise ValueError(
            f"{option} is not UTF-8: byte {byte:#04x} at character {error.start}; give it in UTF-8"
        ) from error
