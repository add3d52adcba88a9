"""The largest of many values, in less time than MLX takes to sort them all."""

import mlx.core as mx

RANKING_BLOCK = 64  # values whose largest is found first


def largest(logits: mx.array, count: int) -> mx.array:
    """Return the largest of logits (..., V), (..., count), in any order.

    MLX sorts all V for that. Where it is less work, blocks are ranked by their largest value: the
    first `count` of them hold as many values that no other block exceeds.
    """
    *outer, size = logits.shape
    num_blocks = -(-size // RANKING_BLOCK)
    if 2 * (count * RANKING_BLOCK + num_blocks) > size:
        return mx.topk(logits, count, axis=-1)
    if more := num_blocks * RANKING_BLOCK - size:
        logits = mx.pad(logits, [*[(0, 0)] * len(outer), (0, more)], constant_values=-mx.inf)
    blocks = logits.reshape(*outer, num_blocks, RANKING_BLOCK)
    first = num_blocks - count
    chosen = mx.argpartition(mx.max(blocks, axis=-1), first, axis=-1)[..., first:]
    values = mx.take_along_axis(blocks, chosen[..., None], axis=-2)
    return mx.topk(values.reshape(*outer, count * RANKING_BLOCK), count, axis=-1)
