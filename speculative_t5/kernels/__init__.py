"""Faster layers for CPUs; `accelerate` is the door.

They are there on Linux, where the C parts were built; without them everything works. The plain MLX
layers of `models` are the reference.
"""

import os

import mlx.core as mx

from .. import device
from ..libraries import NATIVE_SWITCH
from ..models import EncoderDecoder, SharingDraft
from . import layers
from .extension import native_parts as native_parts


def _are_used() -> bool:
    is_off = os.environ.get(NATIVE_SWITCH) == "0"
    return device.on_cpu() and layers.library is not None and not is_off


def takes_quantized(bits: int, group_size: int) -> bool:
    """Whether matrices that are quantized so are computed with here as they are stored."""
    return _are_used() and bits in layers.BITS and group_size in layers.GROUP_SIZES


def accelerate(model: EncoderDecoder | SharingDraft) -> None:
    """Make a model's modules faster ones where MLX computes on a CPU, by changing their classes.

    To be called before the first generation, or followed by `model.recompile()`. Outputs stay
    within float32 rounding. Layers that are wrapped, now or later, are run as they are. Matrices of
    16 bits, and quantized ones, are computed with in float32 if the rest of the model is float32.
    MLX cannot differentiate these operations.
    """
    if model.dtype != mx.float32 or not _are_used():
        return
    for module in model.modules():  # those that a draft shares are its target's
        if faster := layers.faster_class(module):
            module.__class__ = faster
