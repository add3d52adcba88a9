"""How many tokens to draft next: the number that pays best on this machine."""

import math
import threading
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .draft_length import Schedule
from .outcomes import LENGTHS, PLAIN_KIND, ROUNDS_AROUND, CostCurve, Outcome, RunRates, kind_of

# Where a model and a lookup are at hand: the model's share of a draft, before the lookup adds the
# rest, which costs nothing to draft. The simplest way comes first.
SHARES = 1.0, 0.25, 0.0

# A look is a round with another length than the usual one, to learn what that costs. Losses are in
# passes over one token.
BUDGET_RATE = 0.0025  # share of the time that looks may lose
FIRST_BUDGET = 3.0  # what they may lose besides, for a beginning
MOST_OWED = 1.0  # what may be lost beyond that and has to be made good first
# What a look loses besides if its pass has to be compiled, or if a draft model reads a prompt that
# the usual choice need not read.
EXTRA_WORK = 1.0
LEAST_LOSS = 0.15  # looks that would lose less are taken to lose this much
OPTIMISTIC_BY = 1.5  # standard deviations by which another length may be better than is known
LEAST_GAIN = 0.02  # gain that another length must promise to be looked at or chosen, as a logarithm
RATE_DOUBT = 0.7  # how far what a share gains may be off before it has drafted, as a logarithm
HARDLY_SEEN = 0.2  # a share that was asked in fewer rounds lately is looked at in any case
PROBE_TOKENS = 4  # of such a look
PROBE_ROUNDS = 3  # such looks at once, and looks at what seems better than the usual choice
FIRST_LONGEST = 7  # longest draft at first; later, twice the longest one that was found
FIRST_ROUNDS = 6  # before the first look
PLANNED_EVERY, MOST_PLANNED = 8, 48  # a plan has one round more for each 8 seen, 48 at most
SHORT_PLAN = 3  # rounds after which a new choice, and one that seems better, are thought over
SAVED_FIRST = 256  # rounds before what was learned is kept first, and then as they double


class PlannedRound(NamedTuple):
    """What a round is to draft, or could."""

    share: int  # an index of the shares
    num_draft: int
    looks: bool = False  # whether it is a look


class Prospects(NamedTuple):
    """What to expect of each choice."""

    gains: np.ndarray  # logarithms of tokens for a cost of 1
    costs: np.ndarray


class Look(NamedTuple):
    """A choice to look at in the next rounds."""

    other: int  # an index of the choices
    rounds: int  # in which it is looked at
    loss: float  # that all of these are charged
    seems_better: bool  # than the usual choice, if that were not in doubt


NO_LOOK = Look(0, 0, 0.0, False)


