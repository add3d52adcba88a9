"""Loading the extension that has T5's layers as operations of MLX's graphs (native/blocks.cpp).

`library` is None where it was not built or does not fit; everything works without it.
"""

from __future__ import annotations

import ctypes
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from .. import device

BUILT_FOR = "built for MLX"  # begins the state of layers that were built for another MLX


def load() -> tuple[Any, str]:
    """Return the extension or None, and its state: "loaded", or why it was not."""
    if device.products is None:
        return None, device.parts.get("layers", "not loaded: they need the products")
    try:
        found: Any = import_module("._blocks", __package__)
    except ModuleNotFoundError:
        return None, "not built"
    except ImportError as error:
        return None, f"not loaded: {error}"
    built, installed = getattr(found, "mlx_version", "an older version"), version("mlx")
    if built != installed:  # MLX's C++ interface changes with every release
        return None, f"{BUILT_FOR} {built}, and {installed} is installed"
    try:
        device.products.layers.restype = ctypes.c_void_p
        found.initialize(device.products.layers())
        one = mx.ones((1, 1))
        found.feed_forward(one[None], one[0], one, one, "relu", False, 1e-6)
    except (AttributeError, TypeError, ValueError) as error:
        # Parts of different builds; to another nanobind, MLX's arrays are of no known type.
        return None, f"not loaded: {error}"
    return found, "loaded"


library, _found = load()
if sys.platform.startswith("linux"):
    device.parts["layers"] = _found


def usable(*arrays: mx.array | None) -> bool:
    """Whether the extension can compute with these arrays: float32, on the CPU."""
    return (
        library is not None
        and device.on_cpu()
        and all(array is None or array.dtype == mx.float32 for array in arrays)
    )
