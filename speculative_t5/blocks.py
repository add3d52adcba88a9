"""T5's layers as single operations of MLX's graphs, on Linux CPUs: native/blocks.cpp.

A layer is forty operations in MLX's own terms, each of which is scheduled, allocated and looked at
apart, for some microseconds; small models spend most of their time on that. Here a layer is two or
three. `library` is None where they cannot be had, and everything works without them.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

import mlx.core as mx

from . import backend


def load() -> Any:
    """The extension; None if it was not built, or not for this MLX and these layers."""
    if backend.products is None:
        return None
    try:
        found: Any = import_module("._blocks", __package__)
        if found.mlx_version != mx.__version__:  # type: ignore[attr-defined]
            return None
        backend.products.layers.restype = ctypes.c_void_p
        found.initialize(backend.products.layers())
        one = mx.ones((1, 1))
        found.feed_forward(one, mx.ones(1), one, one, "relu", False, 1e-6)
    except (AttributeError, ImportError, TypeError, ValueError):
        # Parts of different builds; to another nanobind, MLX's arrays are of no known type.
        return None
    return found


library = load()
if library is None and backend.products is not None:
    backend.tips.append("no blocks")


def usable(*arrays: mx.array | None) -> bool:
    """Whether operations on these arrays, all they are to be given, can be had here."""
    return (
        library is not None
        and backend.on_cpu()
        and all(array is None or array.dtype == mx.float32 for array in arrays)
    )
