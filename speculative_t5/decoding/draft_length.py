"""How many tokens to draft next: a fixed number, or the one that pays best on this machine."""

import atexit
import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import threading
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from .. import __version__
from ..cpu import libraries
from ..files import write_whole

MAX_DRAFT = 63  # the most that an adaptive schedule asks for: passes of up to 64 tokens
# Lengths to choose from: few, as each is a shape to compile, and just below the steps of GPUs.
LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 19, 24, 31, 47, MAX_DRAFT]
# Rounds by what they take: 0 is plain decoding, n one that asked for a draft, with n tokens in the
# target's pass. To ask takes time even where nothing is found.
SIZES = np.arange(MAX_DRAFT + 2)
TOKENS = np.maximum(SIZES, 1)  # in the target's pass
# Where a model and a lookup are at hand: the model's share of a draft, before the lookup adds the
# rest, which costs nothing to draft. What is tried first comes first. A kind of round is its size,
# and that by its share.
SHARES = 1.0, 0.25, 0.0

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

# A look is a round with another length than the usual one, to learn what that costs; a probe is a
# look while nothing is usually drafted. Losses are in passes over one token.
EXPLORED = 0.01  # share of the time that looks may lose
LEAST_LOSS = 0.1  # looks that would lose less are taken to lose this much
EXPLORED_FIRST = 6.0  # what looks may lose besides, for a beginning
FIRST_ROUNDS = 3  # with a time that says something, before the first look
FIRST_PROBE = 7  # tokens, of a share that has hardly been seen
ROUNDS_OF_SHARE = 4  # that tell what a share gives, until they are forgotten
MOST_CHARGED = 1.2  # times its usual cost, for a look that also had a pass to compile
WORTHWHILE = 1.02  # gain that another length must promise to be looked at, or to be chosen
OTHER_SHARE = 1.08  # gain over the first share for another one, as by chance one of many seems best
MAX_PATIENCE = 8  # longest wait between failed probes, as a multiple of the first
MOST_IDLE = 500  # longest wait in rounds, however slow a probe was by chance
PLANNED_EVERY, MOST_PLANNED = 8, 48  # a plan has one round more for each 8 seen, 48 at most
IDLE_PLANNED = 4  # where nothing is drafted, plans are this many times as long
NEWLY_CHOSEN = 3  # rounds after which a new choice is thought over
SAVED_FIRST = 64  # rounds before what was learned is kept first, and then as they double


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
    def kind(self) -> int:
        """The kind of round that it was."""
        return kind(self.length if self.num_draft else 0, self.share)


def kind(size: int, share: int) -> int:
    """Return the kind of rounds of one of SIZES, with a share; plain ones have no share."""
    return size + share * len(SIZES) if size else 0


Choice = tuple[int, int]  # who is to draft, and how many tokens


class Schedule(Protocol):
    """Chooses the draft length of each round from the outcomes of earlier rounds.

    It observes counts and times, never tokens: by the rules that sample a draft first, a length
    that depended on a token's value could decide whether that token is accepted, and the output
    would no longer follow the target's distribution.
    """

    def next(self, remaining: int, rows: int = 1) -> int:
        """Return how many tokens to draft when at most `remaining` more may be emitted.

        A round emits one token more than it drafts, so drafting `remaining` would waste one. The
        batch has `rows` rows.
        """

    def kept(self, found: int) -> int:
        """Return how many tokens to keep of a draft that is shorter or longer than asked for."""
        return found

    def observe(self, outcome: Outcome) -> None:
        """Learn from the round that the last `next` was for."""
        return


@dataclass(frozen=True)
class FixedSchedule(Schedule):
    """Always drafts the same number of tokens, unless the output is about to end."""

    num_draft: int

    def next(self, remaining: int, rows: int = 1) -> int:
        return min(self.num_draft, remaining - 1)


