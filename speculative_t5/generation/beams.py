"""Beam search for `SpeculativeDecoder`: from prompts to the outputs that users get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..decoding import (
    NOTHING_LEFT,
    BeamPlan,
    BeamResult,
    LanguageModel,
    Request,
    beam_search,
)
from ..tokenizers import Detokenizer, Tokenizer, pieces
from .drafting import agreement
from .options import GenerationOptions
from .outputs import Generation
from .shaping import Shaping


def check_plain(options: GenerationOptions, *, drafts: bool, steady: bool) -> None:
    """Refuse a beam search with drafts, or with steady passes."""
    if drafts and options.speculative:
        raise ValueError(
            f"num_beams is {options.num_beams}, and a beam search does not go with a draft: give "
            "speculative=False"
        )
    if steady:
        raise ValueError(
            f"num_beams is {options.num_beams}, and a beam search does not go with steady passes: "
            "leave out one of them"
        )


def beam_outputs(
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    requests: Iterable[Request],
    options: GenerationOptions,
    shaping: Shaping,
    batch_size: int,
) -> Iterator[tuple[int, Generation]]:
    """Search for the best outputs of prompts; yield each prompt's best one with the others."""
    beams = options.beams
    assert beams is not None
    transform = shaping.sampler.transform
    stop_ids, agree = shaping.stop_ids, agreement(model)
    plan = BeamPlan(beams, options.max_tokens, transform, stop_ids, agree)
    results = beam_search(model, requests, plan, batch_size=max(1, batch_size // beams.num_beams))
    return ((done.index, _best(done, tokenizer)) for done in results)


def _best(result: BeamResult, tokenizer: Tokenizer | None) -> Generation:
    """Return the best output, with the others as its alternatives."""
    outputs = []
    for found in result.hypotheses:
        parts = pieces(found.tokens, Detokenizer(tokenizer), end=True) if tokenizer else ()
        stats = replace(result.stats, emitted=found.emitted)
        text = "".join(parts)
        outputs.append(
            Generation(text, found.tokens, found.finish_reason, stats, parts, score=found.score)
        )
    if not outputs:
        raise ValueError(NOTHING_LEFT)
    first, *others = outputs
    return replace(first, alternatives=tuple(others))
