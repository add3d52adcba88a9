"""`ModelDrafter`: drafts by a small model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from .draft import Contexts, Draft, empty_draft
from .history import TokenHistory
from .keys import Keys
from .logits import nothing_allowed
from .protocols import LanguageModel, Session
from .results import Broadcast, counters, identity
from .sampling import Groups, argmax, padded, sample


class ModelDrafter:
    """Drafts with a small model, a token or a block in a pass, without waiting for the device.

    `vocab_size` is the target's. Models of one family differ in padding: the draft's logits beyond
    it are dropped, and missing ones have probability 0. Only ids below `first_ids` are proposed.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        first_ids: int | None = None,
        broadcast: Broadcast = identity,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._broadcast = broadcast
        self._width = min(model.info.vocab_size, vocab_size, first_ids or vocab_size)
        self._masks = [model.info.vocab_size + i for i in range(model.info.block - 1)]
        self._prompts: list[list[int]] = []
        self._session: Session | None = None
        self._new: set[int] = set()  # rows whose prompts the session has not encoded yet
        self._was_asked = False  # in the last round

    @property
    def dtype(self) -> mx.Dtype | None:
        """The type that the model computes in, if it says so."""
        return getattr(self._model, "dtype", None)

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._prompts = [self._embeddable(prompt) for prompt in prompts]
        self._session = session
        self._new = set()
        self._was_asked = False

    def propose(self, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys) -> Draft:
        longest = self._model.info.max_context or sys.maxsize
        limits = [max(0, longest - len(c) + 1) for c in contexts]  # the last one is never fed
        num_draft = min(num_draft, max(limits))
        if num_draft and not self._was_asked:
            counters.extra_work += 1  # it has to read what was emitted meanwhile
        self._was_asked = num_draft > 0
        if num_draft == 0:
            if self._session is not None:
                # Drop rejected tokens now: later they could not be told from confirmed ones.
                self._session.truncate(self._confirmed(self._session, contexts))
            return empty_draft(len(contexts))
        # Prompts are encoded only now: where drafting never pays, it should cost nothing.
        new, self._new = sorted(self._new), set()
        if self._session is None:
            self._session = self._model.start(self._prompts)[0]
        elif new:
            self._session.replace(new, self._session.encode([self._prompts[row] for row in new]))
        session, probs = self._session, None
        if groups.greedy and not groups.transforms:
            tokens = self._best(session, contexts, num_draft)
        else:
            tokens, probs = self._chosen(session, contexts, num_draft, groups, keys)
        lengths = [num_draft] * len(contexts)
        return Draft(self._broadcast(tokens), lengths, probs).limited(limits)

    def _best(self, session: Session, contexts: Contexts, num_draft: int) -> mx.array:
        """Return the greedy continuation, (B, K) int32, with marks where its logits are NaN.

        A mark never agrees with the target (`verify.num_agreed`); embedded it is any id.
        """
        step = partial(session.step_argmax, vocab_size=self._width)
        blocks = [self._catch_up(session, contexts, step)]
        mx.async_eval(blocks)  # the device begins while the host builds the rest
        while len(blocks) * self._model.info.block < num_draft:
            blocks.append(self._continue(session, blocks[-1], step))
        return mx.concatenate(blocks, axis=1)[:, :num_draft]

    def _chosen(
        self, session: Session, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys
    ) -> tuple[mx.array, mx.array | None]:
        """Return a continuation, (B, K) int32, and q, (B, K, V) float32; None if all is greedy."""
        step = partial(session.step, vocab_size=self._width)
        block, block_logits = self._model.info.block, self._catch_up(session, contexts, step)
        tokens, probs = mx.zeros((len(contexts), 0), dtype=mx.int32), []
        for position in range(num_draft):
            place = position % block
            if position and place == 0:
                # A transform may have forced a token that the draft lacks.
                last = tokens[:, -block:]
                if groups.transforms:
                    last = mx.minimum(last, self._model.info.vocab_size - 1)
                block_logits = self._continue(session, last, step)
            logits = block_logits[:, place : place + 1]
            if groups.transforms:
                logits = self._transformed(logits, contexts, tokens, groups)
            own = logits[:, 0]
            if keys is None:
                chosen = argmax(own)
            else:
                # As wide as the target's: an id's noise depends on the width.
                probs.append(padded(groups.probs(own), self._vocab_size))
                chosen = sample(probs[-1], keys[:, position])
            tokens = mx.concatenate([tokens, chosen[:, None]], axis=1)
            mx.async_eval(tokens)
        return tokens, mx.stack(probs, axis=1) if probs else None

    def _transformed(
        self, logits: mx.array, contexts: Contexts, drafted: mx.array, groups: Groups
    ) -> mx.array:
        """Transform logits (B, 1, V) that follow contexts and drafted tokens, as the target's."""
        logits = padded(logits, self._vocab_size, -mx.inf)
        starts = [len(p) if self._model.info.is_decoder_only else 1 for p in self._prompts]
        found = groups.transformed(logits, TokenHistory(contexts, starts, drafted))
        # Where the draft can propose nothing that is allowed, whatever it proposes is rejected.
        return mx.where(nothing_allowed(found)[..., None], logits, found)

    def _catch_up(
        self, session: Session, contexts: Contexts, step: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Feed the tokens that the session lacks; return the results for the next, (B, M, ...).

        It lacks the token that the target put after the draft and, where the whole draft was
        accepted, the last drafted block. Rows that lack fewer tokens than others are padded.
        """
        confirmed = self._confirmed(session, contexts)
        missing = [len(c) - n for c, n in zip(contexts, confirmed, strict=True)]
        width = max(missing)
        info = self._model.info
        if width > info.block + 1 and info.max_context is None:
            width = 1 << (width - 1).bit_length()  # after a lookup's tokens: few shapes to compile
        session.truncate(confirmed)
        feed = [
            self._embeddable(c[-m:]) + self._masks + [0] * (width - m)
            for c, m in zip(contexts, missing, strict=True)
        ]
        results = step(mx.array(feed, dtype=mx.int32))
        session.truncate([len(c) for c in contexts])
        if min(missing) == width:
            return results[:, width - 1 :]
        places = mx.array(missing)[:, None] - 1 + mx.arange(info.block)
        places = places.reshape(*places.shape, *[1] * (results.ndim - 2))
        return mx.take_along_axis(results, places, axis=1)

    def _continue(
        self, session: Session, drafted: mx.array, step: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Feed a drafted block, (B, M) int32; return the results for the next, (B, M, ...)."""
        if not self._masks:
            return step(drafted)
        lengths = [n + drafted.shape[1] for n in session.lengths]
        masks = mx.array([self._masks] * len(lengths), dtype=mx.int32)
        results = step(mx.concatenate([drafted, masks], axis=1))
        session.truncate(lengths)
        return results[:, len(self._masks) :]

    def _confirmed(self, session: Session, contexts: Contexts) -> list[int]:
        """Return how many cached tokens of each row are the first ones of its context."""
        return [min(n, len(c) - 1) for c, n in zip(contexts, session.lengths, strict=True)]

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._prompts[row] = self._embeddable(prompt)
        self._new.update(rows)

    def select(self, rows: Sequence[int]) -> None:
        self._prompts = [self._prompts[row] for row in rows]
        self._new = {i for i, row in enumerate(rows) if row in self._new}
        if self._session is not None:
            self._session.select(rows)

    def lag(self, contexts: Contexts) -> int:
        """Return the most tokens of any row that it has not read."""
        if self._session is None:
            return max(map(len, contexts))
        confirmed = self._confirmed(self._session, contexts)
        return max(len(c) - n for c, n in zip(contexts, confirmed, strict=True))

    def forget(self, rows: Sequence[int], contexts: Contexts) -> None:
        """Drop what was just drafted for these rows, which get other drafts."""
        if self._session is None:  # nothing was drafted: contexts are as long as it reads
            return
        kept = [*self._session.lengths]
        for row in rows:
            kept[row] = min(kept[row], len(contexts[row]))
        self._session.truncate(kept)

    def expect(self, row: int, prediction: Sequence[int]) -> None:
        """Ignore it: the model itself says what may come next."""

    def _embeddable(self, tokens: Sequence[int]) -> list[int]:
        """Map ids beyond the draft's embedding, which only the target has, to its last one."""
        last = self._model.info.vocab_size - 1
        return [min(token, last) for token in tokens]
