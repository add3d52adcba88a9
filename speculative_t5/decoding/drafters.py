"""Drafters: the protocol, a prompt lookup, one beside a model, and one that drafts nothing.

The model's is in `model_drafter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from .draft import Contexts, Draft, empty_draft
from .keys import Keys
from .lookup import Lookup
from .model_drafter import ModelDrafter
from .protocols import ModelInfo, Session
from .results import read
from .sampling import Groups

MOST_LAG = 24  # tokens that a draft model may not have read while a prediction is copied


class Drafter(Protocol):
    """Proposes what may come next in each row of a batch."""

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        """Begin a batch, which a draft that shares its target's encoder has in `session`."""
        return

    def propose(self, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys) -> Draft:
        """Draft up to `num_draft` tokens, which may be 0, after each row's context.

        A context only grows, until `start` or `replace`. The rows' samplers are the target's own,
        so that q resembles p, and a row's draft depends on its own keys alone, those of its
        positions, (B, K or more, 2).
        """

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Give these rows to new prompts."""
        return

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order.

        To add rows, the caller repeats one, and then gives the copies to new prompts by `replace`.
        """
        return

    def expect(self, row: int, prediction: Sequence[int]) -> None:
        """Take what the output of a row that has just begun is expected to be; it may differ."""
        return


class EmptyDrafter(Drafter):
    """Drafts nothing: the loop then decodes with the target alone."""

    def propose(self, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys) -> Draft:
        return empty_draft(len(contexts))


class LookupDrafter:
    """Drafts what followed the output's last tokens in the prompt or the output, see `Lookup`.

    It needs no model. Of special tokens only EOS is proposed, as the last token, where the end of
    the source is reached.
    """

    def __init__(self, info: ModelInfo, min_ngram: int = 1, max_ngram: int = 8) -> None:
        self.info = info  # of the target
        self._sizes = (min_ngram, max_ngram)
        self._lookups: list[Lookup] = []

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._lookups = [self._lookup(prompt) for prompt in prompts]

    def propose(self, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys) -> Draft:
        if num_draft == 0:  # the texts are read once something is asked for
            return empty_draft(len(contexts))
        return self.as_draft(self.find(contexts, num_draft, [()] * len(contexts)))

    def as_draft(self, found: list[list[int]]) -> Draft:
        """Return each row's tokens as a draft with one-hot q."""
        lengths = [len(f) for f in found]
        width = max(lengths)
        tokens = mx.array([f + [0] * (width - len(f)) for f in found], dtype=mx.int32)
        return Draft(tokens.reshape(len(found), width), lengths)

    def find(
        self, contexts: Contexts, num_draft: int, assumed: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return up to `num_draft` tokens to follow each row's context and assumed tokens."""
        rows = zip(self._lookups, contexts, assumed, strict=True)
        return [
            self._without_special(lookup.propose(tokens, num_draft, after))
            for lookup, tokens, after in rows
        ]

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self._lookups[row] = self._lookup(prompt)

    def select(self, rows: Sequence[int]) -> None:
        self._lookups = [self._lookups[row] for row in rows]

    def expect(self, row: int, prediction: Sequence[int]) -> None:
        self._lookups[row].expect(prediction)

    def _lookup(self, prompt: Sequence[int]) -> Lookup:
        if self.info.is_decoder_only:  # contexts begin with the prompt: they are one text
            return Lookup([], *self._sizes, given=len(prompt))
        return Lookup(prompt, *self._sizes)

    def _without_special(self, tokens: list[int]) -> list[int]:
        """Cut at the first special token, which is kept only if it is EOS."""
        for i, token in enumerate(tokens):
            if token in self.info.special_tokens:
                return tokens[: i + 1] if token in self.info.eos_token_ids else tokens[:i]
        return tokens


def one_hot_after(lengths: Sequence[int], probs: mx.array | None, draft: Draft) -> Draft:
    """Return a draft whose tokens have a model's q (B, K, V), as many of each row as `lengths` say.

    The q of further tokens, which a lookup has found, is one-hot; without `probs` all of them are.
    """
    if probs is None:
        return draft
    width, size = draft.tokens.shape[1], probs.shape[-1]
    probs = mx.pad(probs, [(0, 0), (0, max(0, width - probs.shape[1])), (0, 0)])[:, :width]
    is_found = mx.arange(width)[:, None] >= mx.array(list(lengths))[:, None, None]
    return replace(draft, probs=mx.where(is_found, draft.dense(size), probs))


DraftSplit = Callable[[int], tuple[int, int]]  # see `Schedule.split`


class CombinedDrafter:
    """A model's draft, and after it tokens that a lookup finds to follow it.

    Where it finds nothing, or the model's draft has ended with EOS, the draft is the model's alone.
    """

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter, split: DraftSplit) -> None:
        self._model = model
        self._lookup = lookup
        self._split = split
        self.dtype = model.dtype

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._model.start(prompts, session)
        self._lookup.start(prompts)

    def propose(self, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys) -> Draft:
        by_model, by_lookup = self._split(num_draft)
        first = self._model.propose(contexts, by_model, groups, keys)
        if by_lookup == 0:
            return first
        drafted: list[list[int]] = [[] for _ in contexts]
        if by_model:
            # The round's second wait: the lookup continues from the tokens that the model drafted.
            rows = zip(read(first.tokens), first.lengths, strict=True)
            drafted = [[max(token, 0) for token in row[:n]] for row, n in rows]  # marks are any id
        found = zip(drafted, self._lookup.find(contexts, by_lookup, drafted), strict=True)
        ends = self._lookup.info.eos_token_ids
        both = self._lookup.as_draft([d + more if ends.isdisjoint(d) else d for d, more in found])
        return one_hot_after(first.lengths, first.probs, both)

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._model.replace(rows, prompts)
        self._lookup.replace(rows, prompts)

    def select(self, rows: Sequence[int]) -> None:
        self._model.select(rows)
        self._lookup.select(rows)

    def expect(self, row: int, prediction: Sequence[int]) -> None:
        self._lookup.expect(row, prediction)


