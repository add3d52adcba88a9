"""The rules that decide which drafted tokens stand, and what follows them: pure functions."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx

from .draft import Draft
from .sampling import drawn, uniform

Rule = Literal["coupled", "token", "block"]


class Verdict(NamedTuple):
    """The decision on a draft."""

    num_accepted: mx.array  # drafted tokens accepted in each row, (B,) int32
    # After them, (B,) int32; `NO_TOKEN` where none is allowed, or what marks NaN (`faults`).
    next_token: mx.array


@dataclass(frozen=True)
class Acceptance:
    """A rule applied to a draft, before anything is sampled: all its probabilities.

    Position i passes if u_i * total_i < chance_i, for u_i uniform in [0, 1). There is no division,
    so that 0 / 0 never arises.
    """

    chance: mx.array  # (B, K) float32
    total: mx.array  # (B, K) float32
    # w_0 to w_K, (B, K + 1) float32: after i accepted tokens the next one is sampled from
    # norm(max(w_i * p - q, 0)).
    ratios: mx.array
    in_order: bool  # keep the draft up to the first that fails; or else up to the last that passes

    def count_accepted(self, uniforms: mx.array) -> mx.array:
        """Return how many drafted tokens stand, (B,) int32, given u (B, K) from [0, 1)."""
        passed = (uniforms * self.total < self.chance).astype(mx.int32)
        if self.in_order:
            return mx.sum(mx.cumprod(passed, axis=1), axis=1)
        positions = mx.arange(passed.shape[1] + 1)
        return mx.max(mx.pad(passed, [(0, 0), (1, 0)]) * positions, axis=1)


def token_acceptance(
    draft: Draft, target_probs: mx.array, *, delta: float = 0.0, allowed: mx.array | None = None
) -> Acceptance:
    """The token-wise rule (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    A drafted x is accepted with probability min(1, p(x) / q(x) + delta), if all before it are.
    With delta 0, the tokens are distributed as if the target had sampled them; delta 1 accepts
    every drafted token, except where `allowed` (B, K) bool is False. p is (B, K + 1, V) float32.
    """
    p_x = at_tokens(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q_x = at_tokens(draft.dense(target_probs.shape[-1]), draft.tokens)
    # q(x) = 0 marks a position where nothing was drafted: u * 0 < p(x) must not accept it.
    chance = mx.where(q_x > 0, p_x + delta * q_x, 0)
    if allowed is not None:
        chance = mx.where(allowed, chance, 0)
    return Acceptance(chance, q_x, mx.ones_like(target_probs[..., 0]), in_order=True)


def block_acceptance(draft: Draft, target_probs: mx.array) -> Acceptance:
    """Block verification (Sun et al. 2403.10444, algorithm 2): exact, and never accepts less.

    A token that p likes less than q does may stand for the sake of those after it: in expectation
    at least as many tokens stand as by the token-wise rule.

    Position i passes with probability h_i: with w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    and S_i = sum max(w_i p_{i+1} - q_{i+1}, 0), h_i = S_i / (S_i + 1 - w_i). After the last
    position q is a zero row, which makes h_K = w_K.
    """
    p_x = at_tokens(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q_x = at_tokens(draft.dense(target_probs.shape[-1]), draft.tokens)
    # Where nothing was drafted the ratio is 0, and so are all later ones: none of them can pass.
    steps = mx.where(q_x > 0, p_x / mx.where(q_x > 0, q_x, 1), 0)
    ratio = mx.ones_like(target_probs[:, 0, 0])
    ratios = [ratio]
    for i in range(draft.tokens.shape[1]):
        ratio = mx.minimum(ratio * steps[:, i], 1)
        ratios.append(ratio)
    w = mx.stack(ratios, axis=1)
    q = _with_bonus(draft, target_probs.shape[-1])
    excess = mx.maximum(w[:, 1:, None] * target_probs[:, 1:] - q[:, 1:], 0)
    chance = mx.sum(excess, axis=-1)
    return Acceptance(chance, chance + (1 - w[:, 1:]), w, in_order=False)


def residual(
    draft: Draft, target_probs: mx.array, ratios: mx.array, num_accepted: mx.array
) -> mx.array:
    """Return the weights max(w p - q, 0), (B, V) float32, of the token after those accepted (B,).

    After a whole draft q is a zero row, and the bonus token comes from p itself.
    """
    position = num_accepted[:, None]
    w_n = mx.take_along_axis(ratios, position, axis=1)
    p_n = mx.take_along_axis(target_probs, position[..., None], axis=1)[:, 0]
    q = _with_bonus(draft, target_probs.shape[-1])
    q_n = mx.take_along_axis(q, position[..., None], axis=1)[:, 0]
    weights = mx.maximum(w_n * p_n - q_n, 0)
    # Rounding can leave only zeros where p and q are equal; sampling from p is then as good.
    empty = mx.sum(weights, axis=-1, keepdims=True) == 0
    return mx.where(empty, p_n, weights)


def decide(acceptance: Acceptance, draft: Draft, target_probs: mx.array, keys: mx.array) -> Verdict:
    """Sample how many drafted tokens stand, and the next one, by `verdict_keys` (B, K + 1, 2)."""
    uniforms = uniform(keys[:, :-1])
    num_accepted = acceptance.count_accepted(uniforms)
    weights = residual(draft, target_probs, acceptance.ratios, num_accepted)
    return Verdict(num_accepted, drawn(weights, keys[:, -1]))


def _with_bonus(draft: Draft, vocab_size: int) -> mx.array:
    """Return q (B, K + 1, V), with a zero row for the position after the draft."""
    return mx.pad(draft.dense(vocab_size), [(0, 0), (0, 1), (0, 0)])


def at_tokens(values: mx.array, tokens: mx.array) -> mx.array:
    """Take values (B, K, V) at tokens (B, K) -> (B, K)."""
    return mx.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
