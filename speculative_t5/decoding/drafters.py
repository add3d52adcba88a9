"""Drafters: an empty one, a small model, a prompt lookup, and a model with a lookup after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import mlx.core as mx

from .draft import Draft, empty_draft
from .lookup import Lookup, check_ngrams
from .protocols import LanguageModel, Session
from .sampling import Sampler, argmax, place_keys, sample
from .transform import History
from .waits import read


class Drafter(Protocol):
    """Proposes what may come next in each row of a batch."""

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        """Begin a batch of prompts.

        A draft model that shares its target's encoder has begun with them, in `session`.
        """

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        """Draft up to `num_draft` tokens after each row's context.

        Args:
            context: The target's tokens so far. A row's context only grows, until `start` or
                `replace`.
            num_draft: How many tokens are wanted; may be 0.
            keys: (B, 2) uint32; a row's draft depends on its own key alone. None where all
                distributions are one-hot and nothing is sampled.
        """

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Give these rows to new prompts."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""


class EmptyDrafter:
    """Drafts nothing: the loop then decodes with the target alone."""

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        pass

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        return empty_draft(len(context))

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        pass


class ModelDrafter:
    """Drafts with a small model, one token after another, without waiting for the device.

    Args:
        model: The draft model.
        sampler: The target's own transform, so that q resembles p.
        vocab_size: The target's vocabulary size. Models of one family differ in padding: the
            draft's logits beyond it are dropped, and missing ones have probability 0.
        first_ids: Propose only ids below this; None is all.
    """

    def __init__(
        self, model: LanguageModel, sampler: Sampler, vocab_size: int, first_ids: int | None = None
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._vocab_size = vocab_size
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
            return Draft(self._best(session, context, num_draft), lengths).limited(rooms)
        tokens, probs = self._sampled(session, context, place_keys(keys, num_draft))
        return Draft(tokens, lengths, probs).limited(rooms)

    def _room(self, context: Sequence[int]) -> int:
        """Return how many tokens fit after a context; the last drafted one is never fed."""
        limit = self._model.max_context
        return sys.maxsize if limit is None else max(0, limit - len(context) + 1)

    def _best(self, session: Session, context: list[list[int]], num_draft: int) -> mx.array:
        """Return the greedy continuation, (B, K) int32."""
        if self._sampler.transform is not None:
            return self._chosen(session, context, num_draft, lambda logits, _: argmax(logits))
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

        def choose(logits: mx.array, place: int) -> mx.array:
            probs.append(self._sampler.probs(logits))
            return sample(probs[-1], keys[:, place])

        tokens = self._chosen(session, context, keys.shape[1], choose)
        q = mx.stack(probs, axis=1)
        missing = self._vocab_size - q.shape[-1]
        return tokens, mx.pad(q, [(0, 0), (0, 0), (0, missing)]) if missing else q

    def _chosen(
        self,
        session: Session,
        context: list[list[int]],
        num_draft: int,
        choose: Callable[[mx.array, int], mx.array],
    ) -> mx.array:
        """Return a continuation, (B, K) int32; `choose` takes logits (B, V) and the place."""
        step = partial(session.step, vocab_size=self._width)
        logits = self._catch_up(session, context, step)
        tokens = mx.zeros((len(context), 0), dtype=mx.int32)
        for place in range(num_draft):
            if place:
                last = tokens[:, -1:]
                if self._sampler.transform is not None:  # which may force what the draft lacks
                    last = mx.minimum(last, self._model.vocab_size - 1)
                logits = step(last)
            token = choose(self._transformed(logits, context, tokens)[:, 0], place)
            tokens = mx.concatenate([tokens, token[:, None]], axis=1)
            mx.async_eval(tokens)
        return tokens

    def _transformed(
        self, logits: mx.array, context: list[list[int]], drafted: mx.array
    ) -> mx.array:
        """Transform logits (B, 1, V) that follow contexts and drafted tokens."""
        if self._sampler.transform is None:
            return logits
        missing = self._vocab_size - logits.shape[-1]
        if missing:  # a transform is about the target's ids
            logits = mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)
        starts = [len(p) if self._model.is_decoder_only else 1 for p in self._prompts]
        found = self._sampler.transformed(logits, History(context, starts, drafted))
        # Where the draft can propose nothing that is allowed, whatever it proposes is rejected.
        return mx.where(mx.max(found, axis=-1, keepdims=True) == -mx.inf, logits, found)

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


class LookupDrafter:
    """Prompt lookup: drafts what followed the output's last tokens in the prompt or the output.

    It needs no model. Where outputs copy from their sources, as in correcting or summarising, the
    text at hand is a good draft. See `Lookup` for the rule.

    Args:
        eos_token_ids: Proposed, as the last token, where the end of the source is reached.
        special_tokens: Ids never proposed otherwise.
        min_ngram: Shortest match to trust, in tokens, see `check_ngrams`.
        max_ngram: Matches longer than this count as this long.
        is_decoder_only: Contexts begin with the prompt: prompt and output are one text.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        special_tokens: frozenset[int],
        *,
        min_ngram: int = 1,
        max_ngram: int = 8,
        is_decoder_only: bool = False,
    ) -> None:
        check_ngrams(min_ngram, max_ngram)
        self._eos_token_ids = eos_token_ids
        self._is_decoder_only = is_decoder_only
        self._special = special_tokens
        self._sizes = (min_ngram, max_ngram)
        self._lookups: list[Lookup] = []

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._lookups = [self._lookup(prompt) for prompt in prompts]

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        return self.as_draft(self.find(context, num_draft))

    def as_draft(self, found: list[list[int]]) -> Draft:
        """Return each row's tokens, if it has any, as a draft with one-hot q."""
        lengths = [len(f) for f in found]
        width = max(lengths)
        tokens = mx.array([f + [0] * (width - len(f)) for f in found], dtype=mx.int32)
        return Draft(tokens.reshape(len(found), width), lengths)

    def find(
        self,
        context: list[list[int]],
        num_draft: int,
        assumed: Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """Return up to `num_draft` tokens to follow each row's context and assumed tokens."""
        more = [()] * len(context) if assumed is None else assumed
        return [
            self._without_special(lookup.propose(tokens, num_draft, after))
            for lookup, tokens, after in zip(self._lookups, context, more, strict=True)
        ]

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._lookups[row] = self._lookup(prompt)

    def select(self, rows: Sequence[int]) -> None:
        self._lookups = [self._lookups[row] for row in rows]

    def _lookup(self, prompt: Sequence[int]) -> Lookup:
        return Lookup([] if self._is_decoder_only else prompt, *self._sizes)

    def _without_special(self, tokens: list[int]) -> list[int]:
        """Cut at the first special token, which is kept only if it is EOS."""
        for i, token in enumerate(tokens):
            if token in self._special:
                return tokens[: i + 1] if token in self._eos_token_ids else tokens[:i]
        return tokens


class CombinedDrafter:
    """A model's draft, and after it, at no cost, what a prompt lookup finds to follow it.

    The lookup treats the model's tokens as output, and adds up to `num_draft` more. Where it finds
    nothing, or the model's draft has ended with EOS, the draft is the model's alone.

    Args:
        model: Drafts first.
        lookup: Drafts what follows.
        eos_token_ids: Nothing follows these.
        shared: Keep both together to `num_draft` tokens: the model drafts half of them, rounded up.
    """

    def __init__(
        self,
        model: ModelDrafter,
        lookup: LookupDrafter,
        eos_token_ids: frozenset[int],
        *,
        shared: bool = False,
    ) -> None:
        self._model = model
        self._lookup = lookup
        self._eos_token_ids = eos_token_ids
        self._shared = shared

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._model.start(prompts, session)
        self._lookup.start(prompts)

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        by_model = (num_draft + 1) // 2 if self._shared else num_draft
        first = self._model.propose(context, by_model, keys)
        by_lookup = num_draft - by_model if self._shared else num_draft
        if by_lookup == 0:
            return first
        # The round's second wait: the lookup continues from the tokens that the model drafted.
        rows = zip(read(first.tokens), first.lengths, strict=True)
        drafted = [tokens[:n] for tokens, n in rows]
        found = self._lookup.find(context, by_lookup, drafted)
        pairs = zip(drafted, found, strict=True)
        both = self._lookup.as_draft(
            [d + more if self._eos_token_ids.isdisjoint(d) else d for d, more in pairs]
        )
        if first.probs is None:
            return both
        # After each row's own tokens from the model, q is one-hot.
        width, size = both.tokens.shape[1], first.probs.shape[-1]
        probs = mx.pad(first.probs, [(0, 0), (0, width - first.probs.shape[1]), (0, 0)])
        is_lookup = mx.arange(width)[:, None] >= mx.array(list(first.lengths))[:, None, None]
        return replace(both, probs=mx.where(is_lookup, both.dense(size), probs))

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._model.replace(rows, prompts)
        self._lookup.replace(rows, prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._model.select(rows)
        self._lookup.select(rows)
