"""MLX on this machine: its device, its threads and its memory.

The package imports this module before anything else imports `mlx.core`, as `libraries` are to be
loaded ahead of it.
"""

import os
import platform
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from . import libraries  # isort: skip  (before mlx.core)

MEMORY_INFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")  # of Linux
CACHED_SHARE = 8  # of Metal's memory, an eighth may be kept for reuse
DEVICE_VARIABLE = "SPECULATIVE_T5_DEVICE"  # "cpu" computes on the CPU where MLX would take a GPU
LATE_IMPORT = (
    "mlx.core was imported before speculative_t5, so MLX uses its slow reference BLAS on this CPU; "
    "import speculative_t5 first"
)

# Otherwise MLX multiplies float32 matrices in TF32, with 11 significant bits, on CUDA and on M5
# chips. It reads this once, at its first product on such a device.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx  # noqa: E402  (the libraries have to be loaded before)

MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]  # its stubs leave it out

if (chosen := os.environ.get(DEVICE_VARIABLE, "").lower()) == "cpu":
    mx.set_default_device(mx.cpu)
elif chosen not in ("", "gpu"):
    warnings.warn(
        f"{DEVICE_VARIABLE} must be cpu or gpu, got {chosen!r}: MLX's own choice is used",
        RuntimeWarning,
        stacklevel=2,
    )


class DefaultType(NamedTuple):
    """The type that a model computes in if none is asked for, and in a few words why."""

    dtype: mx.Dtype
    reason: str


def default_type(stored: Collection[mx.Dtype] = (), *, gated: bool = False) -> DefaultType:
    """Choose a model's type by the types that its weights are stored in, if any.

    `gated` says that its feed-forward is, as in T5 v1.1 and later, where float16 overflows.
    """
    if on_cpu():
        return DefaultType(mx.float32, "the CPU's libraries have no faster type")
    if gated:
        return DefaultType(mx.bfloat16, "float16 overflows in gated feed-forwards")
    if {*stored} == {mx.float16}:
        return DefaultType(mx.float16, "as stored")
    return DefaultType(mx.bfloat16, "half the size of float32, with its range")


def chip(of: mx.Device | mx.DeviceType = mx.cpu) -> str:
    """Return the name of a device's chip, or else of the processor's kind."""
    return str(mx.device_info(of).get("device_name") or platform.machine())


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


class _Process:
    used = False  # whether MLX has computed in this process, or in a parent before the fork
    forked = False  # whether a parent that had used MLX forked this process
    limited = False  # whether `limit_memory` has done its work


class _Release:
    """Releases a thread's streams and compiled functions when the thread's locals are dropped.

    MLX alone does so later, as the thread ends, waiting for the interpreter's lock: if the program
    ends meanwhile, the process aborts.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._this_thread = threading.get_ident  # modules may be gone when the interpreter ends
        self._clear = mx.clear_streams

    def __del__(self) -> None:
        # The main thread drops the locals of a daemon thread that outlives the program.
        if self._this_thread() == self._thread:
            self._clear()


_locals = threading.local()
_lock = threading.RLock()


def enter_thread() -> None:
    """Prepare the calling thread for MLX; to be called before every generation."""
    if _Process.forked:  # it would wait forever
        raise RuntimeError(
            "this process was forked from one that had used MLX, and has none of its threads: "
            "use multiprocessing's spawn start method"
        )
    _Process.used = True
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread and not hasattr(_locals, "release"):
        _locals.release = _Release()


@contextmanager
def turn() -> Iterator[None]:
    """Enter the thread, and let one at a time use a GPU, which gains nothing by more.

    On a CPU, threads compute side by side.
    """
    enter_thread()  # before the lock, which a fork may leave locked
    if on_cpu():
        yield
    else:
        with _lock:
            yield


def free_memory() -> int | None:
    """Return the bytes of main memory that programs can still take; None where it is not known.

    On Linux, of the machine and of its control group (version 2), what is less.
    """
    found = []
    with suppress(OSError, ValueError):  # not Linux
        lines = dict(line.split(":") for line in MEMORY_INFO.read_text().splitlines())
        found = [int(lines["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in lines else []
    with suppress(OSError, ValueError):  # no group, or one without a limit
        used = int((CONTROL_GROUP / "memory.current").read_text())
        stat = dict(
            line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        )
        can_go = int(stat.get("inactive_file", 0))  # files that the kernel drops when it has to
        found.append(int((CONTROL_GROUP / "memory.max").read_text()) - used + can_go)
    return max(0, min(found)) if found else None


def limit_memory() -> None:
    """Set MLX's memory limits on Metal, once and for the rest of the process.

    Memory is wired up to the size that Metal recommends, as mlx-lm wires it, so that macOS 15 and
    later do not page weights out between passes; MLX keeps at most an eighth of that for reuse. A
    limit that the user has set stays.
    """
    if _Process.limited or on_cpu() or not mx.metal.is_available():
        return
    _Process.limited = True
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if not isinstance(recommended, int) or not recommended:
        return
    if before := mx.set_wired_limit(recommended):
        mx.set_wired_limit(before)
    cache = recommended // CACHED_SHARE
    if (before := mx.set_cache_limit(cache)) < cache:
        mx.set_cache_limit(before)


def _after_fork() -> None:
    _Process.forked = _Process.used


os.register_at_fork(after_in_child=_after_fork)
if libraries.late and on_cpu():
    warnings.warn(LATE_IMPORT, RuntimeWarning, stacklevel=3)
