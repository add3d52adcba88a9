"""T5's modules, with each layer as two or three operations of MLX's graphs (native/blocks.cpp).

A layer takes about forty of MLX's own operations, whose overhead dominates in small models. And
MLX's products of matrices that are not float32 never reach a fast library on Linux's CPUs; here
they are read as they are stored, in 16, 8 or 4 bits, and computed with in float32.

The modules differ from the plain ones in their classes alone, and compute as those do where
something in them is of another kind.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..models import HeadOutput, t5
from .extension import load_layers

library, _ = load_layers()  # native/blocks.cpp
BITS, GROUP_SIZES = (4, 8), (32, 64, 128)  # of quantized matrices that it takes


class FusedEmbedding(nn.Embedding):
    """An embedding that returns NaN for ids out of its range, which MLX does not check."""

    def __call__(self, tokens: mx.array) -> mx.array:
        return _embed(self, tokens, super().__call__)


class StoredEmbedding(FusedEmbedding):
    """One of 16 bits, for a model that computes in float32."""

    def __call__(self, tokens: mx.array) -> mx.array:
        x: mx.array = super().__call__(tokens).astype(mx.float32)
        return x

    def as_linear(self, x: mx.array) -> mx.array:
        if self.weight.dtype == mx.float32:
            y: mx.array = super().as_linear(x)
            return y
        return _product(self, x, super().as_linear)


class StoredLinear(nn.Linear):
    """A matrix of 16 bits, where no larger operation has it.

    Set to float32, as it is to be trained, it is MLX's own.
    """

    def __call__(self, x: mx.array) -> mx.array:
        if self.weight.dtype == mx.float32:
            return super().__call__(x)
        return _product(self, x, super().__call__)


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """As `FusedEmbedding`."""

    def __call__(self, tokens: mx.array) -> mx.array:
        x: mx.array = _embed(self, tokens, super().__call__).astype(mx.float32)
        return x  # also where the library cannot

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x, super().as_linear)


class QuantizedLinear(nn.QuantizedLinear):
    """A quantized matrix, where no larger operation has it."""

    def __call__(self, x: mx.array) -> mx.array:
        return _product(self, x, super().__call__)


class FusedEncoderLayer(t5.EncoderLayer):
    def __call__(self, x: mx.array, bias: t5.Bias) -> mx.array:
        if not (_fits(self) and _usable(x, bias.table, bias.mask)):
            return super().__call__(x, bias)
        attention = self.self_attention
        x = library.encoder_attention(
            x,
            self.self_norm.weight,
            _matrix(attention.qkv),
            _matrix(attention.out),
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
            _matrix(own.qkv),
            _matrix(own.out),
            bias.table,
            cache,
            bias.offsets,
            self.self_norm.eps,
        )
        # Rows with the same source are one row of several positions here.
        grouped = library.cross_attention(
            x.reshape(source.shape[1], -1, x.shape[2]),
            self.cross_norm.weight,
            _matrix(cross.q),
            _matrix(cross.out),
            source,
            mask,
            self.cross_norm.eps,
        )
        return _feed_forward(self, grouped.reshape(x.shape)), cache


class FusedCrossAttention(t5.CrossAttention):
    """Keys and values of a source in one operation."""

    def keys_values(self, memory: mx.array, width: int | None = None) -> mx.array:
        matrix = _matrix(self.kv)
        if width is None or matrix is None or not _usable(memory):
            return super().keys_values(memory, width)
        kv: mx.array = library.keys_values(memory, matrix, self.num_heads, width)
        return kv


class FusedHead(t5.Head):
    """The last normalization and the output's product in one operation."""

    def __call__(
        self, kind: HeadOutput, x: mx.array, norm: nn.Module, output: nn.Module, size: int
    ) -> mx.array:
        matrix = _matrix(output)
        if self.cap is not None or matrix is None or not (_is_norm(norm) and _usable(x)):
            return super().__call__(kind, x, norm, output, size)
        run = {"logits": library.logits, "argmax": library.best, "judged": library.judged}[kind]
        scores: mx.array = run(x, norm.weight, matrix, self.scale, norm.eps, size)
        return scores


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedEmbedding: QuantizedEmbedding,
    nn.QuantizedLinear: QuantizedLinear,
    t5.EncoderLayer: FusedEncoderLayer,
    t5.DecoderLayer: FusedDecoderLayer,
    t5.CrossAttention: FusedCrossAttention,
    t5.Head: FusedHead,
}


