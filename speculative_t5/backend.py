"""What has to happen before `mlx.core` is imported, and choices that depend on the device.

Imported first by the package. MLX's CPU wheel for Linux links the reference BLAS; symbols of an
OpenBLAS that is loaded before it, globally, are used in its place.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from typing import Literal

OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblasp.so.0")
TIPS = {
    "missing": "OpenBLAS was not found, so MLX uses its slow reference BLAS on this CPU; "
    "get it with `apt-get install libopenblas0` (Debian, Ubuntu) or "
    "`dnf install openblas` (Fedora)",
    "late": "mlx.core was imported before speculative_t5, so MLX uses its slow reference BLAS on "
    "this CPU; import speculative_t5 first",
}


def load_openblas() -> Literal["loaded", "missing", "late"] | None:
    """Load OpenBLAS ahead of MLX, on Linux.

    Returns:
        "loaded"; "missing", if the system has none; "late", if it has but MLX was imported before;
        None where it does not apply (not Linux).
    """
    if not sys.platform.startswith("linux"):
        return None
    late = "mlx.core" in sys.modules
    for name in OPENBLAS_NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL if late else ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return "late" if late else "loaded"
    return "missing"


openblas = load_openblas()

import mlx.core as mx  # noqa: E402  (the point of this module is what comes before)


def default_dtype() -> mx.Dtype:
    """float32 on a CPU, whose BLAS knows no other type; bfloat16 on Metal and CUDA."""
    return mx.float32 if _on_cpu() else mx.bfloat16


def advice() -> str | None:
    """One line for the user when MLX could be faster on this CPU, else None."""
    return TIPS.get(openblas or "") if _on_cpu() else None


def _on_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


if openblas == "late" and _on_cpu():
    warnings.warn(TIPS["late"], RuntimeWarning, stacklevel=3)
