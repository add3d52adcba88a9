"""T5's layers as single operations of MLX's graphs, on Linux CPUs: native/blocks.cpp.

A layer is forty operations in MLX's own terms, each of which is scheduled, allocated and looked at
apart, for some microseconds; small models spend most of their time on that. Here a layer is two or
three. `library` is None where they cannot be had, and everything works without them.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import backend


def load() -> Any:
    """The extension; None if it was not built, or for another version of MLX."""
    if backend.products is None:
        return None
    try:
        found: Any = import_module("._blocks", __package__)
    except ImportError:
        return None
    if found.mlx_version != version("mlx"):
        return None
    backend.products.layers.restype = ctypes.c_void_p
    found.initialize(backend.products.layers())
    one = mx.ones((1, 1))
    try:
        found.feed_forward(one, mx.ones(1), one, one, "relu", False, 1e-6)
    except TypeError:  # MLX's arrays are strange to it: they are of another nanobind
        return None
    return found


library = load()
if library is None and backend.products is not None:
    backend.tips.append("no blocks")


def fit(x: mx.array, *layers: nn.Module) -> bool:
    """Whether these layers, norms and products, can be run on `x` here."""
    return (
        library is not None
        and x.dtype == mx.float32
        and backend.on_cpu()
        and all("scales" not in each and each.weight.dtype == mx.float32 for each in layers)
    )