class Counts:
    """Counts of drafted and accepted tokens by position, those of earlier rounds weighing less.

    `values` are five rows of MAX_DRAFT + 1. At i, from 1, they count rows that were asked for i
    tokens or more: `asked` all of them, `had` those that drafted as many; `reached` those that
    accepted the first i - 1, `offered` those of them that drafted an i-th, `passed` those that
    accepted it. At 0 they count what a drafter adds after the tokens asked for: `asked` all rows,
    `had` extra tokens, `reached` rows that accepted all tokens asked for, `passed` extra tokens
    accepted.
    """

    def __init__(self, values: Any = None) -> None:
        self.values = np.zeros((5, MAX_DRAFT + 1)) if values is None else np.array(values, float)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Count rounds for each of which at least one token was asked."""
        rows = [len(outcome.num_drafted) for outcome in outcomes]
        lengths = np.array([outcome.num_draft for outcome in outcomes])
        asked = np.repeat(lengths, rows)
        drafted = np.array([n for outcome in outcomes for n in outcome.num_drafted], int)
        accepted = np.array([n for outcome in outcomes for n in outcome.num_accepted], int)
        had, passed = np.minimum(drafted, asked), np.minimum(accepted, asked)
        reached = np.minimum(accepted + 1, asked)
        counts = [_up_to(n) for n in (asked, had, reached, np.minimum(had, reached), passed)]
        shares = np.repeat(1 / np.maximum(rows, 1), rows)  # of each row in its round
        asking, reaching = _up_to(lengths), _up_to(reached, shares)
        # A position that is seldom reached remembers rounds from longer ago.
        self.values[:2] *= MEMORY**asking
        self.values[2:] *= MEMORY**reaching
        self.values *= LONGER ** (len(outcomes) - asking)
        self.values[:, 1:] += np.array(counts)[:, 1:]
        all_passed, extra = np.sum(passed == asked), np.sum(drafted - had)
        self.values[:, 0] += len(asked), extra, all_passed, 0, np.sum(accepted - passed)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what to expect for K = 0 to MAX_DRAFT: accepted tokens, and chances of drafts.

        The second has the chance that a K-th token is drafted, and at 0 the number of extra ones. A
        position with few counts of its own borrows the rate of all positions, to which PRIOR_TOKENS
        at TYPICAL_RATE are added. As long as that rate is not well known, each accepted token makes
        the next one likelier (the predictive rate of a Beta distribution). After an accepted token
        a drafter is taken to have another one, unless it was seen to have none.
        """
        asked, had, reached, offered, passed = self.values
        before = np.arange(MAX_DRAFT)
        known = PRIOR_TOKENS + offered[1:].sum() + before
        borrowed = (PRIOR_TOKENS * TYPICAL_RATE + passed[1:].sum() + before) / known
        rates = (passed[1:] + SMOOTHING * borrowed) / (offered[1:] + SMOOTHING)
        offers = (offered[1:] + 1) / (reached[1:] + 1)
        survival = np.cumprod([1.0, *rates * offers])
        accepts = np.cumsum(survival) - 1 + survival * passed[0] / (reached[0] + 1)
        accepts[0] = 0
        chances = had / (asked + 1)
        chances[1:] = np.minimum.accumulate((had[1:] + 1) / (asked[1:] + 1))
        return accepts, chances


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
                # What is known is doubted: a round is slower by chance, but not so much faster.
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
        """Return which of SIZES are known, with a share or plain."""
        own = range(kind(1, share), kind(1, share) + len(SIZES) - 1)
        return sorted(n % len(SIZES) for n in self.known if n == 0 or n in own)

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
                costs, seen, last = np.array([self.known[kind(n, share)] for n in sizes]).T
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


@dataclass
class Exploration:
    """What looks may lose, and have lost, in passes over one token."""

    budget: float = EXPLORED_FIRST
    idle: float = 0  # rounds without a draft
    patience: float = 1.0  # before a probe; it doubles with each that changes nothing
    probe_loss: float = 0.0  # of the last probe


