"""From logits to probabilities, and from probabilities to tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import check_integer, check_number

MIN_TEMPERATURE = 1e-5  # below it, float32 logits divided by it overflow


@dataclass(frozen=True)
class Sampler:
    """The transform that target and draft share: temperature, then top-k, then top-p.

    Temperature 0 is greedy decoding, as a one-hot distribution on the argmax: verification sees
    probabilities only and needs no second, greedy path.

    Args:
        temperature: What logits are divided by; 0 is greedy, and the filters then change nothing.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the most probable tokens whose probabilities, as left by top-k, reach this sum
            (nucleus sampling, 1904.09751); 1 keeps all.

    Raises:
        ValueError: If an option is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        temperature = check_number("temperature", self.temperature)
        if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
            raise ValueError(
                f"temperature must be 0 or at least {MIN_TEMPERATURE:g}, got {self.temperature}"
            )
        check_integer("top_k", self.top_k, 0)
        if not 0 < check_number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (1 is off), got {self.top_p}")

    def probs(self, logits: mx.array) -> mx.array:
        """Logits (..., V) of any float type -> probabilities (..., V) float32."""
        logits = logits.astype(mx.float32)
        if self.temperature == 0:
            return one_hot(mx.argmax(logits, axis=-1), logits.shape[-1])
        logits = logits - mx.max(logits, axis=-1, keepdims=True)
        return self.filter(mx.softmax(logits / self.temperature, axis=-1))

    def filter(self, probs: mx.array) -> mx.array:
        """Top-k, then top-p, of probabilities (..., V), scaled to sum to 1 again.

        Tokens as probable as the last one kept are kept with it, so that the choice hangs on
        probabilities alone.
        """
        size = probs.shape[-1]
        top_k = min(self.top_k, size) or size
        if top_k < size:
            probs = _keep(probs, mx.min(mx.topk(probs, top_k, axis=-1), axis=-1, keepdims=True))
        if self.top_p < 1:
            # Ties beyond the k best are as probable as the k-th: the k best decide.
            best = mx.topk(probs, top_k, axis=-1) if top_k < size else probs
            ranked = -mx.sort(-best, axis=-1)
            before = mx.cumsum(ranked, axis=-1, inclusive=False)
            # At least one, though a tiny top_p be 0 in float32.
            last = mx.maximum(mx.sum(before < self.top_p, axis=-1, keepdims=True), 1) - 1
            probs = _keep(probs, mx.take_along_axis(ranked, last, axis=-1))
        return probs


def _keep(probs: mx.array, least: mx.array) -> mx.array:
    """Probabilities of at least `least` (..., 1), scaled to sum to 1."""
    kept = mx.where(probs >= least, probs, 0)
    return kept / mx.sum(kept, axis=-1, keepdims=True)


def one_hot(tokens: mx.array, vocab_size: int) -> mx.array:
    """Ids (...) -> probabilities (..., V) float32."""
    return (mx.arange(vocab_size) == tokens[..., None]).astype(mx.float32)


def argmax(logits: mx.array) -> mx.array:
    """The greedy choice: logits (..., V) -> ids (...) int32, the first of equals."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def draw(weights: mx.array, keys: mx.array | None) -> mx.array:
    """Draw an id for each row, (B,) int32, in proportion to its weights (B, V) float32.

    The weights are not negative, and need not sum to 1. A token of weight 0 is never drawn. Without
    keys nothing is left to chance: the heaviest token is taken, which for one-hot weights is the
    draw.

    Args:
        weights: (B, V) float32.
        keys: (B, 2) uint32. What a row draws hangs on its own key and weights alone.
    """
    if keys is None:
        return argmax(weights)
    return _categorical(mx.log(weights), keys).astype(mx.int32)


def uniform(keys: mx.array) -> mx.array:
    """A draw from [0, 1) for each key: keys (..., 2) uint32 -> (...) float32."""
    if keys.size == 0:
        return mx.zeros(keys.shape[:-1])
    return _uniform(keys.reshape(-1, 2)).reshape(keys.shape[:-1])


def round_keys(seed: int, index: int, round_: int) -> np.ndarray:
    """Keys for one round of one row, (2, 2) uint32: for drafting, and for the verdict.

    They hang on nothing but the seed, the index of the prompt and the number of the round: a row
    draws the same in any batch.
    """
    words = np.random.SeedSequence(seed, spawn_key=(index, round_)).generate_state(4)
    return words.reshape(2, 2)


def place_keys(keys: mx.array, num_places: int) -> mx.array:
    """A key for each place of a draft: keys (B, 2) uint32 -> (B, num_places, 2).

    That of a place is the same however many there are, which `mx.random.split` does not promise.
    """
    places = mx.arange(num_places, dtype=mx.uint32)
    return keys[:, None] ^ mx.stack([mx.zeros_like(places), places], axis=-1)


def final_keys(keys: mx.array) -> mx.array:
    """Keys (B, 2) that differ from those of all places."""
    return keys ^ mx.array([1, 0], dtype=mx.uint32)


_uniform = mx.vmap(lambda key: mx.random.uniform(key=key))
_categorical = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))
