"""What rounds gave and took: what is accepted of drafts, and what passes cost on this machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

import numpy as np

MAX_DRAFT = 63  # the most that an adaptive schedule asks for: passes of up to 64 tokens
# Rounds by what they take: 0 is plain decoding, n one that asked for a draft, with n tokens in the
# target's pass. To ask takes time even where nothing is found.
SIZES = np.arange(MAX_DRAFT + 2)
TOKENS = np.maximum(SIZES, 1)  # in the target's pass

TYPICAL_RATE = 0.8  # acceptance rate of a draft that is worth having
PRIOR_TOKENS = 4.0  # weight, in tokens, of that rate against the tokens seen so far
SMOOTHING = 4.0  # tokens that each position borrows from all positions together
MEMORY = 0.98  # factor by which counts decay each round
LONGER = 0.995  # the same for positions that a round did not ask for
LONGEST = 0.999  # and for shares

MORE_TOKENS = 0.2  # guess: the cost of a further token in a round, by that of a pass over one
MOST_SEEN = 50  # rounds after which a length's cost is as well known as it can be
OUTLIER = 0.25  # difference from what is expected, as a logarithm, that surprises
AROUND = 5  # rounds before and after one, whose medians tell how fast the machine was
UNSETTLED = 0.12  # difference between the two, as a logarithm, if that has changed between them
NOTHING_KNOWN = 1e-3  # the least that a pass may cost, before any is known
AGEING = 2e-3  # by how much the doubt about a cost grows with each round without one
MOST_DOUBT = 0.9  # share of a cost that may be an error


def kind_of(size: int, share: int) -> int:
    """Return the kind of rounds of one of SIZES in which a model drafts a share, see `SHARES`."""
    return size + share * len(SIZES) if size else 0


@dataclass(frozen=True)
class Outcome:
    """Counts and times of one round of a batch; the counts of rows with room for `num_draft`."""

    num_draft: int  # tokens that the drafter was asked for
    num_drafted: Sequence[int]  # that it proposed, by row
    num_accepted: Sequence[int]  # that were accepted and emitted
    draft_seconds: float  # of the host; with `Plan.timed`, until the device has drafted
    verify_seconds: float  # from there to the verdicts
    rows: int = 1  # in the batch
    length: int = 1  # of the target's pass, in tokens
    typical: bool = True  # whether its time is that of other rounds with such a pass
    share: int = 0  # an index of the shares to choose from

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds

    @property
    def size(self) -> int:
        """Which of SIZES it was."""
        return self.length if self.num_draft else 0

    @property
    def kind(self) -> int:
        return kind_of(self.size, self.share)


class Counts:
    """Counts of drafted and accepted tokens by position, those of earlier rounds weighing less.

    `values` are five rows of MAX_DRAFT + 1. At i they count rows that were asked for i tokens or
    more: `asked` all of them, `had` those that drafted as many; `reached` those that accepted the
    first i - 1, `offered` those of them that drafted an i-th, `passed` those that accepted it. At 0
    there is nothing to count.
    """

    def __init__(self, values: Any = None) -> None:
        self.values = np.zeros((5, MAX_DRAFT + 1)) if values is None else np.array(values, float)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Count rounds for each of which at least one token was asked."""
        rows = [len(outcome.num_drafted) for outcome in outcomes]
        lengths = np.array([outcome.num_draft for outcome in outcomes])
        asked = np.repeat(lengths, rows)
        had = np.array([n for outcome in outcomes for n in outcome.num_drafted], int)
        passed = np.array([n for outcome in outcomes for n in outcome.num_accepted], int)
        reached = np.minimum(passed + 1, asked)
        counts = [_up_to(n) for n in (asked, had, reached, np.minimum(had, reached), passed)]
        shares = np.repeat(1 / np.maximum(rows, 1), rows)  # of each row in its round
        asking, reaching = _up_to(lengths), _up_to(reached, shares)
        # A position that is seldom reached remembers rounds from longer ago.
        self.values[:2] *= MEMORY**asking
        self.values[2:] *= MEMORY**reaching
        self.values *= LONGER ** (len(outcomes) - asking)
        self.values[:, 1:] += np.array(counts)[:, 1:]

    @property
    def rows(self) -> float:
        """Rows that were asked for tokens, as far as they are remembered."""
        return float(self.values[0, 1])

    def forget(self, rounds: int) -> None:
        """Let counts decay for rounds in which another one drafted."""
        self.values *= LONGEST**rounds

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what to expect for K = 0 to MAX_DRAFT: accepted tokens, and chances of drafts.

        The second has the chance that a K-th token is drafted. A position with few counts of its
        own borrows the rate of all positions, to which PRIOR_TOKENS at TYPICAL_RATE are added. As
        long as that rate is not well known, each accepted token makes the next one likelier (the
        predictive rate of a Beta distribution). After an accepted token a drafter is taken to have
        another one, unless it was seen to have none.
        """
        asked, had, reached, offered, passed = self.values
        before = np.arange(MAX_DRAFT)
        known = PRIOR_TOKENS + offered[1:].sum() + before
        borrowed = (PRIOR_TOKENS * TYPICAL_RATE + passed[1:].sum() + before) / known
        rates = (passed[1:] + SMOOTHING * borrowed) / (offered[1:] + SMOOTHING)
        offers = (offered[1:] + 1) / (reached[1:] + 1)
        survival = np.cumprod([1.0, *rates * offers])
        return np.cumsum(survival) - 1, np.minimum.accumulate((had + 1) / (asked + 1))


class Costs:
    """What rounds of each kind take, relative to plain decoding.

    Each round is compared with those around it, so that a machine that becomes slower changes no
    ratio. Kinds that have not been seen are as costly as a guess, or as those around them.
    """

    def __init__(self, known: Mapping[int, Sequence[float]] | None = None) -> None:
        # Of each kind: cost, rounds that it was seen in, the last of them.
        self.known = {n: [cost, seen, 0.0] for n, (cost, seen) in (known or {}).items()}
        self.rounds = 0
        self._surprising: set[int] = set()  # kinds whose only look took longer than expected
        self._last: list[tuple[int, float]] = []  # rounds, as `observe` is given them
        self._guess = 1 + MORE_TOKENS * (TOKENS - 1.0)
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by share

    @property
    def scale(self) -> float:
        """Seconds for a cost of 1 in the last rounds; 0 before the first."""
        return median([seconds / self.cost(n) for n, seconds in self._last] or [0.0])

    def observe(self, rounds: Sequence[tuple[int, float]]) -> None:
        """Learn from rounds in their order, each as its kind and its seconds."""
        every = [*self._last, *rounds]
        self._last = every[-AROUND:]
        # Of those with a known cost: the logarithm of the seconds for a cost of 1.
        paces = [(n, math.log(s / self.known[n][0])) if n in self.known else None for n, s in every]
        for at in range(len(every) - len(rounds), len(every)):
            kind, seconds = every[at]
            self.rounds += 1
            before, after = (
                [each for each in part if each]
                for part in (paces[max(at - AROUND, 0) : at], paces[at + 1 : at + 1 + AROUND])
            )
            others = [each for each in (*before, *after) if each[0] != kind]
            # Others are compared with the usual kind, not that with them.
            if not others or 2 * len(others) < len(before) + len(after):
                self.known.setdefault(kind, [self.cost(kind), 1.0, 0.0])
                self.known[kind][2] = self.rounds
                continue
            if before and after and abs(_middle(before) - _middle(after)) > UNSETTLED:
                continue  # another program has begun, or ended its work
            cost, seen, _ = self.known.get(kind, (self.cost(kind), 0.0, 0.0))
            own = math.log(seconds / cost) - _middle(others)
            if not seen and own > OUTLIER and kind not in self._surprising:
                self._surprising.add(kind)
                continue  # perhaps by chance, which a second look will tell
            if seen and abs(own) > OUTLIER:
                # A surprise casts doubt on what is known. By chance a round may be much slower than
                # usual, but hardly much faster.
                seen /= 2
                own = min(max(own, -OUTLIER) if seen >= 1 else own, OUTLIER)
                cost *= math.exp(own / (seen + 1))
            else:
                cost *= math.exp(own / (seen + 1))
                seen = min(seen + 1, MOST_SEEN)
            self.known[kind] = [cost, seen, self.rounds]
            usual = self.known[median_low(n for n, _ in others)]
            usual[1] = min(usual[1] + 1, MOST_SEEN)
        self._curves.clear()

    def cost(self, kind: int) -> float:
        """Return the cost to expect of a round of this kind."""
        known, (share, size) = self.known.get(kind), divmod(kind, len(SIZES))
        return known[0] if known else float(self.curves(share)[0][size])

    def sizes(self, share: int) -> list[int]:
        """Return which of SIZES are known with a share."""
        return [n for n in SIZES.tolist() if kind_of(n, share) in self.known]

    def curves(self, share: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the cost to expect and the least that is possible, for each of SIZES.

        Between known kinds the expected cost rises as the guess does. The least cost assumes that
        a longer pass costs no less than a shorter one, and no more than several with as many tokens
        together.
        """
        if share not in self._curves:
            sizes = self.sizes(share)
            # A smaller share of the model costs no more.
            guess = self.curves(share - 1)[0] if share else self._guess
            expected, least = guess, np.full(len(SIZES), NOTHING_KNOWN)
            if sizes:
                costs, seen, last = np.array([self.known[kind_of(n, share)] for n in sizes]).T
                costs = np.minimum.accumulate(costs[::-1])[::-1]
                expected = expected * np.interp(SIZES, sizes, costs / guess[sizes])
                doubt = np.minimum((1 + AGEING * (self.rounds - last)) / (seen + 1), MOST_DOUBT)
                least[sizes] = costs * (1 - doubt)
                per_token = np.maximum.accumulate((least / TOKENS)[::-1])[::-1]
                known, least = least[sizes], np.maximum.accumulate(least)
                least = np.minimum(np.maximum(least, per_token * TOKENS), expected)
                least[sizes] = known
            self._curves[share] = expected, least
        return self._curves[share]


def _up_to(ends: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return how many of `ends`, or what weight of them, are i or more, for i = 0 to MAX_DRAFT."""
    counts: np.ndarray = np.bincount(ends, weights, MAX_DRAFT + 1)
    return counts[::-1].cumsum()[::-1]


def _middle(rounds: Sequence[tuple[int, float]]) -> float:
    """Return the median of the second values."""
    return median(value for _, value in rounds)
