"""T5 (arXiv 1910.10683): encoder, decoder, output head, and its decoding session.

Shapes: B batch, S source length, L query length, T cached length, H heads, D head size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .cache import KeysValues, KVCache, SourceCache, additive, padding_mask
from .config import Activation, Quantization, T5Config
from .positions import PositionBias, position_biases
from .session import Vocabulary

ENCODED_TOKENS = 512  # of a pass of the encoder, padding included, unless one prompt has more

ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "silu": nn.silu,
}


class T5(nn.Module):
    """An encoder-decoder; a `LanguageModel` by way of `start`."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.vocabulary: Vocabulary | None = None
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        if config.own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.quantization:
            quantize(self, config.quantization)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_id(self) -> int:
        return self.config.eos_token_id

    @property
    def max_source(self) -> int:
        return self.config.n_positions

    @property
    def special_tokens(self) -> frozenset[int]:
        config = self.config
        named = self.vocabulary.special if self.vocabulary else frozenset()
        return named | {config.pad_token_id, config.eos_token_id, config.decoder_start_token_id}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the configuration and of a sample of every weight."""
        digest = hashlib.sha256(repr(self.config).encode())
        weights = cast(list[tuple[str, mx.array]], tree_flatten(self.parameters()))
        samples = {name: w.reshape(-1)[:8].astype(mx.float32) for name, w in weights}
        mx.eval(samples)
        for name, sample in sorted(samples.items()):
            digest.update(f"{name} {sample.tolist()}".encode())
        return f"{digest.hexdigest()} {self.dtype}"

    @property
    def dtype(self) -> mx.Dtype:
        return self.encoder.norm.weight.dtype

    def __call__(
        self,
        encoder_tokens: mx.array,
        decoder_tokens: mx.array,
        *,
        encoder_mask: mx.array | None = None,
    ) -> mx.array:
        """Score whole sequences.

        Args:
            encoder_tokens: (B, S) int32, padded at the end.
            decoder_tokens: (B, L) int32, the start token first.
            encoder_mask: (B, S) bool, True at real tokens; by default what is not padding.

        Returns:
            Logits (B, L, V) of the token after each of `decoder_tokens`.
        """
        if encoder_mask is None:
            encoder_mask = encoder_tokens != self.config.pad_token_id
        mask = additive(encoder_mask, self.dtype)
        batch, length = encoder_tokens.shape
        sources = SourceCache(self.encode(encoder_tokens, mask), [length] * batch)
        sources.mask = mask
        return T5Session(self, sources).step(decoder_tokens)

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[T5Session, list[list[int]]]:
        """Encode prompts (source ids, EOS included) and begin decoding them as one batch."""
        session = T5Session(self, self.sources(prompts))
        return session, [[self.config.decoder_start_token_id] for _ in prompts]

    def sources(self, prompts: Sequence[Sequence[int]]) -> SourceCache:
        """Prompts as cross-attention sees them.

        Encoded a few at a time, those of like length together: past a few hundred tokens a pass
        gains nothing by more of them, and loses by padding.
        """
        groups = _groups(prompts)
        if len(groups) == 1:
            return self._encoded(prompts)
        cache = None
        for group in groups:
            new = self._encoded([prompts[i] for i in group])
            if cache is None:
                longest = max(map(len, prompts))
                cache = SourceCache.empty_like(new, len(prompts), longest)
            cache.replace(group, new)
            mx.eval(cache.layers)
        assert cache is not None
        return cache

    def _encoded(self, prompts: Sequence[Sequence[int]]) -> SourceCache:
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        pad = self.config.pad_token_id
        tokens = mx.array([[*p, *[pad] * (longest - len(p))] for p in prompts], dtype=mx.int32)
        layers = self.encode(tokens, padding_mask(lengths, self.dtype))
        mx.eval(layers)  # or the first step would wait for it, and be taken for slow
        return SourceCache(layers, lengths)

    def encode(self, tokens: mx.array, mask: mx.array | None) -> list[KeysValues]:
        """Source ids (B, S), additive mask (B, 1, 1, S) -> each layer's keys and values."""
        memory = self.encoder(self.shared(tokens), mask)
        return [layer.cross_attention.keys_values(memory) for layer in self.decoder.layers]

    def head(self, hidden: mx.array) -> mx.array:
        """Decoder's output (B, L, d_model) -> logits (B, L, V)."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        return self.lm_head(hidden) if self.config.own_head else self.shared.as_linear(hidden)


def _groups(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of prompts to encode together: all in order, or by length if they are many tokens."""
    order = list(range(len(prompts)))
    if len(prompts) * max(map(len, prompts)) <= ENCODED_TOKENS:
        return [order]
    groups: list[list[int]] = [[]]
    for i in sorted(order, key=lambda i: len(prompts[i])):
        if groups[-1] and (len(groups[-1]) + 1) * len(prompts[i]) > ENCODED_TOKENS:
            groups.append([])
        groups[-1].append(i)
    return groups


def quantize(model: T5, how: Quantization) -> None:
    """Put quantized layers in the places of those that `how` names."""

    def chosen(path: str, module: nn.Module) -> bool:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how.group_size:
            return False
        if path in ("shared", "lm_head"):
            return how.embeddings
        return not (how.keep_wo and path.endswith(".wo"))

    nn.quantize(model, how.group_size, how.bits, class_predicate=chosen)


