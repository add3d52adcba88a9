"""The layers of T5 (arXiv 1910.10683), each with its normalization before and its sum after.

Shapes: B batch, S source length, L query length, T cached length, H heads, D head size. Hidden
states are (B * L, d_model). On Linux CPUs a layer is a single operation where `blocks` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn

from ...cpu import blocks
from ...device import on_cpu
from ..cache import KeysValues, resized, write
from .config import Activation, T5Config
from .positions import Bias, Derived, PositionBias, position_biases

MANY_SCORES = 2048  # from so many on, `softmax` is put together here
# 2**x for x from -0.5 to 0.5, the highest power first: least squares, within 2e-7.
POWERS_OF_2 = (
    1.54653179e-04, 1.33952854e-03, 9.61803993e-03, 5.55034067e-02, 2.40226511e-01,
    6.93147200e-01, 1.0,
)  # fmt: skip

ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "silu": nn.silu,
}


class Encoder(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.position_bias = PositionBias(config, bidirectional=True)
        self.layers = [EncoderLayer(config) for _ in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, hidden: mx.array, batch: int, mask: mx.array | None) -> mx.array:
        """Embedded sources (B * S, d_model), additive mask (B, 1, 1, S) -> memory, as embedded."""
        length = len(hidden) // batch
        start = mx.zeros(1, dtype=mx.int32)
        biases = position_biases(self.position_bias.tables(), start, length, length)
        for layer, bias in zip(self.layers, cycle(biases), strict=False):
            hidden = layer(hidden, batch, bias, mask)
        memory: mx.array = self.norm(hidden)
        return memory


class EncoderLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.self_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.self_attention = SelfAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)

    def __call__(self, x: mx.array, batch: int, bias: Bias, mask: mx.array | None) -> mx.array:
        x = self.self_attention.of_source(x, self.self_norm, batch, bias, mask)
        return self.feed_forward(x, self.feed_forward_norm)


class Decoder(nn.Module):
    """The decoder's weights; `T5.step` runs them."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.position_bias = PositionBias(config, bidirectional=False)
        self.layers = [DecoderLayer(config) for _ in range(config.num_decoder_layers)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)


class DecoderLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.self_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.self_attention = SelfAttention(config)
        self.cross_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.cross_attention = CrossAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)

    def __call__(
        self,
        x: mx.array,
        bias: Bias,
        cache: KeysValues,
        at: mx.array,
        cross: KeysValues,
        mask: mx.array | None,
    ) -> tuple[mx.array, KeysValues]:
        """One layer over new positions.

        Args:
            x: (B * L, d_model).
            bias: Of self-attention, with the causal mask; its scores (B or 1, H, L, C).
            cache: Keys and values of earlier positions, (B, H, C, D).
            at: Where in them the new ones begin, (B,) or (1,) int32.
            cross: Keys and values of the encoder's memory, (B, H, T, D) each.
            mask: The source's additive padding mask, (B, 1, 1, T).

        Returns:
            (B * L, d_model), and the cache with the new positions.
        """
        x, cache = self.self_attention(x, self.self_norm, bias, cache, at)
        x = self.cross_attention(x, self.cross_norm, cross, mask)
        return self.feed_forward(x, self.feed_forward_norm), cache


