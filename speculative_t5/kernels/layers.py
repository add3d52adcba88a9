"""T5's modules, with each layer as two or three operations of MLX's graphs (native/blocks.cpp).

A layer takes about forty of MLX's own operations, whose overhead dominates in small models. The
modules here differ from the plain ones in their classes alone, and compute as those do where
something in them is not plain float32.
"""

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..models import HeadOutput, t5
from .extension import load_layers

library, _ = load_layers()  # native/blocks.cpp


class FusedEmbedding(nn.Embedding):
    """An embedding that returns NaN for ids out of its range, which MLX does not check."""

    def __call__(self, tokens: mx.array) -> mx.array:
        if _usable(self.weight):
            x: mx.array = library.embed(tokens.astype(mx.int32), self.weight)
        else:
            x = super().__call__(tokens)
        return x


class FusedEncoderLayer(t5.EncoderLayer):
    def __call__(self, x: mx.array, bias: t5.Bias) -> mx.array:
        if not (_fits(self) and _usable(x, bias.table, bias.mask)):
            return super().__call__(x, bias)
        attention = self.self_attention
        x = library.encoder_attention(
            x,
            self.self_norm.weight,
            attention.qkv.weight,
            attention.out.weight,
            bias.table,
            bias.mask,
            self.self_norm.eps,
        )
        return _feed_forward(self, x)


class FusedDecoderLayer(t5.DecoderLayer):
    def __call__(
        self,
        x: mx.array,
        bias: t5.Bias,
        cache: mx.array | None,
        source: mx.array,
        padding: t5.Padding | None,
    ) -> tuple[mx.array, mx.array]:
        own, cross = self.self_attention, self.cross_attention
        mask = None if padding is None else padding.mask
        if cache is None or not (_fits(self) and _usable(x, bias.table, source, mask, cache)):
            return super().__call__(x, bias, cache, source, padding)
        x, cache = library.decoder_attention(
            x,
            self.self_norm.weight,
            own.qkv.weight,
            own.out.weight,
            bias.table,
            cache,
            bias.offsets,
            self.self_norm.eps,
        )
        # Rows with the same source are one row of several positions here.
        grouped = library.cross_attention(
            x.reshape(source.shape[1], -1, x.shape[2]),
            self.cross_norm.weight,
            cross.q.weight,
            cross.out.weight,
            source,
            mask,
            self.cross_norm.eps,
        )
        return _feed_forward(self, grouped.reshape(x.shape)), cache


class FusedCrossAttention(t5.CrossAttention):
    """Keys and values of a source in one operation."""

    def keys_values(self, memory: mx.array, width: int | None = None) -> mx.array:
        if width is None or not (_is_plain(self.kv) and _usable(memory)):
            return super().keys_values(memory, width)
        kv: mx.array = library.keys_values(memory, self.kv.weight, self.num_heads, width)
        return kv


class FusedHead(t5.Head):
    """The last normalization and the output's product in one operation."""

    def __call__(
        self, kind: HeadOutput, x: mx.array, norm: nn.Module, output: nn.Module, size: int
    ) -> mx.array:
        if self.cap is not None or not (_is_plain(norm) and _is_plain(output) and _usable(x)):
            return super().__call__(kind, x, norm, output, size)
        run = library.logits if kind == "logits" else library.best
        scores: mx.array = run(x, norm.weight, output.weight, self.scale, norm.eps, size)
        return scores


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: FusedEmbedding,  # the embedding is not one of these if it is quantized
    t5.EncoderLayer: FusedEncoderLayer,
    t5.DecoderLayer: FusedDecoderLayer,
    t5.CrossAttention: FusedCrossAttention,
    t5.Head: FusedHead,
}


def _feed_forward(layer: t5.EncoderLayer | t5.DecoderLayer, x: mx.array) -> mx.array:
    norm, inner = layer.feed_forward_norm, layer.feed_forward
    y: mx.array = library.feed_forward(
        x, norm.weight, inner.wi.weight, inner.wo.weight, inner.activation, inner.gated, norm.eps
    )
    return y


def _fits(layer: t5.EncoderLayer | t5.DecoderLayer) -> bool:
    """Whether nothing in a layer is quantized, wrapped or replaced."""
    own, feed = layer.self_attention, layer.feed_forward
    if type(own) is not t5.SelfAttention or type(feed) is not t5.FeedForward:
        return False
    parts = [layer.self_norm, own.qkv, own.out, layer.feed_forward_norm, feed.wi, feed.wo]
    if isinstance(layer, t5.DecoderLayer):
        cross = layer.cross_attention
        if type(cross) is not FusedCrossAttention:
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
