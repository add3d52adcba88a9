"""From logits to probabilities, and from probabilities to tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

MIN_TEMPERATURE = 1e-5  # below it, float32 logits divided by it overflow


@dataclass(frozen=True)
class Sampler:
    """The transform that target and draft share.

    Temperature 0 is greedy decoding, as a one-hot distribution on the argmax: verification sees
    probabilities only and needs no second, greedy path.
    """

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(
                f"temperature must be 0 or at least {MIN_TEMPERATURE:g}, got {self.temperature}"
            )

    def probs(self, logits: mx.array) -> mx.array:
        """Logits (..., V) of any float type -> probabilities (..., V) float32."""
        logits = logits.astype(mx.float32)
        if self.temperature == 0:
            return one_hot(mx.argmax(logits, axis=-1), logits.shape[-1])
        logits = logits - mx.max(logits, axis=-1, keepdims=True)
        return mx.softmax(logits / self.temperature, axis=-1)


def one_hot(tokens: mx.array, vocab_size: int) -> mx.array:
    """Ids (...) -> probabilities (..., V) float32."""
    return (mx.arange(vocab_size) == tokens[..., None]).astype(mx.float32)


def draw(weights: mx.array, key: mx.array | None) -> mx.array:
    """Draw ids (...) int32 in proportion to non-negative `weights` (..., V) float32.

    The weights need not sum to 1. A token of weight 0 is never drawn. Without a key nothing is
    left to chance: the heaviest token is taken, which for one-hot weights is the draw.
    """
    if key is None:
        return mx.argmax(weights, axis=-1).astype(mx.int32)
    return mx.random.categorical(mx.log(weights), key=key).astype(mx.int32)
