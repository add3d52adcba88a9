"""Verification: which drafted tokens stand, and which token follows them. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from .draft import Draft
from .sampling import draw, one_hot


@dataclass(frozen=True)
class Verdict:
    """Per row: drafted tokens accepted, and the token after them (recovered, or the bonus).

    Both (B,) int32.
    """

    num_accepted: mx.array
    next_token: mx.array


def verify_tokens(
    draft: Draft, target_probs: mx.array, key: mx.array | None, *, delta: float = 0.0
) -> Verdict:
    """The token-wise rule (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    A drafted x is accepted with probability min(1, p(x) / q(x) + delta); after the first
    rejection the next token comes from the residual norm(max(p - q, 0)).

    Args:
        draft: K drafted tokens per row, and the distributions q they were drawn from.
        target_probs: p, (B, K + 1, V) float32.
        key: Randomness for the acceptance tests and the next token; None if p is one-hot.
        delta: 0 keeps the target's distribution exactly; 1 accepts every drafted token.

    Returns:
        A Verdict; distributed, with the accepted tokens before it, as the target's own draws when
        delta is 0.
    """
    if key is None:
        uniform, draw_key = mx.full(draft.tokens.shape, 0.5), None
    else:
        accept_key, draw_key = mx.random.split(key)
        uniform = mx.random.uniform(shape=draft.tokens.shape, key=accept_key)
    num_accepted = count_accepted(draft, target_probs, uniform, delta=delta)
    return Verdict(num_accepted, draw(residual(draft, target_probs, num_accepted), draw_key))


def count_accepted(
    draft: Draft, target_probs: mx.array, uniform: mx.array, *, delta: float = 0.0
) -> mx.array:
    """Drafted tokens before the first rejection, (B,) int32.

    Args:
        draft: K drafted tokens per row, and the distributions q they were drawn from.
        target_probs: p, (B, K + 1, V) float32.
        uniform: The acceptance tests' draws from [0, 1), (B, K).
        delta: As in `verify_tokens`.
    """
    p_x = _at(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q_x = _at(draft.probs, draft.tokens)
    # q(x) = 0 marks a place where nothing was drafted: u * 0 < p(x) must not accept it.
    accepted = (uniform * q_x < p_x + delta * q_x) & (q_x > 0)
    return mx.sum(mx.cumprod(accepted.astype(mx.int32), axis=1), axis=1)


def residual(draft: Draft, target_probs: mx.array, num_accepted: mx.array) -> mx.array:
    """Weights of the token after `num_accepted` (B,) drafted ones: max(p - q, 0), (B, V) float32.

    With a zero row appended to q, the bonus token after a whole draft comes from p itself.
    """
    q = mx.concatenate([draft.probs, mx.zeros_like(target_probs[:, :1])], axis=1)
    at = num_accepted[:, None, None]
    p_n = mx.take_along_axis(target_probs, at, axis=1)[:, 0]
    q_n = mx.take_along_axis(q, at, axis=1)[:, 0]
    weights = mx.maximum(p_n - q_n, 0)
    # Rounding can leave nothing where p and q are equal; the difference is then immaterial.
    empty = mx.sum(weights, axis=-1, keepdims=True) == 0
    return mx.where(empty, p_n, weights)


def lenient_greedy(draft: Draft, logits: mx.array, *, delta: float) -> mx.array:
    """Target distributions at temperature 0: one-hot, where a near-tie counts as the argmax.

    A drafted token stands for the argmax if its probability (at temperature 1) is at least
    (1 - delta) times the largest (2211.17192, appendix A.5, with l = 1 - delta), so that greedy
    decoding with delta stays deterministic.

    Args:
        draft: K drafted tokens per row.
        logits: The target's, (B, K + 1, V).
        delta: In [0, 1]; 0 is exact greedy decoding.

    Returns:
        (B, K + 1, V) float32.
    """
    num_draft = draft.tokens.shape[1]
    best = mx.argmax(logits, axis=-1)
    if delta > 0 and num_draft > 0:
        drafted = logits[:, :num_draft].astype(mx.float32)
        margin = math.log1p(-delta) if delta < 1 else -math.inf
        near = _at(drafted, draft.tokens) >= mx.max(drafted, axis=-1) + margin
        proposed = _at(draft.probs, draft.tokens) > 0
        kept = mx.where(near & proposed, draft.tokens, best[:, :num_draft])
        best = mx.concatenate([kept, best[:, num_draft:]], axis=1)
    return one_hot(best, logits.shape[-1])


def _at(values: mx.array, tokens: mx.array) -> mx.array:
    """Values (B, K, V) at tokens (B, K) -> (B, K)."""
    return mx.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
