"""Calibration: measure what rounds cost on this machine, once per pair, and keep it on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np

from .. import __version__, device
from .draft import Draft
from .drafters import Drafter
from .results import Round
from .schedule import MAX_DRAFT, Calibration, Counts, Outcome, Schedule

GRID = (*range(13), MAX_DRAFT)  # draft lengths to time: costs rise in steps
SAMPLES = 12  # timed rounds of each length
BUDGET = 3.0  # seconds; where the samples take longer, one of each length is enough
WARMUP = 0.5  # seconds of rounds that do not count
MAX_RUNS = 100

SHAPES = [(MAX_DRAFT + 1,), (2 * MAX_DRAFT + 1,), (4, MAX_DRAFT + 1), ()]  # of a Calibration

Rehearsal = Callable[[Schedule, int], Iterator[Round]]


def calibrate(rehearse: Rehearsal, num_prompts: int, *settings: object) -> Calibration:
    """Return the calibration for these settings, from the cache or else newly measured.

    Where the cache cannot be written, every process measures for itself. `rehearse` decodes
    `num_prompts` prompts with the given schedule and seed. The measurements depend on models and
    options, the `settings`, whose `repr` is in the key.
    """
    code = (__version__, version("mlx"), device.parts)
    digest = hashlib.sha256(repr((code, hardware(), settings)).encode()).hexdigest()
    path = cache_folder() / f"{digest[:32]}.json"
    found = _read(path)
    if found is None:
        measured = measure(rehearse, num_prompts)
        found = _read(path)  # another process may have been faster: all should use the same one
        if found is None:
            found = measured
            _write(path, found)
    return found


def hardware() -> tuple[object, ...]:
    """Identify this machine by its hardware.

    Its name would not do: a laptop's changes with its network, and every container has its own.
    """
    used = mx.default_device()
    names = [mx.device_info(each).get("device_name") for each in (mx.cpu, used)]
    return (platform.machine(), *names, used, device.num_threads())


def cache_folder() -> Path:
    """Return the folder of calibrations.

    Any of them may be deleted; it is then measured again, and may come out a little different.
    """
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        root = tempfile.gettempdir()
    return Path(root) / "speculative_t5" / "calibration"


def measure(rehearse: Rehearsal, num_prompts: int) -> Calibration:
    """Time rounds of all draft lengths in `GRID`, repeatedly on the same prompts.

    The shortest times count, since disturbances only make a round longer. It takes about `BUDGET`
    seconds, or one round of each length where those take longer.
    """
    started = time.perf_counter()
    warmup, rotation = _Rotation(), _Rotation()

    def warm() -> bool:
        return warmup.rounds >= (2 if _since(started) > WARMUP else len(GRID))

    def measured() -> bool:
        return rotation.has(1 if _since(started) > BUDGET else SAMPLES)

    _run(rehearse, warmup, warm)  # the first rounds are slower, and do not count
    _run(rehearse, rotation, measured)
    counts = tuple(map(tuple, rotation.counts.values))
    draft, verify = _line(rotation.draft_seconds), _steps(rotation.verify_seconds)
    return Calibration(draft, verify, counts, num_prompts)


def _run(rehearse: Rehearsal, rotation: _Rotation, enough: Callable[[], bool]) -> None:
    for seed in range(MAX_RUNS):
        rotation.ended = False
        for _ in rehearse(rotation, seed):
            if enough():
                return
            if rotation.ended:
                break


def _since(moment: float) -> float:
    return time.perf_counter() - moment


class _Rotation:
    """A schedule that cycles through the grid, and records what it observes.

    Rounds count only until a row of the batch has ended: fewer rows cost less.
    """

    def __init__(self) -> None:
        self.draft_seconds: defaultdict[int, list[float]] = defaultdict(list)  # by K
        self.verify_seconds: defaultdict[int, list[float]] = defaultdict(list)  # by L
        self.counts = Counts()
        self.rounds = 0
        self.ended = False
        self._rows = 0
        self._order = random.Random(0)
        self._ahead: list[int] = []

    def has(self, samples: int) -> bool:
        """Whether every length of the grid has been timed `samples` times."""
        return all(len(self.draft_seconds[num_draft]) >= samples for num_draft in GRID)

    def next(self, remaining: int) -> int:
        # In a new order each time: the first round of a run also encodes the draft's source.
        self._ahead = self._ahead or self._order.sample(GRID, len(GRID))
        return min(self._ahead.pop(), remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        self.rounds += 1
        self._rows = self._rows or len(outcome.num_drafted)
        self.ended = len(outcome.num_drafted) < self._rows
        if self.ended:
            return
        if outcome.num_draft:
            self.counts.add(outcome)
        self.draft_seconds[outcome.num_draft].append(outcome.draft_seconds)
        length = 1 + max(outcome.num_draft, *outcome.num_drafted)  # drafts are `Padded`
        self.verify_seconds[length].append(outcome.verify_seconds)


class Padded:
    """Pads another drafter's drafts to the length asked for.

    Rehearsals need it: the time of a pass must not depend on how much a lookup happens to find.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.start = drafter.start
        self.replace = drafter.replace
        self.select = drafter.select
        self._propose = drafter.propose

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        draft = self._propose(context, num_draft, keys)
        lacking = max(0, num_draft - draft.tokens.shape[1])
        probs = draft.probs
        if probs is not None:
            probs = mx.pad(probs, [(0, 0), (0, lacking), (0, 0)])
        return Draft(mx.pad(draft.tokens, [(0, 0), (0, lacking)]), draft.lengths, probs)


def _line(samples: dict[int, list[float]]) -> tuple[float, ...]:
    """Return seconds to draft 0 to MAX_DRAFT tokens, fitted by a line: tokens cost the same."""
    known = sorted(num_draft for num_draft in samples if num_draft)
    step, base = np.polyfit(known, [min(samples[num_draft]) for num_draft in known], 1)
    line = np.maximum(base + step * np.arange(MAX_DRAFT + 1), 0)
    line[0] = min(samples[0])
    return tuple(line.tolist())


def _steps(samples: dict[int, list[float]]) -> tuple[float, ...]:
    """Return seconds to verify 1 to 2 MAX_DRAFT + 1 tokens, interpolated between measurements.

    Times never fall with length: a shorter pass can always be padded to a longer one.
    """
    known = sorted(samples)
    measured = [min(samples[length]) for length in known]
    values = np.minimum.accumulate(measured[::-1])[::-1].tolist()
    end = 2 * MAX_DRAFT + 1
    if known[-1] < end:
        slope = (values[-1] - values[0]) / max(known[-1] - known[0], 1)
        values.append(values[-1] + max(slope, 0) * (end - known[-1]))
        known.append(end)
    return tuple(np.interp(range(1, end + 1), known, values).tolist())


def _read(path: Path) -> Calibration | None:
    """Return the calibration in a file; None if it is missing or damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tables = [np.array(raw[field.name], dtype=float) for field in fields(Calibration)]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if [table.shape for table in tables] != SHAPES:
        return None
    draft, verify, counts, num_prompts = tables
    if not all(np.isfinite(t).all() and t.min() >= 0 for t in tables) or verify.min() == 0:
        return None
    rows = tuple(map(tuple, counts.tolist()))
    return Calibration(tuple(draft.tolist()), tuple(verify.tolist()), rows, int(num_prompts))


def _write(path: Path, calibration: Calibration) -> None:
    # Where this fails, the next process measures again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            part.write_text(json.dumps(asdict(calibration)), encoding="utf-8")
            part.replace(path)
