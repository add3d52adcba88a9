"""The rows of `bench`: what each way to decode costs, and how its rounds divide."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from .comparison import (
    PLAIN_DECODING,
    Comparison,
    Item,
    Run,
    Turn,
    Variant,
    compare_with_plain,
    sweep,
    tokens_per_pass,
    tokens_per_second,
)


@dataclass(frozen=True)
class VariantReport:
    """One variant over all prompts; medians over the turns.

    Figures of rounds leave out the first round of each output, in which the draft reads the prompt,
    unless no output has another.
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
    same: int  # outputs that equal those of plain decoding
    outputs: int


def report_on(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    turns: int,
    progress: Callable[[], None] = lambda: None,
) -> list[VariantReport]:
    """Measure variants, plain decoding among them, `turns` times; then parts of their rounds.

    `progress` is called after each turn, of which there are `turns` + 2. Outputs of which all have
    one token are refused.
    """
    outputs, in_turn = itertools.count(1), len(variants) * len(prompts)

    def count_output() -> None:
        if next(outputs) % in_turn == 0:
            progress()

    comparison = compare_with_plain(
        variants, prompts, turns=turns, after_warm_up=_refuse_single_tokens, progress=count_output
    )
    timed = sweep(variants, prompts, random.Random(0), timed=True, progress=count_output)
    return [make_report(each.name, comparison, timed[each.name]) for each in variants]


def _refuse_single_tokens(warm: Turn) -> None:
    if not first_counted(warm[PLAIN_DECODING]):
        raise ValueError(
            "every output ends with its first token, which leaves nothing to measure: give "
            "longer prompts or a larger --max-tokens"
        )


def make_report(name: str, comparison: Comparison, timed: Sequence[Run]) -> VariantReport:
    """Sum up a variant, given its runs with a wait after each draft, too."""
    turns = comparison.turns
    last = turns[-1][name]
    drafted = sum(sum(outcome.num_drafted) for run in last for outcome in run.outcomes)
    accepted = sum(sum(outcome.num_accepted) for run in last for outcome in run.outcomes)
    outcomes = later(timed, lambda run: run.outcomes)
    draft_ms = 1e3 * fmean(outcome.draft_seconds for outcome in outcomes)
    verify_ms = 1e3 * fmean(outcome.verify_seconds for outcome in outcomes)
    return VariantReport(
        name=name,
        tokens_per_second=comparison.typical(name, tokens_per_second),
        round_ms=comparison.typical(name, _round_ms),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=_round_ms(timed) - draft_ms - verify_ms,
        waits=fmean(n for turn in turns for n in later(turn[name], lambda run: run.waits)),
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_per_round=tokens_per_pass(last),
        forwards=comparison.gain(name, tokens_per_pass),
        speedup=comparison.gain(name, _later_per_second),
        same=comparison.num_same(name),
        outputs=len(last),
    )


def first_counted(runs: Sequence[Run]) -> int:
    """Return the index of each output's first round that counts: 1, or 0 if all have one only."""
    return int(any(len(run.rounds) > 1 for run in runs))


def later(runs: Sequence[Run], of: Callable[[Run], Sequence[Item]]) -> list[Item]:
    """Return what lists of the runs have for the rounds that count."""
    return [each for run in runs for each in of(run)[first_counted(runs) :]]


def _later_per_second(runs: Sequence[Run]) -> float:
    return sum(later(runs, lambda run: run.emitted)) / sum(later(runs, lambda run: run.rounds))


def _round_ms(runs: Sequence[Run]) -> float:
    return 1e3 * fmean(later(runs, lambda run: run.rounds))
