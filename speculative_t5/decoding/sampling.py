"""Sampling: from logits to probabilities, and from probabilities to tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..options import check_number, option_error
from .faults import marked
from .history import TokenHistory
from .keys import Keys
from .logits import LogitsTransform
from .ranking import largest

MIN_TEMPERATURE = 1e-5  # below it, float32 logits divided by it overflow
# Above it, a temperature is infinite in float32: all tokens that remain are equally probable.
MAX_TEMPERATURE = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampler:
    """What target and draft share: a transform, if any, then temperature, then top-k, then top-p.

    Temperature 0 is greedy decoding: `probs` is then one-hot on the argmax. Verification need not
    make such rows: it counts the ids that agree, as all rules would (`verify.num_agreed`).
    """

    temperature: float = 0.0  # divides the logits; 0 is greedy, and the filters change nothing
    top_k: int = 0  # keep the k most probable tokens; 0 keeps all
    # Keep the fewest most probable tokens whose probabilities, after top-k, reach this sum
    # (nucleus sampling, 1904.09751); 1 keeps all.
    top_p: float = 1.0
    transform: LogitsTransform | None = None  # by the tokens so far, also in greedy decoding

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not 0 < check_number("top_p", self.top_p) <= 1:
            raise option_error("top_p", "above 0 and at most 1 (1 is off)", self.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def agrees(self, other: "Sampler") -> bool:
        """Whether the other one chooses alike: of greedy ones, only the transform matters."""
        if self.greedy and other.greedy:
            return self.transform == other.transform
        return self == other

    def transformed(self, logits: mx.array, history: TokenHistory) -> mx.array:
        """Transform logits (B, L, V) that follow the tokens of `history`; for `probs` or argmax."""
        return logits if self.transform is None else self.transform(logits, history)

    def probs(self, logits: mx.array) -> mx.array:
        """Turn logits (..., V) of any float type into probabilities (..., V) float32."""
        logits = logits.astype(mx.float32)
        if self.temperature == 0:
            return one_hot(mx.argmax(logits, axis=-1), logits.shape[-1])
        return self.filter(logits)

    def filter(self, logits: mx.array) -> mx.array:
        """Return probabilities (..., V) of logits (..., V), after temperature, top-k and top-p.

        Logits are ranked, since probabilities at a high temperature are equal where logits are not.
        Tokens whose logits equal that of the last one kept are kept with it, so that the choice
        depends on logits alone.
        """
        size = logits.shape[-1]
        top_k = min(self.top_k, size) or size
        temperature = min(self.temperature, MAX_TEMPERATURE)
        logits = logits - mx.max(logits, axis=-1, keepdims=True)
        if top_k == size and self.top_p == 1:
            return mx.softmax(logits / temperature, axis=-1)
        best, weights = logits, mx.exp(logits / temperature)
        if top_k < size:
            best = largest(logits, top_k)
            weights = mx.where(logits >= mx.min(best, axis=-1, keepdims=True), weights, 0)
        total = mx.sum(weights, axis=-1, keepdims=True)
        if self.top_p < 1:
            # Ties beyond the k best count in the total, but the k best decide how far to go.
            ranked = -mx.sort(-best, axis=-1)
            before = mx.cumsum(mx.exp(ranked / temperature), axis=-1, inclusive=False)
            # Keep at least one: a tiny top_p is 0 in float32.
            count = mx.maximum(mx.sum(before < self.top_p * total, axis=-1, keepdims=True), 1)
            least = mx.take_along_axis(ranked, count - 1, axis=-1)
            weights = mx.where(logits >= least, weights, 0)
            total = mx.sum(weights, axis=-1, keepdims=True)
        return weights / total


class Groups:
    """The rows of a batch, grouped by their samplers; each group is computed together.

    A row's values are those that it has without its neighbours. `tops` are how many of the most
    probable ids each row wants to know at its tokens, besides how probable these are; None if it
    wants neither, as all do if there are no `tops`.
    """

    def __init__(self, samplers: Sequence[Sampler], tops: Sequence[int | None] = ()) -> None:
        found: list[tuple[Sampler, list[int]]] = []
        for row, sampler in enumerate(samplers):
            # Compared and not hashed: a processor of logits may be any callable.
            rows = next((rows for other, rows in found if other.agrees(sampler)), None)
            if rows is None:
                found.append((sampler, [row]))
            else:
                rows.append(row)
        self._groups = [
            (sampler, rows, mx.array(rows) if len(found) > 1 else slice(None))
            for sampler, rows in found
        ]
        grouped = [row for _, rows in found for row in rows]
        self._order = mx.array(sorted(range(len(grouped)), key=grouped.__getitem__))
        self.greedy_rows = [sampler.greedy for sampler in samplers]
        self.greedy = all(self.greedy_rows)
        self.transforms = any(sampler.transform for sampler in samplers)
        self.tops = tops or [None] * len(samplers)
        self.top = max((top for top in self.tops if top is not None), default=None)  # for all rows

    def transformed(self, logits: mx.array, history: TokenHistory) -> mx.array:
        """Transform each row's logits (B, L, V) as its own sampler does."""
        if len(self._groups) == 1:
            return self._groups[0][0].transformed(logits, history)
        return self._join(
            sampler.transformed(logits[index], history.of_rows(rows))
            for sampler, rows, index in self._groups
        )

    def probs(self, logits: mx.array) -> mx.array:
        """Turn logits (B, ..., V) into probabilities (B, ..., V) float32, row by row."""
        return self._join(sampler.probs(logits[index]) for sampler, _, index in self._groups)

    def choose(self, logits: mx.array, keys: Keys) -> mx.array:
        """Choose an id for each position of logits (B, L, V), given keys (B, L, 2): (B, L) int32.

        Greedy rows take the best, others sample; where all are greedy there need be no keys. Where
        logits are NaN it is `BROKEN`.
        """
        if keys is None:
            return best(logits)
        return self._join(
            best(logits[index])
            if sampler.greedy
            else drawn(sampler.probs(logits[index]), keys[index])
            for sampler, _, index in self._groups
        )

    def _join(self, parts: Iterable[mx.array]) -> mx.array:
        """Put values of the groups, (B_g, ...) each, together in the order of rows, (B, ...)."""
        first, *others = parts
        return mx.concatenate([first, *others])[self._order] if others else first


