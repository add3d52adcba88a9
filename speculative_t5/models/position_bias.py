"""What a T5 adds to the scores of attention: relative position bias, and masks of padding.

Shapes: B batch, P sources, L query length, T cached length, H heads.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .config import T5Config


class PositionBias(nn.Module):
    """Relative position bias of a stack: one for all layers, or one for each (umt5)."""

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
        self.weight = mx.zeros((own * num_buckets, config.num_heads))  # a block of rows for each

    def tables(self) -> list[mx.array]:
        """Bias by relative position, from -max_distance to max_distance; it is flat beyond.

        It is (H, 2 * max_distance + 1) for each layer, or a single one that all layers share; -inf
        for keys ahead of the query in a causal stack.
        """
        tables = []
        # Lists, as nanobind may lose a Ctrl-C while it converts a numpy array.
        buckets, ahead = (mx.array(each.tolist()) for each in (self.buckets, self.relative > 0))
        for weight in self.weight.reshape(-1, self.num_buckets, self.weight.shape[1]):
            table = weight[buckets].T
            if not self.bidirectional:
                table = mx.where(ahead, mx.array(-mx.inf, table.dtype), table)
            tables.append(mx.contiguous(table))
        return tables


class Bias(NamedTuple):
    """What a layer adds to the scores of attention, and what that is made of."""

    scores: mx.array  # (B or 1, H, L, T); as MLX is lazy, it costs nothing where it is not used
    table: mx.array  # (H, 2 * max_distance + 1), see `PositionBias.tables`
    offsets: mx.array  # position of each row's first query, (B,) or (1,) int32
    mask: mx.array | None  # additive, of padding, (B, 1, 1, T)


class Padding(NamedTuple):
    """The additive mask of sources' padding, as attention reads it, and what that is made of."""

    scores: mx.array  # (P, H, L, T), or for a single source as `mask`; costs as `Bias.scores`
    mask: mx.array  # (P, 1, 1, T)


def position_biases(
    tables: Sequence[mx.array],
    offsets: mx.array,
    num_queries: int,
    num_keys: int,
    mask: mx.array | None = None,
    batch: int = 1,
) -> Iterator[Bias]:
    """Yield each layer's bias of L queries against keys 0 to T - 1, without end; see `Bias`.

    With a batch, scores are of all its rows, see `for_each_row`.
    """
    queries = offsets[:, None, None] + mx.arange(num_queries)[:, None]
    biases = []
    for table, scores in zip(tables, _scores(tables, queries, mx.arange(num_keys)), strict=True):
        scores = scores if mask is None else scores + mask
        scores = for_each_row(scores, batch, scores.shape[1], num_queries)
        biases.append(Bias(scores, table, offsets, mask))
    return cycle(biases)  # one serves all layers, or each has its own


def block_places(length: int, block: int) -> tuple[mx.array, mx.array]:
    """Return positions (M * L,) of L tokens and their masks, and what each sees, a square of bools.

    M is `block`. The tokens are followed by M - 1 parts of L masks each. In part n, mask i is n
    positions after token i. It sees the tokens up to that one, that token's earlier masks, and
    itself.
    """
    index = mx.arange(block * length)
    token, part = index % length, index // length
    before = (part == 0) & (token <= token[:, None])
    own = (token == token[:, None]) & (part <= part[:, None])
    return token + part, before | own


def block_biases(tables: Sequence[mx.array], length: int, block: int) -> Iterator[Bias]:
    """Yield each layer's bias of tokens and masks, see `block_places`, as `position_biases`."""
    (places, seen), start = block_places(length, block), mx.zeros(1, dtype=mx.int32)
    every = _scores(tables, places[None, :, None], places)
    masked = (mx.where(seen, scores, -mx.inf) for scores in every)
    pairs = zip(tables, masked, strict=True)
    return cycle([Bias(scores, table, start, None) for table, scores in pairs])


def _scores(tables: Sequence[mx.array], queries: mx.array, keys: mx.array) -> list[mx.array]:
    """Return each table's bias (B, H, L, T), given positions of queries (B, L, 1) and keys (T,)."""
    reach = tables[0].shape[1] // 2
    index = mx.clip(keys - queries, -reach, reach) + reach
    return [mx.take(table, index, axis=1).swapaxes(0, 1) for table in tables]


def for_each_row(mask: mx.array, batch: int, num_heads: int, num_queries: int) -> mx.array:
    """Make an additive mask (B, H, L, T) of one that is 1 along some of these axes.

    With several rows, MLX's attention on Metal copies, in every layer, any mask that is not in
    row-major order. A single row's is returned as it is.
    """
    if batch == 1:
        return mask
    return mx.contiguous(mx.broadcast_to(mask, (batch, num_heads, num_queries, mask.shape[-1])))


def relative_position_bucket(
    relative: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Buckets of relative positions (T5, section 2.1): half exact, half growing by logarithm.

    `relative` is the key's position minus the query's, integers of any shape; the buckets, int32,
    have that shape. Keys after the query have buckets of their own if `bidirectional` (the
    encoder); `num_buckets` is that of both directions together. The last bucket holds everything
    from `max_distance` on.

    Example:
        With 32 buckets up to 128 and `bidirectional=False`, the key 3 places before the query
        (relative -3) is in bucket 3, the one 100 places before in bucket 30.
    """
    distance, offset = np.maximum(-relative, 0), np.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        distance, offset = np.abs(relative), np.where(relative > 0, num_buckets, 0)
    exact = num_buckets // 2
    # float32 throughout, as the models were trained: float64 rounds some powers of 2 otherwise.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    scaled = ratio / np.float32(np.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + scaled.astype(np.int32), num_buckets - 1)
    return np.asarray(offset + np.where(distance < exact, distance, far), dtype=np.int32)
