"""`accelerate`: swaps a T5's modules for faster ones, as `nn.quantize` swaps linears."""

from __future__ import annotations

import os

import mlx.nn as nn

from .. import device
from ..models import T5
from . import blocks
from .attention import attend
from .layers import FusedDecoder, FusedEmbedding, FusedEncoder, FusedHead


def accelerate(model: T5) -> None:
    """Swap a model's modules for faster ones where MLX computes on a CPU.

    To be called before the first generation, or followed by `model.recompile()`. Every CPU gets
    `attend`; the fused stacks need the C parts. Parameters keep their names, and outputs stay
    within float32 rounding. Layers that are quantized or wrapped, now or later, are run as they
    are. MLX cannot differentiate the fused operations.
    """
    if not device.on_cpu() or os.environ.get(device.SWITCH) == "0":
        return
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.self_attention.attend = attend
            if stack is model.decoder:
                layer.cross_attention.attend = attend
    if blocks.library is None:
        return
    if type(model.shared) is nn.Embedding:  # not if it is quantized
        model.shared = FusedEmbedding(model.shared)
    model.encoder = FusedEncoder(model.encoder)
    model.decoder = FusedDecoder(model.decoder)
    model.head = FusedHead(model.config)
