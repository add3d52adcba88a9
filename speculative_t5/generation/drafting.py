"""A decoder's models: whether target and draft go together, and texts as ids of their tokenizer."""

from dataclasses import replace
from typing import Literal

from ..checkpoints import dtype_name
from ..decoding import LanguageModel, ModelInfo
from ..errors import check_utf8
from ..models import T5, SharingDraft, TextEncoder
from ..options import OptionError, option_error
from ..tokenizers import Tokenizer, unknown_characters
from .decoder_options import DraftingOptions


def spelled(
    info: ModelInfo, tokenizer: Tokenizer | None, name: str, text: str
) -> list[tuple[int, ...]]:
    """Return the ids of a text where an output begins, and those after a space.

    They are without the control tokens around a text. `name` is that of the option, for messages.
    """
    check_utf8(name, text)
    if tokenizer is None:
        raise OptionError(f"{{{name}}} has the text {{!r}}: give ids, or a tokenizer", text)
    ways, around = [], tokenizer.encode("")
    for way in (text, f" {text}"):
        ids = tokenizer.encode(way)
        if lacking := unknown_characters(tokenizer, way, ids):
            raise OptionError(
                f"{{{name}}} has the text {{!r}}, and the vocabulary lacks {{!r}}: leave it out, "
                "or give ids",
                way,
                lacking[0],
            )
        if len(around) == 2 and [*ids[:1], *ids[-1:]] == around:  # BERT's and RoBERTa's
            ids = ids[1:-1]
        elif not info.is_decoder_only and ids[-1:] == [info.eos_token_id]:
            ids = ids[:-1]
        elif ids and ids[0] in info.special_tokens and not tokenizer.decode(ids[:1]):
            ids = ids[1:]
        if not ids:
            raise OptionError(
                f"{{{name}}} has the text {{!r}}, which has no ids: leave it out", way
            )
        ways.append(tuple(ids))
    return list(dict.fromkeys(ways))


def pair_up(
    model: LanguageModel,
    draft: LanguageModel | Literal["lookup"] | None,
    options: DraftingOptions,
) -> tuple[LanguageModel | None, DraftingOptions]:
    """Return the draft model, if any, and the options that it implies; refuse a wrong one."""
    if isinstance(model, TextEncoder):
        raise ValueError(
            f"{model.name or 'the model'} is an encoder alone, which generates nothing: use it by "
            "Encoder, or choose a whole model"
        )
    if not hasattr(model, "start"):
        raise ValueError(
            f"model must be a loaded model, got {model!r}: give from_pretrained its name or folder"
        )
    is_shared = isinstance(model, T5) and model.num_processes > 1
    if is_shared:  # "auto" goes by measured times, and all processes must draft alike
        options = replace(options, num_draft=options.fixed)
    if is_shared and options.steady:
        raise OptionError(
            "steady passes are tried out on each machine, and the processes that share a model "
            "must run the same ones: leave {steady} out"
        )
    if isinstance(draft, str) and draft == "lookup":
        draft, options = None, replace(options, lookup=True)
    elif draft is not None and not hasattr(draft, "start"):
        raise ValueError(f"draft must be a loaded model, 'lookup' or None, got {draft!r}")
    if draft is not None:
        _check_pair(model, draft)
    if isinstance(draft, SharingDraft) and options.draft_vocab is None:
        options = replace(options, draft_vocab=draft.own.draft_vocab)
    # Where a decoder-only model's ids end with EOS, as GPT-2's do, a draft can do without it.
    least = 0 if model.info.is_decoder_only else model.info.eos_token_id
    if options.draft_vocab is not None and options.draft_vocab <= least:
        expected = f"above {model.info.eos_token_id}, the id that ends outputs"
        raise option_error("draft_vocab", expected, options.draft_vocab)
    return draft, options


def _check_pair(model: LanguageModel, draft: LanguageModel) -> None:
    """Refuse a target and a draft whose ids stand for different tokens, or another's draft."""
    if isinstance(draft, SharingDraft) and draft.target is not model:
        raise ValueError(
            "the draft shares the encoder of another model that was loaded: give "
            "load(NAME, target=model) the model of this decoder"
        )
    if isinstance(draft, SharingDraft) and draft.dtype != draft.target.dtype:
        raise ValueError(
            f"the draft computes in {dtype_name(draft.dtype)}, and its target in "
            f"{dtype_name(draft.target.dtype)}: load it again with target=model"
        )
    if model.info.is_decoder_only != draft.info.is_decoder_only:
        kinds = {True: "decoder-only", False: "an encoder-decoder"}
        raise ValueError(
            f"the target is {kinds[model.info.is_decoder_only]}, the draft is "
            f"{kinds[draft.info.is_decoder_only]}: choose another draft, or 'lookup'"
        )
    ours, theirs = model.info.vocabulary, draft.info.vocabulary
    if ours and theirs and ours != theirs:
        raise ValueError(
            "target and draft must share a tokenizer: "
            f"the target's has {ours}, the draft's has {theirs}; choose another draft, or 'lookup'"
        )
