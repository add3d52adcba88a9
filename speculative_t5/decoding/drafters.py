"""Proposing tokens for the target to check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import mlx.core as mx

from .lookup import Lookup, check_ngrams
from .protocols import LanguageModel, Session
from .sampling import Sampler, draw, one_hot, place_keys
from .waits import read


@dataclass(frozen=True)
class Draft:
    """K proposed tokens per row and the distributions they were drawn from.

    Attributes:
        tokens: (B, K) int32.
        lengths: How many places of each row hold a token, from the first; what is behind them is
            no token.
        probs: q, (B, K, V) float32 over the target's vocabulary, a zero row where nothing was
            drafted; None where every q is one-hot, as in greedy drafts and lookups.
    """

    tokens: mx.array
    lengths: Sequence[int]
    probs: mx.array | None = None

    @property
    def mask(self) -> mx.array | None:
        """(B, K) bool, True at tokens; None if all are."""
        width = self.tokens.shape[1]
        if min(self.lengths) == width:
            return None
        return mx.array(list(self.lengths))[:, None] > mx.arange(width)

    def dense(self, vocab_size: int) -> mx.array:
        """Q as an array (B, K, V) in any case."""
        if self.probs is not None:
            return self.probs
        probs, real = one_hot(self.tokens, vocab_size), self.mask
        return probs if real is None else probs * real[..., None]

    def limited(self, limits: Sequence[int]) -> Draft:
        """The first `limits[row]` tokens of each row, as if no more had been drafted."""
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


class Drafter(Protocol):
    """Proposes what may come next in each row of a batch."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin a batch of prompts."""

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        """Draft `num_draft` tokens after each row's context, the target's tokens so far.

        Args:
            context: The rows' tokens. A row's context only grows, until `start` or `replace`.
            num_draft: How many tokens are asked for.
            keys: (B, 2) uint32; a row's draft hangs on its own key alone. None where distributions
                are one-hot and nothing is left to chance.
        """

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Give these rows to new prompts."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""


class EmptyDrafter:
    """Drafts nothing: the loop is then regular decoding by the target."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        return empty_draft(len(context))

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        pass


class ModelDrafter:
    """Drafts with a small model, token after token on the device, without waiting for any.

    Args:
        model: The draft model.
        sampler: The target's own transform, so that q resembles p.
        vocab_size: The target's vocabulary size. Sizes of one family differ in padding: the
            draft's logits beyond it are dropped, and missing ones have probability 0.
        first_ids: Propose of the first so many ids only; None is all.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: Sampler,
        vocab_size: int,
        first_ids: int | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._width = min(model.vocab_size, vocab_size, first_ids or vocab_size)
        self._prompts: list[list[int]] = []
        self._session: Session | None = None
        self._new: set[int] = set()  # rows given to prompts that the session does not have yet

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = [self._known(prompt) for prompt in prompts]
        self._session = None
        self._new = set()

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        rooms = [self._room(c) for c in context]
        num_draft = min(num_draft, max(rooms))
        if num_draft == 0:
            if self._session is not None:
                # Rejected tokens must not pass for the context once that has grown over them.
                self._session.truncate(self._agreed(self._session, context))
            return empty_draft(len(context))
        session = self._session = self._encoded()
        lengths = [num_draft] * len(context)
        if keys is None:
            return Draft(self._best(session, context, num_draft), lengths).limited(rooms)
        tokens, probs = self._drawn(session, context, place_keys(keys, num_draft))
        missing = self._vocab_size - probs.shape[-1]
        if missing:
            probs = mx.pad(probs, [(0, 0), (0, 0), (0, missing)])
        return Draft(tokens, lengths, probs).limited(rooms)

    def _room(self, context: Sequence[int]) -> int:
        """Tokens that the model can draft after a context: it reads that and all but the last."""
        limit = self._model.max_context
        return sys.maxsize if limit is None else max(0, limit - len(context) + 1)

    def _best(self, session: Session, context: list[list[int]], num_draft: int) -> mx.array:
        """The greedy continuation, (B, K) int32."""
        choose = partial(session.step_argmax, vocab_size=self._width)
        tokens = [self._catch_up(session, context, choose)]
        mx.async_eval(tokens)  # the device begins, while the rest is being built
        while len(tokens) < num_draft:
            tokens.append(choose(tokens[-1]))
        return mx.concatenate(tokens, axis=1)

    def _drawn(
        self, session: Session, context: list[list[int]], keys: mx.array
    ) -> tuple[mx.array, mx.array]:
        """A drawn continuation, (B, K) int32, and what it was drawn from, (B, K, V) float32."""
        tokens: list[mx.array] = []
        probs: list[mx.array] = []
        step = partial(session.step, vocab_size=self._width)
        logits = self._catch_up(session, context, step)
        for place in range(keys.shape[1]):
            if tokens:
                logits = step(tokens[-1])
            probs.append(self._sampler.probs(logits[:, 0]))
            tokens.append(draw(probs[-1], keys[:, place])[:, None])
            mx.async_eval(tokens[-1])
        return mx.concatenate(tokens, axis=1), mx.stack(probs, axis=1)

    def _encoded(self) -> Session:
        """The session, with all prompts encoded.

        Not before it is needed: where drafting does not pay, that should cost nothing.
        """
        rows, self._new = sorted(self._new), set()
        if self._session is None:
            return self._model.start(self._prompts)[0]
        if rows:
            encoded = self._session.encode([self._prompts[row] for row in rows])
            self._session.replace(rows, encoded)
        return self._session

    def _catch_up(
        self,
        session: Session,
        context: list[list[int]],
        step: Callable[[mx.array], mx.array],
    ) -> mx.array:
        """Feed what the session lacks of each context: what `step` gives after the last tokens.

        That is (B, 1) or (B, 1, V) of what it gives for all tokens.

        It lacks at least the token that the target put after the draft, and where all drafts were
        accepted also the last one, which was drafted but never fed. Rows that lack fewer tokens
        than others are padded behind, and cut back.
        """
        agreed = self._agreed(session, context)
        missing = [len(c) - n for c, n in zip(context, agreed, strict=True)]
        width = max(missing)
        session.truncate(agreed)
        feed = [
            self._known(c[-m:]) + [0] * (width - m) for c, m in zip(context, missing, strict=True)
        ]
        given = step(mx.array(feed, dtype=mx.int32))
        session.truncate([len(c) for c in context])
        if min(missing) == width:
            return given[:, width - 1 :]
        last = mx.array(missing).reshape(-1, *[1] * (given.ndim - 1)) - 1
        return mx.take_along_axis(given, last, axis=1)

    def _agreed(self, session: Session, context: list[list[int]]) -> list[int]:
        """How many of its cached tokens, in each row, the context has confirmed.

        A round adds the accepted drafts and one more token: no more than that is the draft's own.
        """
        return [min(n, len(c) - 1) for c, n in zip(context, session.lengths, strict=True)]

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._prompts[row] = self._known(prompt)
        self._new.update(rows)

    def select(self, rows: Sequence[int]) -> None:
        self._prompts = [self._prompts[row] for row in rows]
        self._new = {place for place, row in enumerate(rows) if row in self._new}
        if self._session is not None:
            self._session.select(rows)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """The target's padding ids may lie beyond the draft's embedding, which is not checked."""
        last = self._model.vocab_size - 1
        return [min(token, last) for token in tokens]


