"""`LogitsTransform` in plain Python, one sequence at a time, as its options are defined."""

import math
from collections.abc import Sequence
from typing import Any

from speculative_t5.decoding import LogitsTransform

import mlx.core as mx
import numpy as np


def _less_of_the_last(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor: the token before becomes less probable, the more so the longer the text is."""
    return logits - 0.3 * tokens.size * (mx.arange(logits.shape[1]) == tokens[-1])


# Over three ids, of which 1 is EOS, each changes the distribution of outputs of three tokens.
TRANSFORMS = {
    "bias": LogitsTransform(logit_bias=((0, 1.5), (2, -0.5))),
    "penalty": LogitsTransform(repetition_penalty=1.8),
    "ngram": LogitsTransform(no_repeat_ngram_size=2),
    "bad words": LogitsTransform(bad_words=((2, 0), (0, 0, 2))),
    "min_tokens": LogitsTransform(min_tokens=2, end_ids=(1,)),
    "suppress": LogitsTransform(suppress_tokens=(0,)),
    "forced": LogitsTransform(forced_tokens=(2, 0)),
    "not first": LogitsTransform(begin_suppress_tokens=(2, 1)),
    "not first after forced ones": LogitsTransform(
        begin_suppress_tokens=(2,), forced_tokens=(2,), suppress_tokens=(0,)
    ),
    "processor": LogitsTransform(processors=(_less_of_the_last,)),
    "together": LogitsTransform(
        logit_bias=((0, 1.5),), repetition_penalty=1.4, no_repeat_ngram_size=3,
        bad_words=((2, 0),), min_tokens=2, end_ids=(1,), processors=(_less_of_the_last,),
    ),
}  # fmt: skip


def _strict_grammar(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor that knows of nothing after a T5's EOS: it fails when it is asked."""
    assert 1 not in tokens.tolist(), "asked what follows the end"
    return logits


def _nothing_after(*ids: int) -> tuple[tuple[int, ...], ...]:
    """Return bad words that leave nothing, of three ids, to follow these."""
    return tuple((first, second) for first in ids for second in range(3))


# Where outputs of a T5 over the same ids end, nothing can follow; with "dead", before they end too.
ENDINGS = {
    "once each": LogitsTransform(no_repeat_ngram_size=1, suppress_tokens=(0,)),
    "nothing after the end": LogitsTransform(bad_words=_nothing_after(1)),
    "strict grammar": LogitsTransform(processors=(_strict_grammar,), end_ids=(1,)),
    "forced end": LogitsTransform(forced_tokens=(2, 1), bad_words=_nothing_after(1)),
    "dead": LogitsTransform(bad_words=_nothing_after(2)),
    "dead or ended": LogitsTransform(bad_words=_nothing_after(1, 2)),
}


def transformed(
    transform: LogitsTransform, logits: Sequence[float], context: Sequence[int], start: int
) -> list[float]:
    """Transform the logits (V,) of what follows a context, whose output begins at `start`."""
    found = list(map(float, logits))
    for token, bias in transform.logit_bias:
        found[token] += bias
    for token in set(context):
        penalty = transform.repetition_penalty
        found[token] *= penalty if found[token] < 0 else 1 / penalty
    banned: set[int] = set(transform.suppress_tokens)
    banned |= {w[-1] for w in transform.bad_words if ends_with(context, w[:-1])}
    if size := transform.no_repeat_ngram_size:
        ngrams = {tuple(context[i : i + size]) for i in range(len(context) - size + 1)}
        banned |= {ngram[-1] for ngram in ngrams if ends_with(context, ngram[:-1])}
    if len(context) - start < transform.min_tokens:
        banned |= set(transform.end_ids)
    if len(context) - start == len(transform.forced_tokens):
        banned |= set(transform.begin_suppress_tokens)
    for token in banned:
        found[token] = -math.inf
    forced = transform.forced_tokens[len(context) - start :][:1]
    if forced:
        found = [0.0 if token == forced[0] else -math.inf for token in range(len(found))]
    for processor in transform.processors:
        row: Any = processor(mx.array(list(context)), mx.array([found])).tolist()
        found = row[0]
    return found


def ends_with(context: Sequence[int], words: Sequence[int]) -> bool:
    """Whether a context ends with these tokens."""
    return tuple(context[len(context) - len(words) :]) == tuple(words)


def transformed_rows(
    transform: LogitsTransform, logits: mx.array, before: list[int], outputs: list[Sequence[int]]
) -> mx.array:
    """Transform logits (N, V) of what follows N outputs, all after the same tokens."""
    rows = zip(np.array(logits, np.float64).tolist(), outputs, strict=True)
    return mx.array(
        [transformed(transform, row, [*before, *output], len(before)) for row, output in rows]
    )
