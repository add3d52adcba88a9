"""What rounds gave and took: what is accepted of drafts, and what passes cost on this machine."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Lengths to choose from: few, as each is a shape to compile, and just below the steps of GPUs.
LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 19, 24, 31, 47, 63]
MAX_DRAFT = LENGTHS[-1]
LONGEST_RUN = 2 * (MAX_DRAFT + 1)  # tokens in a row up to which acceptance rates are counted
# For each of LENGTHS, 1 at the places in a run where a round begins, and 0 elsewhere.
_EMITTED = 1 + np.array(LENGTHS)[:, None]  # by a round whose draft is accepted whole
ROUND_BEGINS = (np.arange(LONGEST_RUN + 1) % _EMITTED == 0).astype(float)

# Where a comment says so, other values were measured on the cases of simulated_devices.py in
# scripts/benchmarks, as parts of the speed of the best fixed length over 1,000 rounds.

# Acceptance, by places in a run:
TYPICAL_RATE, TYPICAL_TOKENS = 0.8, 10.0  # a guess, and how many tokens it counts for
BORROWED_TOKENS = 2.0  # for how many tokens the rate of the others counts at each place
COUNT_MEMORY = 0.985  # factor by which counts decay each round

# Costs. A guess, in passes over one token: a further token in the target's pass, and a step of a
# draft model, as the shipped pair has them on two cores.
TOKEN_COST, STEP_COST = 0.1, 0.1
ROW_COST = 0.2  # the same for a token of another row, whose keys are its own
GUESSED = TOKEN_COST, STEP_COST, ROW_COST
# How far the guess may be off, as standard deviations of logarithms: for all lengths together, with
# each doubling of the tokens, and for each length besides.
ALL_OFF, DOUBLED_OFF, EACH_OFF = 0.3, 0.3, 0.05
SHARES_ALIKE = 0.7  # correlation between the errors of two shares
LEAST_NOISE = 0.05  # chance difference between two rounds, at least, as a logarithm
NOISE_LEARNED = 0.05  # part of the noise that each round replaces
BY_CHANCE = 0.8  # part of a surprise that may be chance, as another program makes a round longer
DOUBT_GROWTH = 1e-4  # part of the guess's errors that a cost becomes doubtful by, each round
# Rounds before and after one, with whose median it is compared. With 3, a good draft on an M3
# reaches 0.974 instead of 0.987, a restless device 0.981 instead of 0.988.
ROUNDS_AROUND = 5


@dataclass(frozen=True)
class Outcome:
    """Counts and times of one round of a batch; the counts of rows with room for `num_draft`."""

    num_draft: int  # tokens that the drafter was asked for
    num_drafted: Sequence[int]  # that it proposed, by row
    num_accepted: Sequence[int]  # that were accepted and emitted
    draft_seconds: float  # of the host; with `Plan.timed`, until the device has drafted
    verify_seconds: float  # from there to the verdicts, and until they are emitted
    rows: int = 1  # in the batch
    length: int = 1  # of the target's pass, in tokens
    typical: bool = True  # whether its time is that of other rounds with such a pass
    share: int = 0  # an index of the shares to choose from
    between_seconds: float = 0.0  # of the host, since the round before it
    # Tokens in a row, just before the round, that drafts got right, by row; if empty, none.
    num_right: Sequence[int] = ()

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.between_seconds

    @property
    def kind(self) -> int | None:
        """Which of `CostCurve`'s kinds it was; None for one whose output was about to end."""
        if self.num_draft == 0:
            return PLAIN_KIND
        found = self.length - 1
        return kind_of(self.share, LENGTHS.index(found)) if found in LENGTHS else None


PLAIN_KIND = 0  # the kind of a round of plain decoding


def kind_of(share: int, place: int) -> int:
    """Return the kind of rounds that asked a share for a draft and found LENGTHS[place] tokens.

    To ask takes time even where nothing is found.
    """
    return 1 + share * len(LENGTHS) + place