class AdaptiveSchedule(Schedule):
    """Chooses the draft length with the most expected tokens per second; 0 if none pays.

    Tokens are expected by how long runs of accepted tokens are (see `RunRates`), costs by a curve
    for each size of the batch. The usual choice is the best by both, unless it gains too little
    over the one before. Another one is looked at while it might be better, as far as its doubt
    goes, and as long as looks have cost little.

    With several `shares` it chooses among the lengths of all. Which share's tokens are accepted is
    much in doubt at first, so another one than the usual becomes usual only after it was asked, and
    if it would be better even at worst: that is, by one standard deviation. Threads may share one
    schedule.
    """

    def __init__(
        self,
        shares: Sequence[float] = (1.0,),
        learned: Mapping[str, Any] | None = None,
        save: Callable[[dict[str, Any]], None] | None = None,
        *,
        rows_are_free: bool = False,
    ) -> None:
        """Begin with what an earlier one `learned`; `save` is given that now and then.

        `rows_are_free` says that a pass over a few rows is guessed to take as long as over one.
        """
        self._rows_are_free = rows_are_free
        self.shares = shares
        pairs = [(0, 0), *((i, n) for i in range(len(shares)) for n in LENGTHS[1:])]
        self._choices = [PlannedRound(*pair) for pair in pairs]
        self._lengths = np.array([length for _, length in pairs])
        # What another share would draft in the same way is no choice.
        self._differs = np.array([shares[i] == 1 or model_part(shares[i], n) < n for i, n in pairs])
        drafts = [kind_of(i, at) for i in range(len(shares)) for at in range(1, len(LENGTHS))]
        self._kinds = [PLAIN_KIND, *drafts]
        self._drafted_by = np.array([-1, *(share for share, _ in pairs[1:])])
        known = learned or {"rates": [()] * len(shares), "costs": {}, "budget": FIRST_BUDGET}
        self._rates = [RunRates(*each) for each in known["rates"]]
        self._costs: dict[int, CostCurve] = {  # by the size of the batch
            int(size): CostCurve(shares, each) for size, each in known["costs"].items()
        }
        self._budget: float = known["budget"]  # what looks may lose
        self._usual: dict[int, int] = {}  # an index of the choices
        self._looked: dict[int, Look] = {}  # in the last plan
        self._tried: defaultdict[int, set[int]] = defaultdict(set)  # lengths, in this process
        # The next rounds, by the size of the batch. To choose for each round takes longer than a
        # small model's pass.
        self._plans: defaultdict[int, deque[PlannedRound]] = defaultdict(deque)
        self._seen: list[tuple[Outcome, bool]] = []  # since the last plan; whether it was a look
        self._rounds, self._save, self._save_at = 0, save, SAVED_FIRST
        self._learning = threading.Lock()

    def next(self, remaining: int, rows: int = 1) -> int:
        return self.choice(remaining, rows)[1]

    def choice(self, remaining: int, rows: int = 1) -> tuple[int, int]:
        """Return an index of the shares, and what `next` does."""
        with self._learning:
            plan = self._plans[_size(rows)]
            if not plan:
                plan.extend(self._plan(_size(rows)))
            return plan[0].share, min(plan[0].num_draft, remaining - 1)

    def kept(self, found: int) -> int:
        return LENGTHS[bisect(LENGTHS, found) - 1]

    def think(self, rows: int) -> None:
        """Choose for the rounds after the last one of a plan, which is being computed.

        Thinking takes a third of a small model's pass. It waits for the result of a look, and of
        a plan that has only one round.
        """
        with self._learning:
            plan = self._plans[_size(rows)]
            if len(plan) == 1 and self._seen and not plan[0].looks:
                self._learn()
                plan.extend(self._plan(_size(rows)))

    def observe(self, outcome: Outcome) -> None:
        with self._learning:
            size = _size(outcome.rows)
            plan, lengths = self._plans[size], self._tried[size]
            planned = plan.popleft() if plan else PlannedRound(0, 0)
            looks = planned == (outcome.share, outcome.num_draft, True)
            if looks and not outcome.typical:
                if not (self._seen and self._seen[-1][1]):
                    plan.appendleft(planned)  # once more, as its time says nothing
                compiles = outcome.length - 1 not in lengths and not self._is_longer(planned, size)
                if compiles or not self._asks_model(size):
                    self._budget -= EXTRA_WORK
            self._seen.append((outcome, looks))
            lengths |= {outcome.num_draft, outcome.length - 1}
            if not plan:
                self._learn()

    def _asks_model(self, size: int) -> bool:
        """Return whether the usual choice does, which then has read all that was emitted."""
        share, num_draft, _ = self._choices[self._usual[size]]
        return self.shares[share] * num_draft > 0

    def _is_longer(self, planned: PlannedRound, size: int) -> bool:
        """Return whether it only drafts more than the usual choice.

        A device whose passes take the same whatever their length would be too slow to reach the
        best one if each step there had to pay for compiling.
        """
        usual = self._choices[self._usual[size]]
        return planned.share == usual.share and planned.num_draft > usual.num_draft

    def _learn(self) -> None:
        """Learn from the rounds since the last plan."""
        times = defaultdict[int, list[tuple[int, float]]](list)
        for outcome, _ in self._seen:
            if outcome.typical and outcome.kind is not None:
                times[_size(outcome.rows)].append((outcome.kind, outcome.seconds))
        for size, rounds in times.items():
            self._curve(size).observe(rounds)
        for share, rates in enumerate(self._rates):
            drafts = [each for each, _ in self._seen if each.num_draft and each.share == share]
            rates.add(drafts, len(self._seen))
        self._rounds += len(self._seen)
        self._seen.clear()
        if self._save and self._rounds >= self._save_at:
            self._save_at *= 2
            self._save(self._learned())

    def _curve(self, size: int) -> CostCurve:
        if size not in self._costs:
            rows = 1 if self._rows_are_free else size
            self._costs[size] = CostCurve(self.shares, rows=rows)
        return self._costs[size]

    def _prospects(self, size: int) -> Prospects:
        gains, costs = [np.zeros(1)], [np.ones(1)]
        for share, rates in enumerate(self._rates):
            tokens, chances = rates.expected()
            curve = self._curve(size).costs(share)
            mean = curve[0] + np.cumsum(chances[1:] * np.diff(curve))
            gains.append(np.log(tokens[1:] / mean))
            costs.append(mean)
        return Prospects(np.concatenate(gains), np.concatenate(costs))

    def _plan(self, size: int) -> list[PlannedRound]:
        """Choose for the next rounds."""
        prospects, before = self._prospects(size), self._usual.get(size)
        best = self._usual[size] = self._best(size, prospects.gains, before)
        looked = self._looked.get(size, NO_LOOK)
        if looked.other == best:
            self._budget += looked.loss  # it has lost nothing
        count = 1 + min(self._rounds // PLANNED_EVERY, MOST_PLANNED - 1)
        self._budget += BUDGET_RATE * count * prospects.costs[best]
        self._budget = min(max(self._budget, -MOST_OWED), FIRST_BUDGET)
        usual, look = self._choices[best], self._look(size, prospects, best)
        if best != before or look.seems_better:
            count = min(count, SHORT_PLAN)
        self._budget -= look.loss
        self._looked[size] = look
        after = min(count // 2, ROUNDS_AROUND)  # it is compared with these and those before it
        looks = [self._choices[look.other]._replace(looks=True)] * look.rounds
        first = count - after - min(look.rounds, 1)
        return [*[usual] * first, *looks, *[usual] * after]

    def _best(self, size: int, gains: np.ndarray, before: int | None) -> int:
        """Return the best choice, or the one before if that is nearly as good."""
        seen = [each.seen for each in self._rates]
        doubts = self._rate_doubts(1 if before is None else before, seen)
        at_worst = gains - np.sqrt(doubts)
        was_asked = np.array([True, True, *(drafts > 0 for drafts in seen[1:])])
        possible = self._near(size) & was_asked[self._drafted_by + 1]
        best = int(np.argmax(np.where(possible, at_worst, -np.inf)))
        if before is not None and at_worst[best] <= gains[before] + LEAST_GAIN:
            return before
        return best

    def _rate_doubts(self, usual: int, num_seen: Sequence[float]) -> np.ndarray:
        """Return the variance of what each choice gains over those of the usual one's share.

        `num_seen` has the number of drafts by which the rates of each share are known.
        """
        doubts = np.array([0.0, *(RATE_DOUBT**2 / (1 + drafts) for drafts in num_seen)])
        both = doubts[self._drafted_by + 1] + doubts[self._drafted_by[usual] + 1]
        compared = (self._drafted_by != self._drafted_by[usual]) & (self._drafted_by >= 0)
        found: np.ndarray = np.where(compared, both, 0)
        return found

    def _near(self, size: int) -> np.ndarray:
        """Return which choices differ and are at most about twice as long as any that was seen.

        Costs beyond are a mere guess.
        """
        near = self._lengths <= max(2 * self._curve(size).longest, FIRST_LONGEST)
        found: np.ndarray = near & self._differs
        return found

    def _look(self, size: int, prospects: Prospects, best: int) -> Look:
        """Choose what promises most for what a look at it may lose, if anything does."""
        if self._rounds < FIRST_ROUNDS:
            return NO_LOOK
        gains, curve = prospects.gains - prospects.gains[best], self._curve(size)
        variances = curve.doubts(self._kinds, self._kinds[best])
        recent = [each.recent for each in self._rates]  # what was seen long ago may have changed
        variances += self._rate_doubts(best, recent)
        promises = gains + OPTIMISTIC_BY * np.sqrt(variances) - LEAST_GAIN
        if not curve.has_plain:
            promises[0] = np.inf  # plain decoding is what others must not be slower than
        hardly_seen = np.array([False, *(rounds < HARDLY_SEEN for rounds in recent)])
        unknown = hardly_seen[self._drafted_by + 1]
        promises[unknown & (self._lengths == PROBE_TOKENS)] = np.inf
        promises[best] = 0
        lost = np.maximum(prospects.costs * (1 - np.exp(gains)), LEAST_LOSS)
        losses = lost + EXTRA_WORK * self._compiles(size)
        # These would be usual if they were not in doubt, so a look at them should lose nothing.
        better = gains > LEAST_GAIN
        promises[~better & (losses > self._budget) | ~self._near(size)] = 0
        other = int(np.argmax(promises / losses))
        if promises[other] <= 0:
            return NO_LOOK
        if better[other]:
            return Look(other, PROBE_ROUNDS, 0.0, seems_better=True)
        rounds = PROBE_ROUNDS if unknown[other] else 1
        return Look(other, rounds, float(rounds * lost[other]), seems_better=False)

    def _compiles(self, size: int) -> np.ndarray:
        """Return which choices a pass would be compiled for, and charged."""
        tried = self._tried[size]
        return np.array(
            [
                choice.num_draft not in tried and not self._is_longer(choice, size)
                for choice in self._choices
            ]
        )

    def keep(self) -> None:
        """Save what was learned for later processes, at the end of this one."""
        if self._save and self._learning.acquire(blocking=False):  # a dead thread may hold it
            self._learn()
            self._save(self._learned())
            self._learning.release()

    def _learned(self) -> dict[str, Any]:
        return {
            "rates": [each.learned for each in self._rates],
            "costs": {str(size): curve.learned for size, curve in self._costs.items()},
            "budget": self._budget,
        }


class SplitSchedule(Schedule):
    """The schedule of one batch, by one that also chooses who drafts in a round."""

    def __init__(self, schedule: AdaptiveSchedule) -> None:
        self._schedule = schedule
        self._share = 0  # in this round

    def next(self, remaining: int, rows: int = 1) -> int:
        self._share, num_draft = self._schedule.choice(remaining, rows)
        return num_draft

    def split(self, num_draft: int) -> tuple[int, int]:
        by_model = model_part(self._schedule.shares[self._share], num_draft)
        return by_model, num_draft - by_model

    def kept(self, found: int) -> int:
        return self._schedule.kept(found)

    def think(self, rows: int) -> None:
        self._schedule.think(rows)

    def observe(self, outcome: Outcome) -> None:
        self._schedule.observe(replace(outcome, share=self._share))


def model_part(share: float, num_draft: int) -> int:
    """Return how many tokens the model drafts."""
    return math.ceil(share * num_draft)


def _size(rows: int) -> int:
    """Return the next power of 2: batches of similar size have the same costs."""
    return 1 << (rows - 1).bit_length()
