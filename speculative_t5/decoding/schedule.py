"""How many tokens to draft next."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFT = 16  # the most that an adaptive schedule asks for

TYPICAL_RATE = 0.8  # of accepted tokens, for a draft that is worth having
PRIOR_TOKENS = 24.0  # that the rate expected of a text counts for, against its own tokens
PROMPT_TOKENS, MOST_TOKENS = 12.0, 200.0  # that more prompts of a calibration count for, and all
PRIOR_ROUNDS = 8.0  # that a calibration's draft lengths count for
SMOOTHING = 16.0  # tokens that each place borrows from all places together
MEMORY = 0.98  # weight of what was seen a round ago
PROBE_SHARE = 1 / 64  # of the time that may go into drafting one token where that did not pay
MAX_PATIENCE = 8  # times longer than at first, between probes that fail


@dataclass(frozen=True)
class Outcome:
    """What came of one round of a batch.

    Attributes:
        num_draft: Tokens that each row was asked for.
        num_drafted: Tokens proposed, of each row.
        num_accepted: Of these accepted and emitted.
        draft_seconds: Until the drafts were there, where that is told apart (`Plan.timed`).
        verify_seconds: From there to the verdicts.
    """

    num_draft: int
    num_drafted: Sequence[int]
    num_accepted: Sequence[int]
    draft_seconds: float
    verify_seconds: float


class Schedule(Protocol):
    """Decides the draft length of each round from what came of the rounds before it.

    It is told counts, never tokens: a length that hung on a token's value could decide that token's
    fate, and the output would no longer be the target's own.
    """

    def next(self, remaining: int) -> int:
        """Tokens to draft when at most `remaining` more may be emitted.

        A round emits one token more than it drafts, so drafting `remaining` would waste one.
        """

    def observe(self, outcome: Outcome) -> None:
        """Learn from the round that `next` was asked about."""


@dataclass(frozen=True)
class FixedSchedule:
    """Always the same number of tokens, less where the output is about to end."""

    num_draft: int

    def next(self, remaining: int) -> int:
        return min(self.num_draft, remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        pass


@dataclass(frozen=True)
class Calibration:
    """What was measured of a target and a drafter on this machine.

    Attributes:
        draft_seconds: To draft K tokens, for K = 0 to MAX_DRAFT.
        verify_seconds: To verify a pass over L tokens, for L = 1, 2, ...
        counts: `Counts.values` of the rounds measured.
        num_prompts: Prompts that they came from.
    """

    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    counts: tuple[tuple[float, ...], ...]
    num_prompts: int


class Counts:
    """How far drafts came, by place: sums over rounds and rows, older rounds weighing less.

    Attributes:
        values: Four lists of MAX_DRAFT + 1. By place i: rows whose draft reached it (asked for i
            tokens, i - 1 accepted), rows that accepted it, rows asked for it, rows that had it.
            Place 0 is about what a drafter adds after the tokens asked for: rows that accepted
            all of those, extra tokens accepted by them, rows at all, extra tokens drafted.
    """

    # Plain numbers: the device waits while they are looked at, and arrays so short take longer.
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
        """Make all weigh less, or more."""
        self.values = [[value * factor for value in row] for row in self.values]

    def pooled(self) -> float:
        """Rate of acceptance over all places."""
        reached, passed, _, _ = self.values
        return (sum(passed[1:]) + 0.5) / (sum(reached[1:]) + 1)

    def expected(self, rate: float) -> tuple[list[float], list[float]]:
        """Tokens that a round is expected to accept and to draft if asked for 0 to MAX_DRAFT.

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
    """The rate of acceptance to expect of other prompts than those calibrated on.

    Prompts differ, so that one of them tells little about a pair, except whether its draft is any
    good: on the scale of log-odds, the rate of n prompts is drawn to that of a typical draft by
    one part in n + 1 (the random-effects estimate where prompts vary as much as pairs).
    """
    here, typical = (
        math.log(rate / (1 - rate)) for rate in (Counts(calibration.counts).pooled(), TYPICAL_RATE)
    )
    weight = 1 / (calibration.num_prompts + 1)
    return 1 / (1 + math.exp(-((1 - weight) * here + weight * typical)))


def counts_for_others(calibration: Calibration) -> Counts:
    """The calibration's counts, weighing as much as they tell of other prompts."""
    counts = Counts(calibration.counts)
    reached, passed, asked, had = counts.values
    rounds, tokens = max(asked[0], 1.0), max(sum(reached[1:]), 1.0)
    # What the first prompt tells is all in `rate_of_others`.
    worth = min(tokens, PROMPT_TOKENS * (calibration.num_prompts - 1), MOST_TOKENS)
    share = min(1.0, PRIOR_ROUNDS / rounds)
    for row, factor in (
        (reached, worth / tokens),
        (passed, worth / tokens),
        (asked, share),
        (had, share),
    ):
        row[0] *= share
        row[1:] = [value * factor for value in row[1:]]
    return counts


class AdaptiveSchedule:
    """The draft length that promises the most tokens per second, 0 where drafting does not pay.

    A round that drafts K tokens is expected to emit 1 + the tokens accepted (2211.17192, equation
    1, with a rate for each place), and costs drafting and verifying them as calibrated. Rates
    begin with the calibration's and follow what is observed. Several threads may use one.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._learning = threading.Lock()
        self._rate = rate_of_others(calibration)
        self._counts = counts_for_others(calibration)
        draft, verify = calibration.draft_seconds, calibration.verify_seconds
        extra = (draft[1] + verify[1]) / (draft[0] + verify[0]) - 1
        self._idle = 0
        self._patience = max(1.0, extra / PROBE_SHARE)  # rounds without a draft before a probe
        self._most_patience = MAX_PATIENCE * self._patience
        self._best = self._choose()

    def fresh(self) -> AdaptiveSchedule:
        """One that has observed nothing yet."""
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
                # A probe that succeeds is soon followed by another, one that fails later and later.
                patience = self._patience * (1 / 8 if any(outcome.num_accepted) else 2)
                self._patience = min(max(1.0, patience), self._most_patience)
            self._idle = 0
            self._counts.scale(MEMORY)
            self._counts.add(outcome)
            self._best = self._choose()

    def _choose(self) -> int:
        accepts, drafts = self._counts.expected(self._rate)
        costs = zip(self._calibration.draft_seconds, accepts, drafts, strict=True)
        speeds = [(1 + a) / (seconds + self._verifying(1 + d)) for seconds, a, d in costs]
        return speeds.index(max(speeds))

    def _verifying(self, tokens: float) -> float:
        """Seconds of a pass over so many tokens, on a line between whole numbers of them."""
        verify = self._calibration.verify_seconds
        below = min(int(tokens), len(verify) - 1)
        share = min(tokens - below, 1.0)
        return verify[below - 1] + share * (verify[below] - verify[below - 1])