class ExpectingDrafter:
    """A model's draft; in rows whose output goes on as expected, what follows there instead.

    A row's draft does not depend on its neighbours: the model drafts for all rows unless it need
    not for any, and drops what another draft stands for. It reads what is copied now and then, so
    that no round has to wait until it has read a whole output.
    """

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter) -> None:
        self._model, self._lookup = model, lookup
        self._expects: list[bool] = []  # of each row
        self.dtype = model.dtype

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._model.start(prompts, session)
        self._lookup.start(prompts)
        self._expects = [False] * len(prompts)

    def propose(self, contexts: Contexts, num_draft: int, groups: Groups, keys: Keys) -> Draft:
        if num_draft == 0 or not any(self._expects):
            return self._model.propose(contexts, num_draft, groups, keys)
        found = self._lookup.find(contexts, num_draft, [()] * len(contexts))
        copied = [bool(each) and own for each, own in zip(found, self._expects, strict=True)]
        if all(copied):
            if self._model.lag(contexts) > MOST_LAG:
                self._model.propose(contexts, 1, groups, keys)  # for what it reads, not its token
                self._model.forget(range(len(contexts)), contexts)
            else:
                self._model.propose(contexts, 0, groups, keys)
            return self._lookup.as_draft(found)
        first = self._model.propose(contexts, num_draft, groups, keys)
        if not any(copied):
            return first
        self._model.forget([row for row, is_copied in enumerate(copied) if is_copied], contexts)
        rows = zip(copied, found, read(first.tokens), first.lengths, strict=True)
        both = self._lookup.as_draft([own if is_own else row[:n] for is_own, own, row, n in rows])
        by_model = [0 if own else n for own, n in zip(copied, first.lengths, strict=True)]
        return one_hot_after(by_model, first.probs, both)

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._model.replace(rows, prompts)
        self._lookup.replace(rows, prompts)
        for row in rows:
            self._expects[row] = False

    def select(self, rows: Sequence[int]) -> None:
        self._model.select(rows)
        self._lookup.select(rows)
        self._expects = [self._expects[row] for row in rows]

    def expect(self, row: int, prediction: Sequence[int]) -> None:
        self._lookup.expect(row, prediction)
        self._expects[row] = True
