"""The layers of T5 (arXiv 1910.10683), as `modeling_t5.py` of transformers has them.

Shapes: B batch, S source length, L query length, T cached length, H heads, D head size. Hidden
states are (B, L, d_model). A layer normalizes its input and adds its output: x + f(norm(x)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import mlx.core as mx
import mlx.nn as nn

from ...decoding import argmax
from ..cache import KeysValues, resized, write
from .config import Activation, T5Config
from .positions import PositionBias, position_biases

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

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Embedded sources (B, S, d_model), additive mask (B, 1, 1, S) -> memory, as `x`."""
        length, start = x.shape[1], mx.zeros(1, dtype=mx.int32)
        biases = position_biases(self.position_bias.tables(), start, length, length)
        if mask is not None:
            biases = [bias + mask for bias in biases]
        # One bias serves all layers, or each has its own.
        for layer, bias in zip(self.layers, cycle(biases), strict=False):
            x = layer(x, bias)
        memory: mx.array = self.norm(x)
        return memory


class EncoderLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.self_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.self_attention = SelfAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        """(B, S, d_model) and bias (B or 1, H, S, S), with the mask -> (B, S, d_model)."""
        attended, _ = self.self_attention(self.self_norm(x), bias)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The decoder's layers; its last normalization is applied by `Head`."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.position_bias = PositionBias(config, bidirectional=False)
        self.layers = [DecoderLayer(config) for _ in range(config.num_decoder_layers)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def read(self, memory: mx.array, width: int) -> list[KeysValues]:
        """Project the encoder's memory (B, S, d_model) for cross-attention.

        Returns:
            Each layer's keys and values, (B, H, T, D), zeros from S on; T is `width`, at least S.
        """
        pairs = [layer.cross_attention.keys_values(memory) for layer in self.layers]
        return [(resized(keys, width), resized(values, width)) for keys, values in pairs]

    def __call__(
        self,
        x: mx.array,
        offsets: mx.array,
        cache: Sequence[KeysValues],
        sources: Sequence[KeysValues],
        mask: mx.array | None,
        tables: Sequence[mx.array],
    ) -> tuple[mx.array, list[KeysValues]]:
        """Run all layers over new positions of every row.

        Args:
            x: Embedded tokens, (B, L, d_model).
            offsets: Position of each row's first token, (B,) int32, or (1,) if all are the same.
            cache: Each layer's keys and values of earlier positions, (B, H, T, D), with room for L
                more.
            sources: What `read` returned, for the sources of B / P rows after each other each.
            mask: Additive padding mask of the sources, (P, 1, 1, T of the sources).
            tables: `PositionBias.tables()` of this decoder.

        Returns:
            The last layer's output, (B, L, d_model), and the cache with the new positions.
        """
        biases = position_biases(tables, offsets, x.shape[1], cache[0][0].shape[2])
        written: list[KeysValues] = []
        parts = zip(self.layers, cycle(biases), cache, sources, strict=False)
        for layer, bias, pair, source in parts:
            x, pair = layer(x, bias, offsets, pair, source, mask)
            written.append(pair)
        return x, written

    def whole(self, x: mx.array, memory: mx.array, mask: mx.array | None) -> mx.array:
        """Run all layers over whole sequences, without caches, so that gradients can be taken.

        Embedded tokens (B, L, d_model), the encoder's memory (B, S, d_model) and the additive mask
        (B, 1, 1, S) of its padding -> the last layer's output, (B, L, d_model).
        """
        length, start = x.shape[1], mx.zeros(1, dtype=mx.int32)
        biases = position_biases(self.position_bias.tables(), start, length, length)
        for layer, bias in zip(self.layers, cycle(biases), strict=False):
            x, _ = layer(x, bias, None, None, layer.cross_attention.keys_values(memory), mask)
        return x


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
        bias: mx.array,
        offsets: mx.array | None,
        cache: KeysValues | None,
        source: KeysValues,
        mask: mx.array | None,
    ) -> tuple[mx.array, KeysValues]:
        """Run one layer; as `Decoder`, with a causal bias (B or 1, H, L, T)."""
        attended, cache = self.self_attention(self.self_norm(x), bias, cache, offsets)
        x = x + attended
        x = x + self.cross_attention(self.cross_norm(x), source, mask)
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class SelfAttention(nn.Module):
    """Multi-head attention; one product makes queries, keys and values."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.attend = attend
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def __call__(
        self,
        x: mx.array,
        bias: mx.array,
        cache: KeysValues | None = None,
        offsets: mx.array | None = None,
    ) -> tuple[mx.array, KeysValues]:
        """Attend from new positions to themselves and to those in the cache, if there is one.

        Buffers of the cache are longer than what counts in them. Whatever lies beyond a row's
        positions, rejected tokens among it, is hidden by the bias: -inf for keys after the query.
        """
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)
        if cache is not None and offsets is not None:
            k, v = write(cache[0], k, offsets), write(cache[1], v, offsets)
        return self.out(join_heads(self.attend(q, k, v, bias))), (k, v)


class CrossAttention(nn.Module):
    """Multi-head attention to the encoder's memory."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.attend = attend
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.kv = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def keys_values(self, memory: mx.array) -> KeysValues:
        """Encoder's memory (B, S, d_model) -> keys and values (B, H, S, D)."""
        k, v = split_heads(self.kv(memory), 2, self.num_heads)
        return k, v

    def __call__(self, x: mx.array, source: KeysValues, mask: mx.array | None) -> mx.array:
        """Attend from (B, L, d_model) to keys and values (P, H, T, D), without a position bias.

        With fewer sources than rows, B / P rows after each other have the same one, and their
        queries are those of one row.
        """
        grouped = x.reshape(len(source[0]), -1, x.shape[2])
        (q,) = split_heads(self.q(grouped), 1, self.num_heads)
        out: mx.array = self.out(join_heads(self.attend(q, *source, mask)))
        return out.reshape(x.shape)


