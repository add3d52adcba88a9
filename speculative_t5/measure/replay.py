"""Drafts of a given acceptance, at the cost of a drafter's own."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..decoding import Draft, Drafter, Groups, ModelInfo, Plan, Session
from ..generation import SpeculativeDecoder


class ReplayDrafter(Drafter):
    """A drafter that costs as much as another one, and proposes a known output.

    The chance of each token to be right is `acceptance`; prompt and position decide, so that it is
    the same in every run. `outputs` are the greedy ones of the target, by the ids of their prompts.
    """

    def __init__(
        self,
        drafter: Drafter,
        outputs: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        target: ModelInfo,
    ) -> None:
        self._drafter = drafter
        self._outputs = outputs
        self._acceptance = acceptance
        self._target = target
        self._replayed: list[list[int]] = []  # by row: what is at each place of its context

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._drafter.start(prompts, session)
        self._replayed = [self._corrupted(tuple(prompt)) for prompt in prompts]

    def propose(
        self, contexts: list[list[int]], num_draft: int, groups: Groups, keys: mx.array | None
    ) -> Draft:
        draft = self._drafter.propose(contexts, num_draft, groups, keys)
        width = draft.tokens.shape[1]
        rows = [
            (replayed[len(tokens) :] + [0] * width)[:width]
            for replayed, tokens in zip(self._replayed, contexts, strict=True)
        ]
        # The sum depends on the drafter's own tokens, so that these are computed as well.
        zeros = draft.tokens - draft.tokens
        return replace(draft, tokens=mx.array(rows, dtype=mx.int32) + zeros)

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._drafter.replace(rows, prompts)
        for row, prompt in zip(rows, prompts, strict=True):
            self._replayed[row] = self._corrupted(tuple(prompt))

    def select(self, rows: Sequence[int]) -> None:
        self._drafter.select(rows)
        self._replayed = [self._replayed[row] for row in rows]

    def _corrupted(self, prompt: tuple[int, ...]) -> list[int]:
        rng, size = random.Random(str(prompt)), self._target.vocab_size
        return [0] + [  # before the output, a context has the start token
            token if rng.random() < self._acceptance else (token + 1) % size
            for token in self._outputs[prompt]
        ]


def replaying_plan(
    decoder: SpeculativeDecoder, outputs: Mapping[tuple[int, ...], Sequence[int]], acceptance: float
) -> Plan:
    """Return a decoder's plan with a `ReplayDrafter` around its drafter."""
    plan = decoder.engine.plan()
    drafter = ReplayDrafter(plan.drafter, outputs, acceptance, decoder.model.info)
    return replace(plan, drafter=drafter)
