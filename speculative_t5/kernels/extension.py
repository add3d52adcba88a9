"""The layers in C as an extension of Python (native/blocks.cpp), and which C parts are in use."""

import ctypes
from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx

from .. import device, libraries


@cache
def load_layers() -> tuple[Any, str]:
    """Load the layers; return "loaded", too, or None and why not."""
    if libraries.products is None:
        return None, libraries.blas_parts.get("layers", "not loaded: they need the products")
    try:
        found: Any = import_module("._blocks", __package__)
    except ModuleNotFoundError:
        return None, "not built"
    except ImportError as error:
        return None, f"not loaded: {error}"
    built, installed = getattr(found, "mlx_version", "an older version"), device.MLX_VERSION
    if built != installed:  # MLX's C++ interface changes with every release
        return None, f"built for MLX {built}, and {installed} is installed"
    try:
        libraries.products.layers.restype = ctypes.c_void_p
        found.initialize(libraries.products.layers())
        one = mx.ones((1, 1))
        matrix = found.Matrix(one)
        found.feed_forward(one[None], one[0], matrix, matrix, "relu", False, 1e-6)
    except (AttributeError, TypeError, ValueError) as error:
        # Parts of different builds; to another nanobind, MLX's arrays are of no known type.
        return None, f"not loaded: {error}"
    return found, "loaded"


def native_parts() -> dict[str, str]:
    """Return for each C part what was loaded, or why it was not; there are none off Linux."""
    return libraries.blas_parts | {"layers": load_layers()[1]} if libraries.blas_parts else {}
