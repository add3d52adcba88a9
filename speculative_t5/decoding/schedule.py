"""How many tokens to draft next."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFT = 16  # the most that an adaptive schedule asks for

TYPICAL_RATE = 0.8  # acceptance rate of a draft that is worth having
PRIOR_TOKENS = 24.0  # weight, in tokens, of the expected rate against a text's own tokens
PROMPT_TOKENS, MOST_TOKENS = 12.0, 200.0  # weight of each further calibration prompt, and of all
PRIOR_ROUNDS = 8.0  # weight, in rounds, of a calibration's draft lengths
SMOOTHING = 16.0  # tokens that each place borrows from all places together
MEMORY = 0.98  # factor by which counts decay each round
PROBE_SHARE = 1 / 64  # of the time that may be spent on probes: drafting where it did not pay
MAX_PATIENCE = 8  # longest wait between failed probes, as a multiple of the first


@dataclass(frozen=True)
class Outcome:
    """Counts and times of one round of a batch."""

    num_draft: int  # tokens that the drafter was asked for
    num_drafted: Sequence[int]  # tokens proposed for each row that had room for `num_draft`
    num_accepted: Sequence[int]  # how many of them were accepted and emitted
    draft_seconds: float  # includes what the device needs for it only with `Plan.timed`
    verify_seconds: float  # from there to the verdicts


class Schedule(Protocol):
    """Chooses the draft length of each round from the outcomes of earlier rounds.

    It observes counts, never tokens: a draft length that depended on a token's value could decide
    whether that token is accepted, and the output would no longer follow the target's distribution.
    """

    def next(self, remaining: int) -> int:
        """Return how many tokens to draft when at most `remaining` more may be emitted.

        A round emits one token more than it drafts, so drafting `remaining` would waste one.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn from the round that the last `next` was for."""


@dataclass(frozen=True)
class FixedSchedule:
    """Always drafts the same number of tokens, fewer only where the output is about to end."""

    num_draft: int

    def next(self, remaining: int) -> int:
        return min(self.num_draft, remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        pass


@dataclass(frozen=True)
class Calibration:
    """Measurements of a target and a drafter on this machine."""

    draft_seconds: tuple[float, ...]  # to draft K tokens, for K = 0 to MAX_DRAFT
    verify_seconds: tuple[float, ...]  # of a pass over L tokens and its verdict, for L = 1, 2, ...
    counts: tuple[tuple[float, ...], ...]  # `Counts.values` of the measured rounds
    num_prompts: int  # that the rounds came from


class Counts:
    """Counts of drafted and accepted tokens by place; older rounds weigh less.

    Attributes:
        values: Four lists of MAX_DRAFT + 1. By place i, from 1: rows whose draft reached it (asked
            for i tokens, i - 1 accepted), rows that accepted it, rows that were asked for it, rows
            that had it. Place 0 counts what a drafter adds after the tokens asked for: rows that
            accepted all of those, extra tokens accepted by them, all rows, extra tokens drafted.
    """

    # Lists of floats: arrays so short are slower, and the device idles meanwhile.
    def __init__(self, values: Sequence[Sequence[float]] | None = None) -> None:
        self.values = [list(row) for row in values or [[0.0] * (MAX_DRAFT + 1)] * 4]

    def add(self, outcome: Outcome) -> None:
        """Count a round of at least one token asked for."""
        num_draft = outcome.num_draft
        reached, passed, asked, had = self.values
        for drafted, accepted in zip(outcome.num_drafted, outcome.num_accepted, strict=True):
            for place in range(1, num_draft + 1):
                reached[place] += accepted >= place - 1
                passed[place] += accepted >= place
                asked[place] += 1
                had[place] += drafted >= place
            reached[0] += accepted >= num_draft
            passed[0] += max(accepted - num_draft, 0)
            asked[0] += 1
            had[0] += max(drafted - num_draft, 0)

    def scale(self, factor: float) -> None:
        """Multiply the weight of all rounds so far."""
        self.values = [[value * factor for value in row] for row in self.values]

    def pooled(self) -> float:
        """Return the acceptance rate over all places."""
        reached, passed, _, _ = self.values
        return (sum(passed[1:]) + 0.5) / (sum(reached[1:]) + 1)

    def expected(self, rate: float) -> tuple[list[float], list[float]]:
        """Return the expected numbers of accepted and of drafted tokens, for K = 0 to MAX_DRAFT.

        A place with few counts of its own borrows the rate of all places, to which `rate` adds
        PRIOR_TOKENS tokens. As long as that rate is not well known, each accepted token makes the
        next one likelier (the predictive rate of a Beta distribution).
        """
        reached, passed, asked, had = self.values
        known = PRIOR_TOKENS + sum(reached[1:])
        likely = PRIOR_TOKENS * rate + sum(passed[1:])
        extra_accepted = passed[0] / (reached[0] + 1)
        extra_drafted = had[0] / (asked[0] + 1)
        accepts, drafts = [0.0], [0.0]
        survival, accepted, drafted = 1.0, 0.0, 0.0
        for place in range(1, MAX_DRAFT + 1):
            borrowed = (likely + place - 1) / (known + place - 1)
            survival *= (passed[place] + SMOOTHING * borrowed) / (reached[place] + SMOOTHING)
            accepted += survival
            drafted += (had[place] + 1) / (asked[place] + 1)
            accepts.append(accepted + survival * extra_accepted)
            drafts.append(drafted + extra_drafted)
        return accepts, drafts


def rate_of_others(calibration: Calibration) -> float:
    """Return the acceptance rate to expect on other prompts than the calibration's.

    Prompts differ, so one prompt says little about a pair except whether its draft is any good. On
    the scale of log-odds, the rate of n prompts is shrunk towards that of a typical draft by one
    part in n + 1 (the random-effects estimate where prompts vary as much as pairs do).
    """
    here, typical = (
        math.log(rate / (1 - rate)) for rate in (Counts(calibration.counts).pooled(), TYPICAL_RATE)
    )
    weight = 1 / (calibration.num_prompts + 1)
    return 1 / (1 + math.exp(-((1 - weight) * here + weight * typical)))


def counts_for_others(calibration: Calibration) -> Counts:
    """Return the calibration's counts, weighted by how much they say about other prompts."""
    counts = Counts(calibration.counts)
    reached, _, asked, _ = counts.values
    rounds, tokens = max(asked[0], 1.0), max(sum(reached[1:]), 1.0)
    # The first prompt counts in `rate_of_others` alone.
    worth = min(tokens, PROMPT_TOKENS * (calibration.num_prompts - 1), MOST_TOKENS)
    share = min(1.0, PRIOR_ROUNDS / rounds)
    factors = (worth / tokens, worth / tokens, share, share)
    for row, factor in zip(counts.values, factors, strict=True):
        row[0] *= share
        row[1:] = [value * factor for value in row[1:]]
    return counts