def faster_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a module of a model that computes in float32 is to have, if any."""
    if type(module) is nn.Embedding:
        return FusedEmbedding if module.weight.dtype == mx.float32 else StoredEmbedding
    if type(module) is nn.Linear:  # MLX's own products of float32 reach the C parts
        return None if module.weight.dtype == mx.float32 else StoredLinear
    return FUSED.get(type(module))


def _feed_forward(layer: t5.EncoderLayer | t5.DecoderLayer, x: mx.array) -> mx.array:
    norm, inner = layer.feed_forward_norm, layer.feed_forward
    y: mx.array = library.feed_forward(
        x,
        norm.weight,
        _matrix(inner.wi),
        _matrix(inner.wo),
        inner.activation,
        inner.gated,
        norm.eps,
    )
    return y


def _embed(module: nn.Module, tokens: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
    """Return rows of a matrix by ids; `plain` does so where the library cannot."""
    matrix = _matrix(module)
    if matrix is None or tokens.ndim != 2 or not _usable():
        return plain(tokens)
    x: mx.array = library.embed(tokens.astype(mx.int32), matrix)
    return x


def _product(module: nn.Module, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
    """Return x times a matrix, plus its bias if any; `plain` does so where the library cannot."""
    matrix = _matrix(module, takes_bias=True)
    if matrix is None or not _usable(x):
        return plain(x)
    y: mx.array = library.linear(x, matrix)
    return y + module.bias if "bias" in module else y


def _fits(layer: t5.EncoderLayer | t5.DecoderLayer) -> bool:
    """Whether nothing in a layer is wrapped or replaced."""
    own, feed = layer.self_attention, layer.feed_forward
    if type(own) is not t5.SelfAttention or type(feed) is not t5.FeedForward:
        return False
    norms = [layer.self_norm, layer.feed_forward_norm]
    matrices = [own.qkv, own.out, feed.wi, feed.wo]
    if isinstance(layer, t5.DecoderLayer):
        cross = layer.cross_attention
        if type(cross) is not FusedCrossAttention:
            return False
        norms.append(layer.cross_norm)
        matrices += [cross.q, cross.out]
    return all(map(_is_norm, norms)) and all(_matrix(each) is not None for each in matrices)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a float32 norm of MLX."""
    return type(module) is nn.RMSNorm and module.weight.dtype == mx.float32


def _matrix(module: nn.Module, *, takes_bias: bool = False) -> Any:
    """Return a module's matrix as the library takes it; None if it cannot.

    It takes those as MLX's affine quantization packs them in 8 or 4 bits, or of floats: of 16 bits
    only where they are computed with in float32. Fused layers take none that has a bias.
    """
    if library is None or ("bias" in module and not takes_bias):
        return None
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        if module.mode != "affine" or module.bits not in BITS:
            return None
        return library.Matrix(module.weight, module.scales, module.biases, module.bits)
    is_stored = type(module) in (StoredLinear, StoredEmbedding)
    is_plain = type(module) in (nn.Linear, nn.Embedding, FusedEmbedding)
    if is_stored or (is_plain and module.weight.dtype == mx.float32):
        return library.Matrix(module.weight)
    return None


def _usable(*arrays: mx.array | None) -> bool:
    """Whether the extension can compute with these arrays: float32, on the CPU."""
    return (
        library is not None
        and device.on_cpu()
        and all(array is None or array.dtype == mx.float32 for array in arrays)
    )
