"""Scoring: the probabilities that models give to the tokens of a finished output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import cast

import mlx.core as mx

from .. import device
from .protocols import LanguageModel
from .sampling import Sampler
from .transform import History

PASS = 32  # tokens per pass: bounds the memory for logits, and all passes have one shape


def pair_probabilities(
    model: LanguageModel,
    draft: LanguageModel | None,
    source: Sequence[int],
    tokens: Sequence[int],
    sampler: Sampler,
    draft_vocab: int | None = None,
) -> tuple[tuple[float, float | None], ...]:
    """Return (p, q) of each token: the target's probability and the draft's.

    q is None without a draft, and where the draft's context is full. Ids from `draft_vocab` on have
    q = 0. For the other arguments see `token_probabilities`.
    """
    size = model.vocab_size
    with device.turn():
        p = token_probabilities(model, source, tokens, sampler, size)
    if draft is None:
        return tuple((each, None) for each in p)
    limit, asked = draft.max_context, tokens
    if limit is not None:  # the tokens before each scored one must fit
        asked = tokens[: max(0, limit - len(source) + 1)]
    with device.turn():
        q = token_probabilities(draft, source, asked, sampler, min(size, draft_vocab or size))
    return tuple(zip_longest(p, q))


def token_probabilities(
    model: LanguageModel,
    source: Sequence[int],
    tokens: Sequence[int],
    sampler: Sampler,
    vocab_size: int,
) -> list[float]:
    """Return the probability of each token of an output, given all tokens before it.

    Up to rounding these are the probabilities of decoding. At temperature 0, where decoding has
    only 0 and 1, they are those of temperature 1. The model, a target or a draft with its
    tokenizer, may choose among ids below `vocab_size`, if it has as many.
    """
    if sampler.temperature == 0:
        sampler = replace(sampler, temperature=1.0)
    width, last = min(vocab_size, model.vocab_size), model.vocab_size - 1
    session, (context,) = model.start([[min(token, last) for token in source]])
    fed = [context[-1], *tokens]  # all before it is in the session's cache
    found: list[float] = []
    for start in range(0, len(tokens), PASS):
        asked = list(tokens[start : start + PASS])
        # Each fed token gives the logits of the next one; padding of the last pass is ignored.
        feed = fed[start : start + PASS]
        padded = [[min(token, last) for token in feed] + [0] * (PASS - len(feed))]
        logits = session.step(mx.array(padded, dtype=mx.int32), width)
        drafted = mx.array([padded[0][1:]], dtype=mx.int32)
        before = [*context, *tokens[:start]]
        history = History([before], [len(context)], drafted)
        probs = sampler.probs(sampler.transformed(logits, history)[0])
        known = mx.array([min(token, width - 1) for token in asked])[:, None]
        given = mx.take_along_axis(probs[: len(asked)], known, axis=-1)[:, 0].tolist()
        found += [
            p if token < width else 0.0
            for p, token in zip(cast(list[float], given), asked, strict=True)
        ]
    return found
