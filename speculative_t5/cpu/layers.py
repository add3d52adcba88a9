"""T5's stacks with each layer as two or three operations of MLX's graphs (native/blocks.cpp).

A layer takes about forty of MLX's own operations, whose overhead dominates in small models. The
stacks adopt the modules of the plain ones, and run a layer's own code where it is not a plain
float32 one. The biases for that cost nothing where no layer uses them, as MLX is lazy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn

from .. import device, models
from .libraries import load_layers

library, _ = load_layers()  # native/blocks.cpp

MANY_SCORES = 512  # of one query, from which on `softmax` is composed here
# 2**x for x from -0.5 to 0.5, the highest power first: least squares, within 2e-7.
POWERS_OF_2 = (
    1.54653179e-04, 1.33952854e-03, 9.61803993e-03, 5.55034067e-02, 2.40226511e-01,
    6.93147200e-01, 1.0,
)  # fmt: skip


class FusedEmbedding(nn.Embedding):
    """An embedding that returns NaN for ids out of its range, which MLX does not check."""

    def __init__(self, plain: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.weight = plain.weight

    def __call__(self, tokens: mx.array) -> mx.array:
        if _usable(self.weight):
            x: mx.array = library.embed(tokens.astype(mx.int32), self.weight)
        else:
            x = super().__call__(tokens)
        return x


class FusedEncoder(models.Encoder):
    """A plain encoder's modules, each layer run as two operations."""

    def __init__(self, plain: models.Encoder) -> None:
        nn.Module.__init__(self)
        self.position_bias, self.layers, self.norm = plain.position_bias, plain.layers, plain.norm

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        length, start = x.shape[1], mx.zeros(1, dtype=mx.int32)
        tables = self.position_bias.tables()
        biases = models.position_biases(tables, start, length, length)
        for layer, table, bias in zip(self.layers, cycle(tables), cycle(biases), strict=False):
            if _fits(layer, models.EncoderLayer) and _usable(x, table, mask):
                attention = layer.self_attention
                x = library.encoder_attention(
                    x, layer.self_norm.weight, attention.qkv.weight, attention.out.weight, table,
                    mask, layer.self_norm.eps,
                )  # fmt: skip
                x = _feed_forward(layer, x)
            else:
                x = layer(x, bias if mask is None else bias + mask)
        memory: mx.array = self.norm(x)
        return memory


class FusedDecoder(models.Decoder):
    """A plain decoder's modules, each layer run as three operations."""

    def __init__(self, plain: models.Decoder) -> None:
        nn.Module.__init__(self)
        self.position_bias, self.layers, self.norm = plain.position_bias, plain.layers, plain.norm

    def read(self, memory: mx.array, width: int) -> list[models.KeysValues]:
        if not all(_is_plain(layer.cross_attention.kv) for layer in self.layers) or (
            not _usable(memory)
        ):
            return super().read(memory, width)
        return [
            library.keys_values(
                memory, layer.cross_attention.kv.weight, layer.cross_attention.num_heads, width
            )
            for layer in self.layers
        ]

    def __call__(
        self,
        x: mx.array,
        offsets: mx.array,
        cache: Sequence[models.KeysValues],
        sources: Sequence[models.KeysValues],
        mask: mx.array | None,
        tables: Sequence[mx.array],
    ) -> tuple[mx.array, list[models.KeysValues]]:
        biases = models.position_biases(tables, offsets, x.shape[1], cache[0][0].shape[2])
        written: list[models.KeysValues] = []
        for layer, table, bias, pair, source in zip(
            self.layers, cycle(tables), cycle(biases), cache, sources, strict=False
        ):
            if _fits(layer, models.DecoderLayer) and _usable(x, table, *pair, *source, mask):
                x, pair = _decoder_layer(layer, x, table, offsets, pair, source, mask)
            else:
                x, pair = layer(x, bias, offsets, pair, source, mask)
            written.append(pair)
        return x, written


class FusedHead(models.Head):
    """The last normalization and the output's product in one operation."""

    def __call__(
        self, kind: models.HeadOutput, x: mx.array, norm: nn.Module, output: nn.Module, size: int
    ) -> mx.array:
        if not (_is_plain(norm) and _is_plain(output) and _usable(x)):
            return super().__call__(kind, x, norm, output, size)
        run = library.logits if kind == "logits" else library.best
        scores: mx.array = run(x, norm.weight, output.weight, self.scale, norm.eps, size)
        return scores


