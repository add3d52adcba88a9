"""Key/value buffers with a length per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from .. import device

# Capacities are few, as each is a shape to compile for: powers of 2 from SMALLEST_CAPACITY to
# GROWTH, then multiples of GROWTH.
SMALLEST_CAPACITY, GROWTH = 32, 256
SOURCE_STEP = 32  # widths of sources are multiples of this, for the same reason

# A layer's keys and values: one array (2, B, H, T, D), or several (B, H, T, D). Axes are counted
# from the end, so that both are handled alike.
LayerBuffers = Any


@dataclass(frozen=True)
class EncodedPrompt:
    """One row of a cache that several prompts were encoded into, and the context it begins with."""

    cache: Buffers
    row: int
    context: list[int]


class Buffers:
    """Keys and values of all layers, for a batch of rows of different lengths."""

    def __init__(
        self, layers: Sequence[LayerBuffers], lengths: Sequence[int] | None = None
    ) -> None:
        self.layers = list(layers)  # of arrays (..., B, H, C, D), C being the capacity
        # All arrays have the same numbers of rows and positions.
        flat: Any = tree_flatten(layers[0])
        rows, _, self.capacity, _ = flat[0][1].shape[-4:]
        # Positions of each row that count.
        self.lengths: list[int] = [0] * rows if lengths is None else list(lengths)

    def resize(self, capacity: int) -> None:
        if capacity != self.capacity:
            self.layers = tree_map(lambda buffer: resized(buffer, capacity), self.layers)
            self.capacity = capacity

    def fit(self, needed: int) -> None:
        """Resize if the capacity is too small for `needed` positions, or twice too large."""
        least = capacity_for(needed)
        if not needed <= self.capacity <= 2 * least:
            self.resize(least)

    def give(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> None:
        """Overwrite `rows[i]` with `encoded[i]`; those of one cache are written together."""
        together: dict[int, list[int]] = {}
        for i, item in enumerate(encoded):
            together.setdefault(id(item.cache), []).append(i)
        for group in together.values():
            new = encoded[group[0]].cache
            self.replace([rows[i] for i in group], new, [encoded[i].row for i in group])

    def replace(self, rows: Sequence[int], new: Buffers, new_rows: Sequence[int]) -> None:
        """Overwrite `rows[i]` with row `new_rows[i]` of another cache, in place."""
        lengths = [new.lengths[row] for row in new_rows]
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        self.fit(max(self.lengths))
        longest = max(lengths)
        if longest == 0:  # prompts of one token leave nothing to write, which MLX cannot do
            return
        places: list[tuple[Any, Any]] = list(zip(rows, new_rows, strict=True))
        if not device.on_cpu():  # a CPU takes five times as long for one operation for all
            places = [(mx.array(list(rows)), mx.array(list(new_rows)))]

        def overwrite(buffer: mx.array, new_buffer: mx.array) -> mx.array:
            for row, new_row in places:
                buffer[..., row, :, :longest, :] = new_buffer[..., new_row, :, :longest, :]
            return buffer

        self.layers = tree_map(overwrite, self.layers, new.layers)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order; a row may be kept several times.

        On a CPU one layer follows the other, and takes the memory that the one before it has left:
        new memory takes as long to map as a pass, and all layers twice are the most that a batch
        ever needs.
        """
        if list(rows) == list(range(len(self.lengths))):
            return
        index = mx.array(list(rows), dtype=mx.int32)
        for i, _ in enumerate(self.layers):
            # `mx.take` along an axis that is not the first is ten times slower on a CPU.
            self.layers[i] = tree_map(lambda buffer: buffer[..., index, :, :, :], self.layers[i])
            if device.on_cpu():
                mx.eval(self.layers[i])
        self.lengths = [self.lengths[row] for row in rows]


