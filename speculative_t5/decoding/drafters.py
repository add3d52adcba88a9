"""Drafters: an empty one, a prompt lookup, and a model with a lookup after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from .draft import Draft, empty_draft
from .lookup import Lookup, check_ngrams
from .model_drafter import ModelDrafter
from .protocols import Session
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
        """Keep only these rows, in this order.

        To make room for more prompts a row may come several times; `replace` follows for all but
        its first place.
        """


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
