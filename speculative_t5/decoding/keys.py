"""Keys that tokens are sampled with: each depends on what it is for, and on nothing else."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

# uint32: (B, 2), one for each row, or (B, L, 2), one for each position; None: nothing is sampled
Keys = mx.array | None


def round_keys(seed: int, index: int, round_: int) -> np.ndarray:
    """Return keys for one round of one row, (2, 2) uint32: for drafting, and for the verdict.

    They depend only on the seed, the prompt's index and the number of the round: a row samples the
    same in any batch.
    """
    words = np.random.SeedSequence(seed, spawn_key=(index, round_)).generate_state(4)
    return words.reshape(2, 2)


def output_keys(seed: int, index: int) -> np.ndarray:
    """Return the key of one row's output, (2,) uint32, from which `position_keys` makes others."""
    return np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(2)


def position_keys(
    keys: mx.array, num_positions: int, starts: Sequence[int] | None = None
) -> mx.array:
    """Return a key for each position: keys (B, 2) uint32 -> (B, num_positions, 2).

    Each row's positions begin with its start, or 0. A position's key does not depend on their
    number; `mx.random.split` does not promise that.
    """
    first = mx.array([*(starts or [0] * len(keys))], dtype=mx.uint32)[:, None]
    positions = first + mx.arange(num_positions, dtype=mx.uint32)
    return keys[:, None] ^ mx.stack([mx.zeros_like(positions), positions], axis=-1)


def final_keys(keys: mx.array) -> mx.array:
    """Return keys (B, 2) that differ from those of all positions."""
    return keys ^ mx.array([1, 0], dtype=mx.uint32)


def verdict_keys(keys: mx.array, num_drafted: int) -> mx.array:
    """Return keys for each drafted token and then for the next one: keys (B, 2) -> (B, K + 1, 2).

    The last is none of `position_keys`, so that it does not depend on K.
    """
    return mx.concatenate([position_keys(keys, num_drafted), final_keys(keys)[:, None]], axis=1)
