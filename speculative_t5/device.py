"""MLX on this machine: the libraries loaded ahead of it, its device, and its threads.

The package imports this module before anything else imports `mlx.core`, because MLX's CPU wheel for
Linux links the reference BLAS, but calls the functions of libraries that were loaded globally
before it. Those are our own products of few rows (cpu/native/products.c), which pass larger ones to
the OpenBLAS of the package scipy-openblas32; where they were not built, it is a copy of that
OpenBLAS under BLAS's usual names (see setup.py).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

FEW_ROWS = 128  # for more, OpenBLAS is faster than our own products
PTHREADS = 1  # OpenBLAS's number for the kind that several threads may call at once
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_CFS = Path("/sys/fs/cgroup/cpu")
FOLDER = Path(__file__).parent / "cpu"  # of the C parts, if they were built

CACHED_SHARE = 8  # of Metal's memory, an eighth may be kept for reuse

SWITCH = "SPECULATIVE_T5_NATIVE"  # "0" leaves MLX as it is, for comparison
CHOICE = "SPECULATIVE_T5_DEVICE"  # "cpu" computes on the CPU where MLX would take a GPU
PARTS = ("products", "layers", "OpenBLAS")

LATE = (
    "mlx.core was imported before speculative_t5, so MLX uses its slow reference BLAS on this CPU; "
    "import speculative_t5 first"
)


def load_blas() -> tuple[ctypes.CDLL | None, dict[str, str]]:
    """Load our products and OpenBLAS ahead of MLX, on Linux.

    Returns:
        Our products, if they were built; and for each part what was loaded, or why it was not.
    """
    if not sys.platform.startswith("linux"):
        return None, {}
    if os.environ.get(SWITCH) == "0":
        return None, dict.fromkeys(PARTS, f"switched off by {SWITCH}=0")
    mode = ctypes.RTLD_LOCAL if "mlx.core" in sys.modules else ctypes.RTLD_GLOBAL
    products, missing = load_products(mode)
    if products is None:
        return None, {"products": missing, "OpenBLAS": _load_plain_openblas(mode)}
    openblas, found = load_openblas()
    address, shared = None, False
    if openblas:
        address = ctypes.cast(openblas.scipy_cblas_sgemm, ctypes.c_void_p)
        shared = openblas.scipy_openblas_get_parallel() == PTHREADS
        if shared:
            openblas.scipy_openblas_set_num_threads(1)  # our threads call it
    products.products_init(address, shared, FEW_ROWS, num_threads(), 2)
    level = ("portable code", "AVX2", "AVX-512")[products.products_level()]
    return products, {"products": f"loaded, {level}", "OpenBLAS": found}


def load_products(mode: int) -> tuple[ctypes.CDLL | None, str]:
    """Load the library built from cpu/native/*.c; return None and the reason if that fails."""
    return _load(next(FOLDER.glob(f"_products{EXTENSION_SUFFIXES[0]}"), None), mode)


def load_openblas() -> tuple[ctypes.CDLL | None, str]:
    """Load the OpenBLAS of scipy-openblas32, whose names have a prefix; None and why if not."""
    spec = find_spec("scipy_openblas32")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return None, "not installed: pip install scipy-openblas32"
    libraries = Path(next(iter(folders)), "lib").glob("libscipy_openblas*.so*")
    return _load(next(libraries, None), ctypes.RTLD_LOCAL)


def _load_plain_openblas(mode: int) -> str:
    """Load the copy of OpenBLAS that MLX calls by BLAS's usual names; return its state."""
    openblas, found = _load(next(FOLDER.glob("_openblas.so"), None), mode)
    if openblas:
        openblas.scipy_openblas_set_num_threads(num_threads())
    return found


def _load(path: Path | None, mode: int) -> tuple[ctypes.CDLL | None, str]:
    if path is None:
        return None, "not built"
    try:
        return ctypes.CDLL(str(path), mode=mode), "loaded"
    except OSError as error:
        return None, f"not loaded: {error}"


def num_threads() -> int:
    """Return the number of threads to compute with.

    It is the environment's, as OpenBLAS reads it, or else the number of processors that this
    process may run on, but no more than its share of time: in a container limited to two processors
    of many, threads for all would wait for each other.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value):
            return int(value)
    if not hasattr(os, "sched_getaffinity"):  # not Linux, where the number is not used
        return os.cpu_count() or 1
    return max(1, min(len(os.sched_getaffinity(0)), _share_of_time()))


def _share_of_time() -> int:
    """Return how many processors' time a container's control group may use, rounded up."""
    try:
        if CPU_MAX.exists():  # version 2: "200000 100000", or "max 100000"
            quota, period = CPU_MAX.read_text(encoding="ascii").split()
        else:
            quota, period = (
                (CPU_CFS / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip()
                for name in ("quota", "period")
            )
        limited = quota != "max" and int(quota) > 0
        return -(-int(quota) // int(period)) if limited else sys.maxsize
    except (OSError, ValueError, ZeroDivisionError):  # no control groups, or of another kind
        return sys.maxsize


late = "mlx.core" in sys.modules
products, parts = load_blas()
# Otherwise MLX multiplies float32 matrices in TF32, with 11 significant bits, on CUDA and on M5
# chips. It reads this once, at its first product on such a device.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx  # noqa: E402  (the libraries have to be loaded before)

if (chosen := os.environ.get(CHOICE, "").lower()) == "cpu":
    mx.set_default_device(mx.cpu)
elif chosen not in ("", "gpu"):
    warnings.warn(
        f"{CHOICE} must be cpu or gpu, got {chosen!r}: MLX's own choice is used",
        RuntimeWarning,
        stacklevel=2,
    )


def default_dtype() -> mx.Dtype:
    """Return float32 on a CPU, whose BLAS has no other type, and bfloat16 on Metal and CUDA."""
    return mx.float32 if on_cpu() else mx.bfloat16


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

    At that time the thread may still run Python. MLX alone would release them later, when the
    system ends the thread, and wait for the interpreter's lock: if the program ends meanwhile, the
    process aborts ("terminate called without an active exception").
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


def enter_thread() -> None:
    """Prepare the calling thread for MLX; to be called before every generation.

    Raises:
        RuntimeError: If this process was forked after MLX had been used: the child has none of
            MLX's threads, and its first computation would wait for them forever.
    """
    if _Process.forked:
        raise RuntimeError(
            "this process was forked from one that had used MLX, and has none of its threads: "
            "use multiprocessing's spawn start method"
        )
    _Process.used = True
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread and not hasattr(_locals, "release"):
        _locals.release = _Release()


_lock = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Enter the thread, and let one at a time use a GPU; on a CPU, threads compute side by side.

    MLX's maintainers call Metal safe for threads since MLX 0.31.2, but a GPU has nothing to gain
    from passes that are submitted side by side.
    """
    enter_thread()  # before the lock, which a fork may leave locked
    if on_cpu():
        yield
    else:
        with _lock:
            yield


def limit_memory() -> None:
    """Set MLX's memory limits on Metal, once and for the rest of the process.

    Memory is wired up to the size that Metal recommends to use, as mlx-lm wires it, unless the user
    has set a limit: macOS 15 and later then do not page weights out between passes. MLX keeps at
    most an eighth of that size for reuse, or less if the user has set less; its own limit is one
    and a half times the size.
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


if late and parts and on_cpu():
    warnings.warn(LATE, RuntimeWarning, stacklevel=3)
