"""`accelerate`: swaps a model's modules for faster ones, as `nn.quantize` swaps linears."""

from __future__ import annotations

import os

import mlx.nn as nn

from .. import device
from ..models import T5, SharingDraft
from . import blocks
from .attention import attend
from .layers import FusedDecoder, FusedEmbedding, FusedEncoder, FusedHead


def accelerate(model: T5 | SharingDraft) -> None:
    """Swap a model's modules for faster ones where MLX computes on a CPU.

    To be called before the first generation, or followed by `model.recompile()`. Every CPU gets
    `attend`; the fused stacks need the C parts. Parameters keep their names, and outputs stay
    within float32 rounding. Layers that are quantized or wrapped, now or later, are run as they
    are. MLX cannot differentiate the fused operations.
    """
    if not device.on_cpu() or os.environ.get(device.SWITCH) == "0":
        return
    for layer in model.decoder.layers:
        layer.self_attention.attend = layer.cross_attention.attend = attend
    if blocks.library is not None:
        model.decoder = FusedDecoder(model.decoder)
    if isinstance(model, SharingDraft):  # the rest is the target's
        return
    for encoder_layer in model.encoder.layers:
        encoder_layer.self_attention.attend = attend
    if blocks.library is None:
        return
    if type(model.shared) is nn.Embedding:  # not if it is quantized
        model.shared = FusedEmbedding(model.shared)
    model.encoder = FusedEncoder(model.encoder)
    model.head = FusedHead(model.config)
