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


def best_continuations(totals: mx.array, count: int) -> mx.array:
    """Find the best of all beams' continuations.

    Args:
        totals: Scores of each id after each of a prompt's N beams, (P, N, V) float32.
        count: How many to find, K.

    Returns:
        (P, 3 K) int32: the bits of the K largest scores, the largest first; their beams; their ids.
        Of equal scores the one of the first beam, and then of the first id, comes first. K is less
        if there are fewer continuations; ids from V on stand for nothing, and have the score -inf.
    """
    prompts, _, size = totals.shape
    padded = size + -size % RANKING_BLOCK
    totals = mx.pad(totals, [(0, 0), (0, 0), (0, padded - size)], constant_values=-mx.inf)
    blocks = totals.reshape(prompts, -1, RANKING_BLOCK)
    # The K best are in the K blocks whose largest are the largest: any other is below K of these.
    chosen = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :count]
    chosen = mx.sort(chosen, axis=-1)
    pool = mx.take_along_axis(blocks, chosen[..., None], axis=1).reshape(prompts, -1)
    order = mx.argsort(-pool, axis=-1)[:, :count]
    scores = mx.take_along_axis(pool, order, axis=-1)
    first = mx.take_along_axis(chosen, order // RANKING_BLOCK, axis=-1) * RANKING_BLOCK
    positions = first + order % RANKING_BLOCK
    found = [mx.view(scores, mx.int32), positions // padded, positions % padded]
    return mx.concatenate([part.astype(mx.int32) for part in found], axis=-1)
