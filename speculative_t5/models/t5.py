"""T5 (arXiv 1910.10683): its layers, as `modeling_t5.py` of transformers has them, and the model.

Shapes: B batch, S source length, L query length, T cached length, H heads, D head size. Hidden
states are (B, L, d_model). A layer normalizes its input and adds its output: x + f(norm(x)).
"""

from collections.abc import Callable, Sequence
from copy import copy

import mlx.core as mx
import mlx.nn as nn

from ..decoding import best, best_logprobs
from .cache import resized, write
from .config import Activation, T5Config
from .encoder_decoder import DecoderStack, EncoderDecoder
from .position_bias import Bias, Padding, PositionBias, block_biases, for_each_row, position_biases
from .quantization import quantize
from .session import HeadOutput
from .t5gemma_config import StackConfig

ACTIVATION_FUNCTIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "silu": nn.silu,
}


def split_heads(x: mx.array, parts: int, num_heads: int) -> mx.array:
    """(B, L, parts * H * D) -> (parts, B, H, L, D), a view."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, parts, num_heads, -1).transpose(2, 0, 3, 1, 4)


def join_heads(x: mx.array) -> mx.array:
    """(B, H, L, D) -> (B, L, H * D)."""
    batch, _, length, _ = x.shape
    return (x if length == 1 else x.swapaxes(1, 2)).reshape(batch, length, -1)


def add_product(x: mx.array, layer: nn.Module, y: mx.array) -> mx.array:
    """Return x + layer(y), (..., d_model), in one operation if the layer is a plain matrix."""
    if not is_matrix(layer):
        out: mx.array = x + layer(y)
        return out
    rows = mx.addmm(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), layer.weight.T)
    return rows.reshape(x.shape)


def is_matrix(layer: nn.Module) -> bool:
    """Whether a layer is a plain product: not quantized, split, wrapped or with a bias."""
    return type(layer) is nn.Linear and "bias" not in layer


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """Attention of queries (B, H, L, D) to T keys and values; T5 does not scale by 1/sqrt(D)."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)


class SelfAttention(nn.Module):
    """Multi-head attention, added to x; one product makes queries, keys and values."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def __call__(
        self, x: mx.array, normed: mx.array, bias: Bias, cache: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Attend from new positions to themselves and to those in the cache, if there is one.

        Returned are x with what they found, and keys and values. The bias hides whatever lies
        beyond a row's positions, rejected tokens among it.
        """
        heads = split_heads(self.qkv(normed), 3, self.num_heads)
        (q,), kv = heads[:1], heads[1:]
        if cache is not None:
            kv = write(cache, kv, bias.offsets)
        k, v = kv  # a view each, while kv[0] would be a copy
        return add_product(x, self.out, join_heads(attend(q, k, v, bias.scores))), kv


class CrossAttention(nn.Module):
    """Multi-head attention to the encoder's memory, added to x."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.kv = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def keys_values(self, memory: mx.array, width: int | None = None) -> mx.array:
        """Encoder's memory (B, S, d_model) -> keys and values (2, B, H, T, D), zeros from S on.

        T is `width`, at least S; or S, and gradients can be taken.
        """
        kv = split_heads(self.kv(memory), 2, self.num_heads)
        return kv if width is None else resized(kv, width)

    def __call__(
        self, x: mx.array, normed: mx.array, source: mx.array, mask: mx.array | None
    ) -> mx.array:
        """Attend from (B, L, d_model) to keys and values (2, P, H, T, D), without a position bias.

        With fewer sources than rows, B / P consecutive rows read one as a single row.
        """
        grouped = normed.reshape(source.shape[1], -1, x.shape[2])
        (q,), (k, v) = split_heads(self.q(grouped), 1, self.num_heads), source
        found = join_heads(attend(q, k, v, mask))
        return add_product(x, self.out, found.reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """act(n W) W' added to x, n being normed; `wi` is W.

    With a gate (v1.1) it is (act(n W) * n V) W'; `wi` is W and then V.
    """

    def __init__(self, config: T5Config | StackConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = config.activation
        self.wi = nn.Linear(config.d_model, config.d_ff * (2 if config.gated else 1), bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def hidden(self, inner: mx.array) -> mx.array:
        """Return what `wo` is to be multiplied by, (B, L, d_ff), given the product of `wi`."""
        act = ACTIVATION_FUNCTIONS[self.activation]
        if self.gated:
            gate, linear = mx.split(inner, 2, axis=-1)
            return act(gate) * linear
        return act(inner)

    def __call__(self, x: mx.array, normed: mx.array) -> mx.array:
        return add_product(x, self.wo, self.hidden(self.wi(normed)))


class EncoderLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.self_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.self_attention = SelfAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)

    def __call__(self, x: mx.array, bias: Bias) -> mx.array:
        x, _ = self.self_attention(x, self.self_norm(x), bias)
        return self.feed_forward(x, self.feed_forward_norm(x))


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
        cache: mx.array | None,
        source: mx.array,
        padding: Padding | None,
    ) -> tuple[mx.array, mx.array]:
        """Run one layer over new positions, or over whole sequences without a cache."""
        x, cache = self.self_attention(x, self.self_norm(x), bias, cache)
        mask = None if padding is None else padding.scores
        x = self.cross_attention(x, self.cross_norm(x), source, mask)
        return self.feed_forward(x, self.feed_forward_norm(x)), cache


class EncoderStack(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.position_bias = PositionBias(config, bidirectional=True)
        self.layers = [EncoderLayer(config) for _ in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Embedded sources (B, S, d_model), additive mask (B, 1, 1, S) -> memory, as `x`."""
        length, start = x.shape[1], mx.zeros(1, dtype=mx.int32)
        biases = position_biases(self.position_bias.tables(), start, length, length, mask)
        for layer, bias in zip(self.layers, biases, strict=False):
            x = layer(x, bias)
        memory: mx.array = self.norm(x)
        return memory


