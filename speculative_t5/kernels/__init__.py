"""Faster layers for CPUs and for Metal; `accelerate` is the door.

Those for CPUs are there on Linux, where the C parts were built; Macs choose theirs (`metal`).
Without them everything works. The plain MLX layers of `models` are the reference.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from .. import device, libraries
from ..libraries import NATIVE_SWITCH
from ..models import CompiledModel, EncoderDecoder, SharingDraft, TextEncoder
from . import layers
from .extension import native_parts as native_parts

if TYPE_CHECKING:
    from .metal import Choice

MATRICES = nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding
MOST_ENCODED = 256  # tokens of prompts at once: a fifth faster than 128 with batches of 16
PARTNERS = {"scales": "biases", "biases": "scales"}  # a product takes both in one type


def takes_stored() -> bool:
    """Whether matrices of 16 bits are read here as they are stored, and computed with in float32.

    Then a model computes in float32, in whatever type its matrices are kept.
    """
    is_off = os.environ.get(NATIVE_SWITCH) == "0"
    return device.on_cpu() and layers.library is not None and not is_off


def on_metal() -> bool:
    """Whether MLX computes on Metal, and kernels of ours may."""
    is_off = os.environ.get(NATIVE_SWITCH) == "0"
    return not device.on_cpu() and mx.metal.is_available() and not is_off


def try_all_on_metal() -> None:
    """Let loading take the time to try all kernels: in a process that checks or measures."""
    if on_metal():
        from .metal import limit

        limit.seconds = math.inf


def chosen_for_metal(model: CompiledModel) -> dict[str, Choice]:
    """Return what this Mac chooses for each kernel of ours that a model has a use for, by name."""
    from .metal import kernel_choices

    return kernel_choices(model)


def alike_rows_on_metal(model: CompiledModel, choices: Mapping[str, Choice]) -> int:
    """Return up to how many rows a pass gives each token the bits that it has alone."""
    from .metal import alike_rows

    return alike_rows(model, choices)


@contextmanager
def without_kernels(model: Any) -> Iterator[bool]:
    """Let a model on Metal run MLX's operations alone; say whether it had kernels of ours."""
    if not (on_metal() and isinstance(model, CompiledModel)):
        yield False
        return
    from .metal import kernels_off

    with kernels_off(model) as had_some:
        yield had_some


def takes_quantized(bits: int, group_size: int) -> bool:
    """Whether matrices that are quantized so are computed with here as they are stored."""
    return takes_stored() and bits in layers.BITS and group_size in layers.GROUP_SIZES


def kept_types(
    model: nn.Module, stored: Mapping[str, mx.Dtype], dtype: mx.Dtype | None = None
) -> dict[str, mx.Dtype]:
    """Return the type in memory of each parameter of a model that computes in float32.

    Matrices, and the scales and biases of quantized ones, have the type that they are `stored` in,
    or `dtype` if one is given; all else, such as norms, is float32.
    """
    kept, modules = {}, dict(model.named_modules())
    for name, kind in stored.items():
        module, _, part = name.rpartition(".")
        if not isinstance(modules.get(module), MATRICES):
            kept[name] = mx.float32
        elif stored.get(f"{module}.{PARTNERS.get(part)}", kind) == kind:
            kept[name] = dtype or kind
        else:
            kept[name] = dtype or mx.float32
    return kept


def accelerate(model: EncoderDecoder | SharingDraft | TextEncoder) -> None:
    """Make a model's modules faster ones where there are such, by changing their classes.

    To be called before the first generation, or followed by `model.recompile()`. Outputs stay
    within float32 rounding, those of quantized models within what docs/converting.md says. Layers
    that are wrapped, now or later, are run as they are. Matrices of 16 bits, and quantized ones,
    are computed with as they are stored if the rest of the model is float32.
    MLX cannot differentiate these operations.
    """
    if model.dtype == mx.float32 and takes_stored():
        accelerate_modules(model)  # those that a draft shares are its target's
        if isinstance(model, EncoderDecoder) and _multiplies_integers(model):
            model.most_encoded = MOST_ENCODED
    elif on_metal() and isinstance(model, CompiledModel):
        from .metal import accelerate_on_metal

        accelerate_on_metal(model)


def _multiplies_integers(model: nn.Module) -> bool:
    """Whether all products are sums of integers, so that no row depends on how many there are."""
    products = libraries.products
    matrices = [each for each in model.modules() if isinstance(each, nn.QuantizedLinear)]
    return (
        products is not None
        and products.products_level() >= libraries.INTEGERS_LEVEL
        and not any(isinstance(each, nn.Linear) for each in model.modules())
        and all(takes_quantized(each.bits, each.group_size) for each in matrices)
    )


def accelerate_modules(model: nn.Module) -> None:
    """Make modules of a model of any family faster ones; it has to compute in float32."""
    for module in model.modules():
        if faster := layers.faster_class(module):
            module.__class__ = faster
