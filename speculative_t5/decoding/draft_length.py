"""How many tokens to draft next: a fixed number, or the one that pays best on this machine."""

import contextlib
import hashlib
import json
import math
import os
import platform
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import mlx.core as mx
import numpy as np

from .. import __version__
from ..cpu import libraries
from ..files import write_whole
from .results import Round

MAX_DRAFT = 16  # the most that an adaptive schedule asks for
LENGTHS = np.arange(1, 2 * MAX_DRAFT + 2)  # of verifying passes: a lookup may add as many tokens

TYPICAL_RATE = 0.8  # acceptance rate of a draft that is worth having
PRIOR_TOKENS = 24.0  # weight, in tokens, of the expected rate against a text's own tokens
PROMPT_TOKENS, MOST_TOKENS = 12.0, 200.0  # weight of each further calibration prompt, and of all
PRIOR_ROUNDS = 8.0  # weight, in rounds, of a calibration's draft lengths
SMOOTHING = 16.0  # tokens that each position borrows from all positions together
MEMORY = 0.98  # factor by which counts decay each round
PROBE_SHARE = 1 / 64  # of the time that may be spent on probes: drafting where it did not pay
MAX_PATIENCE = 8  # longest wait between failed probes, as a multiple of the first


@dataclass(frozen=True)
class Outcome:
    """Counts and times of one round of a batch; the counts of rows with room for `num_draft`."""

    num_draft: int  # tokens that the drafter was asked for
    num_drafted: Sequence[int]  # that it proposed, by row
    num_accepted: Sequence[int]  # that were accepted and emitted
    draft_seconds: float  # of the host; with `Plan.timed`, until the device has drafted
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
        return


@dataclass(frozen=True)
class FixedSchedule(Schedule):
    """Always drafts the same number of tokens, unless the output is about to end."""

    num_draft: int

    def next(self, remaining: int) -> int:
        return min(self.num_draft, remaining - 1)


@dataclass(frozen=True)
class Calibration:
    """Measurements of a target and a drafter on this machine."""

    draft_seconds: Sequence[float]  # to draft K tokens, for K = 0 to MAX_DRAFT
    verify_seconds: Sequence[float]  # of a pass over L tokens and its verdict, from L = 1 on
    counts: Sequence[Sequence[float]]  # `Counts.values` of the measured rounds
    num_prompts: int  # that the rounds came from


class Counts:
    """Counts of drafted and accepted tokens by position.

    `values` are four lists of MAX_DRAFT + 1. At i, from 1, they count rows that were asked for i
    tokens or more: `reached` those that accepted the first i - 1, `passed` those that accepted the
    i-th as well, `asked` all of them, `had` those that drafted as many. At 0 they count what a
    drafter adds after the tokens asked for: `reached` rows that accepted all tokens asked for,
    `passed` extra tokens accepted, `asked` all rows, `had` extra tokens.
    """

    # Lists of floats: arrays so short are slower, and the device idles meanwhile.
    def __init__(self, values: Sequence[Sequence[float]] | None = None) -> None:
        self.values = [list(row) for row in values or [[0.0] * (MAX_DRAFT + 1)] * 4]

    def add(self, outcome: Outcome) -> None:
        """Count a round for which at least one token was asked."""
        num_draft = outcome.num_draft
        reached, passed, asked, had = self.values
        for drafted, accepted in zip(outcome.num_drafted, outcome.num_accepted, strict=True):
            for position in range(1, num_draft + 1):
                reached[position] += accepted >= position - 1
                passed[position] += accepted >= position
                asked[position] += 1
                had[position] += drafted >= position
            reached[0] += accepted >= num_draft
            passed[0] += max(accepted - num_draft, 0)
            asked[0] += 1
            had[0] += max(drafted - num_draft, 0)

    def pooled(self) -> float:
        """Return the acceptance rate of all positions together."""
        reached, passed, _, _ = self.values
        return (sum(passed[1:]) + 0.5) / (sum(reached[1:]) + 1)

    def expected(self, rate: float) -> tuple[list[float], list[float]]:
        """Return the expected numbers of accepted and of drafted tokens, for K = 0 to MAX_DRAFT.

        A position with few counts of its own borrows the rate of all positions, to which `rate`
        adds PRIOR_TOKENS tokens. As long as that rate is not well known, each accepted token makes
        the next one likelier (the predictive rate of a Beta distribution).
        """
        reached, passed, asked, had = self.values
        known = PRIOR_TOKENS + sum(reached[1:])
        likely = PRIOR_TOKENS * rate + sum(passed[1:])
        extra_accepted = passed[0] / (reached[0] + 1)
        extra_drafted = had[0] / (asked[0] + 1)
        accepts, drafts = [0.0], [0.0]
        survival, accepted, drafted = 1.0, 0.0, 0.0
        for position in range(1, MAX_DRAFT + 1):
            borrowed = (likely + position - 1) / (known + position - 1)
            survival *= (passed[position] + SMOOTHING * borrowed) / (reached[position] + SMOOTHING)
            accepted += survival
            drafted += (had[position] + 1) / (asked[position] + 1)
            accepts.append(accepted + survival * extra_accepted)
            drafts.append(drafted + extra_drafted)
        return accepts, drafts