class FeedForward(nn.Module):
    """act(x W) W', or with a gate (v1.1): (act(x W) * x V) W'; `wi` is W, or W and then V."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = config.activation
        self.wi = nn.Linear(config.d_model, config.d_ff * (2 if config.gated else 1), bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        act, hidden = ACTIVATIONS[self.activation], self.wi(x)
        if self.gated:
            gate, linear = mx.split(hidden, 2, axis=-1)
            hidden = act(gate) * linear
        else:
            hidden = act(hidden)
        out: mx.array = self.wo(hidden)
        return out


class Head(nn.Module):
    """The step from the decoder's last hidden states to logits.

    It holds no weights, so that checkpoints keep theirs where they are: norm in the decoder, output
    matrix in the model, where it may be the embedding.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0

    def logits(self, x: mx.array, norm: nn.Module, output: nn.Module, size: int) -> mx.array:
        """Score the first `size` ids: hidden states (B, L, d_model) -> logits (B, L, size).

        `norm` is the decoder's last normalization; `output` the output matrix (`lm_head`), or the
        embedding where that is also the output.
        """
        x = norm(x) if self.scale == 1 else norm(x) * self.scale
        if isinstance(output, nn.Linear | nn.Embedding) and "bias" not in output:
            logits: mx.array = x @ output.weight[:size].T  # no others are computed
        else:
            project = output.as_linear if hasattr(output, "as_linear") else output
            logits = project(x)[..., :size]
        return logits

    def argmax(self, x: mx.array, norm: nn.Module, output: nn.Module, size: int) -> mx.array:
        """Return the best of the first `size` ids, (B, L) int32; arguments as in `logits`."""
        return argmax(self.logits(x, norm, output, size))


def split_heads(x: mx.array, parts: int, num_heads: int) -> list[mx.array]:
    """(B, L, parts * H * D) -> `parts` arrays (B, H, L, D)."""
    batch, length, _ = x.shape
    if length == 1:  # no transpose is needed, and small models gain by leaving it out
        heads = x.reshape(batch, parts * num_heads, 1, -1)
    else:
        heads = x.reshape(batch, length, parts * num_heads, -1).swapaxes(1, 2)
    return list(mx.split(heads, parts, axis=1)) if parts > 1 else [heads]


def join_heads(x: mx.array) -> mx.array:
    """(B, H, L, D) -> (B, L, H * D)."""
    batch, _, length, _ = x.shape
    return (x if length == 1 else x.swapaxes(1, 2)).reshape(batch, length, -1)


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """Attention of queries (B, H, L, D) to T keys and values; T5 does not scale by 1/sqrt(D)."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
