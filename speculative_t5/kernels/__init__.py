"""Faster layers for CPUs; `accelerate` is the door.

They are there on Linux, where the C parts were built; without them everything works. The plain MLX
layers of `models` are the reference.
"""

import os

from .. import device
from ..libraries import NATIVE_SWITCH
from ..models import EncoderDecoder, SharingDraft
from . import layers
from .extension import native_parts as native_parts


def accelerate(model: EncoderDecoder | SharingDraft) -> None:
    """Make a model's modules faster ones where MLX computes on a CPU, by changing their classes.

    To be called before the first generation, or followed by `model.recompile()`. Outputs stay
    within float32 rounding. Layers that are quantized or wrapped, now or later, are run as they
    are. MLX cannot differentiate the fused operations.
    """
    if not device.on_cpu() or layers.library is None or os.environ.get(NATIVE_SWITCH) == "0":
        return
    for module in model.modules():  # those that a draft shares are its target's
        if type(module) in layers.FUSED:
            module.__class__ = layers.FUSED[type(module)]
