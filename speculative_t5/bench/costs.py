"""Bare costs: what a round's forward passes take without the decoding loop around them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import numpy as np

from ..decoding import LanguageModel, Session
from ..generation import SpeculativeDecoder

REPEATS, MIN_SECONDS = 5, 0.15  # for each cost, every time it is measured
FILLER = 5  # the id that bare passes read, if the vocabulary has it


@dataclass(frozen=True)
class Costs:
    """Seconds of bare passes."""

    plain: float  # of a pass over one token, after another such pass
    # By (K, L): drafting K tokens one after the other, then a pass over L tokens.
    rounds: Mapping[tuple[int, int], float]

    def seconds(self, num_draft: int, length: int) -> float:
        """Return the cost of such a round, interpolated between those that were measured."""
        drafts = sorted({k for k, _ in self.rounds})
        found = []
        for k in drafts:
            lengths = sorted(length for drafted, length in self.rounds if drafted == k)
            found.append(np.interp(length, lengths, [self.rounds[k, n] for n in lengths]))
        return float(np.interp(num_draft, drafts, found))


def measure_costs(
    target: Stepper,
    draft: Stepper | None,
    shapes: Sequence[tuple[int, int]],
    vocab_size: int,
    *,
    min_seconds: float | None = None,
) -> Costs:
    """Measure bare costs of rounds (K, L); drafts are of the first `vocab_size` ids.

    Target and draft model, if there is one, are at the same length of output. Each cost is measured
    for `min_seconds`, by default `MIN_SECONDS`, and at least `REPEATS` times.
    """
    enough = MIN_SECONDS if min_seconds is None else min_seconds

    def seconds(num_draft: int, length: int) -> float:
        samples: list[float] = []
        first = time.perf_counter()
        while len(samples) < REPEATS or time.perf_counter() - first < enough:
            began = time.perf_counter()
            drafted = draft.draft(num_draft, vocab_size) if draft else []
            target.verify(length, drafted)
            samples.append(time.perf_counter() - began)
        # The first ones still feel the rounds of another shape before them.
        return median(samples[len(samples) // 3 :])

    return Costs(seconds(0, 1), {shape: seconds(*shape) for shape in shapes})


def drafted_ids(decoder: SpeculativeDecoder) -> int:
    """Return how many ids a decoder's draft may propose."""
    models = [decoder.model, decoder.draft] if decoder.draft else [decoder.model]
    ids = min(model.info.vocab_size for model in models)
    return min(ids, decoder.draft_vocab or ids)


class Stepper:
    """A model's session that steps from the same length again and again.

    The cache holds `length` tokens of output; a decoder-only model has the prompt before them. Ids
    that the model does not have are replaced by its last. `width` is that of `LanguageModel.start`.
    """

    def __init__(
        self, model: LanguageModel, prompt: list[int], length: int, width: int | None = None
    ) -> None:
        last = model.info.vocab_size - 1
        self._filler = min(FILLER, last)
        self._session: Session = model.start([[min(i, last) for i in prompt]], width=width)[0]
        self._length = self._session.lengths[0] + length
        while (missing := self._length - self._session.lengths[0]) > 0:
            mx.eval(self._session.step(self._fill(min(16, missing))))

    @property
    def lengths(self) -> list[int]:
        """Cached positions, (1,)."""
        return self._session.lengths

    def verify(self, length: int, drafted: Sequence[mx.array]) -> None:
        """Run a pass over `length` tokens, the drafted ones (1, 1) first; wait for its argmax."""
        given = [self._fill(1), *drafted][:length]
        tokens = mx.concatenate([*given, self._fill(length - len(given))], axis=1)
        mx.concatenate([tokens, self._session.step_argmax(tokens)], axis=1).tolist()
        self._session.truncate([self._length])

    def draft(self, num_draft: int, vocab_size: int) -> list[mx.array]:
        """Draft greedily, without a wait: a token (1, 1) int32 for each step."""
        tokens: list[mx.array] = []
        for _ in range(num_draft):
            last = tokens[-1] if tokens else self._fill(1)
            tokens.append(self._session.step_argmax(last, vocab_size))
        if tokens:
            self._session.truncate([self._length])
        return tokens

    def _fill(self, count: int) -> mx.array:
        """Return filler ids (1, count) int32."""
        return mx.array([[self._filler] * count], dtype=mx.int32)