def rate_of_others(calibration: Calibration) -> float:
    """Return the acceptance rate to expect on other prompts than the calibration's.

    On the scale of log-odds, the rate of n prompts is shrunk towards that of a typical draft by one
    part in n + 1 (the random-effects estimate where prompts vary as much as pairs do).
    """
    rates = (Counts(calibration.counts).pooled(), TYPICAL_RATE)
    here, typical = (math.log(rate / (1 - rate)) for rate in rates)
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
    1, with a rate for each position), and takes as long as calibrated. Rates begin with the
    calibration's and follow the outcomes. Threads may share one schedule.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._learning = threading.Lock()
        self._rate = rate_of_others(calibration)
        self._counts = counts_for_others(calibration)
        self._draft_seconds = np.array(calibration.draft_seconds)
        draft, verify = calibration.draft_seconds, calibration.verify_seconds
        extra = (draft[1] + verify[1]) / (draft[0] + verify[0]) - 1
        self._idle = 0  # rounds without a draft
        self._patience = max(1.0, extra / PROBE_SHARE)  # such rounds before a probe
        self._most_patience = MAX_PATIENCE * self._patience
        self._best = self._best_length()

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
            self._counts = Counts([[MEMORY * n for n in row] for row in self._counts.values])
            self._counts.add(outcome)
            self._best = self._best_length()

    def _best_length(self) -> int:
        accepts, drafts = map(np.array, self._counts.expected(self._rate))
        verifying = np.interp(1 + drafts, LENGTHS, self.calibration.verify_seconds)
        return int(np.argmax((1 + accepts) / (self._draft_seconds + verifying)))


GRID = (*range(13), MAX_DRAFT)  # draft lengths to time: costs rise in steps
SAMPLES = 12  # timed rounds of each length
BUDGET = 3.0  # seconds; where the samples take longer, one of each length is enough
SETTLING = 0.5  # seconds of rounds that do not count
MAX_RUNS = 100

SHAPES = [(MAX_DRAFT + 1,), (2 * MAX_DRAFT + 1,), (4, MAX_DRAFT + 1), ()]  # of a Calibration

WarmUp = Callable[[Schedule, int], Iterator[Round]]


def calibrate(warm_up: WarmUp, num_prompts: int, *settings: object) -> Calibration:
    """Return the calibration for models and options, from the cache or else newly measured.

    `warm_up` decodes `num_prompts` prompts with a schedule and a seed. The key has the `repr` of
    the settings, and the hardware: a laptop's name changes with its network.
    """
    device = mx.default_device()
    names = [mx.device_info(each).get("device_name") for each in (mx.cpu, device)]
    hardware = (platform.machine(), *names, device, libraries.num_threads())
    code = (__version__, version("mlx"), libraries.parts())
    digest = hashlib.sha256(repr((code, hardware, settings)).encode()).hexdigest()
    path = cache_folder() / f"{digest[:32]}.json"
    if found := _read(path):
        return found
    measured = measure(warm_up, num_prompts)
    if found := _read(path):  # another process was faster: all should use the same one
        return found
    with contextlib.suppress(OSError):  # then each process measures for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(measured)).encode())
    return measured


