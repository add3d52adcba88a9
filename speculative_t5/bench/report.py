"""From recorded runs and bare costs to the figures of a variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..decoding import Outcome
from .costs import Costs
from .runs import PLAIN, Run, Variant


@dataclass(frozen=True)
class Turn:
    """Everything measured once: the runs of each variant by its name, and bare costs."""

    runs: Mapping[str, Sequence[Run]]
    costs: Costs


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


def make_report(variant: Variant, turns: Sequence[Turn], timed: Sequence[Run]) -> Report:
    """Sum up a variant, given its runs with a wait after each draft; `PLAIN` ran in each turn."""
    own = [turn.runs[variant.name] for turn in turns]
    plain = [turn.runs[PLAIN] for turn in turns]
    speedups = [_per_token(p) / _per_token(o) for p, o in zip(plain, own, strict=True)]
    theories = [_theory(variant, o, t.costs) for o, t in zip(own, turns, strict=True)]
    outcomes = [outcome for run in own[-1] for outcome in run.outcomes]
    drafted = sum(sum(outcome.num_drafted) for outcome in outcomes)
    accepted = sum(sum(outcome.num_accepted) for outcome in outcomes)
    parts = [outcome for run in timed for outcome in run.outcomes[1:]]
    draft_ms = _mean_ms(outcome.draft_seconds for outcome in parts)
    verify_ms = _mean_ms(outcome.verify_seconds for outcome in parts)
    return Report(
        name=variant.name,
        tokens_per_second=median(
            sum(sum(run.emitted) for run in runs) / sum(run.seconds for run in runs) for runs in own
        ),
        round_ms=median(_round_ms(runs) for runs in own),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=_round_ms(timed) - draft_ms - verify_ms,
        waits=fmean(waits for runs in own for run in runs for waits in run.waits[1:]),
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_per_round=_per_pass(own[-1]),
        forwards=median(_per_pass(o) / _per_pass(p) for p, o in zip(plain, own, strict=True)),
        speedup=median(speedups),
        theory=median(theories),
        efficiency=median(s / t for s, t in zip(speedups, theories, strict=True)),
        same=sum(o.tokens == p.tokens for p, o in zip(plain[-1], own[-1], strict=True)),
        outputs=len(own[-1]),
    )


def shape_of(variant: Variant, outcome: Outcome) -> tuple[int, int]:
    """Return the tokens that a model drafted in a round, and those of the target's pass."""
    return outcome.num_draft if variant.drafts else 0, 1 + max(outcome.num_drafted)


def emitted_later(runs: Sequence[Run]) -> int:
    """Count the tokens emitted after the first rounds."""
    return sum(sum(run.emitted[1:]) for run in runs)


def _per_token(runs: Sequence[Run]) -> float:
    """Return the seconds of rounds per token, first rounds left out."""
    return sum(sum(run.rounds[1:]) for run in runs) / emitted_later(runs)


def _per_pass(runs: Sequence[Run]) -> float:
    """Return the tokens per pass of the target."""
    return sum(sum(run.emitted) for run in runs) / sum(len(run.rounds) for run in runs)


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
