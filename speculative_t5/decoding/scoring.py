"""Scoring: the probabilities that models give to the tokens of a finished output."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import mlx.core as mx

from .. import device
from .faults import check_numbers
from .history import TokenHistory
from .logprobs import judged
from .loop import first_context, token_budget
from .protocols import LanguageModel
from .results import Logprob, as_logprobs
from .sampling import Sampler, padded

TOKENS_PER_PASS = 32  # tokens per pass: bounds the memory for logits, and all passes have one shape


def pair_probabilities(
    model: LanguageModel,
    draft: LanguageModel | None,
    source: Sequence[int],
    tokens: Sequence[int],
    sampler: Sampler,
    draft_vocab: int | None = None,
    first: int | None = None,
) -> tuple[tuple[float, float | None], ...]:
    """Return (p, q) of each token: the target's probability and the draft's.

    `first` is the token that the decoder reads first, if it is not the model's own. q is None
    without a draft, and where the draft's context is full. Ids from `draft_vocab` on have
    q = 0. See `token_probabilities`.
    """
    size, q = model.info.vocab_size, list[float]()
    with device.turn():
        p = token_probabilities(model, source, tokens, sampler, size, size, first)
        if draft is not None:
            # The tokens before each scored one must fit.
            asked = tokens[: max(0, token_budget(draft, source, len(tokens)))]
            q = token_probabilities(draft, source, asked, sampler, draft_vocab or size, size, first)
    return tuple(zip_longest(p, q))


def token_probabilities(
    model: LanguageModel,
    source: Sequence[int],
    tokens: Sequence[int],
    sampler: Sampler,
    first_ids: int,
    vocab_size: int,
    first: int | None = None,
) -> list[float]:
    """Return the probability of each token of an output, given all tokens before it.

    Up to rounding these are the probabilities of decoding. At temperature 0, where decoding has
    only 0 and 1, they are those of temperature 1. The model, a target or a draft, chooses among the
    ids below `first_ids` that it has; the tokens and the sampler's transform are of `vocab_size`.
    """
    if sampler.temperature == 0:
        sampler = replace(sampler, temperature=1.0)
    width = min(first_ids, vocab_size, model.info.vocab_size)
    found: list[float] = []
    for logits, asked, history in _passes(model, source, tokens, width, first):
        logits = padded(logits, vocab_size, -mx.inf)
        probs = sampler.probs(sampler.transformed(logits, history)[0])
        given: Any = mx.take_along_axis(probs, mx.array(asked)[:, None], axis=-1)[:, 0].tolist()
        # A transform may force a token that the model cannot choose.
        check_numbers(given, "the probabilities", getattr(model, "dtype", None))
        found += [p if token < width else 0.0 for p, token in zip(given, asked, strict=True)]
    return found


def log_probabilities(
    model: LanguageModel,
    source: Sequence[int],
    tokens: Sequence[int],
    top: int = 0,
    first: int | None = None,
) -> list[Logprob]:
    """Return the natural logarithm of a model's probability for each token of an output.

    With each come the `top` most probable ids and theirs. This takes passes of its own, where
    `RowOptions.logprobs` has the same from those that decode.
    """
    found: list[Logprob] = []
    with device.turn():
        for logits, asked, _ in _passes(model, source, tokens, model.info.vocab_size, first):
            numbers: Any = judged(logits, mx.array([asked], dtype=mx.int32), top).tolist()
            some = as_logprobs(numbers[0], top)
            values = (each.value for each in some)
            check_numbers(values, "the probabilities", getattr(model, "dtype", None))
            found += some
    return found


def _passes(
    model: LanguageModel,
    source: Sequence[int],
    tokens: Sequence[int],
    width: int,
    first: int | None = None,
) -> Iterator[tuple[mx.array, list[int], TokenHistory]]:
    """Yield logits (1, N, V), the N tokens of an output that they precede, and what they follow.

    All tokens come, at most `TOKENS_PER_PASS` at a time. The decoder reads `first` before them, or
    the model's own start token.
    """
    last = model.info.vocab_size - 1
    session, (context,) = model.start([[min(token, last) for token in source]])
    context = [min(token, last) for token in first_context(context, first)]
    fed = [context[-1], *tokens]  # all before it is in the session's cache
    for start in range(0, len(tokens), TOKENS_PER_PASS):
        # Each fed token gives the logits of the next one.
        feed = fed[start : start + TOKENS_PER_PASS]
        padded = [*(min(token, last) for token in feed), *[0] * (TOKENS_PER_PASS - len(feed))]
        asked = list(tokens[start : start + TOKENS_PER_PASS])
        logits = session.step(mx.array([padded], dtype=mx.int32), width)[:, : len(asked)]
        drafted = mx.array([asked[:-1]], dtype=mx.int32)
        history = TokenHistory([[*context, *tokens[:start]]], [len(context)], drafted)
        yield logits, asked, history
