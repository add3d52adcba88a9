"""Faster layers for CPUs; `accelerate` is the door.

On any CPU that is a faster attention; on Linux, where the C parts were built, all layers. Without
them everything works. Imports `device` and `models`, whose plain MLX layers are the reference;
`libraries`, which `device` loads ahead of MLX, imports nothing of the package.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .libraries import SWITCH

if TYPE_CHECKING:
    from ..models import T5, SharingDraft


def accelerate(model: T5 | SharingDraft) -> None:
    """Swap a model's modules for faster ones where MLX computes on a CPU.

    To be called before the first generation, or followed by `model.recompile()`. Parameters keep
    their names, and outputs stay within float32 rounding. Layers that are quantized or wrapped, now
    or later, are run as they are. MLX cannot differentiate the fused operations.
    """
    import mlx.nn as nn

    from .. import device  # only now, as `device` imports this package
    from ..models import SharingDraft
    from . import layers

    if not device.on_cpu() or os.environ.get(SWITCH) == "0":
        return
    for layer in model.decoder.layers:
        layer.self_attention.attend = layer.cross_attention.attend = layers.attend
    if layers.library is not None:
        model.decoder = layers.FusedDecoder(model.decoder)
    if isinstance(model, SharingDraft):  # the rest is the target's
        return
    for encoder_layer in model.encoder.layers:
        encoder_layer.self_attention.attend = layers.attend
    if layers.library is None:
        return
    if type(model.shared) is nn.Embedding:  # not if it is quantized
        model.shared = layers.FusedEmbedding(model.shared)
    model.encoder = layers.FusedEncoder(model.encoder)
    model.head = layers.FusedHead(model.config)
