"""T5's relative position bias (arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .config import T5Config


class PositionBias(nn.Module):
    """Relative position bias; layer 0's serves all layers of its stack."""

    def __init__(self, config: T5Config, *, bidirectional: bool) -> None:
        super().__init__()
        self._bidirectional = bidirectional
        self._max_distance = config.relative_attention_max_distance
        self.weight = mx.zeros((config.relative_attention_num_buckets, config.num_heads))

    def table(self) -> mx.array:
        """Bias by relative position, from -max_distance to max_distance, beyond which it is flat.

        Returns:
            (H, 2 * max_distance + 1); -inf where a causal stack may not look.
        """
        relative = np.arange(-self._max_distance, self._max_distance + 1)
        buckets = relative_position_bucket(
            relative,
            bidirectional=self._bidirectional,
            num_buckets=self.weight.shape[0],
            max_distance=self._max_distance,
        )
        table = self.weight[mx.array(buckets)].T
        if self._bidirectional:
            return table
        return mx.where(mx.array(relative) > 0, mx.array(-mx.inf, table.dtype), table)


def position_bias(table: mx.array, positions: np.ndarray, num_keys: int) -> mx.array:
    """Bias of queries at `positions` (B, L) against keys 0 to T - 1: (B, H, L, T).

    Args:
        table: `PositionBias.table()`.
        positions: Absolute positions of the queries, (B, L) integers.
        num_keys: T.
    """
    reach = table.shape[1] // 2
    relative = np.arange(num_keys) - positions[..., None]
    index = np.clip(relative, -reach, reach) + reach
    return mx.take(table, mx.array(index.astype(np.int32)), axis=1).swapaxes(0, 1)


def relative_position_bucket(
    relative: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Buckets of relative positions (T5, section 2.1): half exact, half growing by logarithm.

    Args:
        relative: Position of the key minus position of the query, integers of any shape.
        bidirectional: Whether keys after the query have buckets of their own (the encoder).
        num_buckets: Of both directions together.
        max_distance: Where the last bucket begins to hold everything.

    Returns:
        int32 buckets of the same shape.

    Example:
        With 32 buckets up to 128 and `bidirectional=False`, the key 3 places before the query
        (relative -3) is in bucket 3, the one 100 places before in bucket 30.
    """
    offset = np.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        offset = np.where(relative > 0, num_buckets, 0)
        distance = np.abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = num_buckets // 2
    # float32 throughout, as the models were trained: float64 rounds some powers of 2 otherwise.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    scaled = ratio / np.float32(np.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + scaled.astype(np.int32), num_buckets - 1)
    return np.asarray(offset + np.where(distance < exact, distance, far), dtype=np.int32)
