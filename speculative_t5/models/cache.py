"""Key/value buffers with a length per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import mlx.core as mx

# Capacities: few, as each is a shape to compile for, and near what is needed.
SMALLEST, GROWTH = 32, 256  # powers of 2 from the one to the other, then multiples of the latter
SOURCE_STEP = 32  # what a source takes is a multiple of this: few shapes, each compiled once

KeysValues = tuple[mx.array, mx.array]  # (B, H, T, D) each


@dataclass(frozen=True)
class LayerShape:
    """Of one layer's keys and values: heads, sizes of a key and of a value, type."""

    num_heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype

    def zeros(self, batch: int, capacity: int) -> KeysValues:
        """Room for so many positions of so many rows, (B, H, C, D) each."""
        k, v = (
            mx.zeros((batch, self.num_heads, capacity, size), self.dtype)
            for size in (self.key_size, self.value_size)
        )
        return k, v


class KVCache:
    """Self-attention keys and values of all layers, for a batch of rows of different lengths.

    A row's length says what counts: rewinding moves the length and leaves the buffers alone, and
    what lies beyond it is overwritten by the next step.

    Attributes:
        layers: Keys and values of each layer, (B, H, C, D), C being the capacity.
        lengths: Positions of each row that count.

    Args:
        shapes: Of each layer.
        batch: Number of rows, which are empty.
    """

    def __init__(self, shapes: Sequence[LayerShape], batch: int) -> None:
        self.layers: list[KeysValues] = [shape.zeros(batch, SMALLEST) for shape in shapes]
        self.lengths = [0] * batch

    @property
    def capacity(self) -> int:
        return int(self.layers[0][0].shape[2])

    def reserve(self, num_tokens: int) -> mx.array:
        """Make room for `num_tokens` more positions in every row; give back what a long row took.

        MLX does not check the bounds of a slice update: every `write` must be covered by this.

        Returns:
            Where to `write`: each row's length, (B,) int32, or (1,) if all are the same.
        """
        capacity = fitting(max(self.lengths) + num_tokens, self.capacity)
        if capacity != self.capacity:
            self.layers = [(resized(k, capacity), resized(v, capacity)) for k, v in self.layers]
        same = min(self.lengths) == max(self.lengths)
        return mx.array(self.lengths[:1] if same else self.lengths, dtype=mx.int32)

    def take(self) -> list[KeysValues]:
        """The layers, to write to; nothing else must hold them, or each write would copy them."""
        layers, self.layers = self.layers, []
        return layers

    def put(self, layers: list[KeysValues], num_tokens: int) -> None:
        """The layers taken, with `num_tokens` more positions written in every row."""
        self.layers = layers
        self.lengths = [length + num_tokens for length in self.lengths]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` positions of each row."""
        assert len(lengths) == len(self.lengths)
        assert all(0 <= n <= old for n, old in zip(lengths, self.lengths, strict=True)), lengths
        self.lengths = list(lengths)

    def replace(self, rows: Sequence[int], new: KVCache, new_rows: Sequence[int]) -> None:
        """Overwrite `rows[i]` with row `new_rows[i]` of another cache."""
        lengths = [new.lengths[row] for row in new_rows]
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        self.reserve(0)
        if max(lengths):  # prompts of one token leave nothing to write, which MLX cannot do
            overwrite(self.layers, rows, new.layers, new_rows, max(lengths))

    def clear(self, rows: Sequence[int]) -> None:
        """Make these rows empty."""
        for row in rows:
            self.lengths[row] = 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        index = mx.array(list(rows), dtype=mx.int32)
        self.layers = [(mx.take(k, index, 0), mx.take(v, index, 0)) for k, v in self.layers]
        self.lengths = [self.lengths[row] for row in rows]


class SourceCache:
    """Cross-attention's keys and values of all layers, for rows of sources of different lengths.

    Rows can be given to other sources, which are written over the old ones in place.

    Attributes:
        lengths: Positions that each row's source takes.
        mask: Additive, (B, 1, 1, T), T being the width: -inf beyond a row's length. None where no
            row is shorter than T.

    Args:
        layers: Keys and values of each layer, (B, H, S, D).
        lengths: See above; at most S.
    """

    def __init__(self, layers: Sequence[KeysValues], lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._dtype = layers[0][0].dtype
        self._layers = [(resized(k, self.width), resized(v, self.width)) for k, v in layers]
        self.mask = padding_mask(self.lengths, self.width, self._dtype)

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

    @property
    def width(self) -> int:
        """T: the length of the longest row, rounded up."""
        return source_width(self.lengths)

    def view(self) -> list[KeysValues]:
        """Keys and values of each layer, (B, H, T, D)."""
        if self.width == self.capacity:
            return self._layers
        return [(k[:, :, : self.width], v[:, :, : self.width]) for k, v in self._layers]

    def replace(self, rows: Sequence[int], new: SourceCache, new_rows: Sequence[int]) -> None:
        """Overwrite `rows[i]` with row `new_rows[i]` of another cache."""
        lengths = [new.lengths[row] for row in new_rows]
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        capacity = fitting(self.width, self.capacity)
        if capacity != self.capacity:
            self._layers = [(resized(k, capacity), resized(v, capacity)) for k, v in self._layers]
        overwrite(self._layers, rows, new.layers, new_rows, max(lengths))
        self.mask = padding_mask(self.lengths, self.width, self._dtype)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        index = mx.array(list(rows), dtype=mx.int32)
        self._layers = [(mx.take(k, index, 0), mx.take(v, index, 0)) for k, v in self._layers]
        self.lengths = [self.lengths[row] for row in rows]
        self.mask = padding_mask(self.lengths, self.width, self._dtype)


Cache = TypeVar("Cache", KVCache, SourceCache)


@dataclass(frozen=True)
class EncodedPrompt(Generic[Cache]):
    """One row of a cache that several prompts were encoded into, and the context it begins with."""

    cache: Cache
    row: int
    context: list[int]


def replace_rows(
    cache: Cache, rows: Sequence[int], encoded: Sequence[EncodedPrompt[Cache]]
) -> None:
    """Overwrite `rows[i]` of a cache with `encoded[i]`; those of one cache are written together."""
    together: dict[int, list[int]] = {}
    for i, (_, item) in enumerate(zip(rows, encoded, strict=True)):
        together.setdefault(id(item.cache), []).append(i)
    for group in together.values():
        new = encoded[group[0]].cache
        cache.replace([rows[i] for i in group], new, [encoded[i].row for i in group])


def overwrite(
    layers: Sequence[KeysValues],
    rows: Sequence[int],
    new: Sequence[KeysValues],
    new_rows: Sequence[int],
    length: int,
) -> None:
    """Write the first `length` positions of some rows of `new` over rows of `layers`, in place."""
    to, taken = mx.array(list(rows), dtype=mx.int32), mx.array(list(new_rows), dtype=mx.int32)
    for pair, new_pair in zip(layers, new, strict=True):
        for buffer, new_buffer in zip(pair, new_pair, strict=True):
            buffer[to, :, :length] = new_buffer[taken, :, :length]


def source_width(lengths: Sequence[int]) -> int:
    """The width that a `SourceCache` of rows so long has."""
    return -(-max(lengths) // SOURCE_STEP) * SOURCE_STEP


def padding_mask(lengths: Sequence[int], width: int, dtype: mx.Dtype) -> mx.array | None:
    """The additive mask (B, 1, 1, width) of rows so long; None if all have that width."""
    if min(lengths) == width:
        return None
    return additive(mx.array(list(lengths))[:, None] > mx.arange(width), dtype)


def additive(real: mx.array, dtype: mx.Dtype) -> mx.array:
    """(B, T) bool, True at tokens -> what to add to attention's logits, (B, 1, 1, T)."""
    return mx.where(real, 0.0, -mx.inf).astype(dtype)[:, None, None]


def fitting(needed: int, capacity: int) -> int:
    """The capacity to have instead of this one; the same unless it is too small or twice too large.

    Rows are as large as the longest needs, so that a single long one costs all of them: what it
    took is given back when it has ended.
    """
    fit = SMALLEST
    while fit < min(needed, GROWTH):
        fit *= 2
    if needed > GROWTH:
        fit = -(-needed // GROWTH) * GROWTH
    return fit if needed > capacity or capacity > 2 * fit else capacity


def resized(buffer: mx.array, capacity: int) -> mx.array:
    """`buffer` (B, H, C, D) with that capacity for C, cut or followed by zeros."""
    more = capacity - buffer.shape[2]
    if more == 0:
        return buffer
    if more > 0:
        return mx.pad(buffer, [(0, 0), (0, 0), (0, more), (0, 0)])
    return mx.contiguous(buffer[:, :, :capacity])


def write(buffer: mx.array, new: mx.array, at: mx.array) -> mx.array:
    """A buffer (B, H, C, D) with `new` (B, H, L, D) written from position `at` of each row.

    `at` is what `KVCache.reserve` gave for L tokens, (B,) or (1,) int32.
    """
    if at.size == 1:
        return mx.slice_update(buffer, new, at, axes=(2,))
    positions = at[:, None] + mx.arange(new.shape[2])
    return mx.put_along_axis(buffer, positions[:, None, :, None], new, axis=2)
