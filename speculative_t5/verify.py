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
    draft: Draft, target_probs: mx.array, key: mx.array, *, delta: float = 0.0
) -> Verdict:
    """The token-wise rule (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    A drafted x is accepted with probability min(1, p(x) / q(x) + delta); after the first
    rejection the next token comes from the residual norm(max(p - q, 0)). With a zero row appended
    to q, the bonus token after a fully accepted draft is a draw from the residual too.

    Args:
        draft: K drafted tokens per row, and the distributions q they were drawn from.
        target_probs: p, (B, K + 1, V) float32.
        key: Randomness for the acceptance tests and the next token.
        delta: 0 keeps the target's distribution exactly; 1 accepts every drafted token.

    Returns:
        A Verdict; distributed, with the accepted tokens before it, as the target's own draws when
        delta is 0.
    """
    accept_key, draw_key = mx.random.split(key)
    batch, num_draft = draft.tokens.shape
    p_x = _at(target_probs[:, :num_draft], draft.tokens)
    q_x = _at(draft.probs, draft.tokens)
    u = mx.random.uniform(shape=(batch, num_draft), key=accept_key)
    # q(x) = 0 marks a place where nothing was drafted: u * 0 < p(x) must not accept it.
    accepted = (u * q_x < p_x + delta * q_x) & (q_x > 0)
    num_accepted = mx.sum(mx.cumprod(accepted.astype(mx.int32), axis=1), axis=1)

    q = mx.concatenate([draft.probs, mx.zeros_like(target_probs[:, :1])], axis=1)
    at = num_accepted[:, None, None]
    p_n = mx.take_along_axis(target_probs, at, axis=1)[:, 0]
    q_n = mx.take_along_axis(q, at, axis=1)[:, 0]
    residual = mx.maximum(p_n - q_n, 0)
    # Rounding can leave no residual where p and q are equal; the difference is then immaterial.
    empty = mx.sum(residual, axis=-1, keepdims=True) == 0
    return Verdict(num_accepted, draw(mx.where(empty, p_n, residual), draw_key))


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