class RunRates:
    """How often a drafted token is accepted, and how often there is one.

    Acceptance has a rate for each place in a run of right tokens, which goes on from one round to
    the next. If it had one for each place in a draft, the rates would depend on the length in use:
    a long draft is more often the first after an error, and of several short ones most begin in an
    easy stretch of the text.

    `runs` has two rows. At i, the first counts accepted tokens that followed i right ones, and the
    second all drafted tokens that did. `finds` has two rows, too. At i, the first counts requests
    for i tokens or more, and the second those for which as many were found. Earlier rounds weigh
    less.

    The target adds a token to each draft that is accepted whole. Whether the draft would have been
    right about it is not known, so what follows counts partly as the beginning of a new run.
    """

    def __init__(self, runs: Any = None, finds: Any = None, recent: float = 0.0) -> None:
        self.runs = np.zeros((2, LONGEST_RUN)) if runs is None else np.array(runs, float)
        self.finds = np.zeros((2, MAX_DRAFT + 1)) if finds is None else np.array(finds, float)
        self.recent = recent  # rounds that asked; it falls while others draft, or nobody does
        self._expected = self._expect()

    @property
    def seen(self) -> float:
        """How many rows the rates are known from."""
        return float(self.finds[0, 1])

    @property
    def learned(self) -> tuple[list[list[float]], list[list[float]], float]:
        return self.runs.tolist(), self.finds.tolist(), self.recent

    def add(self, outcomes: Sequence[Outcome], num_rounds: int) -> None:
        """Count those of the last rounds that asked for at least one token."""
        self.recent = self.recent * COUNT_MEMORY**num_rounds + len(outcomes)
        if not outcomes:
            return
        rows = [len(outcome.num_drafted) for outcome in outcomes]
        asked = np.repeat(np.array([outcome.num_draft for outcome in outcomes], int), rows)
        drafted = _as_array(outcome.num_drafted for outcome in outcomes)
        accepted = _as_array(outcome.num_accepted for outcome in outcomes)
        before = _as_array(each.num_right or [0] * len(each.num_drafted) for each in outcomes)
        self.finds *= COUNT_MEMORY ** len(outcomes)
        self.finds += [_up_to(ends, MAX_DRAFT + 1) for ends in (asked, drafted)]
        before = np.minimum(before, LONGEST_RUN - MAX_DRAFT)
        tried = np.minimum(accepted + 1, asked)
        goes_on = np.where(before > 0, _typical(*self.runs), 1.0)
        self.runs *= COUNT_MEMORY ** len(outcomes)
        self.runs += [
            _between(before, before + counts, goes_on) + _between(0 * before, counts, 1 - goes_on)
            for counts in (accepted, tried)
        ]
        self._expected = self._expect()

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what to expect for each of LENGTHS: tokens of a round, and chances of a draft.

        The second has the chance that as many tokens are drafted. A token that is not found is not
        accepted. A place in a run of which little is known is taken to have the rate of all places
        together. For those after the first, that rate leaves out the first, which depends on
        whether a lookup has found the right place.
        """
        return self._expected

    def _expect(self) -> tuple[np.ndarray, np.ndarray]:
        passed, tried = self.runs
        rates = np.full(LONGEST_RUN, _typical(passed[1:], tried[1:]))
        rates[0] = _typical(passed, tried)
        rates = (passed + BORROWED_TOKENS * rates) / (tried + BORROWED_TOKENS)
        # The chance that a run reaches each place. The sum is the mean length of a run, with the
        # token that ends it; the sum over the places where rounds begin is the mean of its rounds.
        # If all rates are the same, the quotient is equation 1 of arXiv 2211.17192.
        reached = np.ones(LONGEST_RUN + 1)
        np.cumprod(rates, out=reached[1:])
        tokens = reached.sum() / (ROUND_BEGINS @ reached)
        asked, drafted = self.finds
        chances = np.minimum.accumulate((drafted + 1) / (asked + 1))
        return tokens, chances[LENGTHS]


class CostCurve:
    """What rounds take, by who drafts and by the tokens in the target's pass, with error bars.

    It holds logarithms of costs, for each kind of round (see `kind_of`); plain decoding costs 1. It
    begins as a guess whose errors are correlated: what one length shows moves the others. A round
    is compared with those around it, so that a machine that becomes slower changes no ratio, and
    the difference moves the curve by the rules for Gaussian variables (a Kalman filter).
    """

    def __init__(self, shares: Sequence[float], learned: Any = None, rows: int = 1) -> None:
        """Begin with a guess, or what an earlier one `learned`.

        `rows` is how many are in a batch whose passes are bound by arithmetic: plain decoding then
        takes a token of each. It is 1 where further rows cost next to nothing.
        """
        octaves = np.log2(1 + np.array(LENGTHS))
        errors = ALL_OFF**2 + DOUBLED_OFF**2 * np.minimum.outer(octaves, octaves)
        errors += EACH_OFF**2 * np.eye(len(LENGTHS))
        alike = SHARES_ALIKE + (1 - SHARES_ALIKE) * np.eye(len(shares))
        self._guess = np.pad(np.kron(alike, errors), (1, 0))  # plain decoding is what 1 means
        token_cost = (
            TOKEN_COST * rows / (1 + TOKEN_COST * (rows - 1))
        )  # by a pass over a token each
        per_token = [token_cost + STEP_COST * share for share in shares]
        self.mean = np.append(0.0, np.log(1 + np.outer(per_token, LENGTHS)))
        self.covariance = self._guess.copy()
        self.has_plain = False  # whether plain decoding was seen
        self.longest = 0  # of LENGTHS that were found
        self._noise = LEAST_NOISE
        self._last: list[tuple[int, float]] = []  # rounds, as kinds and logarithms of seconds
        if learned:
            mean, covariance, self.has_plain, self.longest = learned
            self.mean, self.covariance = np.array(mean), np.array(covariance)

    @property
    def learned(self) -> tuple[list[float], list[list[float]], bool, int]:
        covariance = self.covariance.round(6).tolist()
        return self.mean.tolist(), covariance, self.has_plain, self.longest

    def observe(self, rounds: Sequence[tuple[int, float]]) -> None:
        """Learn from rounds in their order, each as its kind and its seconds."""
        every = [*self._last, *((kind, math.log(seconds)) for kind, seconds in rounds)]
        for at in range(len(self._last), len(every)):
            kind, time = every[at]
            self.has_plain |= kind == PLAIN_KIND
            if kind != PLAIN_KIND:
                self.longest = max(self.longest, LENGTHS[(kind - 1) % len(LENGTHS)])
            around = every[max(at - ROUNDS_AROUND, 0) : at] + every[at + 1 : at + 1 + ROUNDS_AROUND]
            if around:
                pace, other = self._pace(around)
                self._compare(kind, other, time - self.mean[kind] - pace)
        self._last = every[-ROUNDS_AROUND:]
        ageing = min(DOUBT_GROWTH * len(rounds), 1)
        self.covariance += ageing * (self._guess - self.covariance)

    def _pace(self, rounds: Sequence[tuple[int, float]]) -> tuple[float, int]:
        """Return the logarithm of the seconds for a cost of 1, and the kind that told it."""
        paces = sorted((time - self.mean[kind], kind) for kind, time in rounds)
        return paces[len(paces) // 2]

    def _compare(self, kind: int, other: int, surplus: float) -> None:
        """Learn that a round took longer than expected, as a logarithm, by one of another kind."""
        if kind == other:
            typical = 1.25 * min(abs(surplus), 3 * self._noise)  # a standard deviation
            self._noise += NOISE_LEARNED * (typical - self._noise)
            return
        towards = self.covariance[kind] - self.covariance[other]
        noise = math.hypot(max(self._noise, LEAST_NOISE), BY_CHANCE * surplus)
        variance = towards[kind] - towards[other] + noise**2
        self.mean += towards * (surplus / variance)
        self.covariance -= np.outer(towards, towards) / variance

    def costs(self, share: int) -> np.ndarray:
        """Return the cost to expect where each of LENGTHS is found by a share.

        None is below plain decoding's, and a shorter pass costs no more than a longer one.
        """
        curve = np.maximum(self.mean[kind_of(share, 0) : kind_of(share + 1, 0)], 0)
        costs: np.ndarray = np.exp(np.minimum.accumulate(curve[::-1])[::-1])
        return costs

    def doubts(self, kinds: Sequence[int], other: int) -> np.ndarray:
        """Return the variance of the logarithm of each kind's cost by another one's."""
        variances = np.diag(self.covariance) - 2 * self.covariance[other]
        doubts: np.ndarray = np.maximum(variances[kinds] + self.covariance[other, other], 0)
        return doubts


def _typical(passed: np.ndarray, tried: np.ndarray) -> float:
    """Return the rate of all positions together, as far as it is known."""
    return float((passed.sum() + TYPICAL_TOKENS * TYPICAL_RATE) / (tried.sum() + TYPICAL_TOKENS))


def _as_array(counts: Iterable[Sequence[int]]) -> np.ndarray:
    return np.array([n for each in counts for n in each], int)


def _up_to(ends: np.ndarray, size: int) -> np.ndarray:
    """Return how many of `ends` are i or more, for each i below `size`."""
    counts: np.ndarray = np.bincount(ends, minlength=size)
    return counts[::-1].cumsum()[::-1]


def _between(begins: np.ndarray, ends: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return, for each place in a run, the total weight of the ranges that it is in."""
    begun, ended = (
        np.bincount(np.minimum(each, LONGEST_RUN), weights, LONGEST_RUN + 1)
        for each in (begins, ends)
    )
    counts: np.ndarray = (begun - ended).cumsum()[:LONGEST_RUN]
    return counts