class SelfAttention(nn.Module):
    """Multi-head attention; one product makes q, k and v."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self._num_heads = config.num_heads
        self.qkv = Linear(config.d_model, 3 * inner, bias=False)
        self.out = Linear(inner, config.d_model, bias=False)

    def __call__(
        self, x: mx.array, norm: nn.RMSNorm, bias: Bias, cache: KeysValues, at: mx.array
    ) -> tuple[mx.array, KeysValues]:
        """New positions over those in the cache and themselves: x + attention, and the cache."""
        if fused((norm, self.qkv, self.out), x, bias.table, *cache):
            x, *written = blocks.library.decoder_attention(
                x, norm.weight, self.qkv.weight, self.out.weight, bias.table, *cache, at, norm.eps
            )
            return x, tuple(written)
        q, k, v = split_heads(self.qkv(norm(x)), len(cache[0]), 3, self._num_heads)
        cache = write(cache[0], k, at), write(cache[1], v, at)
        return x + self.out(attend(q, *cache, bias.scores)), cache

    def of_source(
        self, x: mx.array, norm: nn.RMSNorm, batch: int, bias: Bias, mask: mx.array | None
    ) -> mx.array:
        """All positions of a source over each other: x + attention, (B * S, d_model)."""
        if fused((norm, self.qkv, self.out), x, bias.table, mask):
            y: mx.array = blocks.library.encoder_attention(
                x, norm.weight, self.qkv.weight, self.out.weight, bias.table, mask, batch, norm.eps
            )
            return y
        q, k, v = split_heads(self.qkv(norm(x)), batch, 3, self._num_heads)
        scores = bias.scores if mask is None else bias.scores + mask
        return x + self.out(attend(q, k, v, scores, rows=len(x) // batch))


class CrossAttention(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self._num_heads = config.num_heads
        self.q = Linear(config.d_model, inner, bias=False)
        self.kv = Linear(config.d_model, 2 * inner, bias=False)
        self.out = Linear(inner, config.d_model, bias=False)

    def keys_values(self, memory: mx.array, batch: int, width: int) -> KeysValues:
        """Encoder's memory (B * S, d_model) -> keys and values (B, H, width, D), zeros behind S."""
        if fused((self.kv,), memory):
            pair: KeysValues = blocks.library.keys_values(
                memory, self.kv.weight, batch, self._num_heads, width
            )
            return pair
        k, v = split_heads(self.kv(memory), batch, 2, self._num_heads)
        return resized(k, width), resized(v, width)

    def __call__(
        self, x: mx.array, norm: nn.RMSNorm, cross: KeysValues, mask: mx.array | None
    ) -> mx.array:
        """New positions over the source's: x + attention, (B * L, d_model)."""
        if fused((norm, self.q, self.out), x, *cross, mask):
            y: mx.array = blocks.library.cross_attention(
                x, norm.weight, self.q.weight, self.out.weight, *cross, mask, norm.eps
            )
            return y
        (q,) = split_heads(self.q(norm(x)), len(cross[0]), 1, self._num_heads)
        return x + self.out(attend(q, *cross, mask))


class FeedForward(nn.Module):
    """act(x W) W', or with a gate (v1.1): (act(x W) * x V) W', W and V being one matrix."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self._gated = config.gated
        self._activation = config.activation
        self.wi = Linear(config.d_model, config.d_ff * (2 if config.gated else 1), bias=False)
        self.wo = Linear(config.d_ff, config.d_model, bias=False)

    def __call__(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        """Give x + the layer, (N, d_model)."""
        if fused((norm, self.wi, self.wo), x):
            y: mx.array = blocks.library.feed_forward(
                x, norm.weight, self.wi.weight, self.wo.weight, self._activation, self._gated,
                norm.eps,
            )  # fmt: skip
            return y
        act, hidden = ACTIVATIONS[self._activation], self.wi(norm(x))
        if self._gated:
            gate, linear = mx.split(hidden, 2, axis=-1)
            return x + self.wo(act(gate) * linear)
        return x + self.wo(act(hidden))


class Linear(nn.Linear):
    """A product with the weight's transpose, which is kept (`keep_transposed`) between steps."""

    def __call__(self, x: mx.array) -> mx.array:
        return x @ transposed(self)


class Embedding(nn.Embedding):
    """One that also serves as a head."""

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ transposed(self)


FUSED = (Linear, Embedding, nn.RMSNorm)


def fused(layers: Sequence[nn.Module], *arrays: mx.array | None) -> bool:
    """Whether `blocks` can run these layers: none quantized, wrapped, or put in another's place."""
    return blocks.usable(*arrays) and all(
        type(layer) in FUSED and "bias" not in layer and layer.weight.dtype == mx.float32
        for layer in layers
    )


