"""What has to happen before `mlx.core` is imported, and choices that depend on the device.

Imported first by the package. MLX's CPU wheel for Linux links the reference BLAS; symbols of
libraries that are loaded before it, globally, are used in its place: here our own products of few
rows (native/products.c), and OpenBLAS for all others, which our threads call.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

OPENBLAS_NAMES = ("libopenblasp.so.0", "libopenblas.so.0")  # with threads of its own first
PTHREADS = 1  # the kind of OpenBLAS that several threads may call at once
FEW_ROWS = 128  # beyond that OpenBLAS is faster than our own products
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_CFS = Path("/sys/fs/cgroup/cpu")
TIPS = {
    "no products": "the package's C part was not built, so decoding on this CPU takes about three "
    "times as long; install a compiler (`apt-get install g++ python3-dev`) and the package again",
    "no openblas": "OpenBLAS was not found, so long prompts and large batches take longer on this "
    "CPU; get it with `apt-get install libopenblas0` (Debian, Ubuntu) or `dnf install openblas` "
    "(Fedora)",
    "no blocks": "the package's layers for this CPU were not built, or for another version of MLX "
    "than is installed, so decoding takes about 1.5 times as long; install a compiler (`apt-get "
    "install g++ python3-dev`) and the package again",
    "late": "mlx.core was imported before speculative_t5, so MLX uses its slow reference BLAS on "
    "this CPU; import speculative_t5 first",
}


def load_blas() -> tuple[ctypes.CDLL | None, list[str]]:
    """Load our products and OpenBLAS ahead of MLX, on Linux.

    Returns:
        Our products, where they were built, and what TIPS there are to give.
    """
    if not sys.platform.startswith("linux"):
        return None, []
    late = "mlx.core" in sys.modules
    mode = ctypes.RTLD_LOCAL if late else ctypes.RTLD_GLOBAL
    products = load_products(mode)  # first: whose cblas_sgemm is first is called
    openblas = _first(OPENBLAS_NAMES, mode)
    if products:
        library = ctypes.cast(openblas.cblas_sgemm, ctypes.c_void_p) if openblas else None
        shared = openblas is not None and openblas.openblas_get_parallel() == PTHREADS
        if openblas and shared:
            openblas.openblas_set_num_threads(1)  # it is our threads that call it
        products.products_init(library, shared, FEW_ROWS, num_threads(), 2)
    if late:
        return products, ["late"] if products or openblas else []
    found = {"no products": products, "no openblas": openblas}
    return products, [tip for tip, library in found.items() if not library]


def load_products(mode: int) -> ctypes.CDLL | None:
    """The library built from native/*.c; None if it was not."""
    folder = Path(__file__).parent
    return _first([str(folder / f"_products{suffix}") for suffix in EXTENSION_SUFFIXES], mode)


def num_threads() -> int:
    """Threads to compute with: what the environment says, as OpenBLAS reads it, else processors.

    Those are the ones that this process may run on, and no more than its share of time allows: in
    a container limited to two processors of many, threads for all would wait for each other.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value):
            return int(value)
    if not hasattr(os, "sched_getaffinity"):  # not Linux, where nothing asks
        return os.cpu_count() or 1
    return max(1, min(len(os.sched_getaffinity(0)), _share_of_time()))


def _share_of_time() -> int:
    """Processors' worth of time that a container's control group may use, rounded up."""
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


def _first(names: Sequence[str], mode: int) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name, mode=mode)
        except OSError:
            continue
    return None


products, tips = load_blas()

import mlx.core as mx  # noqa: E402  (the point of this module is what comes before)


def default_dtype() -> mx.Dtype:
    """float32 on a CPU, whose BLAS knows no other type; bfloat16 on Metal and CUDA."""
    return mx.float32 if on_cpu() else mx.bfloat16


def advice() -> str | None:
    """One line for the user when MLX could be faster on this CPU, else None."""
    return TIPS[tips[0]] if tips and on_cpu() else None


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


if "late" in tips and on_cpu():
    warnings.warn(TIPS["late"], RuntimeWarning, stacklevel=3)