class KVCache(Buffers):
    """Self-attention's keys and values, from layers of `SMALLEST_CAPACITY` with empty rows on.

    Rewinding moves a row's length and leaves the buffers alone: the next step overwrites what lies
    beyond. `width` is that of passes, see `parts`; None for passes of any length.
    """

    def __init__(self, layers: Sequence[LayerBuffers], width: int | None = None) -> None:
        super().__init__(layers)
        self._width = width

    def fit(self, needed: int) -> None:
        if self._width is None:
            super().fit(needed)
        else:
            self.resize(capacity_for(needed))

    def parts(self, tokens: mx.array) -> Iterator[tuple[mx.array, int]]:
        """Yield the tokens of each pass over new ones (B, L) int32, and how many are no padding.

        All are one pass, unless the cache was given a width. Then every pass is padded to that
        width, and ends where the next position would be the first of a larger capacity: both follow
        from the position alone, however the tokens before it were fed. Each part is taken back
        (`take_back`) before the next one is made.
        """
        width, total, start = self._width, tokens.shape[1], 0
        if width is None:
            yield tokens, total
            return
        while start < total:
            end = max(self.lengths) + width
            count = min(width, capacity_for(end) - end + 1, total - start)
            part = tokens[:, start : start + count]
            yield part if count == width else mx.pad(part, [(0, 0), (0, width - count)]), count
            start += count

    def hand_over(self, num_tokens: int) -> tuple[mx.array, list[LayerBuffers]]:
        """Make room for a pass over tokens of every row; return its offsets and all layers.

        The offsets are each row's length, (B,) int32, or (1,) if all are the same. The cache keeps
        no layers meanwhile, as a write copies buffers that others hold.
        """
        self.fit(max(self.lengths) + num_tokens)  # MLX does not check the bounds of writes
        same = min(self.lengths) == max(self.lengths)
        offsets = mx.array(self.lengths[:1] if same else self.lengths, dtype=mx.int32)
        layers, self.layers = self.layers, []
        return offsets, layers

    def take_back(self, layers: list[LayerBuffers], count: int) -> None:
        """Take the layers with a pass's tokens written, of which the first `count` stay."""
        self.layers = layers
        self.lengths = [length + count for length in self.lengths]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` positions of each row."""
        assert all(0 <= n <= old for n, old in zip(lengths, self.lengths, strict=True)), lengths
        self.lengths = list(lengths)

    def clear(self, rows: Sequence[int]) -> None:
        """Make these rows empty."""
        for row in rows:
            self.lengths[row] = 0


class SourceCache(Buffers):
    """Cross-attention's keys and values, for sources of different lengths.

    Rows that lie side by side and have the same source, as the beams of a prompt, share one copy of
    it if each source has as many: `layers` and `lengths` are those of P sources.
    """

    def __init__(self, layers: Sequence[mx.array], lengths: Sequence[int]) -> None:
        super().__init__(layers, lengths)
        self.repeats = 1  # number of rows that share a source, B / P
        self._measure()

    def _measure(self) -> None:
        self.width = source_width(self.lengths)  # T, up to the capacity
        # (P, 1, 1, T), see `padding_mask`
        self.mask = padding_mask(self.lengths, self.width, self.layers[0].dtype)

    def view(self, part: slice) -> list[mx.array]:
        """Keys and values of each layer of a part, (2, P, H, T, D)."""
        if self.width == self.capacity:
            return self.layers[part]
        return [layer[..., : self.width, :] for layer in self.layers[part]]

    def replace(self, rows: Sequence[int], new: Buffers, new_rows: Sequence[int]) -> None:
        if self.repeats > 1:  # a source would be overwritten for other rows, too
            repeats, self.repeats = self.repeats, 1
            super().select([row // repeats for row in range(len(self.lengths) * repeats)])
        super().replace(rows, new, new_rows)
        self._measure()

    def select(self, rows: Sequence[int]) -> None:
        sources = [row // self.repeats for row in rows]
        kept = [source for source, _ in groupby(sources)]
        self.repeats, left = divmod(len(sources), len(kept))
        if left or sources != [source for source in kept for _ in range(self.repeats)]:
            kept, self.repeats = sources, 1
        if kept != list(range(len(self.lengths))):
            super().select(kept)
            self._measure()


def source_width(lengths: Sequence[int]) -> int:
    """Return the width of a `SourceCache` with rows of these lengths."""
    return -(-max(lengths) // SOURCE_STEP) * SOURCE_STEP


def padding_mask(lengths: Sequence[int], width: int, dtype: mx.Dtype) -> mx.array | None:
    """Make the additive mask (B, 1, 1, width) of rows; None if all have that width."""
    if min(lengths) == width:
        return None
    return additive(mx.array(list(lengths))[:, None] > mx.arange(width), dtype)


def additive(real: mx.array, dtype: mx.Dtype) -> mx.array:
    """(B, T) bool, True at tokens -> additive mask of attention's scores, (B, 1, 1, T)."""
    return mx.where(real, 0.0, -mx.inf).astype(dtype)[:, None, None]


def capacity_for(needed: int) -> int:
    """Return the smallest capacity for `needed` positions."""
    capacity = SMALLEST_CAPACITY
    while capacity < min(needed, GROWTH):
        capacity *= 2
    return capacity if needed <= GROWTH else -(-needed // GROWTH) * GROWTH


def resized(buffer: mx.array, capacity: int) -> mx.array:
    """Cut a buffer (..., C, D) to that capacity, or add zeros."""
    more = capacity - buffer.shape[-2]
    if more == 0:
        return buffer
    if more > 0:
        return mx.pad(buffer, [*[(0, 0)] * (buffer.ndim - 2), (0, more), (0, 0)])
    return mx.contiguous(buffer[..., :capacity, :])


def write(buffer: mx.array, new: mx.array, offsets: mx.array) -> mx.array:
    """Write `new` (..., B, H, L, D) into a buffer (..., B, H, C, D), from each row's offset on.

    `offsets`, (B,) or (1,) int32, is what `KVCache.hand_over` returns for L tokens.
    """
    if offsets.size == 1:
        return mx.slice_update(buffer, new, offsets, axes=(buffer.ndim - 2,))
    positions = (offsets[:, None] + mx.arange(new.shape[-2]))[:, None, :, None]
    outer = tuple(range(buffer.ndim - 4))
    return mx.put_along_axis(buffer, mx.expand_dims(positions, outer), new, axis=-2)
