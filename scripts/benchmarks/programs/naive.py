"""Greedy decoding as it is often first written: the loop to compare with.

Every step projects the encoder's output to cross-attention's keys and values again, computes the
position bias again, copies the caches to make them one position longer, and waits for its token.
Nothing is compiled. It uses the weights of a loaded `T5`, and the same BLAS.

Shapes: S source length, T cached length, H heads, D head size.
"""

from collections.abc import Sequence
from itertools import cycle

from speculative_t5.models.position_bias import relative_position_bucket
from speculative_t5.models.t5 import T5

import mlx.core as mx
import numpy as np

KeysValues = tuple[mx.array, mx.array]  # (H, T, D) each


def generate(model: T5, source: Sequence[int], max_tokens: int) -> list[int]:
    """Return the greedy output for source ids; both include EOS unless `max_tokens` cut it off."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    memory = model.encoder(model.shared(mx.array([source])), None)[0]
    cache: list[KeysValues] = []
    token, output = model.config.decoder_start_token_id, []
    while len(output) < max_tokens and (not output or token != model.info.eos_token_id):
        logits, cache = step(model, token, memory, cache)
        token = int(mx.argmax(logits).item())
        output.append(token)
    return output


def step(
    model: T5, token: int, memory: mx.array, cache: list[KeysValues]
) -> tuple[mx.array, list[KeysValues]]:
    """Run the decoder over one more token, given the encoder's output (S, d_model).

    The cache holds each layer's keys and values. Returns logits (1, V), and the grown cache.
    """
    num_heads = model.config.num_heads
    length = cache[0][0].shape[1] + 1 if cache else 1
    x = model.shared(mx.array([[token]]))[0]
    grown: list[KeysValues] = []
    biases = cycle(position_biases(model, length))
    for i, (layer, bias) in enumerate(zip(model.decoder.layers, biases, strict=False)):
        attention, cross = layer.self_attention, layer.cross_attention
        q, k, v = heads(attention.qkv(layer.self_norm(x)), 3, num_heads)
        if cache:
            k, v = (mx.concatenate(pair, axis=1) for pair in zip(cache[i], (k, v), strict=True))
        grown.append((k, v))
        x = x + attention.out(attend(q, k, v, bias))
        (q,) = heads(cross.q(layer.cross_norm(x)), 1, num_heads)
        k, v = heads(cross.kv(memory), 2, num_heads)
        x = x + cross.out(attend(q, k, v, None))
        x = layer.feed_forward(x[None], layer.feed_forward_norm(x)[None])[0]
    return model.logits(x[None])[0], grown


def position_biases(model: T5, length: int) -> list[mx.array]:
    """Return the last position's bias over `length` keys, (H, 1, T): one, or one a layer (umt5)."""
    config, num_buckets = model.config, model.config.relative_attention_num_buckets
    buckets = relative_position_bucket(
        np.arange(length) - (length - 1),
        bidirectional=False,
        num_buckets=num_buckets,
        max_distance=config.relative_attention_max_distance,
    )
    weights = model.decoder.position_bias.weight.reshape(-1, num_buckets, config.num_heads)
    return [weight[mx.array(buckets)].T[:, None] for weight in weights]


def heads(x: mx.array, parts: int, num_heads: int) -> list[mx.array]:
    """Split (L, parts * H * D) into `parts` arrays (H, L, D)."""
    return list(mx.split(x.reshape(len(x), parts * num_heads, -1).swapaxes(0, 1), parts))


def attend(q: mx.array, k: mx.array, v: mx.array, bias: mx.array | None) -> mx.array:
    """Attend with queries (H, 1, D) to T keys and values, and join the heads: (1, H * D)."""
    scores = q @ k.swapaxes(-1, -2)
    if bias is not None:
        scores = scores + bias
    return (mx.softmax(scores, axis=-1) @ v).reshape(1, -1)
