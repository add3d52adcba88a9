"""Options bound to models: what they mean for a target, its draft and its tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from .. import decoding, device
from ..checkpoints import dtype_name
from ..decoding import AdaptiveSchedule, LanguageModel, Plan, Request, Round, RowOptions, Schedule
from ..errors import check_utf8
from ..models import T5, SharingDraft
from ..tokenizers import Tokenizer, unknown_characters
from .options import DraftingOptions, GenerationOptions
from .outputs import StoppedText

WARM_UP_TOKENS = 128  # of an output that only serves to measure costs

_calibrating = threading.Lock()  # of the process: other threads would disturb what is measured


def bind(
    options: GenerationOptions, model: LanguageModel, tokenizer: Tokenizer | None
) -> RowOptions:
    """Return what the options of a call mean for a target and its tokenizer.

    Raises:
        ValueError: If an option names an id that the model lacks, or is text and there is no
            tokenizer, or text that the vocabulary lacks.
    """
    stop_ids = frozenset(options.stop_token_ids)
    spell = partial(_spelled, model, tokenizer)
    transform = options.transform(spell, stop_ids | model.info.eos_token_ids)
    named: dict[str, Collection[int]] = {"stop_token_ids": stop_ids}
    if transform:
        named |= transform.ids
    for name, ids in named.items():
        if (largest := max(ids, default=-1)) >= model.info.vocab_size:
            raise ValueError(
                f"{name} has the id {largest}, and the model has ids below "
                f"{model.info.vocab_size}: give ids of its tokenizer"
            )
    stop_checker = None
    if options.stop:
        if tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the decoder one")
        stop_checker = partial(StoppedText, tokenizer, options.stop, options.min_tokens)
    sampler = replace(options.sampler, transform=transform) if transform else options.sampler
    seed = options.seed if options.temperature else None
    return RowOptions(
        sampler, options.max_tokens, seed, stop_ids, stop_checker, options.speculative
    )


def _spelled(
    model: LanguageModel, tokenizer: Tokenizer | None, name: str, text: str
) -> list[tuple[int, ...]]:
    """Return the ids of a text where an output begins, and those after a space.

    They are without EOS and a BOS before them. `name` is that of the option, for messages.
    """
    check_utf8(name, text)
    if tokenizer is None:
        raise ValueError(f"{name} has the text {text!r}: give ids, or a tokenizer")
    ways = []
    for way in (text, f" {text}"):
        ids = tokenizer.encode(way)
        if lacking := unknown_characters(tokenizer, way, ids):
            raise ValueError(
                f"{name} has the text {way!r}, and the vocabulary lacks {lacking[0]!r}: leave it "
                "out, or give ids"
            )
        if not model.info.is_decoder_only:
            ids = ids[:-1]
        elif ids and ids[0] in model.info.special_tokens and not tokenizer.decode(ids[:1]):
            ids = ids[1:]
        if not ids:
            raise ValueError(f"{name} has the text {way!r}, which has no ids: leave it out")
        ways.append(tuple(ids))
    return list(dict.fromkeys(ways))


def make_drafter(
    model: LanguageModel, draft: LanguageModel | None, options: DraftingOptions
) -> decoding.Drafter | None:
    """Return the drafter for a target, or None where nothing drafts."""
    by_model = None
    if draft:
        by_model = decoding.ModelDrafter(
            draft, model.info.vocab_size, options.draft_vocab, agreement(model)
        )
    if not options.lookup:
        return by_model
    lookup = decoding.LookupDrafter(model.info, options.min_ngram, options.max_ngram)
    if by_model is None:
        return lookup
    return decoding.CombinedDrafter(by_model, lookup, shared=options.steady)


def agreement(model: LanguageModel) -> decoding.Broadcast:
    """Return what makes choices the same in all processes that share a target."""
    return model.broadcast if isinstance(model, T5) else decoding.identity


def pair_up(
    model: LanguageModel,
    draft: LanguageModel | Literal["lookup"] | None,
    options: DraftingOptions,
) -> tuple[LanguageModel | None, DraftingOptions]:
    """Return the draft model, if there is one, and the options with what the draft implies.

    Refuse a draft that does not go with the target.
    """
    is_shared = isinstance(model, T5) and model.num_processes > 1
    if is_shared and options.num_draft == "auto":
        raise ValueError(
            "num_draft 'auto' goes by measured times, and the processes that share a model must "
            "draft alike: give a number"
        )
    if is_shared and options.steady:
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
        options = replace(options, draft_vocab=draft.own.draft_vocab)
    # Where a decoder-only model's ids end with EOS, as GPT-2's do, a draft can do without it.
    least = 0 if model.info.is_decoder_only else model.info.eos_token_id
    if options.draft_vocab is not None and options.draft_vocab <= least:
        raise ValueError(
            f"draft_vocab must be above {model.info.eos_token_id}, the id that ends outputs, "
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


def adaptive_schedule(
    known: dict[tuple[object, ...], AdaptiveSchedule],
    model: LanguageModel,
    draft: LanguageModel | None,
    drafting: DraftingOptions,
    plan: Plan,
    requests: Sequence[Request],
) -> AdaptiveSchedule:
    """Return the schedule for these options; measure the plan's costs on requests if not known.

    Where outputs do not depend on draft lengths (greedy and exact), the schedule goes on learning
    from one call to the next. Elsewhere each call begins with a fresh one, or the same seed and
    options would not give the same tokens twice. All requests have the options of the first one.
    """
    device.enter_thread()  # before the lock, which a fork may leave locked
    own, verifier = requests[0].options, plan.verifier
    sampler = own.sampler
    sampling = (float(sampler.temperature), sampler.top_k, float(sampler.top_p))
    rule = (verifier.block, float(verifier.delta))
    lookups = (drafting.lookup, drafting.min_ngram, drafting.max_ngram)
    batch_size = 1 << (len(requests) - 1).bit_length()  # the next power of two
    # A transform takes time, and changes what is accepted.
    transform = (sampler.transform.summary,) if sampler.transform else ()
    settings = (*sampling, *rule, *lookups, drafting.draft_vocab, batch_size, *transform)

    def warm_up(schedule: Schedule, seed: int) -> Iterator[Round]:
        sampled = seed if sampler.temperature else None
        brief = replace(own, max_tokens=WARM_UP_TOKENS, seed=sampled)
        timed = replace(plan, schedule=schedule, timed=True)
        bound = [replace(request, options=brief) for request in requests]
        return decoding.decode(model, bound, timed, batch_size=len(bound))

    with _calibrating:
        if settings not in known:
            models = [each.fingerprint if each else None for each in (model, draft)]
            found = decoding.calibrate(warm_up, len(requests), *models, *settings)
            known[settings] = AdaptiveSchedule(found)
        schedule = known[settings]
    greedy_and_exact = sampler.temperature == 0 and verifier.delta == 0
    return schedule if greedy_and_exact else AdaptiveSchedule(schedule.calibration)