class LookupDrafter:
    """Drafts what followed the output's last tokens in the prompt, or earlier in the output.

    No model is needed: where outputs copy from their sources, as in correcting or summarising,
    the text at hand is a draft. See `Lookup` for the rule.

    Args:
        eos_token_ids: Proposed, as the last token, where the source's own end is reached.
        special_tokens: Ids never proposed otherwise.
        min_ngram: Shortest match to trust, in tokens, at least 1.
        max_ngram: Matches longer than this count as this long.
        is_decoder_only: Contexts begin with the prompt: prompt and output are one text.

    Raises:
        ValueError: If an n-gram size is out of its range.
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
        self._ends = eos_token_ids
        self._prompt_in_context = is_decoder_only
        self._special = special_tokens
        self._sizes = (min_ngram, max_ngram)
        self._lookups: list[Lookup] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._lookups = [self._lookup(prompt) for prompt in prompts]

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        return self.as_draft(self.find(context, num_draft))

    def as_draft(self, found: list[list[int]]) -> Draft:
        """Tokens for each row, perhaps none, as a draft that is sure of them."""
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
        """Up to `num_draft` tokens to follow each row's context and what is assumed behind it."""
        behind = [()] * len(context) if assumed is None else assumed
        return [
            self._textual(lookup.propose(tokens, num_draft, more))
            for lookup, tokens, more in zip(self._lookups, context, behind, strict=True)
        ]

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._lookups[row] = self._lookup(prompt)

    def select(self, rows: Sequence[int]) -> None:
        self._lookups = [self._lookups[row] for row in rows]

    def _lookup(self, prompt: Sequence[int]) -> Lookup:
        """For a new row: what there is to look in beside its context."""
        return Lookup([] if self._prompt_in_context else prompt, *self._sizes)

    def _textual(self, tokens: list[int]) -> list[int]:
        """The tokens before the first special one, with it if it is EOS."""
        for i, token in enumerate(tokens):
            if token in self._special:
                return tokens[: i + 1] if token in self._ends else tokens[:i]
        return tokens


class CombinedDrafter:
    """A model's draft, and after it, for free, what a lookup finds to follow it.

    The lookup takes the model's tokens for output, and adds up to `num_draft` more. Where it finds
    nothing, or the model's draft has ended by EOS, the draft is the model's alone.
    """

    def __init__(
        self, model: ModelDrafter, lookup: LookupDrafter, eos_token_ids: frozenset[int]
    ) -> None:
        self._model = model
        self._lookup = lookup
        self._ends = eos_token_ids

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._model.start(prompts)
        self._lookup.start(prompts)

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        first = self._model.propose(context, num_draft, keys)
        if num_draft == 0:
            return first
        # The one read in mid-round: a lookup goes on from the tokens that the model drafted.
        rows = zip(read(first.tokens), first.lengths, strict=True)
        drafted = [tokens[:n] for tokens, n in rows]
        more = self._lookup.find(context, num_draft, drafted)
        both = self._lookup.as_draft(
            [d + m if self._ends.isdisjoint(d) else d for d, m in zip(drafted, more, strict=True)]
        )
        if first.probs is None:
            return both
        # Behind the model's own tokens, as many as each row has, q is one-hot.
        width, own = both.tokens.shape[1], mx.array(list(first.lengths))[:, None, None]
        probs = mx.pad(first.probs, [(0, 0), (0, width - first.probs.shape[1]), (0, 0)])
        looked_up = mx.arange(width)[:, None] >= own
        size = first.probs.shape[-1]
        return replace(both, probs=mx.where(looked_up, both.dense(size), probs))

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._model.replace(rows, prompts)
        self._lookup.replace(rows, prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._model.select(rows)
        self._lookup.select(rows)


def empty_draft(batch: int) -> Draft:
    return Draft(mx.zeros((batch, 0), dtype=mx.int32), [0] * batch)
