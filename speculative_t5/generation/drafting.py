"""From options to a plan and its drafter; which drafts go with a target."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..checkpoints import dtype_name
from ..decoding import (
    Agree,
    CombinedDrafter,
    Drafter,
    EmptyDrafter,
    FixedSchedule,
    LanguageModel,
    LookupDrafter,
    ModelDrafter,
    Plan,
    RowOptions,
    RowSamplers,
    Sampler,
    Verifier,
    alone,
)
from ..models import T5, SharingDraft
from .options import DraftingOptions, GenerationOptions
from .shaping import Shaping


def make_plan(
    model: LanguageModel,
    draft: LanguageModel | None,
    drafting: DraftingOptions,
    options: GenerationOptions,
    shaping: Shaping,
    width: int | None,
) -> Plan:
    """Return the plan by which `decode` generates; nothing is drafted if num_draft is "auto".

    `shaping` is that of `options` for the target; for `width` see `Plan`.
    """
    sampler = shaping.sampler
    drafter = make_drafter(model, draft, drafting, sampler) if options.speculative else None
    fixed = drafter is not None and drafting.num_draft != "auto"
    return Plan(
        drafter or EmptyDrafter(),
        FixedSchedule(int(drafting.num_draft) if fixed else 0),
        Verifier(sampler, drafting.delta, drafting.by_block),
        row_options(options, shaping),
        # T5's passes are compiled, and leave the host little to do meanwhile.
        ahead=drafter is None and model.is_decoder_only and not sampler.transforms,
        width=width,
        sharing=draft if drafter and isinstance(draft, SharingDraft) else None,
        agree=agreement(model),
    )


def make_open_plan(
    model: LanguageModel,
    draft: LanguageModel | None,
    drafting: DraftingOptions,
    width: int | None,
) -> Plan:
    """Return a plan for requests that bring options of their own.

    The number to draft does not depend on neighbours: it is `num_draft`, or where that is "auto",
    which adapts to all rows together, the default of `DraftingOptions`.
    """
    samplers = RowSamplers()
    drafter = make_drafter(model, draft, drafting, samplers)
    number = drafting.num_draft
    fixed = DraftingOptions.num_draft if number == "auto" else number
    return Plan(
        drafter or EmptyDrafter(),
        FixedSchedule(int(fixed) if drafter else 0),
        Verifier(samplers, drafting.delta, drafting.by_block),
        width=width,
        sharing=draft if isinstance(draft, SharingDraft) else None,
        agree=agreement(model),
    )


def row_options(options: GenerationOptions, shaping: Shaping) -> RowOptions:
    """Return what the options of a call, of which `shaping` was made, mean for its rows."""
    return RowOptions(
        shaping.sampler,
        options.max_tokens,
        options.seed if options.temperature else None,
        stop_ids=shaping.stop_ids,
        stopper=shaping.stopper if options.stop else None,
        drafts=options.speculative,
    )


def make_drafter(
    model: LanguageModel,
    draft: LanguageModel | None,
    options: DraftingOptions,
    sampler: Sampler | RowSamplers,
) -> Drafter | None:
    """Return the drafter for a target, or None where nothing drafts."""
    by_model = None
    if draft:
        by_model = ModelDrafter(
            draft, sampler, model.vocab_size, options.draft_vocab, agreement(model)
        )
    if not options.lookup:
        return by_model
    lookup = LookupDrafter(
        model.eos_token_ids,
        model.special_tokens,
        min_ngram=options.min_ngram,
        max_ngram=options.max_ngram,
        is_decoder_only=model.is_decoder_only,
    )
    if by_model is None:
        return lookup
    return CombinedDrafter(by_model, lookup, model.eos_token_ids, shared=options.steady)


def agreement(model: LanguageModel) -> Agree:
    """Return what makes choices the same in all processes that share a target."""
    return model.agreed if isinstance(model, T5) else alone


def pair_up(
    model: LanguageModel,
    draft: LanguageModel | Literal["lookup"] | None,
    options: DraftingOptions,
) -> tuple[LanguageModel | None, DraftingOptions]:
    """Return the draft model, if there is one, and the options with what the draft implies.

    Raises:
        ValueError: If the draft does not go with the target, the draft vocabulary leaves out the
            EOS of a T5, or processes that share the target might run different passes.
    """
    if isinstance(model, T5) and model.num_processes > 1 and options.num_draft == "auto":
        raise ValueError(
            "num_draft 'auto' goes by measured times, and the processes that share a model must "
            "draft alike: give a number"
        )
    if isinstance(model, T5) and model.num_processes > 1 and options.steady:
        raise ValueError(
            "steady passes are tried out on each machine, and the processes that share a model "
            "must run the same ones: leave steady out"
        )
    if isinstance(draft, str) and draft == "lookup":
        draft, options = None, replace(options, lookup=True)
    elif draft is not None and not hasattr(draft, "start"):
        raise ValueError(f"draft must be a loaded model, 'lookup' or None, got {draft!r}")
    if draft is not None:
        _check_pair(model, draft)
    if isinstance(draft, SharingDraft) and options.draft_vocab is None:
        options = replace(options, draft_vocab=draft.draft_vocab)
    # Where a decoder-only model's ids end with EOS, as GPT-2's do, a draft can do without it.
    least = 0 if model.is_decoder_only else model.eos_token_id
    if options.draft_vocab is not None and options.draft_vocab <= least:
        raise ValueError(
            f"draft_vocab must be above {model.eos_token_id}, the id that ends outputs, "
            f"got {options.draft_vocab}"
        )
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
    if model.is_decoder_only != draft.is_decoder_only:
        kinds = {True: "decoder-only", False: "an encoder-decoder"}
        raise ValueError(
            f"the target is {kinds[model.is_decoder_only]}, the draft is "
            f"{kinds[draft.is_decoder_only]}: choose another draft, or 'lookup'"
        )
    ours, theirs = model.vocabulary, draft.vocabulary
    if ours and theirs and ours != theirs:
        raise ValueError(
            "target and draft must share a tokenizer: "
            f"the target's has {ours}, the draft's has {theirs}; choose another draft, or 'lookup'"
        )
