"""Losses of a draft against its target, with their gradients, a few positions at a time.

The output head is the target's and is not trained, so all that training needs of it is the gradient
at the draft's last hidden states. It is computed here together with the loss: logits of a few
hundred positions exist at a time, and never those of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import mlx.core as mx

LossName = Literal["ce", "kl", "ce+kl", "tv", "lk"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
LOGITS = 2**22  # that exist at a time, of draft and target each


def needs_target(loss: LossName) -> bool:
    """Whether a loss needs the target's distributions beside the tokens it has chosen."""
    return loss != "ce"


def head_loss(
    loss: LossName,
    hidden: mx.array,
    weight: mx.array,
    labels: mx.array,
    target_logits: Callable[[int, int], mx.array] | None,
    widest: int,
) -> tuple[mx.array, mx.array]:
    """Compute a loss, summed over positions, and its gradient.

    Args:
        loss: Which.
        hidden: What the output matrix multiplies, (P, d_model) float32.
        weight: The output matrix, (V, d_model), of the ids that the draft may propose.
        labels: The target's tokens, (P,) int32; positions with ids of V and above count for the
            losses with distributions only.
        target_logits: Called with the ends of a range of positions; returns the target's logits
            there, (range, all its ids). Not called for "ce".
        widest: The most logits of a position, of `weight` or `target_logits`.

    Returns:
        The sum of the losses, a scalar, and its gradient by `hidden`, (P, d_model).
    """
    rows = max(1, LOGITS // widest)
    total, gradients = mx.array(0.0), []
    for first in range(0, hidden.shape[0], rows):
        last = min(first + rows, hidden.shape[0])
        logits = hidden[first:last] @ weight.T
        targets = target_logits(first, last) if target_logits and needs_target(loss) else None
        value, gradient = loss_and_gradient(loss, logits, labels[first:last], targets)
        gradients.append(gradient @ weight)
        total = total + value
        mx.eval(total, gradients[-1])  # frees the logits
    return total, mx.concatenate(gradients) if gradients else mx.zeros_like(hidden)


def loss_and_gradient(
    loss: LossName, logits: mx.array, labels: mx.array, target_logits: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return the sum of a loss over positions, and its gradient by the draft's logits.

    q is the draft's distribution and p the target's, both (P, V). Of p only the ids that the draft
    has count; what lies beyond them is lost to any draft.

    ce: -log q(label). kl: KL(p || q) (distillation, arXiv 1503.02531). tv: 1 - sum(min(p, q)), the
    chance that a sampled token is rejected (arXiv 2310.08461). lk: -log(sum(min(p, q)))
    (arXiv 2602.23881). ce+kl: 0.8 of the first and 1.0 of the second (arXiv 2311.00430).
    """
    q, log_sum = softmax(logits)
    if loss == "ce":
        return _cross_entropy(logits, q, log_sum, labels)
    assert target_logits is not None
    size = logits.shape[-1]
    whole, target_log_sum = softmax(target_logits)
    p, log_p = whole[:, :size], target_logits[:, :size] - target_log_sum
    if loss == "kl":
        return _divergence(logits, q, log_sum, p, log_p)
    if loss == "ce+kl":
        first = _cross_entropy(logits, q, log_sum, labels)
        second = _divergence(logits, q, log_sum, p, log_p)
        return 0.8 * first[0] + second[0], 0.8 * first[1] + second[1]
    # Both are functions of the overlap, sum(min(p, q)), whose gradient by q is 1 where q < p.
    overlap = mx.minimum(p, q).sum(-1, keepdims=True)
    below = (q < p).astype(q.dtype)
    slope = q * (below - (q * below).sum(-1, keepdims=True))
    if loss == "tv":
        return (1 - overlap).sum(), -slope
    floor = mx.maximum(overlap, 1e-6)
    return -mx.log(floor).sum(), -slope / floor


def _cross_entropy(
    logits: mx.array, q: mx.array, log_sum: mx.array, labels: mx.array
) -> tuple[mx.array, mx.array]:
    size = logits.shape[-1]
    known = (labels < size)[:, None]
    at = mx.minimum(labels, size - 1)[:, None]
    value = mx.where(known, log_sum - mx.take_along_axis(logits, at, axis=-1), 0.0).sum()
    is_label = mx.arange(size) == at
    return value, mx.where(known, q - is_label, 0.0)


def _divergence(
    logits: mx.array, q: mx.array, log_sum: mx.array, p: mx.array, log_p: mx.array
) -> tuple[mx.array, mx.array]:
    value = (p * (log_p - logits + log_sum)).sum()
    return value, q * p.sum(-1, keepdims=True) - p


def softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return the softmax over the last axis and log(sum(exp(logits))), (P, V) and (P, 1)."""
    largest = logits.max(-1, keepdims=True)
    power = mx.exp(logits - largest)
    total = power.sum(-1, keepdims=True)
    return power / total, largest + mx.log(total)