def check_temperature(temperature: float) -> None:
    """Refuse what neither samples nor is 0, which stands for greedy decoding."""
    value = check_number("temperature", temperature)
    if not (value == 0 or MIN_TEMPERATURE <= value < math.inf):
        expected = f"0 or at least {MIN_TEMPERATURE:g}"
        raise option_error("temperature", expected, temperature)


def padded(values: mx.array, vocab_size: int, value: float = 0.0) -> mx.array:
    """Pad the values (..., V) of the first ids to `vocab_size`."""
    missing = vocab_size - values.shape[-1]
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return mx.pad(values, widths, constant_values=value) if missing else values


def one_hot(tokens: mx.array, vocab_size: int) -> mx.array:
    """Turn ids (...) into probabilities (..., V) float32."""
    return (mx.arange(vocab_size) == tokens[..., None]).astype(mx.float32)


def argmax(logits: mx.array) -> mx.array:
    """Return the best ids (...) int32 of logits (..., V); the first among equals."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def best(logits: mx.array) -> mx.array:
    """Return `argmax`, and `BROKEN` where logits are NaN."""
    return marked(argmax(logits), logits)


def drawn(weights: mx.array, keys: mx.array) -> mx.array:
    """Return `sample`, and `BROKEN` where weights are NaN."""
    return marked(sample(weights, keys), weights)


def sample(weights: mx.array, keys: mx.array) -> mx.array:
    """Sample ids (...) int32 in proportion to weights (..., V) float32, given keys (..., 2).

    They need not sum to 1, and a token of weight 0 is never sampled.
    """
    rows = mx.log(weights).reshape(-1, weights.shape[-1])
    return _categorical(rows, keys.reshape(-1, 2)).reshape(keys.shape[:-1]).astype(mx.int32)


def uniform(keys: mx.array) -> mx.array:
    """Sample from [0, 1) for each key: keys (..., 2) uint32 -> (...) float32."""
    if keys.size == 0:
        return mx.zeros(keys.shape[:-1])
    return _uniform(keys.reshape(-1, 2)).reshape(keys.shape[:-1])


_uniform = mx.vmap(lambda key: mx.random.uniform(key=key))
_categorical = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))