class T5Session:
    """One batch of prompts being decoded; a `Session`."""

    def __init__(self, model: T5, sources: SourceCache) -> None:
        config, batch = model.config, len(sources.lengths)
        self._model = model
        self._sources = sources
        self._ahead: SourceCache | None = None
        self._num_ahead = 0  # its last rows that are not taken yet
        self._bias_tables = model.decoder.position_bias.tables()
        self._cache = KVCache(
            config.num_decoder_layers, config.num_heads, config.d_kv, batch, model.dtype
        )

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array) -> mx.array:
        count = tokens.shape[1]
        cache, sources, decoder = self._cache, self._sources, self._model.decoder
        cache.reserve(count)
        positions = np.array(cache.lengths)[:, None] + np.arange(count)
        if (positions == positions[0]).all():
            positions = positions[:1]
        biases = position_biases(self._bias_tables, positions, max(cache.lengths) + count)
        hidden = self._model.shared(tokens)
        for i, (layer, bias) in enumerate(zip(decoder.layers, cycle(biases), strict=False)):
            hidden = layer(hidden, bias, partial(cache.append, i), sources.view(i), sources.mask)
        cache.advance(count)
        return self._model.head(decoder.norm(hidden))

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def expect(self, prompts: Sequence[Sequence[int]]) -> None:
        assert not self._num_ahead
        self._ahead = self._model.sources(prompts)
        self._num_ahead = len(prompts)

    def replace(self, rows: Sequence[int]) -> list[list[int]]:
        assert self._ahead is not None and len(rows) <= self._num_ahead
        first = len(self._ahead.lengths) - self._num_ahead
        self._sources.replace(rows, self._ahead.part(first, first + len(rows)))
        self._cache.clear(rows)
        self._num_ahead -= len(rows)
        return [[self._model.config.decoder_start_token_id] for _ in rows]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._sources.select(rows)


class Encoder(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.position_bias = PositionBias(config, bidirectional=True)
        self.layers = [EncoderLayer(config) for _ in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)

    def __call__(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        """Embedded source (B, S, d_model), additive mask (B, 1, 1, S) -> memory (B, S, d_model)."""
        length = hidden.shape[1]
        tables = self.position_bias.tables()
        biases = position_biases(tables, np.arange(length)[None], length)
        if mask is not None:
            biases = [bias + mask for bias in biases]
        for layer, bias in zip(self.layers, cycle(biases), strict=False):
            hidden = layer(hidden, bias)
        memory: mx.array = self.norm(hidden)
        return memory


class EncoderLayer(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.self_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.self_attention = SelfAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        x = x + self.self_attention(self.self_norm(x), bias)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The decoder's weights; `T5Session.step` runs them."""

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
        bias: mx.array,
        append: Callable[[mx.array, mx.array], KeysValues],
        cross: KeysValues,
        mask: mx.array | None,
    ) -> mx.array:
        """One layer over new positions.

        Args:
            x: (B, L, d_model).
            bias: Self-attention's position bias and causal mask, (B or 1, H, L, T).
            append: Takes the new keys and values, gives those of all T positions.
            cross: Keys and values of the encoder's memory, (B, H, S, D) each.
            mask: The source's additive padding mask, (B, 1, 1, S).
        """
        x = x + self.self_attention(self.self_norm(x), bias, append)
        x = x + self.cross_attention(self.cross_norm(x), cross, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class SelfAttention(nn.Module):
    """Multi-head attention; one product makes q, k and v."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self._num_heads = config.num_heads
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def __call__(
        self,
        x: mx.array,
        bias: mx.array,
        append: Callable[[mx.array, mx.array], KeysValues] | None = None,
    ) -> mx.array:
        q, k, v = split_heads(self.qkv(x), 3, self._num_heads)
        if append is not None:
            k, v = append(k, v)
        return self.out(attend(q, k, v, bias))


class CrossAttention(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self._num_heads = config.num_heads
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.kv = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.out = nn.Linear(inner, config.d_model, bias=False)

    def keys_values(self, memory: mx.array) -> KeysValues:
        """Encoder's memory (B, S, d_model) -> keys and values (B, H, S, D)."""
        k, v = split_heads(self.kv(memory), 2, self._num_heads)
        return mx.contiguous(k), mx.contiguous(v)

    def __call__(self, x: mx.array, cross: KeysValues, mask: mx.array | None) -> mx.array:
        (q,) = split_heads(self.q(x), 1, self._num_heads)
        return self.out(attend(q, *cross, mask))


class FeedForward(nn.Module):
    """act(x W) W', or with a gate (v1.1): (act(x W) * x V) W', W and V being one matrix."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self._gated = config.gated
        self._activation = ACTIVATIONS[config.activation]
        self.wi = nn.Linear(config.d_model, config.d_ff * (2 if config.gated else 1), bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        hidden = self.wi(x)
        if self._gated:
            gate, linear = mx.split(hidden, 2, axis=-1)
            return self.wo(self._activation(gate) * linear)
        return self.wo(self._activation(hidden))


def split_heads(x: mx.array, parts: int, num_heads: int) -> list[mx.array]:
    """(B, L, parts * H * D) -> `parts` arrays (B, H, L, D)."""
    batch, length, _ = x.shape
    heads = x.reshape(batch, length, parts, num_heads, -1).transpose(2, 0, 3, 1, 4)
    return [heads[i] for i in range(parts)]


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """Queries (B, H, L, D) over T keys and values, joined heads out: (B, L, H * D)."""
    # The library's own scaling would be 1/sqrt(D), which T5 does without.
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    return out.swapaxes(1, 2).reshape(*q.shape[:1], q.shape[2], -1)
