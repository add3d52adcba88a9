"""Proposing tokens for the target to check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .sampling import Sampler, draw
from .session import LanguageModel, Session


@dataclass(frozen=True)
class Draft:
    """K proposed tokens per row and the distributions they were drawn from.

    Attributes:
        tokens: (B, K) int32.
        probs: q, (B, K, V) float32 over the target's vocabulary; a zero row means that nothing
            was drafted there.
    """

    tokens: mx.array
    probs: mx.array

    @property
    def num_drafted(self) -> mx.array:
        """How many places of each row hold a token, (B,) int32."""
        return mx.sum(mx.any(self.probs > 0, axis=-1).astype(mx.int32), axis=1)


class Drafter(Protocol):
    """Proposes what may come next in each row of a batch."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin a batch of prompts (source ids, EOS included)."""

    def propose(self, context: list[list[int]], num_draft: int, key: mx.array | None) -> Draft:
        """Draft `num_draft` tokens after each row's context, the target's tokens so far.

        The key is None where distributions are one-hot and nothing is left to chance.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""


class EmptyDrafter:
    """Drafts nothing: the loop is then regular decoding by the target."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, context: list[list[int]], num_draft: int, key: mx.array | None) -> Draft:
        return empty_draft(len(context), self._vocab_size)

    def select(self, rows: Sequence[int]) -> None:
        pass


class ModelDrafter:
    """Drafts with a small model, token after token on the device, without waiting for any.

    Args:
        model: The draft model.
        sampler: The target's own transform, so that q resembles p.
        vocab_size: The target's vocabulary size. Sizes of one family differ in padding: the
            draft's logits beyond it are dropped, and missing ones have probability 0.
    """

    def __init__(self, model: LanguageModel, sampler: Sampler, vocab_size: int) -> None:
        self._model = model
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._session: Session | None = None

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._session, _ = self._model.start([self._known(prompt) for prompt in prompts])

    def propose(self, context: list[list[int]], num_draft: int, key: mx.array | None) -> Draft:
        assert self._session is not None, "propose before start"
        if num_draft == 0:
            return empty_draft(len(context), self._vocab_size)
        # The last drafted token was never fed, nor what the target put after it: two tokens, or
        # more after rounds that drafted nothing. Equal numbers in all rows keep this one step.
        width = max(len(c) - n for c, n in zip(context, self._session.lengths, strict=True))
        width = min(max(width, 2), *map(len, context))
        self._session.truncate([len(c) - width for c in context])
        feed = mx.array([self._known(c[-width:]) for c in context], dtype=mx.int32)
        tokens, probs = [], []
        keys = [None] * num_draft if key is None else list(mx.random.split(key, num_draft))
        for step_key in keys:
            logits = self._session.step(feed)[:, -1, : self._vocab_size]
            q = self._sampler.probs(logits)
            token = draw(q, step_key)
            mx.async_eval(token)
            tokens.append(token)
            probs.append(q)
            feed = token[:, None]
        stacked = mx.stack(probs, axis=1)
        missing = self._vocab_size - stacked.shape[-1]
        return Draft(mx.stack(tokens, axis=1), mx.pad(stacked, [(0, 0), (0, 0), (0, missing)]))

    def select(self, rows: Sequence[int]) -> None:
        assert self._session is not None, "select before start"
        self._session.select(rows)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The target's padding ids may lie beyond the draft's embedding, which is not checked."""
        last = self._model.vocab_size - 1
        return [min(token, last) for token in tokens]


def empty_draft(batch: int, vocab_size: int) -> Draft:
    return Draft(mx.zeros((batch, 0), dtype=mx.int32), mx.zeros((batch, 0, vocab_size)))
