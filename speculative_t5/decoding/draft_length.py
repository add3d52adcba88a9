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
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from .. import libraries
from .._version import __version__
from ..files import write_whole
from .outcomes import AROUND, MAX_DRAFT, Costs, Counts, Outcome

# Lengths to choose from: few, as each is a shape to compile, and just below the steps of GPUs.
LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 19, 24, 31, 47, MAX_DRAFT]
# Where a model and a lookup are at hand: the model's share of a draft, before the lookup adds the
# rest, which costs nothing to draft. What is tried first comes first.
SHARES = 1.0, 0.25, 0.0

# A look is a round with another length than the usual one, to learn what that costs; a probe is a
# look while nothing is usually drafted. Losses are in passes over one token.
EXPLORED = 0.01  # share of the time that looks may lose
LEAST_LOSS = 0.1  # looks that would lose less are taken to lose this much
EXPLORED_FIRST = 6.0  # what looks may lose besides, for a beginning
FIRST_ROUNDS = 3  # with a time that says something, before the first look
FIRST_PROBE = 7  # tokens, of a share that has hardly been seen
ROWS_OF_SHARE = 4  # drafts that tell what a share gives, until they are forgotten
MOST_CHARGED = 1.2  # times its usual cost, for a look that also had a pass to compile
WORTHWHILE = 1.02  # gain that another length must promise to be looked at, or to be chosen
OTHER_SHARE = 1.08  # gain over the first share for another one, as by chance one of many seems best
MAX_PATIENCE = 8  # longest wait between failed probes, as a multiple of the first
MOST_IDLE = 500  # longest wait in rounds, however slow a probe was by chance
PLANNED_EVERY, MOST_PLANNED = 8, 48  # a plan has one round more for each 8 seen, 48 at most
IDLE_PLANNED = 4  # where nothing is drafted, plans are this many times as long
NEWLY_CHOSEN = 3  # rounds after which a new choice is thought over
SAVED_FIRST = 64  # rounds before what was learned is kept first, and then as they double


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

    def split(self, num_draft: int) -> tuple[int, int]:
        """Return how many tokens a model drafts in this round, and a lookup adds at most.

        It is asked where there are both.
        """
        return num_draft, num_draft

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
    halves: bool = False  # whether a model and a lookup draft this number together

    def next(self, remaining: int, rows: int = 1) -> int:
        return min(self.num_draft, remaining - 1)

    def split(self, num_draft: int) -> tuple[int, int]:
        return ((num_draft + 1) // 2, num_draft // 2) if self.halves else super().split(num_draft)


class Planned(NamedTuple):
    """What a round is to draft, or could."""

    share: int  # an index of the shares
    num_draft: int
    looks: bool = False  # whether it is a look, or a probe


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

    With several `shares` it chooses among the lengths of all, in the same way.
    """

    def __init__(self, store: Path | None = None, shares: Sequence[float] = (1.0,)) -> None:
        self.shares = shares
        self._choices = [Planned(i, n) for i in range(len(shares)) for n in LENGTHS if n or i == 0]
        self._lengths = np.array([choice.num_draft for choice in self._choices])
        self._handicaps = np.array([OTHER_SHARE if each.share else 1.0 for each in self._choices])
        self._learning = threading.Lock()
        self._store = store
        found = _read(store, len(shares))
        self._counts = [Counts(each) for each in found.get("counts", [None] * len(shares))]
        self._costs = defaultdict[int, Costs](Costs)  # by the size of the batch
        for size, known in found.get("costs", {}).items():
            self._costs[int(size)] = Costs({int(kind): each for kind, each in known.items()})
        self._exploration = Exploration(*map(float, found.get("exploration", [])))
        self._exploration.budget = min(self._exploration.budget, EXPLORED_FIRST)
        self._rounds, self._save_at = 0, SAVED_FIRST
        # By the size of the batch: an index of the choices, and what to expect in a cost of 1.
        self._best: dict[int, tuple[int, float]] = {}
        # The next rounds, by the size of the batch. To choose for each round takes longer than a
        # small model's pass.
        self._plans: defaultdict[int, deque[Planned]] = defaultdict(deque)
        self._seen: list[tuple[Outcome, bool]] = []  # since the last plan was made

    def next(self, remaining: int, rows: int = 1) -> int:
        return self.choice(remaining, rows)[1]

    def choice(self, remaining: int, rows: int = 1) -> tuple[int, int]:
        """Return an index of the shares, and what `next` does."""
        with self._learning:
            plan = self._plans[_size(rows)]
            if not plan:
                plan.extend(self._choose(_size(rows)))
            return plan[0].share, min(plan[0].num_draft, remaining - 1)

    def kept(self, found: int) -> int:
        return LENGTHS[bisect(LENGTHS, found) - 1]

    def observe(self, outcome: Outcome) -> None:
        with self._learning:
            plan = self._plans[_size(outcome.rows)]
            planned = plan.popleft() if plan else Planned(0, 0)
            looks = planned == (outcome.share, outcome.num_draft, True)
            if looks and not outcome.typical and not (self._seen and self._seen[-1][1]):
                plan.appendleft(planned)  # once more, as its time says nothing
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
                counts.forget(len(self._seen))
        self._seen.clear()
        if self._rounds >= self._save_at:
            self._save_at *= 2
            self._save()

    def _charge(self, costs: Costs, outcome: Outcome) -> None:
        """Charge what a look has lost; a probe also a draft's reading of the text so far.

        A look that happens to gain is credited, so that luck averages out.
        """
        usual, scale = costs.curves(outcome.share)[0][outcome.size], costs.scale
        spent = outcome.seconds / scale if scale else usual
        best, rate = self._best[_size(outcome.rows)]
        gained = (1 + fmean(outcome.num_accepted)) / rate
        if best:
            self._exploration.budget -= min(spent, MOST_CHARGED * usual) - gained
        else:
            self._exploration.probe_loss += spent - gained

    def _expected(self, costs: Costs) -> np.ndarray:
        """Return the tokens and the cost to expect of each choice, and its least possible cost."""
        parts = []
        for share, counts in enumerate(self._counts):
            accepts, chances = counts.expected()
            expected, least = (_per_length(curve, chances) for curve in costs.curves(share))
            part = np.stack([1 + accepts[LENGTHS], expected, least])
            parts.append(part[:, 1:] if share else part)  # to draft nothing is a choice once
        return np.concatenate(parts, axis=1)

    def _choose(self, size: int) -> list[Planned]:
        """Return what the next rounds are to draft."""
        costs, exploration = self._costs[size], self._exploration
        emitted, expected, least = self._expected(costs)
        rates = emitted / expected
        # No further than twice what is known: the costs of long passes are a mere guess.
        longest = max([1, *(n for share in range(len(self.shares)) for n in costs.sizes(share))])
        possible = np.where(self._lengths < 2 * longest, emitted / least, 0)
        if 0 not in costs.known:
            possible[0] = np.inf  # plain decoding is what others must not be slower than
        promised = rates / self._handicaps
        best, (before, _) = int(np.argmax(promised)), self._best.get(size, (None, 1.0))
        if before is not None and promised[best] < WORTHWHILE * promised[before]:
            best = before
        self._best[size] = best, rates[best]
        losses = np.maximum(expected - emitted / rates[best], 0)
        usual = self._choices[best]
        # What others draft says nothing of shares that have hardly been seen.
        unknown = [
            i for i, (share, length, _) in enumerate(self._choices)
            if self._counts[share].rows < ROWS_OF_SHARE
            and share != usual.share and length == (usual.num_draft or FIRST_PROBE)
        ]  # fmt: skip
        seen = sum(rounds for _, rounds, _ in costs.known.values())
        count = 1 + min(int(max(self._rounds, seen)) // PLANNED_EVERY, MOST_PLANNED - 1)
        if best != before:
            count = min(count, NEWLY_CHOSEN)
        after = min(count // 2, AROUND)  # a look, which is compared with these and those before it
        if best == 0:  # plain decoding
            other = unknown[0] if unknown else 1 + int(np.argmax(rates[1:]))
            # What is accepted is not seen meanwhile.
            loss = max(exploration.probe_loss, 0.0) or losses[other]
            patience = min(max(1.0, exploration.patience * loss / EXPLORED), MOST_IDLE)
            if exploration.idle >= patience:
                exploration.probe_loss = 0.0
                exploration.patience = min(2 * exploration.patience, MAX_PATIENCE)
                return [self._choices[other]._replace(looks=True), *[usual] * after]
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
                look = self._choices[other]._replace(looks=True)
                return [*[usual] * (count - 1 - after), look, *[usual] * after]
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
        learned = {"counts": counts, "costs": sizes, "exploration": exploration}
        kept = json.dumps(learned).encode()
        with contextlib.suppress(OSError):  # then each process learns for itself
            write_whole(self._store, _digest(kept, len(self.shares)) + b"\n" + kept)


class SplitSchedule(Schedule):
    """The schedule of one batch, by one that also chooses who drafts in a round."""

    def __init__(self, schedule: AdaptiveSchedule) -> None:
        self._schedule = schedule
        self._share = 0  # in this round

    def next(self, remaining: int, rows: int = 1) -> int:
        self._share, num_draft = self._schedule.choice(remaining, rows)
        return num_draft

    def split(self, num_draft: int) -> tuple[int, int]:
        by_model = math.ceil(self._schedule.shares[self._share] * num_draft)
        return by_model, num_draft - by_model

    def kept(self, found: int) -> int:
        return self._schedule.kept(found)

    def observe(self, outcome: Outcome) -> None:
        self._schedule.observe(replace(outcome, share=self._share))


def _per_length(curve: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Return the mean cost of a round for each of LENGTHS, given `Counts.expected`'s chances."""
    steps = np.diff(curve[1:])  # of each token more in a pass
    mean = curve[1] + np.cumsum([0.0, *chances[1:] * steps])
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


def _read(path: Path | None, shares: int) -> dict[str, Any]:
    """Return what `AdaptiveSchedule.keep` has kept; nothing if it is missing or damaged."""
    try:
        digest, _, kept = path.read_bytes().partition(b"\n") if path else (b"", b"", b"")
    except OSError:
        return {}
    return json.loads(kept) if digest == _digest(kept, shares) else {}


def _digest(kept: bytes, shares: int) -> bytes:
    form = repr((shares, MAX_DRAFT, Exploration())).encode()
    return hashlib.sha256(form + kept).hexdigest().encode()
