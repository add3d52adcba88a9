"""Measuring variants and bare costs interleaved, so that ratios hold on a machine that drifts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import mlx.core as mx
import numpy as np

from ..decoding import LanguageModel, Outcome, Session
from ..generation import SpeculativeDecoder
from .sweep import (
    PLAIN,
    Run,
    Turn,
    Variant,
    gain,
    sweep,
    tokens_per_pass,
    tokens_per_second,
    typical,
)

REPEATS, MIN_SECONDS = 5, 0.15  # for each cost, every time it is measured
FILLER = 5  # the id that bare passes read, if the vocabulary has it


@dataclass(frozen=True)
class Report:
    """One variant over all prompts; medians over the turns.

    Figures of rounds leave out the first round of each output, in which the draft reads the prompt.
    """

    name: str
    tokens_per_second: float  # over the whole time that a user waits, encoding included
    round_ms: float
    draft_ms: float  # drafting's part of a round, measured apart with a wait after each draft
    verify_ms: float  # the part of the target's pass and the verdict, measured there as well
    other_ms: float  # the rest, spent on the host
    waits: float  # for the device, in a round
    acceptance: float  # accepted / drafted tokens
    tokens_per_round: float  # emitted tokens / rounds, first rounds included
    forwards: float  # tokens per pass of the target over plain decoding's, first rounds included
    speedup: float  # seconds of rounds per token, plain decoding's over this variant's
    theory: float  # the speed-up that `tokens_per_round` and the bare costs would give
    efficiency: float  # speedup / theory
    same: int  # outputs that equal those of plain decoding
    outputs: int


def measure(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    turns: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Report]:
    """Measure variants, plain decoding among them, and bare costs on the same source ids.

    Everything is measured `turns` times, at least once, in a new order each time. `progress`
    receives 1 to `turns` + 2 as the work goes on. A variant of which all outputs end in their first
    round is refused.
    """
    order = random.Random(0)
    sweep(variants, prompts, order)  # the first use is slower
    progress(1)
    timed = sweep(variants, prompts, order, timed=True)
    progress(2)
    for name, runs in timed.items():
        if not emitted_later(runs):
            raise ValueError(
                f"{name}: every output ends in its first round, which leaves nothing "
                "to measure: give longer prompts, a larger --max-tokens or a smaller "
                "--num-draft"
            )
    drafting = [variant.decoder for variant in variants if variant.decoder.draft]
    decoder = [*drafting, variants[0].decoder][0]
    found = {
        shape_of(variant, outcome)
        for variant in variants
        for run in timed[variant.name]
        for outcome in run.outcomes[1:]
    }
    shapes = sorted(found | {(k, length) for k, _ in found for length in (1, k + 1)})
    length = max(1, round(fmean(len(run.tokens) for run in timed[PLAIN]) / 2))

    def bare_costs() -> Costs:
        target = Stepper(decoder.model, prompts[0], length)
        draft = Stepper(decoder.draft, prompts[0], length) if decoder.draft else None
        return measure_costs(target, draft, shapes, drafted_ids(decoder))

    bare_costs()
    measured, costs = [], []
    for turn in range(turns):
        costs.append(bare_costs())
        measured.append(sweep(variants, prompts, order))
        progress(turn + 3)
    return [make_report(each, measured, costs, timed[each.name]) for each in variants]


def make_report(
    variant: Variant, turns: Sequence[Turn], costs: Sequence[Costs], timed: Sequence[Run]
) -> Report:
    """Sum up a variant, given bare costs by turn and its runs with a wait after each draft."""
    name, last = variant.name, turns[-1][variant.name]
    speedups = [gain([turn], name, _later_per_second) for turn in turns]
    theories = [_theory(variant, turn[name], cost) for turn, cost in zip(turns, costs, strict=True)]
    outcomes = [outcome for run in last for outcome in run.outcomes]
    drafted = sum(sum(outcome.num_drafted) for outcome in outcomes)
    accepted = sum(sum(outcome.num_accepted) for outcome in outcomes)
    parts = [outcome for run in timed for outcome in run.outcomes[1:]]
    draft_ms = _mean_ms(outcome.draft_seconds for outcome in parts)
    verify_ms = _mean_ms(outcome.verify_seconds for outcome in parts)
    return Report(
        name=name,
        tokens_per_second=typical(turns, name, tokens_per_second),
        round_ms=typical(turns, name, _round_ms),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=_round_ms(timed) - draft_ms - verify_ms,
        waits=fmean(w for turn in turns for run in turn[name] for w in run.waits[1:]),
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_per_round=tokens_per_pass(last),
        forwards=gain(turns, name, tokens_per_pass),
        speedup=median(speedups),
        theory=median(theories),
        efficiency=median(s / t for s, t in zip(speedups, theories, strict=True)),
        same=sum(o.tokens == p.tokens for p, o in zip(turns[-1][PLAIN], last, strict=True)),
        outputs=len(last),
    )


def shape_of(variant: Variant, outcome: Outcome) -> tuple[int, int]:
    """Return the tokens that a model drafted in a round, and those of the target's pass."""
    return outcome.num_draft if variant.decoder.draft else 0, 1 + max(outcome.num_drafted)


def emitted_later(runs: Sequence[Run]) -> int:
    """Count the tokens emitted after the first rounds."""
    return sum(sum(run.emitted[1:]) for run in runs)


def _later_per_second(runs: Sequence[Run]) -> float:
    """Return the tokens per second of rounds, first rounds left out."""
    return emitted_later(runs) / sum(sum(run.rounds[1:]) for run in runs)


def _theory(variant: Variant, runs: Sequence[Run], costs: Costs) -> float:
    """Return the speed-up that these rounds would have if only bare passes took time."""
    outcomes = [outcome for run in runs for outcome in run.outcomes[1:]]
    seconds = sum(costs.seconds(*shape_of(variant, outcome)) for outcome in outcomes)
    return costs.plain * emitted_later(runs) / seconds


def _round_ms(runs: Sequence[Run]) -> float:
    return _mean_ms(seconds for run in runs for seconds in run.rounds[1:])


def _mean_ms(seconds: Iterable[float]) -> float:
    values = list(seconds)
    return 1e3 * sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Costs:
    """What a round's passes take without the decoding loop around them, in seconds."""

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

    Each is measured for `min_seconds`, by default `MIN_SECONDS`, and at least `REPEATS` times.
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
    that the model does not have are replaced by its last.
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
        return mx.array([[self._filler] * count], dtype=mx.int32)
