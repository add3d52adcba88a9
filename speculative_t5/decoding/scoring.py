"""Probabilities that a model gives to tokens that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

import mlx.core as mx

from .protocols import LanguageModel
from .sampling import Sampler

PASS = 32  # tokens at a time: little memory for logits of large vocabularies, and one shape


def pair_probabilities(
    model: LanguageModel,
    draft: LanguageModel | None,
    source: Sequence[int],
    tokens: Sequence[int],
    sampler: Sampler,
    draft_vocab: int | None = None,
) -> tuple[tuple[float, float | None], ...]:
    """What the target and its draft, if there is one, give to each token: (p, q).

    Args are those of `token_probabilities`; a draft proposes the first `draft_vocab` ids only, and
    nothing where its context is full: q is None there.
    """
    size = model.vocab_size
    p = token_probabilities(model, source, tokens, sampler, size)
    if draft is None:
        return tuple((each, None) for each in p)
    limit, asked = draft.max_context, tokens
    if limit is not None:  # it reads what is before a token
        asked = tokens[: max(0, limit - len(source) + 1)]
    q = token_probabilities(draft, source, asked, sampler, min(size, draft_vocab or size))
    return tuple(zip_longest(p, q))


def token_probabilities(
    model: LanguageModel,
    source: Sequence[int],
    tokens: Sequence[int],
    sampler: Sampler,
    vocab_size: int,
) -> list[float]:
    """The probability of each token of an output, given its source and the tokens before it.

    They are those that decoding saw, up to rounding. At temperature 0, where a sampler leaves
    nothing but 0 and 1, they are those at temperature 1.

    Args:
        model: A target, or a draft with the target's tokenizer.
        source: Ids of the prompt.
        tokens: Ids of the output.
        sampler: What turns logits into probabilities.
        vocab_size: What the model may choose from: the first so many ids, or all that it has.
    """
    if sampler.temperature == 0:
        sampler = Sampler(1.0)
    width, last = min(vocab_size, model.vocab_size), model.vocab_size - 1
    session, (context,) = model.start([[min(token, last) for token in source]])
    fed = [context[-1], *tokens]  # the session has read what comes before
    found: list[float] = []
    for start in range(0, len(tokens), PASS):
        asked = list(tokens[start : start + PASS])
        # Logits are about the token after the one fed; what pads the last pass is not looked at.
        feed = fed[start : start + PASS]
        padded = [[min(token, last) for token in feed] + [0] * (PASS - len(feed))]
        probs = sampler.probs(session.step(mx.array(padded, dtype=mx.int32), width)[0])
        known = mx.array([min(token, width - 1) for token in asked])[:, None]
        given = mx.take_along_axis(probs[: len(asked)], known, axis=-1)[:, 0].tolist()
        found += [
            p if token < width else 0.0
            for p, token in zip(cast(list[float], given), asked, strict=True)
        ]
    return found