class Decoder(DecoderStack):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.head_size = config.d_kv
        self.position_bias = PositionBias(config, bidirectional=False)
        self.layers = [DecoderLayer(config) for _ in range(config.num_decoder_layers)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def tables(self) -> list[mx.array]:
        tables: list[mx.array] = self.position_bias.tables()
        return tables

    def padded(self, head_size: int) -> "Decoder":
        """Return a decoder as `DecoderStack.padded` does.

        It has this one's arrays but for those of attention; it is this one if some of those belong
        to layers that are not plain matrices.
        """
        padded = copy(self)
        padded.layers = [copy(layer) for layer in self.layers]
        for layer in padded.layers:
            for name in ("self_attention", "cross_attention"):
                attention = layer[name] = copy(layer[name])
                for part, product in attention.children().items():
                    if not is_matrix(product):
                        return self
                    attention[part] = copy(product)
                    weight = product.weight if part == "out" else product.weight.T
                    heads = weight.reshape(len(weight), -1, self.head_size)
                    wider = mx.pad(heads, [(0, 0), (0, 0), (0, head_size - self.head_size)])
                    wider = wider.reshape(len(weight), -1)
                    attention[part].weight = wider if part == "out" else mx.contiguous(wider.T)
        padded.head_size = head_size
        return padded

    def read(self, memory: mx.array, width: int) -> list[mx.array]:
        return [layer.cross_attention.keys_values(memory, width) for layer in self.layers]

    def __call__(
        self,
        x: mx.array,
        offsets: mx.array,
        cache: Sequence[mx.array],
        sources: Sequence[mx.array],
        mask: mx.array | None,
        tables: Sequence[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        batch, length, _ = x.shape
        _, _, num_heads, capacity, _ = cache[0].shape
        biases = position_biases(tables, offsets, length, capacity, batch=batch)
        padding = None
        if mask is not None:
            queries = batch * length // len(mask)
            padding = Padding(for_each_row(mask, len(mask), num_heads, queries), mask)
        written: list[mx.array] = []
        for layer, bias, kv, source in zip(self.layers, biases, cache, sources, strict=False):
            x, kv = layer(x, bias, kv, source, padding)
            written.append(kv)
        return x, written

    def whole(
        self, x: mx.array, memory: mx.array, mask: mx.array | None, block: int = 1
    ) -> mx.array:
        tables = self.position_bias.tables()
        biases = block_biases(tables, x.shape[1] // block, block)
        padding = None if mask is None else Padding(mask, mask)
        for layer, bias in zip(self.layers, biases, strict=False):
            x, _ = layer(x, bias, None, layer.cross_attention.keys_values(memory), padding)
        return x


class Head(nn.Module):
    """The step from the decoder's last hidden states to logits, or to the best ids.

    Its weights stay where checkpoints have them: the norm in the decoder, the output matrix in the
    model, where it may be the embedding.
    """

    def __init__(self, scale: float = 1.0, cap: float | None = None) -> None:
        super().__init__()
        self.scale = scale  # of the hidden states
        self.cap = cap  # logits x are cap * tanh(x / cap)

    def capped(self, logits: mx.array) -> mx.array:
        """Keep logits within the cap, if there is one."""
        return logits if self.cap is None else mx.tanh(logits / self.cap) * self.cap

    def project(self, x: mx.array, output: nn.Module, size: int) -> mx.array:
        """Return the product of (B, L, d_model) with the output matrix, of the first `size` ids."""
        if isinstance(output, nn.Linear | nn.Embedding) and "bias" not in output:
            return x @ output.weight[:size].T  # no others are computed
        project = output.as_linear if hasattr(output, "as_linear") else output
        logits: mx.array = project(x)[..., :size]
        return logits

    def __call__(
        self, kind: HeadOutput, x: mx.array, norm: nn.Module, output: nn.Module, size: int
    ) -> mx.array:
        """Score the first `size` ids: (B, L, d_model) -> logits (B, L, size), or the best ids.

        Those are (B, L) as `best` finds them, or (B, L, 2) as `best_logprobs` does.
        """
        x = norm(x) if self.scale == 1 else norm(x) * self.scale
        logits = self.capped(self.project(x, output, size))
        if kind == "logits":
            return logits
        return best(logits) if kind == "argmax" else best_logprobs(logits)


class T5(EncoderDecoder):
    """A T5."""

    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.encoder = EncoderStack(config)
        self.decoder = Decoder(config)
        self.head = Head(config.d_model**-0.5 if config.scale_decoder_outputs else 1.0)
        if config.own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.quantization:
            quantize(self, config.quantization)
