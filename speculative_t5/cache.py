"""Key/value buffers with a length per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

GROWTH = 64  # capacities that change become multiples of this many positions

KeysValues = tuple[mx.array, mx.array]  # (B, H, T, D) each


class KVCache:
    """Self-attention keys and values of all layers, for a batch of rows of different lengths.

    A row's length says what counts: rewinding moves the length and leaves the buffers alone, and
    what lies beyond it is overwritten by the next append.
    """

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, batch: int, dtype: mx.Dtype
    ) -> None:
        self.lengths = [0] * batch
        self._shape = (num_heads, head_dim)
        self._dtype = dtype
        self._keys = [self._empty(GROWTH) for _ in range(num_layers)]
        self._values = [self._empty(GROWTH) for _ in range(num_layers)]

    @property
    def capacity(self) -> int:
        return int(self._keys[0].shape[2])

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more positions in every row; give back what a long row took.

        MLX does not check the bounds of a slice update: every append must be covered by this.
        """
        capacity = fitting(max(self.lengths) + num_tokens, self.capacity)
        if capacity != self.capacity:
            self._keys = [_resized(k, capacity) for k in self._keys]
            self._values = [_resized(v, capacity) for v in self._values]

    def append(self, layer: int, keys: mx.array, values: mx.array) -> KeysValues:
        """Write one layer's new keys and values (B, H, L, D) after each row's length.

        The lengths themselves move with `advance`, once all layers have written.

        Returns:
            Views (B, H, T, D) of the layer's buffers, T being the longest row with its L new
            positions; what is beyond a shorter row is for the caller to mask.
        """
        end = max(self.lengths) + keys.shape[2]
        assert end <= self.capacity, (end, self.capacity)
        self._keys[layer] = _write(self._keys[layer], keys, self.lengths)
        self._values[layer] = _write(self._values[layer], values, self.lengths)
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count the positions that `append` wrote."""
        self.lengths = [length + num_tokens for length in self.lengths]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` positions of each row."""
        assert len(lengths) == len(self.lengths)
        assert all(0 <= n <= old for n, old in zip(lengths, self.lengths, strict=True)), lengths
        self.lengths = list(lengths)

    def clear(self, rows: Sequence[int]) -> None:
        """Make these rows empty."""
        for row in rows:
            self.lengths[row] = 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        index = mx.array(list(rows), dtype=mx.int32)
        self._keys = [mx.take(k, index, axis=0) for k in self._keys]
        self._values = [mx.take(v, index, axis=0) for v in self._values]
        self.lengths = [self.lengths[row] for row in rows]

    def _empty(self, capacity: int) -> mx.array:
        num_heads, head_dim = self._shape
        shape = (len(self.lengths), num_heads, capacity, head_dim)
        return mx.zeros(shape, dtype=self._dtype)


class SourceCache:
    """Cross-attention's keys and values of all layers, for rows of sources of different lengths.

    Rows can be given to other sources, which are written over the old ones in place.

    Attributes:
        lengths: Positions that each row's source takes.
        mask: Additive, (B, 1, 1, T), T being the longest row: -inf beyond a row's length. None
            where rows are equally long.

    Args:
        layers: Keys and values of each layer, (B, H, S, D).
        lengths: See above; at most S.
    """

    def __init__(self, layers: Sequence[KeysValues], lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._layers = list(layers)
        self._dtype = layers[0][0].dtype
        self.mask = padding_mask(self.lengths, self._dtype)

    @classmethod
    def empty_like(cls, other: SourceCache, batch: int, length: int) -> SourceCache:
        """Zeros for so many rows of that length, like another's in all else."""
        _, num_heads, _, head_dim = other.layers[0][0].shape
        zeros = partial(mx.zeros, (batch, num_heads, length, head_dim), other.layers[0][0].dtype)
        return cls([(zeros(), zeros()) for _ in other.layers], [length] * batch)

    @property
    def layers(self) -> list[KeysValues]:
        """The whole buffers."""
        return self._layers

    @property
    def capacity(self) -> int:
        return int(self._layers[0][0].shape[2])

    def view(self, layer: int) -> KeysValues:
        """Keys and values of a layer, (B, H, T, D) each."""
        end = max(self.lengths)
        keys, values = self._layers[layer]
        return keys[:, :, :end], values[:, :, :end]

    def part(self, first: int, end: int) -> SourceCache:
        """Rows `first` to `end - 1`, as far as the longest of them goes."""
        lengths = self.lengths[first:end]
        rows, places = slice(first, end), slice(max(lengths))
        layers = [(k[rows, :, places], v[rows, :, places]) for k, v in self._layers]
        return SourceCache(layers, lengths)

    def replace(self, rows: Sequence[int], new: SourceCache) -> None:
        """Give these rows to those of `new`."""
        for row, length in zip(rows, new.lengths, strict=True):
            self.lengths[row] = length
        capacity = fitting(max(*self.lengths, new.capacity), self.capacity)
        if capacity != self.capacity:
            self._layers = [(_resized(k, capacity), _resized(v, capacity)) for k, v in self._layers]
        at, end = mx.array(list(rows), dtype=mx.int32), new.capacity
        for (keys, values), (new_keys, new_values) in zip(self._layers, new.layers, strict=True):
            keys[at, :, :end] = new_keys
            values[at, :, :end] = new_values
        self.mask = padding_mask(self.lengths, self._dtype)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        index = mx.array(list(rows), dtype=mx.int32)
        self._layers = [(mx.take(k, index, 0), mx.take(v, index, 0)) for k, v in self._layers]
        self.lengths = [self.lengths[row] for row in rows]
        self.mask = padding_mask(self.lengths, self._dtype)


def padding_mask(lengths: Sequence[int], dtype: mx.Dtype) -> mx.array | None:
    """The additive mask (B, 1, 1, T) of rows so long, T being the longest; None if all are."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    return additive(mx.array(list(lengths))[:, None] > mx.arange(longest), dtype)


def additive(real: mx.array, dtype: mx.Dtype) -> mx.array:
    """(B, T) bool, True at tokens -> what to add to attention's logits, (B, 1, 1, T)."""
    return mx.where(real, 0.0, -mx.inf).astype(dtype)[:, None, None]


def fitting(needed: int, capacity: int) -> int:
    """The capacity to have instead of this one; the same unless it is too small or twice too large.

    Rows are as large as the longest needs, so that a single long one costs all of them: what it
    took is given back when it has ended.
    """
    fit = -(-needed // GROWTH) * GROWTH
    return fit if needed > capacity or capacity > 2 * fit else capacity


def _resized(buffer: mx.array, capacity: int) -> mx.array:
    """`buffer` (B, H, C, D) with that capacity for C, cut or followed by zeros."""
    more = capacity - buffer.shape[2]
    if more > 0:
        return mx.pad(buffer, [(0, 0), (0, 0), (0, more), (0, 0)])
    return mx.contiguous(buffer[:, :, :capacity])


def _write(buffer: mx.array, new: mx.array, lengths: list[int]) -> mx.array:
    """`buffer` (B, H, C, D) with `new` (B, H, L, D) written at each row's length."""
    count = new.shape[2]
    if len(set(lengths)) == 1:
        start = lengths[0]
        buffer[:, :, start : start + count] = new
        return buffer
    positions = mx.array(lengths)[:, None] + mx.arange(count)
    return mx.put_along_axis(buffer, positions[:, None, :, None], new, axis=2)
