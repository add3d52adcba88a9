"""Key/value buffers with a length per row."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

GROWTH = 64  # capacity is a multiple of this many positions


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
        """Make room for `num_tokens` more positions in every row; at least doubles when it grows.

        MLX does not check the bounds of a slice update: every append must be covered by this.
        """
        needed = max(self.lengths) + num_tokens
        if needed <= self.capacity:
            return
        capacity = -(-max(needed, 2 * self.capacity) // GROWTH) * GROWTH
        more = self._empty(capacity - self.capacity)
        self._keys = [mx.concatenate([k, more], axis=2) for k in self._keys]
        self._values = [mx.concatenate([v, more], axis=2) for v in self._values]

    def append(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
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


def _write(buffer: mx.array, new: mx.array, lengths: list[int]) -> mx.array:
    """`buffer` (B, H, C, D) with `new` (B, H, L, D) written at each row's length."""
    count = new.shape[2]
    if len(set(lengths)) == 1:
        start = lengths[0]
        buffer[:, :, start : start + count] = new
        return buffer
    positions = mx.array(lengths)[:, None] + mx.arange(count)
    return mx.put_along_axis(buffer, positions[:, None, :, None], new, axis=2)
