"""The drafter that runs a small model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from .draft import Draft, empty_draft
from .protocols import Agree, LanguageModel, Session, alone
from .sampling import Group, RowSamplers, Sampler, argmax, place_keys, sample
from .transform import History, nothing_allowed


class ModelDrafter:
    """Drafts with a small model, one token after another, without waiting for the device.

    Args:
        model: The draft model.
        sampler: The target's own, so that q resembles p.
        vocab_size: The target's vocabulary size. Models of one family differ in padding: the
            draft's logits beyond it are dropped, and missing ones have probability 0.
        first_ids: Propose only ids below this; None is all.
        agree: Applied to what is drafted.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler | RowSamplers,
        vocab_size: int,
        first_ids: int | None = None,
        agree: Agree = alone,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._agree = agree
        self._width = min(model.vocab_size, vocab_size, first_ids or vocab_size)
        self._prompts: list[list[int]] = []
        self._session: Session | None = None
        self._new: set[int] = set()  # rows whose prompts the session has not encoded yet

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._prompts = [self._embeddable(prompt) for prompt in prompts]
        self._session = session
        self._new = set()

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        rooms = [self._room(c) for c in context]
        num_draft = min(num_draft, max(rooms))
        if num_draft == 0:
            if self._session is not None:
                # Drop rejected tokens now: later they could not be told from confirmed ones.
                self._session.truncate(self._confirmed(self._session, context))
            return empty_draft(len(context))
        session = self._session = self._encoded()
        lengths = [num_draft] * len(context)
        if keys is None:
            tokens = self._agree(self._best(session, context, num_draft))
            return Draft(tokens, lengths).limited(rooms)
        tokens, probs = self._sampled(session, context, place_keys(keys, num_draft))
        return Draft(self._agree(tokens), lengths, probs).limited(rooms)

    def _room(self, context: Sequence[int]) -> int:
        """Return how many tokens fit after a context; the last drafted one is never fed."""
        limit = self._model.max_context
        return sys.maxsize if limit is None else max(0, limit - len(context) + 1)

    def _best(self, session: Session, context: list[list[int]], num_draft: int) -> mx.array:
        """Return the greedy continuation, (B, K) int32."""
        if self._sampler.transforms:
            return self._chosen(
                session,
                context,
                num_draft,
                lambda groups, _: self._sampler.join([argmax(logits) for _, logits in groups]),
            )
        step = partial(session.step_argmax, vocab_size=self._width)
        tokens = [self._catch_up(session, context, step)]
        mx.async_eval(tokens)  # the device begins while the host builds the rest
        while len(tokens) < num_draft:
            tokens.append(step(tokens[-1]))
        return mx.concatenate(tokens, axis=1)

    def _sampled(
        self, session: Session, context: list[list[int]], keys: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Sample a continuation, (B, K) int32, and return it with q, (B, K, V) float32."""
        probs: list[mx.array] = []

        def choose(groups: list[tuple[Group, mx.array]], place: int) -> mx.array:
            found, tokens = [], []
            for group, logits in groups:
                found.append(group.sampler.probs(logits))
                own = None if group.sampler.greedy else group.take(keys[:, place])
                tokens.append(sample(found[-1], own))
            if len(groups) > 1:  # of a transform they are about all of the target's ids
                found = [padded(q, self._vocab_size) for q in found]
            probs.append(self._sampler.join(found))
            return self._sampler.join(tokens)

        tokens = self._chosen(session, context, keys.shape[1], choose)
        return tokens, padded(mx.stack(probs, axis=1), self._vocab_size)

    def _chosen(
        self,
        session: Session,
        context: list[list[int]],
        num_draft: int,
        choose: Callable[[list[tuple[Group, mx.array]], int], mx.array],
    ) -> mx.array:
        """Return a continuation, (B, K) int32.

        `choose` takes each group of rows with its logits (B_g, V), and the place.
        """
        step = partial(session.step, vocab_size=self._width)
        logits = self._catch_up(session, context, step)
        tokens = mx.zeros((len(context), 0), dtype=mx.int32)
        for place in range(num_draft):
            if place:
                last = tokens[:, -1:]
                if self._sampler.transforms:  # which may force what the draft lacks
                    last = mx.minimum(last, self._model.vocab_size - 1)
                logits = step(last)
            groups = [
                (group, self._transformed(group, logits, context, tokens)[:, 0])
                for group in self._sampler.groups
            ]
            tokens = mx.concatenate([tokens, choose(groups, place)[:, None]], axis=1)
            mx.async_eval(tokens)
        return tokens

    def _transformed(
        self, group: Group, logits: mx.array, context: list[list[int]], drafted: mx.array
    ) -> mx.array:
        """Transform a group's rows of logits (B, 1, V) that follow contexts and drafted tokens."""
        logits = group.take(logits)
        if not group.sampler.transforms:
            return logits
        # A transform is about the target's ids.
        logits = padded(logits, self._vocab_size, -mx.inf)
        starts = [len(p) if self._model.is_decoder_only else 1 for p in self._prompts]
        history = group.history(History(context, starts, drafted))
        found = group.sampler.transformed(logits, history)
        # Where the draft can propose nothing that is allowed, whatever it proposes is rejected.
        return mx.where(nothing_allowed(found)[..., None], logits, found)

    def _encoded(self) -> Session:
        """Return the session with all prompts encoded.

        They are encoded only now: where drafting never pays, encoding should cost nothing.
        """
        rows, self._new = sorted(self._new), set()
        if self._session is None:
            return self._model.start(self._prompts)[0]
        if rows:
            encoded = self._session.encode([self._prompts[row] for row in rows])
            self._session.replace(rows, encoded)
        return self._session

    def _catch_up(
        self, session: Session, context: list[list[int]], step: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Feed the tokens that the session lacks, and return `step`'s result for the last ones.

        It lacks at least the token that the target put after the draft and, where all drafts were
        accepted, the last drafted one, which was never fed. Rows that lack fewer tokens than
        others are padded at the end, and the padding is cut off again.

        Returns:
            (B, 1) or (B, 1, V), as `step` returns (B, L) or (B, L, V).
        """
        confirmed = self._confirmed(session, context)
        missing = [len(c) - n for c, n in zip(context, confirmed, strict=True)]
        width = max(missing)
        session.truncate(confirmed)
        feed = [
            self._embeddable(c[-m:]) + [0] * (width - m)
            for c, m in zip(context, missing, strict=True)
        ]
        results = step(mx.array(feed, dtype=mx.int32))
        session.truncate([len(c) for c in context])
        if min(missing) == width:
            return results[:, width - 1 :]
        last = mx.array(missing).reshape(-1, *[1] * (results.ndim - 1)) - 1
        return mx.take_along_axis(results, last, axis=1)

    def _confirmed(self, session: Session, context: list[list[int]]) -> list[int]:
        """Return how many cached tokens of each row the context has confirmed.

        A round adds the accepted drafts and one more token, so all cached tokens but rejected
        drafts are the context's first ones.
        """
        return [min(n, len(c) - 1) for c, n in zip(context, session.lengths, strict=True)]

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._prompts[row] = self._embeddable(prompt)
        self._new.update(rows)

    def select(self, rows: Sequence[int]) -> None:
        self._prompts = [self._prompts[row] for row in rows]
        self._new = {place for place, row in enumerate(rows) if row in self._new}
        if self._session is not None:
            self._session.select(rows)

    def _embeddable(self, tokens: Sequence[int]) -> list[int]:
        """Map ids beyond the draft's embedding, which only the target has, to its last one."""
        last = self._model.vocab_size - 1
        return [min(token, last) for token in tokens]


def padded(values: mx.array, vocab_size: int, value: float = 0.0) -> mx.array:
    """Add to values (..., V) of the first ids those of the others, up to `vocab_size`."""
    missing = vocab_size - values.shape[-1]
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return mx.pad(values, widths, constant_values=value) if missing else values
