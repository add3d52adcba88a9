"""The libraries that are loaded ahead of MLX on Linux, their threads, and memory.

MLX's CPU wheel for Linux links the reference BLAS, but calls the functions of libraries that were
loaded globally before it: our own products of few rows (kernels/native/products.c), which pass
larger ones to the OpenBLAS of the package scipy-openblas32; or, where they were not built, a copy
of that OpenBLAS under BLAS's usual names (see setup.py). Everything works without any of them.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

NATIVE_SWITCH = "SPECULATIVE_T5_NATIVE"  # "0" leaves MLX as it is; or the most of `LIMITS`
NATIVE_PARTS = ("products", "layers", "OpenBLAS")
KERNELS_FOLDER = Path(__file__).parent / "kernels"  # of the C parts, if they were built
# Of our products, and the same as the switch names them.
INSTRUCTIONS = "portable code", "AVX2", "AVX-512", "AVX-512 with VNNI", "AVX-512 with AMX"
LIMITS = "portable", "avx2", "avx512", "vnni", "amx"
INTEGERS_LEVEL = 3  # from which on products of quantized matrices are sums of integers
FEW_ROWS = 128  # for more, OpenBLAS is faster than our own products
OPENBLAS_PTHREADS = 1  # OpenBLAS's number for the kind that several threads may call at once
# Of glibc's mallopt: freed memory that a process keeps, and what is mapped by itself, in bytes.
TRIM_THRESHOLD, MMAP_THRESHOLD = (-1, 2**29), (-3, 2**25)
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000", or "max 100000"


def load_blas() -> tuple[ctypes.CDLL | None, dict[str, str]]:
    """Load our products and OpenBLAS ahead of MLX, on Linux; say what was loaded, or why not."""
    if not sys.platform.startswith("linux"):
        return None, {}
    if os.environ.get(NATIVE_SWITCH) == "0":
        return None, dict.fromkeys(NATIVE_PARTS, f"switched off by {NATIVE_SWITCH}=0")
    mode = ctypes.RTLD_LOCAL if "mlx.core" in sys.modules else ctypes.RTLD_GLOBAL
    products, missing = _load(KERNELS_FOLDER.glob(f"_products{EXTENSION_SUFFIXES[0]}"), mode)
    if products is None:  # MLX calls a copy of OpenBLAS by BLAS's usual names
        openblas, found = _load(KERNELS_FOLDER.glob("_openblas.so"), mode)
        if openblas:
            openblas.scipy_openblas_set_num_threads(num_threads())
        return None, {"products": missing, "OpenBLAS": found}
    openblas, found = load_openblas()
    address, shared = None, False
    if openblas:
        address = ctypes.cast(openblas.scipy_cblas_sgemm, ctypes.c_void_p)
        shared = openblas.scipy_openblas_get_parallel() == OPENBLAS_PTHREADS
        if shared:
            openblas.scipy_openblas_set_num_threads(1)  # our threads call it
    products.products_init(address, shared, FEW_ROWS, num_threads(), _most_instructions())
    level = INSTRUCTIONS[products.products_level()]
    return products, {"products": f"loaded, {level}", "OpenBLAS": found}


def _most_instructions() -> int:
    """Return the last of `INSTRUCTIONS` that may be used, where the processor has them."""
    asked = os.environ.get(NATIVE_SWITCH, "").lower()
    if asked in LIMITS:
        return LIMITS.index(asked)
    if asked not in ("", "1"):
        known = ", ".join(("0", "1", *LIMITS))
        warnings.warn(
            f"{NATIVE_SWITCH} must be one of {known}, got {asked!r}: all instructions are used",
            RuntimeWarning,
            stacklevel=3,
        )
    return len(INSTRUCTIONS) - 1


def load_openblas() -> tuple[ctypes.CDLL | None, str]:
    """Load the OpenBLAS of scipy-openblas32, whose names have a prefix; None and why if not."""
    spec = find_spec("scipy_openblas32")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return None, "not installed: pip install scipy-openblas32"
    libraries = Path(next(iter(folders)), "lib").glob("libscipy_openblas*.so*")
    return _load(libraries, ctypes.RTLD_LOCAL)


def _load(found: Iterator[Path], mode: int) -> tuple[ctypes.CDLL | None, str]:
    path = next(found, None)
    if path is None:
        return None, "not built"
    try:
        return ctypes.CDLL(str(path), mode=mode), "loaded"
    except OSError as error:
        return None, f"not loaded: {error}"


def num_threads() -> int:
    """Return the environment's number of threads, as OpenBLAS reads it, or else of processors.

    These are those that this process may run on, no more than its share of time in a container.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value):
            return int(value)
    if not hasattr(os, "sched_getaffinity"):  # not Linux, where the number is not used
        return os.cpu_count() or 1
    threads = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError, ZeroDivisionError):  # no control groups, or no limit
        quota, period = map(int, CPU_MAX.read_text(encoding="ascii").split())
        threads = min(threads, -(-quota // period))
    return max(1, threads)


def keep_freed_memory() -> None:
    """Let glibc keep what a pass frees for the next one, unless the environment says otherwise.

    It would give it back, and mapping it anew took a quarter of the time of batches of 256 rows.
    """
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if not sys.platform.startswith("linux") or is_set or os.environ.get(NATIVE_SWITCH) == "0":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt:
        for name, size in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            mallopt(name, size)


late = sys.platform.startswith("linux") and "mlx.core" in sys.modules  # too late to replace BLAS
products, blas_parts = load_blas()
keep_freed_memory()
