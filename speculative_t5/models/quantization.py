"""Quantized matrices of a model: made, and read as plain ones."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .config import Quantization

# The names of matrices that were quantized and no longer are, each with the size of a step.
Steps = tuple[tuple[str, float], ...]


def quantize(model: nn.Module, how: Quantization) -> None:
    """Replace the layers that `how` names by quantized ones."""

    def chosen(path: str, module: nn.Module) -> bool:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how.group_size:
            return False
        if path in ("shared", "encoder_shared", "lm_head"):
            return how.embeddings
        return not (how.keep_wo and path.endswith(".wo"))

    nn.quantize(model, how.group_size, how.bits, class_predicate=chosen)


def plain_weight(
    module: nn.Module, rows: Any = slice(None), dtype: mx.Dtype = mx.float32
) -> mx.array:
    """Return a module's weight, or some rows of it, dequantized and in a type."""
    weight: mx.array = module.weight[rows]
    if "scales" in module:
        scales, biases = (part[rows].astype(dtype) for part in (module.scales, module.biases))
        return mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return weight.astype(dtype)
