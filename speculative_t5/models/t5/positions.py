"""T5's relative position bias (arXiv 1910.10683, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .config import T5Config


class Bias(NamedTuple):
    """What attention adds to its scores.

    Attributes:
        table: By relative position, (H, R); one of `PositionBias.tables()`.
        scores: For each query and key, (B or 1, H, L, T); evaluated only where it is used.
    """

    table: mx.array
    scores: mx.array


@dataclass(frozen=True)
class Derived:
    """Arrays made from a weight, evaluated, for all threads to use while the weight is the same.

    A single object, so that no thread sees a new weight beside old arrays. As it is neither an
    array nor a list, `nn.Module` keeps it as a plain attribute: nobody who goes through a module's
    items finds it, and its size does not change while they do.
    """

    weight: mx.array
    arrays: tuple[mx.array, ...]


class PositionBias(nn.Module):
    """Relative position bias of a stack: layer 0's serves all layers, or each has its own (umt5).

    Its weight holds the layers' one after another: (layers * buckets, H) or (buckets, H).
    """

    def __init__(self, config: T5Config, *, bidirectional: bool) -> None:
        super().__init__()
        depth = config.num_layers if bidirectional else config.num_decoder_layers
        self._bidirectional = bidirectional
        self._max_distance = config.relative_attention_max_distance
        self._num_buckets = config.relative_attention_num_buckets
        own = depth if config.bias_per_layer else 1
        self.weight = mx.zeros((own * self._num_buckets, config.num_heads))
        self._kept: Derived | None = None

    def tables(self) -> list[mx.array]:
        """Bias by relative position, from -max_distance to max_distance, beyond which it is flat.

        Returns:
            (H, 2 * max_distance + 1) for each layer, or a single one that all layers share; -inf
            where a causal stack may not look.
        """
        kept = self._kept
        if kept is not None and kept.weight is self.weight:
            return list(kept.arrays)
        return self._make_tables()

    def keep_tables(self) -> None:
        """Make the tables once, for as long as the weight is the same object."""
        weight, tables = self.weight, self._make_tables()
        mx.eval(tables)
        self._kept = Derived(weight, tuple(tables))

    def forget(self) -> None:
        """Drop the tables that were kept."""
        self._kept = None

    def _make_tables(self) -> list[mx.array]:
        relative = np.arange(-self._max_distance, self._max_distance + 1)
        buckets = relative_position_bucket(
            relative,
            bidirectional=self._bidirectional,
            num_buckets=self._num_buckets,
            max_distance=self._max_distance,
        )
        tables = []
        for weight in self.weight.reshape(-1, self._num_buckets, self.weight.shape[1]):
            table = weight[mx.array(buckets)].T
            if not self._bidirectional:
                table = mx.where(mx.array(relative) > 0, mx.array(-mx.inf, table.dtype), table)
            tables.append(mx.contiguous(table))
        return tables


def position_biases(
    tables: Sequence[mx.array], at: mx.array, num_queries: int, num_keys: int
) -> list[Bias]:
    """Biases of queries at `at` and after it against keys 0 to T - 1, one for each table.

    Args:
        tables: `PositionBias.tables()`.
        at: Absolute position of each row's first query, (B,) int32.
        num_queries: L.
        num_keys: T.
    """
    reach = tables[0].shape[1] // 2
    queries = at[:, None, None] + mx.arange(num_queries)[:, None]
    index = mx.clip(mx.arange(num_keys) - queries, -reach, reach) + reach
    return [Bias(table, mx.take(table, index, axis=1).swapaxes(0, 1)) for table in tables]


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
