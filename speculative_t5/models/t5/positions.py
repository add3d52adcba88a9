"""T5's relative position bias (arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .config import T5Config


class PositionBias(nn.Module):
    """Relative position bias of a stack: layer 0's serves all layers, or each has its own (umt5).

    Its weight holds one block of rows for each: (buckets, H), or (layers * buckets, H).
    """

    def __init__(self, config: T5Config, *, bidirectional: bool) -> None:
        super().__init__()
        depth = config.num_layers if bidirectional else config.num_decoder_layers
        num_buckets = config.relative_attention_num_buckets
        reach = config.relative_attention_max_distance
        own = depth if config.bias_per_layer else 1
        self.bidirectional = bidirectional
        self.relative = np.arange(-reach, reach + 1)
        self.buckets = relative_position_bucket(
            self.relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=reach
        )
        self.num_buckets = num_buckets
        self.weight = mx.zeros((own * num_buckets, config.num_heads))

    def tables(self) -> list[mx.array]:
        """Bias by relative position, from -max_distance to max_distance; it is flat beyond.

        Returns:
            (H, 2 * max_distance + 1) for each layer, or a single one that all layers share; -inf
            for keys ahead of the query in a causal stack.
        """
        tables = []
        for weight in self.weight.reshape(-1, self.num_buckets, self.weight.shape[1]):
            table = weight[mx.array(self.buckets)].T
            if not self.bidirectional:
                ahead = mx.array(self.relative) > 0
                table = mx.where(ahead, mx.array(-mx.inf, table.dtype), table)
            tables.append(mx.contiguous(table))
        return tables


def position_biases(
    tables: Sequence[mx.array], offsets: mx.array, num_queries: int, num_keys: int
) -> list[mx.array]:
    """Biases (B or 1, H, L, T) of L queries against keys 0 to T - 1, for each of the `tables()`.

    `offsets` has the position of each row's first query, (B,) or (1,) int32.
    """
    reach = tables[0].shape[1] // 2
    queries = offsets[:, None, None] + mx.arange(num_queries)[:, None]
    index = mx.clip(mx.arange(num_keys) - queries, -reach, reach) + reach
    return [mx.take(table, index, axis=1).swapaxes(0, 1) for table in tables]


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
