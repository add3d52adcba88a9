"""`TokenHistory`: the tokens that come before logits, where options depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

NO_TOKEN = -1  # instead of a token, where a row has fewer than others


@dataclass(frozen=True)
class TokenHistory:
    """The tokens that logits follow, row by row.

    Of logits (B, L, V) position i follows the contexts and the first N - (L - 1 - i) of the drafted
    tokens.
    """

    contexts: Sequence[Sequence[int]]  # a decoder-only model's prompt or a start token, the output
    starts: Sequence[int]  # how many of these tokens come before the output
    drafted: mx.array  # (B, N) int32, tokens that are assumed to follow

    @cached_property
    def tokens(self) -> mx.array:
        """Contexts and drafted tokens, (B, T + N) int32, `NO_TOKEN` before short rows."""
        longest = max(map(len, self.contexts))
        rows = [[*[NO_TOKEN] * (longest - len(c)), *c] for c in self.contexts]
        return mx.concatenate([mx.array(rows, dtype=mx.int32), self.drafted], axis=1)

    def of_rows(self, rows: Sequence[int]) -> TokenHistory:
        """Return the history of some rows."""
        return TokenHistory(
            [self.contexts[row] for row in rows],
            [self.starts[row] for row in rows],
            self.drafted[mx.array([*rows])],
        )

    def positions(self, length: int) -> mx.array:
        """Return how many tokens of the output each of L positions follows, (B, L) int32."""
        emitted = [len(c) - n for c, n in zip(self.contexts, self.starts, strict=True)]
        last = self.drafted.shape[1]
        after = mx.arange(last - length + 1, last + 1, dtype=mx.int32)
        return mx.array(emitted, dtype=mx.int32)[:, None] + after
