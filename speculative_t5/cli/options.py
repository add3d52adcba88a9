"""Options that several commands have, and the decoder that they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, cast

import typer

from ..checkpoints import DTYPES, model_folders, named_draft
from ..errors import check_utf8
from ..generation import NumDraft, SpeculativeDecoder, VerifyRule

DEFAULT_MODEL = "correct-base"
MODELS, DRAFTING, SAMPLING, OUTPUT = "Models", "Drafting", "Sampling", "Output"  # groups of --help


def known_models(incomplete: str) -> Iterator[str]:
    """Names of the models that are here, for a shell that completes them."""
    return (f.name for f in model_folders() if f.name.startswith(incomplete))


def known_drafts(incomplete: str) -> Iterator[str]:
    """What --draft-model takes by name."""
    yield from known_models(incomplete)
    if "lookup".startswith(incomplete):
        yield "lookup"


def known_rules(incomplete: str) -> Iterator[str]:
    """What --verify takes."""
    return (rule for rule in ("auto", "token", "block") if rule.startswith(incomplete))


def known_dtypes(incomplete: str) -> Iterator[str]:
    """What --dtype takes."""
    return (name for name in DTYPES if name.startswith(incomplete))


Model = Annotated[
    str,
    typer.Option(
        help="Target: a folder, or the name of a model that is here or on the Hugging Face Hub.",
        rich_help_panel=MODELS,
        autocompletion=known_models,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="Draft: a folder or a name, with the target's tokenizer; or lookup, to copy from "
        "the prompt with no model.",
        show_default="the one that the target's config.json names, else none",
        rich_help_panel=MODELS,
        autocompletion=known_drafts,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Put each prompt into the form of a chat, by the model's own template.",
        rich_help_panel=MODELS,
    ),
]
DraftVocab = Annotated[
    int | None,
    typer.Option(
        help="Let the draft propose the first N ids only, which costs less.",
        show_default="all",
        rich_help_panel=DRAFTING,
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        help="Tokens to draft for each pass of the target, or auto.", rich_help_panel=DRAFTING
    ),
]
Lookup = Annotated[
    bool,
    typer.Option(
        "--lookup",
        help="Also copy tokens from the prompt, after the draft model's own.",
        rich_help_panel=DRAFTING,
    ),
]
MinNgram = Annotated[
    int,
    typer.Option(
        help="The fewest last tokens that a lookup must find again.", rich_help_panel=DRAFTING
    ),
]
MaxNgram = Annotated[
    int,
    typer.Option(
        help="The longest match that a lookup prefers to a shorter one.", rich_help_panel=DRAFTING
    ),
]
Delta = Annotated[
    float,
    typer.Option(
        help="Lenience from 0 to 1; above 0 the output is no longer the target's.",
        rich_help_panel=DRAFTING,
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        help="Rule that judges drafts when sampling: token, block (accepts more), or auto.",
        rich_help_panel=DRAFTING,
        autocompletion=known_rules,
    ),
]
RegularDecode = Annotated[
    bool,
    typer.Option(
        "--regular-decode", help="Decode with the target alone.", rich_help_panel=DRAFTING
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0 is greedy; above 0 tokens are sampled.", rich_help_panel=SAMPLING)
]
TopK = Annotated[
    int,
    typer.Option(
        help="Sample from the k most probable tokens; 0 is all.", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Then from the most probable ones that sum to this; 1 is all.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed for sampling.", rich_help_panel=SAMPLING)]
Prefix = Annotated[
    str | None,
    typer.Option(
        help="Put before each prompt that does not begin with it, for example 'summarize: '.",
        show_default="what the model's config.json names, else none",
        rich_help_panel=MODELS,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Type to compute in: float32, float16 or bfloat16.",
        show_default="float32 on a CPU, else bfloat16",
        rich_help_panel=MODELS,
        autocompletion=known_dtypes,
    ),
]
MaxSource = Annotated[
    int | None,
    typer.Option(
        "--max-source-length",
        "--max-source",
        help="The longest prompt in tokens; a longer one is an error.",
        show_default="what the model's config.json says, else 512 for a T5",
        rich_help_panel=MODELS,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate",
        help="Cut prompts that are too long; those of decoder-only models at their beginning, so "
        "that there is room for --max-tokens.",
        rich_help_panel=MODELS,
    ),
]
MaxTokens = Annotated[
    int, typer.Option(help="Upper bound on tokens, EOS included.", rich_help_panel=OUTPUT)
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
    chat: bool,
    prefix: str | None,
    max_source_length: int | None,
    truncate: bool,
    dtype: str | None,
) -> SpeculativeDecoder:
    """Load the models that a command was asked to use."""
    check_utf8("--prefix", prefix or "")
    draft_model = draft_of(model, draft_model)
    if regular_decode:
        draft_model, lookup = None, False
    return SpeculativeDecoder.from_pretrained(
        model, draft_model, num_draft=draft_length(num_draft), delta=delta,
        verify=cast(VerifyRule, verify), lookup=lookup, min_ngram=min_ngram, max_ngram=max_ngram,
        draft_vocab=draft_vocab, chat=chat, prefix=prefix, max_source_length=max_source_length,
        truncate=truncate, dtype=dtype,
    )  # fmt: skip


def draft_of(model: str, draft_model: str | None) -> str | None:
    """The draft to use with a target: the one asked for, else the one that the target names."""
    if draft_model is None and (named := named_draft(model)):
        return str(named)
    return draft_model


def draft_length(text: str, option: str = "--num-draft") -> NumDraft:
    """A number of tokens to draft, or "auto"."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{option} must be an integer of at least 1 or auto, got {text!r}"
        ) from None