class AdaptiveSchedule(Schedule):
    """Chooses the draft length with the most expected tokens per second; 0 if none pays.

    A round that drafts K tokens is expected to emit 1 + the tokens accepted (2211.17192, equation
    1, with a rate for each position). What it takes is learned from the rounds themselves, for each
    size of the batch, beginning with a guess: a length that might be better than the best known one
    is looked at as long as that has cost little. Threads may share one schedule; a look that
    several of them begin at once is charged once.

    With several `shares` it chooses among all lengths of each in the same way, see `Shared`.
    """

    def __init__(self, store: Path | None = None, shares: Sequence[float] = (1.0,)) -> None:
        self.shares = shares
        # To choose from: an index of a share, and a length.
        self._choices = [(i, n) for i in range(len(shares)) for n in LENGTHS if n or i == 0]
        self._learning = threading.Lock()
        self._store = store
        self._counts, costs, self._exploration = _read(store, len(shares))
        self._costs = defaultdict(Costs, costs)  # by the size of the batch
        self._rounds, self._save_at = 0, SAVED_FIRST
        # By the size of the batch: an index of the choices, and what to expect in a cost of 1.
        self._best: dict[int, tuple[int, float]] = {}
        # What the next rounds are to draft, and whether that is a look at another length; by the
        # size of the batch. To choose for each round takes longer than a small model's pass.
        self._plans: defaultdict[int, deque[tuple[Choice, bool]]] = defaultdict(deque)
        self._seen: list[tuple[Outcome, bool]] = []  # since the last plan was made

    def next(self, remaining: int, rows: int = 1) -> int:
        return self.choice(remaining, rows)[1]

    def choice(self, remaining: int, rows: int = 1) -> Choice:
        """Return an index of the shares, and what `next` does."""
        with self._learning:
            plan = self._plans[_size(rows)]
            if not plan:
                plan.extend(self._choose(_size(rows)))
            share, num_draft = plan[0][0]
            return share, min(num_draft, remaining - 1)

    def kept(self, found: int) -> int:
        return LENGTHS[bisect(LENGTHS, found) - 1]

    def observe(self, outcome: Outcome) -> None:
        with self._learning:
            plan = self._plans[_size(outcome.rows)]
            choice, looks = plan.popleft() if plan else ((0, 0), False)
            looks &= choice == (outcome.share, outcome.num_draft)
            if looks and not outcome.typical and not (self._seen and self._seen[-1][1]):
                plan.appendleft((choice, True))  # once more, as its time says nothing
            self._seen.append((outcome, looks))
            if not plan:
                self._learn()

    def _learn(self) -> None:
        by_size: dict[int, list[tuple[int, float]]] = {}
        for outcome, _ in self._seen:
            if outcome.typical:
                times = by_size.setdefault(_size(outcome.rows), [])
                times.append((outcome.kind, outcome.seconds))
        for size, times in by_size.items():
            self._costs[size].observe(times)
        for outcome, looks in self._seen:
            self._rounds += 1
            costs = self._costs[_size(outcome.rows)]
            if looks:
                self._charge(costs, outcome)
            else:
                self._exploration.budget += EXPLORED * costs.cost(outcome.kind)
            self._exploration.idle = 0 if outcome.num_draft else self._exploration.idle + 1
        for share, counts in enumerate(self._counts):
            if drafts := [o for o, _ in self._seen if o.num_draft and o.share == share]:
                counts.add(drafts)
            elif len(self._counts) > 1:
                counts.values *= LONGEST ** len(self._seen)
        self._seen.clear()
        if self._rounds >= self._save_at:
            self._save_at *= 2
            self._save()

    def _charge(self, costs: Costs, outcome: Outcome) -> None:
        """Charge what a look has lost; a probe also a draft's reading of the text so far.

        A look that happens to gain is credited, so that luck averages out.
        """
        usual, scale = costs.curves(outcome.share)[0][outcome.kind % len(SIZES)], costs.scale
        spent = outcome.seconds / scale if scale else usual
        best, rate = self._best[_size(outcome.rows)]
        gained = (1 + fmean(outcome.num_accepted)) / rate
        if best:
            self._exploration.budget -= min(spent, MOST_CHARGED * usual) - gained
        else:
            self._exploration.probe_loss += spent - gained

    def _expected(self, costs: Costs) -> np.ndarray:
        """Return for each choice its tokens and cost to expect, its least cost, and if it is near.

        What is longer than twice what is known is not near: its cost is a mere guess.
        """
        parts = []
        near = np.array(LENGTHS) < 2 * max([1, *(n % len(SIZES) for n in costs.known)])
        for share, counts in enumerate(self._counts):
            accepts, chances = counts.expected()
            expected, least = (_per_length(curve, chances) for curve in costs.curves(share))
            part = np.stack([1 + accepts[LENGTHS], expected, least, near])
            parts.append(part[:, min(share, 1) :])
        return np.concatenate(parts, axis=1)

    def _choose(self, size: int) -> list[tuple[Choice, bool]]:
        """Return what the next rounds are to draft, and whether each is a look."""
        costs, exploration = self._costs[size], self._exploration
        emitted, expected, least, near = self._expected(costs)
        rates, possible = emitted / expected, near * emitted / least
        if 0 not in costs.known:
            possible[0] = np.inf  # plain decoding is what others must not be slower than
        promised = rates / np.array([OTHER_SHARE if share else 1.0 for share, _ in self._choices])
        best, (before, _) = int(np.argmax(promised)), self._best.get(size, (None, 1.0))
        if before is not None and promised[best] < WORTHWHILE * promised[before]:
            best = before
        self._best[size] = best, rates[best]
        losses = np.maximum(expected - emitted / rates[best], 0)
        usual = (self._choices[best], False)
        # What others draft says nothing of shares that have hardly been seen.
        unknown = [
            i for i, (share, length) in enumerate(self._choices)
            if self._counts[share].values[0, 1] < ROUNDS_OF_SHARE
            and share != usual[0][0] and length == (usual[0][1] or FIRST_PROBE)
        ]  # fmt: skip
        seen = sum(rounds for _, rounds, _ in costs.known.values())
        count = 1 + min(int(max(self._rounds, seen)) // PLANNED_EVERY, MOST_PLANNED - 1)
        if best != before:
            count = min(count, NEWLY_CHOSEN)
        after = min(count // 2, AROUND)  # a look, which is compared with these and those before it
        if best == 0:
            other = unknown[0] if unknown else 1 + int(np.argmax(rates[1:]))
            # What is accepted is not seen meanwhile.
            loss = max(exploration.probe_loss, 0.0) or losses[other]
            patience = min(max(1.0, exploration.patience * loss / EXPLORED), MOST_IDLE)
            if exploration.idle >= patience:
                exploration.probe_loss = 0.0
                exploration.patience = min(2 * exploration.patience, MAX_PATIENCE)
                return [(self._choices[other], True), *[usual] * after]
            if best == before:  # meanwhile there is nothing to learn that could change the choice
                count *= IDLE_PLANNED
            return [usual] * min(count, math.ceil(patience - exploration.idle))
        exploration.patience = 1.0
        if costs.rounds >= FIRST_ROUNDS:
            # The usual length may be slower than its known cost says, too.
            surpassed = WORTHWHILE * rates[best] * least[best] / expected[best]
            gains = np.where(losses <= exploration.budget, possible - surpassed, 0)
            gains[best] = 0
            for i in unknown:  # whatever it promises
                gains[i] = np.inf if losses[i] <= exploration.budget else 0
            other = int(np.argmax(gains / np.maximum(losses, LEAST_LOSS)))
            if gains[other] > 0:
                before_look = [usual] * (count - 1 - after)
                return [*before_look, (self._choices[other], True), *[usual] * after]
        return [usual] * count

    def keep(self) -> None:
        """Keep what was learned for later processes, at the end of this one."""
        if self._learning.acquire(blocking=False):  # a thread that is no more may hold it
            self._learn()
            self._save()
            self._learning.release()

    def _save(self) -> None:
        if self._store is None:
            return
        sizes = {
            str(size): {str(n): each[:2] for n, each in costs.known.items()}
            for size, costs in self._costs.items()
        }
        counts = [each.values.tolist() for each in self._counts]
        exploration = astuple(self._exploration)
        kept = {"counts": counts, "costs": sizes, "exploration": exploration}
        with contextlib.suppress(OSError):  # then each process learns for itself
            write_whole(self._store, json.dumps(kept).encode())


class Shared(Schedule):
    """The schedule of one batch, by one that chooses a share as well: who drafts in a round."""

    def __init__(self, schedule: AdaptiveSchedule) -> None:
        self._schedule = schedule
        self._share = 0  # in this round

    def next(self, remaining: int, rows: int = 1) -> int:
        self._share, num_draft = self._schedule.choice(remaining, rows)
        return num_draft

    def split(self, num_draft: int) -> tuple[int, int]:
        """Return how many tokens the model drafts in this round, and then the lookup at most."""
        by_model = math.ceil(self._schedule.shares[self._share] * num_draft)
        return by_model, num_draft - by_model

    def kept(self, found: int) -> int:
        return self._schedule.kept(found)

    def observe(self, outcome: Outcome) -> None:
        self._schedule.observe(replace(outcome, share=self._share))


def _up_to(ends: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return how many of `ends`, or what weight of them, are i or more, for i = 0 to MAX_DRAFT."""
    counts: np.ndarray = np.bincount(ends, weights, MAX_DRAFT + 1)
    return counts[::-1].cumsum()[::-1]


def _middle(rounds: Sequence[tuple[int, float]]) -> float:
    """Return the median of the second values."""
    return median(value for _, value in rounds)


def _per_length(curve: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return the mean cost of a round for each of LENGTHS, given `Counts.expected`'s chances."""
    steps = np.diff(curve[1:])  # of each token more in a pass
    mean = curve[1] + np.cumsum([0.0, *chances[1:] * steps])
    mean[1:] += chances[0] * steps  # of a lookup's tokens after the model's
    mean[0] = curve[0]
    costs: np.ndarray = mean[LENGTHS]
    return costs


def _size(rows: int) -> int:
    """Return the next power of 2: batches of similar size have the same costs."""
    return 1 << (rows - 1).bit_length()


def stored(*settings: object, shares: Sequence[float] = (1.0,)) -> AdaptiveSchedule:
    """Return a schedule for models and options, which knows what earlier processes have learned.

    The key has the `repr` of the settings, and the hardware: a laptop's name changes with its
    network.
    """
    device = mx.default_device()
    names = [mx.device_info(each).get("device_name") for each in (mx.cpu, device)]
    hardware = (platform.machine(), *names, device, libraries.num_threads())
    code = (__version__, version("mlx"), libraries.parts())
    digest = hashlib.sha256(repr((code, hardware, settings, shares)).encode()).hexdigest()
    folder = cache_folder()
    with contextlib.suppress(OSError):  # then nothing is kept
        folder.mkdir(parents=True, exist_ok=True)
    schedule = AdaptiveSchedule(folder / f"{digest[:32]}.json", shares)
    atexit.register(schedule.keep)
    return schedule


def cache_folder() -> Path:
    """Return the folder of what schedules have learned; what is deleted is learned again."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        root = tempfile.gettempdir()
    return Path(root) / "speculative_t5" / "draft-lengths"


def _read(path: Path | None, shares: int) -> tuple[list[Counts], dict[int, Costs], Exploration]:
    """Return what a file has, costs by batch size; nothing learned if missing or damaged."""
    nothing = [Counts() for _ in range(shares)], dict[int, Costs](), Exploration()
    if path is None:
        return nothing
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        counts = [Counts(each) for each in found["counts"]]
        costs = {
            int(size): {int(n): (float(cost), float(seen)) for n, (cost, seen) in known.items()}
            for size, known in found["costs"].items()
        }
        exploration = Exploration(*map(float, found["exploration"]))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return nothing
    except RecursionError:  # brackets within brackets
        return nothing
    known = [(n, *each) for lengths in costs.values() for n, each in lengths.items()]
    shapes = [each.values.shape for each in counts]
    whole = shapes == [(5, MAX_DRAFT + 1)] * shares and all(
        0 <= n < shares * len(SIZES) and 0 < cost < math.inf and 0 < seen < math.inf
        for n, cost, seen in known
    )
    numbers = [n for each in counts for n in each.values.flat]
    finite = np.isfinite([*numbers, *astuple(exploration)]).all()
    if not (whole and finite and min(numbers) >= 0):
        return nothing
    exploration.budget = min(exploration.budget, EXPLORED_FIRST)
    return counts, {size: Costs(known) for size, known in costs.items()}, exploration
