"""How probable tokens are by the target: from the same logits that chose or verified them.

What a round needs of it travels in the one array that the host reads in any case, so that it costs
neither a pass nor a wait.
"""

import mlx.core as mx

from .ranking import best_continuations
from .sampling import best

SUMMED_TOGETHER = 128  # values of a block, whose sum loses little by rounding


def judged(logits: mx.array, ids: mx.array, top: int = 0) -> mx.array:
    """Judge the tokens of a pass; `as_logprobs` reads what is returned, with floats as their bits.

    Args:
        logits: (B, L, V) of any float type, before any transform.
        ids: The token to judge at each position, (B, L) int32; a negative one stands for none.
        top: How many of the most probable ids to find; of equal ones the smaller id comes first.

    Returns:
        (B, L, 1 + 2 N) int32, N being `top`, or V if that is less.
    """
    batch, length, size = logits.shape
    logits, total = with_total(logits)
    given = mx.take_along_axis(logits, mx.maximum(ids, 0)[..., None], axis=-1)
    parts = [mx.view(given - total, mx.int32)]
    if top:
        rows = (logits - total).reshape(-1, 1, size)
        found = best_continuations(rows, min(top, size)).reshape(batch, length, 3, -1)
        parts += [found[:, :, 2], found[:, :, 0]]
    return mx.concatenate(parts, axis=-1)


def with_total(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return logits (..., V) shifted so that the largest is 0, and `logsumexp` of them, (..., 1).

    Of large logits, differences from that total would be rounded as those are.
    """
    logits = logits.astype(mx.float32)
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    return logits, mx.log(sum_of(mx.exp(logits)))


def sum_of(values: mx.array) -> mx.array:
    """Return the sum of values (..., V), (..., 1), block by block.

    MLX's `sum` and `logsumexp` add up a row of 32,128 in one go on CPUs, and the logarithm is then
    wrong by up to 5e-5.
    """
    *outer, size = values.shape
    if more := -size % SUMMED_TOGETHER:
        values = mx.pad(values, [*[(0, 0)] * len(outer), (0, more)])
    blocks = values.reshape(*outer, -1, SUMMED_TOGETHER)
    return mx.sum(mx.sum(blocks, axis=-1), axis=-1, keepdims=True)


def best_logprobs(logits: mx.array) -> mx.array:
    """Return the ids that `best` finds by logits (B, L, V), and what `judged` has of each.

    Together that is (B, L, 2) int32.
    """
    _, total = with_total(logits)  # the best one's logit is 0 there
    return mx.concatenate([best(logits)[..., None], mx.view(0 - total, mx.int32)], axis=-1)