def _decoder_layer(
    layer: models.DecoderLayer,
    x: mx.array,
    table: mx.array,
    offsets: mx.array,
    cache: models.KeysValues,
    source: models.KeysValues,
    mask: mx.array | None,
) -> tuple[mx.array, models.KeysValues]:
    own, cross = layer.self_attention, layer.cross_attention
    x, keys, values = library.decoder_attention(
        x, layer.self_norm.weight, own.qkv.weight, own.out.weight, table, *cache, offsets,
        layer.self_norm.eps,
    )  # fmt: skip
    # Rows with the same source are one row of several positions here.
    grouped = library.cross_attention(
        x.reshape(len(source[0]), -1, x.shape[2]), layer.cross_norm.weight, cross.q.weight,
        cross.out.weight, *source, mask, layer.cross_norm.eps,
    )  # fmt: skip
    return _feed_forward(layer, grouped.reshape(x.shape)), (keys, values)


def _feed_forward(layer: models.EncoderLayer | models.DecoderLayer, x: mx.array) -> mx.array:
    norm, inner = layer.feed_forward_norm, layer.feed_forward
    y: mx.array = library.feed_forward(
        x, norm.weight, inner.wi.weight, inner.wo.weight, inner.activation, inner.gated, norm.eps
    )
    return y


def _fits(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is one of that kind, with nothing in it quantized, wrapped or replaced."""
    if type(layer) is not kind:
        return False
    own, feed = layer.self_attention, layer.feed_forward
    if type(own) is not models.SelfAttention or type(feed) is not models.FeedForward:
        return False
    parts = [layer.self_norm, own.qkv, own.out, layer.feed_forward_norm, feed.wi, feed.wo]
    if kind is models.DecoderLayer:
        cross = layer.cross_attention
        if type(cross) is not models.CrossAttention:
            return False
        parts += [layer.cross_norm, cross.q, cross.out]
    return all(map(_is_plain, parts))


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a float32 matrix or norm of MLX, without a bias."""
    return (
        type(module) in (nn.Linear, nn.Embedding, FusedEmbedding, nn.RMSNorm)
        and "bias" not in module
        and module.weight.dtype == mx.float32
    )


def _usable(*arrays: mx.array | None) -> bool:
    """Whether the extension can compute with these arrays: float32, on the CPU."""
    return (
        library is not None
        and device.on_cpu()
        and all(array is None or array.dtype == mx.float32 for array in arrays)
    )


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """As `models.t5.attend`, for queries (B, H, L, D) and T keys and values."""
    scores = q @ k.swapaxes(-1, -2)
    return softmax(scores if mask is None else scores + mask) @ v


def softmax(scores: mx.array) -> mx.array:
    """Softmax of scores (B, H, L, T) over T.

    For many elements several vectorized kernels are faster than MLX's own on a CPU: 2**t is
    composed of an exponent and a polynomial. The choice does not depend on L: a pass over several
    tokens has to round as passes over single tokens do.
    """
    _, num_heads, _, num_keys = scores.shape
    if scores.dtype != mx.float32 or num_heads * num_keys < MANY_SCORES:
        return mx.softmax(scores, axis=-1, precise=True)
    power, exponent = _powers(scores - mx.max(scores, axis=-1, keepdims=True))
    return _normalized(power, mx.view(exponent, mx.float32))


@partial(mx.compile, shapeless=True)
def _powers(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Two factors of exp(scores), scores <= 0: a number, and the bits of a power of 2."""
    t = mx.maximum(scores * math.log2(math.e), -127.0)  # anything less becomes 0
    whole = mx.round(t)
    fraction = t - whole
    power = fraction * POWERS_OF_2[0] + POWERS_OF_2[1]
    for coefficient in POWERS_OF_2[2:]:
        power = power * fraction + coefficient
    return power, mx.left_shift(whole.astype(mx.int32) + 127, mx.array(23, dtype=mx.int32))


@partial(mx.compile, shapeless=True)
def _normalized(power: mx.array, factor: mx.array) -> mx.array:
    weights = power * factor
    return weights / mx.sum(weights, axis=-1, keepdims=True)
