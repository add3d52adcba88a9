"""T5Gemma (arXiv 2504.06225) and T5Gemma 2 (arXiv 2512.14856), text only.

They are encoder-decoders of Gemma 2's and Gemma 3's blocks, as `modeling_t5gemma.py` and
`modeling_t5gemma2.py` of transformers have them. Shapes are those of `t5`; there are G times as
many heads of queries as of keys and values. A layer normalizes its input and its output:
x + norm(f(norm(x))). Gemma's norms multiply by 1 + w: `weight` is that sum here.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .cache import resized, write
from .encoder_decoder import DecoderStack, EncoderDecoder
from .position_bias import block_places, for_each_row
from .quantization import quantize
from .t5 import FeedForward, Head, join_heads, split_heads
from .t5gemma_config import StackConfig, T5GemmaConfig

Masks = Mapping[str, mx.array]  # of each type of layer, additive, (B or 1, H or 1, L, T)


def attend(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, scale: float, cap: float | None
) -> mx.array:
    """Attention of queries (B, H, L, D) to keys and values (B, H / G, T, D).

    With a cap, scores s are cap * tanh(s / cap), which no kernel of MLX has.
    """
    if cap is None:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    batch, num_heads, length, size = q.shape
    grouped = (q * scale).reshape(batch, k.shape[1], -1, length, size)
    scores = mx.tanh(grouped @ k[:, :, None].swapaxes(3, 4) / cap) * cap
    if mask is not None:
        scores = scores + mask[:, :, None]
    found = mx.softmax(scores, axis=-1, precise=True) @ v[:, :, None]
    return found.reshape(batch, num_heads, length, size)


class Attention(nn.Module):
    """Grouped attention to positions of the same stack, or to the encoder's memory."""

    def __init__(
        self, config: T5GemmaConfig, stack: StackConfig, layer_type: str, source_size: int
    ) -> None:
        super().__init__()
        size = stack.head_dim
        self.num_heads, self.num_key_heads = stack.num_attention_heads, stack.num_key_value_heads
        self.scale = stack.query_pre_attn_scalar**-0.5
        self.cap = stack.attn_logit_softcapping
        self.rope = stack.rope(layer_type)
        self.q = nn.Linear(stack.hidden_size, self.num_heads * size, bias=False)
        self.kv = nn.Linear(source_size, 2 * self.num_key_heads * size, bias=False)
        self.out = nn.Linear(self.num_heads * size, stack.hidden_size, bias=False)
        if config.generation == 2:
            self.q_norm = nn.RMSNorm(size, stack.rms_norm_eps)
            self.k_norm = nn.RMSNorm(size, stack.rms_norm_eps)

    def queries(self, x: mx.array, offsets: mx.array | None = None) -> mx.array:
        """(B, L, d_model) -> (B, H, L, D), at positions from each row's offset on, or at none."""
        (q,) = split_heads(self.q(x), 1, self.num_heads)
        if "q_norm" in self:
            q = self.q_norm(q)
        return q if offsets is None else self.rotate(q, offsets)

    def keys_values(self, x: mx.array, offsets: mx.array | None = None) -> mx.array:
        """(B, L, source_size) -> (2, B, H / G, L, D), keys at positions as in `queries`."""
        k, v = split_heads(self.kv(x), 2, self.num_key_heads)
        if "k_norm" in self:
            k = self.k_norm(k)
        return mx.stack([k if offsets is None else self.rotate(k, offsets), v])

    def source(self, memory: mx.array, width: int | None) -> mx.array:
        """Return keys and values of the encoder's memory, with zeros up to a width."""
        kv = self.keys_values(memory)
        return kv if width is None else resized(kv, width)

    def rotate(self, heads: mx.array, offsets: mx.array) -> mx.array:
        """Rotate heads (B, H, L, D) by their positions.

        Offsets, int32, are the first position of each row, (B,) or (1,), or (1, M) those of M parts
        that each row consists of.
        """
        rope = partial(
            mx.fast.rope,
            dims=heads.shape[-1],
            traditional=False,
            base=self.rope.theta,
            scale=1 / self.rope.factor,
        )
        if offsets.ndim == 1:
            start = offsets if offsets.size == len(heads) else offsets.reshape(())
            return rope(heads, offset=start)
        parts = mx.unflatten(heads, 2, (offsets.size, -1)).moveaxis(2, 0)
        return rope(parts, offset=offsets[0]).moveaxis(0, 2).flatten(2, 3)

    def __call__(self, q: mx.array, kv: mx.array, mask: mx.array | None) -> mx.array:
        k, v = kv
        found: mx.array = self.out(join_heads(attend(q, k, v, mask, self.scale, self.cap)))
        return found