def embed(layer: nn.Module, tokens: mx.array) -> mx.array:
    """Ids (B, L) int32 -> (B * L, d_model). They are not checked."""
    if fused((layer,)):
        rows: mx.array = blocks.library.embed(tokens.astype(mx.int32), layer.weight)
        return rows
    rows = layer(tokens.reshape(-1))
    return rows


def transposed(layer: nn.Module) -> mx.array:
    """A layer's weight as (inputs, outputs): the view that was kept, if it is of this weight."""
    kept: Derived | None = vars(layer).get("_transposed")
    if kept is not None and kept.weight is layer.weight:
        return kept.arrays[0]
    view: mx.array = layer.weight.T
    return view


def keep_transposed(layer: nn.Module) -> None:
    """Take the transpose once, for as long as the weight is the same object."""
    weight = layer.weight
    view = weight.T
    mx.eval(view)
    layer._transposed = Derived(weight, (view,))


def forget_transposed(layer: nn.Module) -> None:
    """Drop the transpose that was kept."""
    vars(layer).pop("_transposed", None)


def split_heads(x: mx.array, batch: int, parts: int, num_heads: int) -> list[mx.array]:
    """(B * L, parts * H * D) -> `parts` arrays (B, H, L, D)."""
    length = len(x) // batch
    if length == 1:  # already in order
        heads = x.reshape(batch, parts * num_heads, 1, -1)
    else:
        heads = x.reshape(batch, length, parts * num_heads, -1).swapaxes(1, 2)
    return list(mx.split(heads, parts, axis=1)) if parts > 1 else [heads]


def attend(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, *, rows: int = 1
) -> mx.array:
    """Queries (B, H, L, D) over T keys and values, joined heads out: (B * L, H * D).

    `rows`: how many queries there are at least, whenever these keys are looked at.
    """
    if on_cpu():
        # What the library's own comes to there, but for its scaling.
        scores = q @ k.swapaxes(-1, -2)
        if mask is not None:
            scores = scores + mask
        out = softmax(scores, rows) @ v
    else:
        # Its scaling would be 1/sqrt(D), which T5 does without.
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    batch, num_heads, length, size = out.shape
    if length > 1:
        out = out.swapaxes(1, 2)
    return out.reshape(batch * length, num_heads * size)


def softmax(scores: mx.array, rows: int) -> mx.array:
    """Softmax of scores (B, H, L, T) over T, on a CPU.

    MLX's own takes 15 ns an element there, for an exponential that calls a function for each
    addition. Where there are many elements, more kernels of vectors are faster: 2**t is put
    together from an exponent and a polynomial. Which way is taken must not hang on L: a pass over
    several tokens has to round as one over a single token does. So `rows` is what counts.
    """
    _, num_heads, _, num_keys = scores.shape
    if scores.dtype != mx.float32 or num_heads * num_keys * rows < MANY_SCORES:
        return mx.softmax(scores, axis=-1, precise=True)
    power, exponent = _powers(scores - mx.max(scores, axis=-1, keepdims=True))
    return _shares(power, mx.view(exponent, mx.float32))


@partial(mx.compile, shapeless=True)
def _powers(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Two factors of exp(scores), which are not above 0: a number, and a power of 2 as its bits."""
    t = mx.maximum(scores * math.log2(math.e), -127.0)  # what is less becomes 0, as it must
    whole = mx.round(t)
    fraction = t - whole
    power = fraction * POWERS_OF_2[0] + POWERS_OF_2[1]
    for coefficient in POWERS_OF_2[2:]:
        power = power * fraction + coefficient
    return power, mx.left_shift(whole.astype(mx.int32) + 127, mx.array(23, dtype=mx.int32))


@partial(mx.compile, shapeless=True)
def _shares(power: mx.array, factor: mx.array) -> mx.array:
    weights = power * factor
    return weights / mx.sum(weights, axis=-1, keepdims=True)
