"""What has to happen before `mlx.core` is imported, and choices that depend on the device.

Imported first by the package. MLX's CPU wheel for Linux links the reference BLAS; symbols of an
OpenBLAS that is loaded before it, globally, are used in its place.
"""

from __future__ import annotations

import ctypes
import sys

OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblasp.so.0")
OPENBLAS_TIP = (
    "OpenBLAS was not found, so MLX uses its slow reference BLAS on this CPU; "
    "get it with `apt-get install libopenblas0` (Debian, Ubuntu) or `dnf install openblas` (Fedora)"
)


def load_openblas() -> bool | None:
    """Load OpenBLAS ahead of MLX, on Linux.

    Returns:
        True if OpenBLAS serves MLX's products, False if it was not found or MLX was imported
        before this could run, None where it does not apply (not Linux).
    """
    if not sys.platform.startswith("linux"):
        return None
    if "mlx.core" in sys.modules:
        return False
    for name in OPENBLAS_NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


openblas_loaded = load_openblas()

import mlx.core as mx  # noqa: E402  (the point of this module is what comes before)


def default_dtype() -> mx.Dtype:
    """float32 on a CPU, whose BLAS knows no other type; bfloat16 on Metal and CUDA."""
    return mx.float32 if _on_cpu() else mx.bfloat16


def advice() -> str | None:
    """One line for the user when this machine could be faster, else None."""
    return OPENBLAS_TIP if _on_cpu() and openblas_loaded is False else None


def _on_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)