class Layer(nn.Module):
    """What all layers have: attention to their own stack, and a feed-forward."""

    def __init__(self, config: T5GemmaConfig, stack: StackConfig, layer_type: str) -> None:
        super().__init__()
        size, epsilon = stack.hidden_size, stack.rms_norm_eps
        self.layer_type = layer_type
        self.self_norm = nn.RMSNorm(size, epsilon)
        self.self_attention = Attention(config, stack, layer_type, size)
        self.self_post_norm = nn.RMSNorm(size, epsilon)
        self.feed_forward_norm = nn.RMSNorm(size, epsilon)
        self.feed_forward = FeedForward(stack)
        self.feed_forward_post_norm = nn.RMSNorm(size, epsilon)

    def heads(
        self, x: mx.array, offsets: mx.array, cache: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return queries of new positions, and keys and values, in the cache if there is one."""
        attention, normed = self.self_attention, self.self_norm(x)
        q, kv = attention.queries(normed, offsets), attention.keys_values(normed, offsets)
        return q, kv if cache is None else write(cache, kv, offsets)

    def fed_forward(self, x: mx.array) -> mx.array:
        hidden = self.feed_forward.hidden(self.feed_forward.wi(self.feed_forward_norm(x)))
        found: mx.array = self.feed_forward_post_norm(self.feed_forward.wo(hidden))
        return x + found


class Step(NamedTuple):
    """What the layers of a stack have in common in a pass."""

    offsets: mx.array  # see `Attention.rotate`
    masks: Masks
    padding: mx.array | None = None  # additive mask of sources, (P, H or 1, L * B / P, T)


class EncoderLayer(Layer):
    def __call__(self, x: mx.array, step: Step) -> mx.array:
        q, kv = self.heads(x, step.offsets)
        found = self.self_attention(q, kv, step.masks[self.layer_type])
        return self.fed_forward(x + self.self_post_norm(found))


class DecoderLayer(Layer):
    """A layer with attention to itself, and then to the encoder's memory (T5Gemma)."""

    def __init__(self, config: T5GemmaConfig, stack: StackConfig, layer_type: str) -> None:
        super().__init__(config, stack, layer_type)
        self.cross_norm = nn.RMSNorm(stack.hidden_size, stack.rms_norm_eps)
        memory_size = config.encoder.hidden_size
        self.cross_attention = Attention(config, stack, layer_type, memory_size)
        self.cross_post_norm = nn.RMSNorm(stack.hidden_size, stack.rms_norm_eps)

    def read(self, memory: mx.array, width: int | None = None) -> mx.array:
        """Encoder's memory (B, S, d) -> keys and values (2, B, H / G, `width` or S, D)."""
        return self.cross_attention.source(memory, width)

    def __call__(
        self, x: mx.array, step: Step, cache: mx.array | None, source: mx.array
    ) -> tuple[mx.array, mx.array]:
        q, kv = self.heads(x, step.offsets, cache)
        found = self.self_attention(q, kv, step.masks[self.layer_type])
        x = x + self.self_post_norm(found)
        # With fewer sources than rows, B / P consecutive rows read one as a single row.
        grouped = self.cross_norm(x).reshape(source.shape[1], -1, x.shape[2])
        q = self.cross_attention.queries(grouped)
        found = self.cross_attention(q, source, step.padding).reshape(x.shape)
        return self.fed_forward(x + self.cross_post_norm(found)), kv


class MergedDecoderLayer(Layer):
    """A layer with one attention to itself and to the encoder's memory together (T5Gemma 2).

    Both give their keys and values by the same matrices, those of the memory without a position.
    Only a draft's layer that is narrower than the memory has one of its own for it.
    """

    def __init__(self, config: T5GemmaConfig, stack: StackConfig, layer_type: str) -> None:
        super().__init__(config, stack, layer_type)
        memory_size = config.encoder.hidden_size
        if stack.hidden_size != memory_size:
            self.memory_kv = nn.Linear(memory_size, len(self.self_attention.kv.weight), bias=False)

    def read(self, memory: mx.array, width: int | None = None) -> mx.array:
        """Encoder's memory (B, S, d) -> keys and values (2, B, H / G, `width` or S, D)."""
        attention = self.self_attention
        if "memory_kv" in self:
            attention = copy(attention)
            attention.kv = self.memory_kv
        return attention.source(memory, width)

    def __call__(
        self, x: mx.array, step: Step, cache: mx.array | None, source: mx.array
    ) -> tuple[mx.array, mx.array]:
        q, kv = self.heads(x, step.offsets, cache)
        both = mx.concatenate([kv, mx.repeat(source, len(x) // source.shape[1], axis=1)], axis=-2)
        found = self.self_attention(q, both, step.masks[self.layer_type])
        return self.fed_forward(x + self.self_post_norm(found)), kv


class EncoderStack(nn.Module):
    def __init__(self, config: T5GemmaConfig) -> None:
        super().__init__()
        stack = config.encoder
        window = stack.sliding_window
        self.reach = window, window  # the most that a key may lie behind a query, and ahead of it
        if config.generation == 2:
            self.reach = (window + 1) // 2 - 1, window // 2
        self.layers = [EncoderLayer(config, stack, kind) for kind in stack.layer_types]
        self.norm = nn.RMSNorm(stack.hidden_size, stack.rms_norm_eps)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Embedded sources (B, S, d), additive mask (B, 1, 1, S) -> memory, as `x`."""
        positions = mx.arange(x.shape[1])
        ahead = positions - positions[:, None]
        behind, before = self.reach
        full = mx.ones((1, 1, 1, x.shape[1]), mx.bool_) if mask is None else mask == 0
        sliding = full & (ahead >= -behind) & (ahead <= before)
        masks = {"full_attention": full, "sliding_attention": sliding}
        added = {kind: _additive(seen, x.dtype) for kind, seen in masks.items()}
        step = Step(mx.zeros(1, dtype=mx.int32), added)
        for layer in self.layers:
            x = layer(x, step)
        memory: mx.array = self.norm(x)
        return memory


def _additive(seen: mx.array, dtype: mx.Dtype) -> mx.array:
    """Make an additive mask; finite, as padding whose window has no token would become NaN."""
    return mx.where(seen, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))


class Decoder(DecoderStack):
    def __init__(self, config: T5GemmaConfig) -> None:
        super().__init__()
        stack = config.decoder
        kind = DecoderLayer if config.generation == 1 else MergedDecoderLayer
        self.merged = config.generation == 2
        self.window = stack.sliding_window
        # MLX's kernel of attention takes a mask for each head, and scores with a cap are composed.
        self.mask_heads = 1 if stack.attn_logit_softcapping else stack.num_attention_heads
        self.head_size = stack.head_dim
        self.layers = [kind(config, stack, layer_type) for layer_type in stack.layer_types]
        self.norm = nn.RMSNorm(stack.hidden_size, stack.rms_norm_eps)

    def read(self, memory: mx.array, width: int) -> list[mx.array]:
        return [layer.read(memory, width) for layer in self.layers]

    def __call__(
        self,
        x: mx.array,
        offsets: mx.array,
        cache: Sequence[mx.array],
        sources: Sequence[mx.array],
        mask: mx.array | None,
        tables: Sequence[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        queries = offsets[:, None, None, None] + mx.arange(x.shape[1])[:, None]
        keys = mx.arange(cache[0].shape[-2])
        full, recent = keys <= queries, keys > queries - self.window
        step = self._step(x, offsets, full, recent, mask, sources[0].shape[-2])
        written: list[mx.array] = []
        for layer, kv, source in zip(self.layers, cache, sources, strict=False):
            x, kv = layer(x, step, kv, source)
            written.append(kv)
        return x, written

    def whole(
        self, x: mx.array, memory: mx.array, mask: mx.array | None, block: int = 1
    ) -> mx.array:
        places, seen = block_places(x.shape[1] // block, block)
        recent = places > places[:, None] - self.window
        full, starts = seen[None, None], mx.arange(block)[None]
        step = self._step(x, starts, full, recent, mask, memory.shape[1])
        for layer in self.layers:
            x, _ = layer(x, step, None, layer.read(memory))
        return x

    def _step(
        self,
        x: mx.array,
        offsets: mx.array,
        full: mx.array,
        recent: mx.array,
        mask: mx.array | None,
        width: int,
    ) -> Step:
        """Make the masks of what queries see, in full or as far as recent, and of T in sources."""
        batch, length, _ = x.shape
        masks = {"full_attention": full, "sliding_attention": full & recent}
        if self.merged:
            seen = mx.ones((1, 1, 1, width), mx.bool_) if mask is None else mask == 0
            if len(seen) > 1:
                seen = mx.repeat(seen, batch // len(seen), axis=0)
            masks = {kind: _beside(each, seen) for kind, each in masks.items()}
        added = {
            kind: for_each_row(_additive(each, x.dtype), batch, self.mask_heads, length)
            for kind, each in masks.items()
        }
        padding = mask
        if mask is not None:
            queries = batch * length // len(mask)
            padding = for_each_row(mask, len(mask), self.mask_heads, queries)
        return Step(offsets, added, padding)


def _beside(seen: mx.array, source: mx.array) -> mx.array:
    """Put masks (B or 1, 1, L, T) and (B or 1, 1, 1, S) side by side: (B or 1, 1, L, T + S)."""
    rows, _, length, _ = seen.shape
    rows = max(rows, len(source))
    parts = [mx.broadcast_to(part, (rows, 1, length, part.shape[3])) for part in (seen, source)]
    return mx.concatenate(parts, axis=3)


class T5Gemma(EncoderDecoder):
    """A T5Gemma of either generation; a `LanguageModel` by way of `start`."""

    config: T5GemmaConfig

    def __init__(self, config: T5GemmaConfig) -> None:
        super().__init__(config)
        if config.generation == 1:
            self.encoder_shared = nn.Embedding(config.vocab_size, config.encoder.hidden_size)
        self.encoder = EncoderStack(config)
        self.decoder = Decoder(config)
        self.head = Head(cap=config.final_logit_softcapping)
        if config.own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.quantization:
            quantize(self, config.quantization)

    def embed(self, tokens: mx.array) -> mx.array:
        return scaled(self.shared(tokens))

    def encode(self, tokens: mx.array, mask: mx.array | None) -> mx.array:
        embedding = self.encoder_shared if "encoder_shared" in self else self.shared
        return self.encoder(scaled(embedding(tokens)), mask)


def scaled(x: mx.array) -> mx.array:
    """Embeddings (B, L, d) times sqrt(d), rounded as the model is."""
    return x * mx.array(x.shape[-1] ** 0.5, x.dtype)