def cache_folder() -> Path:
    """Return the folder of calibrations; one that is deleted is measured again."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        root = tempfile.gettempdir()
    return Path(root) / "speculative_t5" / "calibration"


def measure(warm_up: WarmUp, num_prompts: int) -> Calibration:
    """Time rounds of all draft lengths in `GRID`, repeatedly on the same prompts.

    The shortest times count, since disturbances only make a round longer.
    """
    rotation = _Rotation()
    for seed in range(MAX_RUNS):
        for _ in warm_up(rotation, seed):
            if rotation.has_enough() or rotation.ended:
                break
        if rotation.has_enough():
            break
    draft, verify = _line(rotation.draft_seconds), _steps(rotation.verify_seconds)
    return Calibration(draft, verify, rotation.counts.values, num_prompts)


class _Rotation:
    """A schedule that cycles through the grid, and records rounds until a row has ended."""

    def __init__(self) -> None:
        self.draft_seconds: dict[int, list[float]] = {length: [] for length in GRID}  # by K
        self.verify_seconds: defaultdict[int, list[float]] = defaultdict(list)  # by L
        self.counts = Counts()
        self.ended = False  # whether a row has: fewer rows cost less
        self._started = time.perf_counter()
        self._rounds = self._rows = 0
        self._order = random.Random(0)
        self._lengths: list[int] = []

    def has_enough(self) -> bool:
        """Whether every length of the grid has been timed often enough."""
        least = 1 if self._is_after(BUDGET) else SAMPLES
        return min(len(self.draft_seconds[length]) for length in GRID) >= least

    def _is_after(self, seconds: float) -> bool:
        return time.perf_counter() - self._started > seconds

    def next(self, remaining: int) -> int:
        # In a new order each time: the first round of a run also encodes the draft's source.
        self._lengths = self._lengths or self._order.sample(GRID, len(GRID))
        return min(self._lengths.pop(), remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        self._rounds += 1
        self._rows = self._rows or len(outcome.num_drafted)
        self.ended = len(outcome.num_drafted) < self._rows
        # The first rounds are slower, and do not count.
        if self.ended or self._rounds <= (2 if self._is_after(SETTLING) else len(GRID)):
            return
        if outcome.num_draft:
            self.counts.add(outcome)
        self.draft_seconds.setdefault(outcome.num_draft, []).append(outcome.draft_seconds)
        length = 1 + max(outcome.num_draft, *outcome.num_drafted)  # drafts are padded
        self.verify_seconds[length].append(outcome.verify_seconds)


def _line(samples: dict[int, list[float]]) -> list[float]:
    """Return seconds to draft 0 to MAX_DRAFT tokens, fitted by a line: tokens cost the same."""
    known = sorted(num_draft for num_draft in samples if num_draft)
    step, base = np.polyfit(known, [min(samples[num_draft]) for num_draft in known], 1)
    line: list[float] = np.maximum(base + step * np.arange(MAX_DRAFT + 1), 0).tolist()
    return [min(samples[0]), *line[1:]]


def _steps(samples: dict[int, list[float]]) -> list[float]:
    """Return seconds to verify 1 to 2 MAX_DRAFT + 1 tokens, interpolated between measurements.

    Times never fall with length: a shorter pass can always be padded to a longer one.
    """
    known = sorted(samples)
    measured = [min(samples[length]) for length in known]
    values = np.minimum.accumulate(measured[::-1])[::-1]
    slope = (values[-1] - values[0]) / max(known[-1] - known[0], 1)
    beyond = np.maximum(LENGTHS - known[-1], 0) * slope
    found: list[float] = (np.interp(LENGTHS, known, values) + beyond).tolist()
    return found


def _read(path: Path) -> Calibration | None:
    """Return the calibration in a file; None if it is missing or damaged."""
    try:
        found = Calibration(**json.loads(path.read_text(encoding="utf-8")))
        tables = [np.array(table, dtype=float) for table in vars(found).values()]
    except (OSError, ValueError, TypeError):
        return None
    whole = [table.shape for table in tables] == SHAPES and min(found.verify_seconds) > 0
    return found if whole and all(np.isfinite(t).all() and t.min() >= 0 for t in tables) else None
