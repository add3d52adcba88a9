"""Whether a kernel of ours is used on this machine: where it is right here, and faster.

A kernel that is used is used for 1 to 8 rows, or 1 to 16, so that a token has the same bits in a
pass of its own and in one that verifies it. It has to save a share of the time of such passes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import mlx.core as mx

from ..._version import __version__
from ...device import MLX_VERSION, chip
from ...errors import count, first_line
from ...files import cache_folder, write_whole

ROWS = (1, 2, 4, 6, 8, 9, 16)  # at which a kernel is tried
CHECKED_ROWS = (1, 2, 3, 4, 6, 7, 8, 9, 16)  # which share reads by 1 to 8
FEWER_ROWS, MAX_ROWS = 8, ROWS[-1]  # up to which it may be used
GAIN = 0.95  # the most that ours may take, as a share of MLX's time
SLOWEST = 1.05  # the same of one row, as in plain decoding, and of more than FEWER_ROWS
CHAIN, REPEATS = 16, 3  # operations that wait for each other, and how often their time is taken
SHORTEST_CHAIN, BYTES_OF_CHAIN = 2, 2**28  # fewer are timed where each reads much
# Of the largest number of a result in float32: what rounding may change.
ROUNDING = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.2e-2}

Operation = Callable[[mx.array, int], mx.array]  # of rows, with one of several matrices


@dataclass(frozen=True)
class Choice:
    """Up to how many rows a kernel is used, and why."""

    rows: int  # 0 if it is not
    reason: str
    speeds: dict[str, float] = field(default_factory=dict)  # over MLX's, by number of rows


def judge_kernel(
    ours: Operation,
    theirs: Operation,
    rows: Callable[[int], mx.array],
    *,
    exact: Operation | None = None,
    size: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Try a kernel beside MLX's operations.

    Whatever goes wrong in it is a reason not to use it.

    Args:
        ours: The kernel, on rows (M, K) of any number.
        theirs: The same by MLX.
        exact: The same in float32; else what MLX computes has to do.
        rows: Makes this many rows.
        size: Bytes that an operation reads.
        clock: Seconds.
    """
    chain = max(SHORTEST_CHAIN, min(CHAIN, BYTES_OF_CHAIN // max(size, 1)))
    try:
        for number in CHECKED_ROWS:
            if fault := _fault(ours, exact or theirs, rows(number)):
                return Choice(0, fault)
        seconds = {each: _chain_seconds(ours, theirs, rows(each), chain, clock) for each in ROWS}
    except Exception as error:  # noqa: BLE001  (of a compiler or driver that nobody has tried)
        return Choice(0, what_failed(error))
    speeds = {str(number): round(mlx / own, 3) for number, (own, mlx) in seconds.items()}
    most = [sum(seconds[each][i] for each in ROWS if each > FEWER_ROWS) for i in (0, 1)]
    limit = FEWER_ROWS if most[0] > SLOWEST * most[1] else MAX_ROWS
    several = [each for each in ROWS if 1 < each <= limit]
    pair = [seconds[1][i] + fmean(seconds[each][i] for each in several) for i in (0, 1)]
    if seconds[1][0] > SLOWEST * seconds[1][1]:
        return Choice(0, f"a row takes {seconds[1][0] / seconds[1][1]:.2f} times MLX's", speeds)
    if pair[0] > GAIN * pair[1]:
        return Choice(0, f"it is {pair[1] / pair[0]:.2f} times as fast as MLX's", speeds)
    gain = f"{pair[1] / pair[0]:.2f} times as fast as MLX's"
    return Choice(limit, f"{gain}, up to {limit} rows", speeds)


def _fault(ours: Operation, exact: Operation, x: mx.array) -> str | None:
    """Say what is wrong with a kernel's results, if anything is."""
    found = ours(x, 0)
    if why := apart(found, exact(x, 0)):
        return f"the result for {count(len(x), 'row')} is {why}"
    single = mx.concatenate([ours(x[i : i + 1], 0) for i in range(len(x))])
    if not mx.array_equal(found, single):
        return f"{count(len(x), 'row')} have other bits than each of them alone"
    return None


def apart(found: mx.array, wanted: mx.array) -> str | None:
    """Say how far a result is from what it has to be, if rounding does not explain it."""
    off = float(mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)).max())
    most = ROUNDING[found.dtype] * float(mx.abs(wanted.astype(mx.float32)).max())
    return None if off <= most else f"off by {off:.3g}, and rounding allows {most:.3g}"


def what_failed(error: Exception) -> str:
    """Return a reason not to use a kernel; a compiler says what is wrong behind its first line."""
    told = [line for line in str(error).splitlines() if "error:" in line]
    return f"it failed: {first_line(ValueError(told[0]) if told else error)}"


def _chain_seconds(
    ours: Operation, theirs: Operation, x: mx.array, length: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the least seconds of a chain of each, taken in turns."""

    def chain(operation: Operation) -> float:
        y = x
        for i in range(length):
            # The next one waits for this one; calls that do not depend on each other overlap.
            y = mx.maximum(x, operation(y, i)[:, :1])
        began = clock()
        mx.eval(y)
        return clock() - began

    turns = [(chain(ours), chain(theirs)) for _ in range(REPEATS + 1)][1:]
    own, mlx = (min(times) for times in zip(*turns, strict=True))
    return max(own, 1e-9), max(mlx, 1e-9)


_by_file: dict[Path, dict[str, Choice]] = {}  # by this process, and by others before


class Choices:
    """What was chosen on this machine, kept for later processes; what is deleted is tried again."""

    def __init__(self, source: str) -> None:
        """Read what was chosen for kernels of this source, by this system's compiler."""
        system = platform.mac_ver()[0]
        kind = repr((__version__, MLX_VERSION, chip(mx.gpu), system, source)).encode()
        folder = cache_folder() / "kernels"
        self._path = folder / f"{hashlib.sha256(kind).hexdigest()[:32]}.json"
        self._made = _by_file.setdefault(self._path, {})
        self._read()

    def _read(self) -> None:
        """Take what other processes have tried."""
        with contextlib.suppress(
            OSError, ValueError, TypeError, AttributeError
        ):  # then all are tried again
            kept = json.loads(self._path.read_bytes())
            self._made |= {key: Choice(**choice) for key, choice in kept.items()} | self._made

    def of(self, key: str, judged: Callable[[], Choice]) -> Choice:
        """Return what was chosen for a key, or try it."""
        if key not in self._made:
            self._made[key] = judged()
            self._read()
            kept = json.dumps({key: asdict(each) for key, each in self._made.items()})
            with contextlib.suppress(OSError):  # then each process tries for itself
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, kept.encode())
        return self._made[key]

    def __contains__(self, key: str) -> bool:
        return key in self._made

    def __iter__(self) -> Iterator[tuple[str, Choice]]:
        return iter(self._made.items())
