"""Products of few rows on Metal by kernels of our own, where a machine finds them right and faster.

Nobody has run them on a Mac: tests/metal runs their source on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...models import CompiledModel, position_biases, t5
from . import layers
from .attention import ATTENTION, self_attention
from .choice import Choice, Choices, judge_kernel
from .products import PRODUCTS, product

POSITIONS_TRIED = 64  # of the cache


def accelerate_on_metal(model: CompiledModel) -> None:
    """Make a T5's decoder use kernels of ours, those that this machine chooses.

    A kernel is tried when a model of its shape is first loaded here, which takes part of a second.
    To be called before the first generation, or followed by `model.recompile()`.
    """
    choices = kernel_choices(model).items()
    use_kernels(model, {key: choice.rows for key, choice in choices if choice.rows})


def use_kernels(model: CompiledModel, kernels: Mapping[str, int]) -> None:
    """Make a model use the kernels of these keys, each up to so many rows."""
    layers.taken.update(kernels)
    if any(key.startswith("attention") for key in kernels):
        model.decoder.pads_heads = False
    for module in model.modules():
        if faster := layers.FEW_ROWS_CLASSES.get(type(module)):
            module.__class__ = faster


@contextmanager
def kernels_off(model: CompiledModel) -> Iterator[bool]:
    """Let a model run MLX's operations alone, for a comparison; say whether it had others."""
    kept, pads_heads = {**layers.taken}, model.decoder.pads_heads
    layers.taken.clear()
    model.decoder.pads_heads = True
    model.recompile()
    try:
        yield bool(kept)
    finally:
        layers.taken.update(kept)
        model.decoder.pads_heads = pads_heads
        model.recompile()


def kernel_choices(model: CompiledModel) -> dict[str, Choice]:
    """Return what this machine chooses for each kernel that a model has a use for, by its key."""
    if not isinstance(model.decoder, t5.Decoder):
        return {}
    choices = Choices(PRODUCTS + ATTENTION)
    return {key: choices.of(key, judged) for key, judged in kernel_trials(model)}


def kernel_trials(model: CompiledModel) -> Iterator[tuple[str, Callable[[], Choice]]]:
    """Yield the key of each kernel for a model, and what tries it."""
    same: dict[str, list[nn.Module]] = {}
    for module in [*_products(model.decoder.layers), model.output]:
        if key := layers.product_key(module):
            same.setdefault(key, []).append(module)
    yield from ((key, partial(_try_product, modules)) for key, modules in same.items())
    heads, size = model.config.num_heads, model.decoder.head_size
    cache = mx.zeros((2, 1, heads, POSITIONS_TRIED, size), model.dtype)
    if key := layers.attention_key(model.dtype, cache):
        yield key, partial(_try_attention, cache, model.decoder.tables()[0])


def _products(decoder_layers: Sequence[t5.DecoderLayer]) -> Iterator[nn.Module]:
    for layer in decoder_layers:
        own, cross, feed = layer.self_attention, layer.cross_attention, layer.feed_forward
        yield from (own.qkv, own.out, cross.q, cross.out, feed.wi, feed.wo)


def _try_product(modules: Sequence[nn.Module]) -> Choice:
    """Try a product with all matrices of a shape, which are read in turn."""
    matrices = [matrix for each in modules if (matrix := layers.matrix_of(each))]
    mx.eval([each.weight for each in matrices])

    def ours(x: mx.array, i: int) -> mx.array:
        return product(x, matrices[i % len(matrices)])

    def theirs(x: mx.array, i: int) -> mx.array:
        module = modules[i % len(modules)]
        run: Any = getattr(module, "as_linear", module)
        y: mx.array = run(x)
        return y

    (_, inputs), size = matrices[0].shape, matrices[0].weight.nbytes
    return judge_kernel(ours, theirs, partial(_random_rows, inputs, matrices[0].dtype), size=size)


def _try_attention(cache: mx.array, table: mx.array) -> Choice:
    """Try attention to a whole cache, from so far behind that the bias is the same for all rows."""
    _, _, heads, positions, size = cache.shape
    start = mx.array([positions + table.shape[1]], dtype=mx.int32)
    kv = mx.random.normal(cache.shape, key=mx.random.key(1)).astype(cache.dtype) * size**-0.5

    def ours(x: mx.array, _: int) -> mx.array:
        return self_attention(x[None], kv, table, start)[0]

    def theirs(x: mx.array, _: int) -> mx.array:
        bias = next(position_biases([table], start, len(x), positions))
        (queries,) = t5.split_heads(x[None], 1, heads)
        return t5.join_heads(t5.attend(queries, kv[0], kv[1], bias.scores))[0]

    return judge_kernel(ours, theirs, partial(_random_rows, heads * size, cache.dtype))


def _random_rows(size: int, dtype: mx.Dtype, count: int) -> mx.array:
    return mx.random.normal((count, size), key=mx.random.key(0)).astype(dtype)
