"""What schedules of draft lengths have learned, kept on disk for later processes."""

import atexit
import contextlib
import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import device, libraries
from .._version import __version__
from ..decoding import GUESSED, LENGTHS, LONGEST_RUN, AdaptiveSchedule
from ..device import MLX_VERSION
from ..files import cache_folder, write_whole
from ..kernels import native_parts


class ScheduleFile:
    """A file of what a schedule with these shares has learned."""

    def __init__(self, path: Path, shares: Sequence[float] = (1.0,)) -> None:
        self._path = path
        self._shares = shares

    def schedule(self) -> AdaptiveSchedule:
        """Return a schedule that begins with what is kept, and keeps what it learns."""
        free = not device.on_cpu()  # a GPU has room for more rows than most batches have
        return AdaptiveSchedule(self._shares, self._read(), self._write, rows_are_free=free)

    def _read(self) -> dict[str, Any] | None:
        """Return what was learned; None if the file is missing or damaged."""
        try:
            digest, _, kept = self._path.read_bytes().partition(b"\n")
        except OSError:
            return None
        learned: dict[str, Any] | None = json.loads(kept) if digest == self._digest(kept) else None
        return learned

    def _write(self, learned: dict[str, Any]) -> None:
        kept = json.dumps(learned).encode()
        with contextlib.suppress(OSError):  # then each process learns for itself
            write_whole(self._path, self._digest(kept) + b"\n" + kept)

    def _digest(self, kept: bytes) -> bytes:
        form = repr((self._shares, LENGTHS, LONGEST_RUN, GUESSED)).encode()
        return hashlib.sha256(form + kept).hexdigest().encode()


def stored(*settings: object, shares: Sequence[float] = (1.0,)) -> AdaptiveSchedule:
    """Return a schedule for models and options, which knows what earlier processes have learned.

    The key has the `repr` of the settings, and the hardware: a laptop's name changes with its
    network.
    """
    device = mx.default_device()
    names = [mx.device_info(each).get("device_name") for each in (mx.cpu, device)]
    hardware = (platform.machine(), *names, device, libraries.num_threads())
    code = (__version__, MLX_VERSION, native_parts())
    digest = hashlib.sha256(repr((code, hardware, settings, shares)).encode()).hexdigest()
    folder = cache_folder() / "draft-lengths"
    with contextlib.suppress(OSError):  # then nothing is kept
        folder.mkdir(parents=True, exist_ok=True)
    schedule = ScheduleFile(folder / f"{digest[:32]}.json", shares).schedule()
    atexit.register(schedule.keep)
    return schedule
