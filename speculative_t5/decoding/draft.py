"""`Draft`: proposed tokens, and the distributions that they were sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from .sampling import one_hot

Contexts = list[list[int]]  # of each row: all tokens so far


@dataclass(frozen=True)
class Draft:
    """K proposed tokens per row and the distributions they were sampled from."""

    tokens: mx.array  # (B, K) int32
    lengths: Sequence[int]  # how many tokens each row has; the positions after them are padding
    # q, (B, K, V) float32 over the target's vocabulary, with zero rows at padding. None stands for
    # one-hot rows at `tokens`, as in greedy drafts and prompt lookups; `dense` makes them.
    probs: mx.array | None = None

    @property
    def mask(self) -> mx.array | None:
        """(B, K) bool, True at tokens and False at padding; None if there is no padding."""
        width = self.tokens.shape[1]
        if min(self.lengths) == width:
            return None
        return mx.array(list(self.lengths))[:, None] > mx.arange(width)

    def dense(self, vocab_size: int) -> mx.array:
        """Return q as an array (B, K, V) float32, one-hot rows included."""
        if self.probs is not None:
            return self.probs
        probs, mask = one_hot(self.tokens, vocab_size), self.mask
        return probs if mask is None else probs * mask[..., None]

    def limited(self, limits: Sequence[int]) -> Draft:
        """Keep the first `limits[row]` tokens of each row, as if no more had been drafted."""
        width = self.tokens.shape[1]
        if min(limits) >= width:
            return self
        width = min(width, max(limits))
        lengths = [min(n, limit) for n, limit in zip(self.lengths, limits, strict=True)]
        cut = Draft(self.tokens[:, :width], lengths)
        if self.probs is None:
            return cut
        probs = self.probs[:, :width]
        return replace(cut, probs=probs if cut.mask is None else probs * cut.mask[..., None])


def empty_draft(batch: int) -> Draft:
    """Return a draft of no tokens for `batch` rows."""
    return Draft(mx.zeros((batch, 0), dtype=mx.int32), [0] * batch)