class AdaptiveSchedule:
    """Chooses the draft length with the most expected tokens per second; 0 if none pays.

    A round that drafts K tokens is expected to emit 1 + the tokens accepted (2211.17192, equation
    1, with a rate for each place), and takes as long as calibrated. Rates begin with the
    calibration's and follow the observed outcomes. Threads may share one schedule.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._learning = threading.Lock()
        self._rate = rate_of_others(calibration)
        self._counts = counts_for_others(calibration)
        draft, verify = calibration.draft_seconds, calibration.verify_seconds
        extra = (draft[1] + verify[1]) / (draft[0] + verify[0]) - 1
        self._idle = 0  # rounds without a draft
        self._patience = max(1.0, extra / PROBE_SHARE)  # such rounds before a probe
        self._most_patience = MAX_PATIENCE * self._patience
        self._best = self._best_length()

    def fresh(self) -> AdaptiveSchedule:
        """Return a schedule with this calibration that has observed nothing yet."""
        return AdaptiveSchedule(self._calibration)

    def next(self, remaining: int) -> int:
        num_draft = self._best
        if num_draft == 0 and self._idle >= self._patience:
            num_draft = 1
        return min(num_draft, remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        with self._learning:
            if outcome.num_draft == 0:
                self._idle += 1
                return
            if self._best == 0:
                # After a probe that succeeds the next comes soon, after failures later and later.
                patience = self._patience * (1 / 8 if any(outcome.num_accepted) else 2)
                self._patience = min(max(1.0, patience), self._most_patience)
            self._idle = 0
            self._counts.scale(MEMORY)
            self._counts.add(outcome)
            self._best = self._best_length()

    def _best_length(self) -> int:
        accepts, drafts = self._counts.expected(self._rate)
        costs = zip(self._calibration.draft_seconds, accepts, drafts, strict=True)
        speeds = [(1 + a) / (seconds + self._verifying(1 + d)) for seconds, a, d in costs]
        return speeds.index(max(speeds))

    def _verifying(self, tokens: float) -> float:
        """Return the seconds of a pass over `tokens`, interpolated between whole numbers."""
        verify = self._calibration.verify_seconds
        below = min(int(tokens), len(verify) - 1)
        share = min(tokens - below, 1.0)
        return verify[below - 1] + share * (verify[below] - verify[below - 1])
