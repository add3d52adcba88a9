"""Verification: pure functions that decide which drafted tokens stand and what follows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from .draft import Draft
from .protocols import Session
from .sampling import RowSamplers, Sampler, argmax, final_keys, place_keys, sample, uniform
from .transform import NOTHING, History, nothing_allowed


@dataclass(frozen=True)
class Verdict:
    """The decision on a draft."""

    num_accepted: mx.array  # drafted tokens accepted in each row, (B,) int32
    # The token after them, recovered or the bonus, (B,) int32; `NOTHING` where none is allowed.
    next_token: mx.array


@dataclass(frozen=True)
class Odds:
    """A rule applied to a draft, before anything is sampled: all its probabilities.

    Place i passes if u_i * total_i < chance_i, for u_i uniform in [0, 1). There is no division, so
    that 0 / 0 never arises.

    Attributes:
        chance: (B, K) float32.
        total: (B, K) float32.
        ratios: w_0 to w_K, (B, K + 1) float32: after i accepted tokens the next one is sampled from
            norm(max(w_i * p - q, 0)).
        in_order: Whether the first place to fail ends the draft; otherwise the last place to pass
            does, whatever fails before it.
    """

    chance: mx.array
    total: mx.array
    ratios: mx.array
    in_order: bool

    def count_accepted(self, uniforms: mx.array) -> mx.array:
        """Return how many drafted tokens stand, (B,) int32, given u (B, K) from [0, 1)."""
        passed = (uniforms * self.total < self.chance).astype(mx.int32)
        if self.in_order:
            return mx.sum(mx.cumprod(passed, axis=1), axis=1)
        places = mx.arange(passed.shape[1] + 1)
        return mx.max(mx.pad(passed, [(0, 0), (1, 0)]) * places, axis=1)


@dataclass(frozen=True)
class Verifier:
    """The rule in use, from the target's logits to a verdict."""

    sampler: Sampler | RowSamplers  # from logits to probabilities; target and draft share it
    delta: float = 0.0  # lenience; 0 is exact
    block: bool = False  # use block verification where tokens are sampled; allows no delta

    def __post_init__(self) -> None:
        assert not (self.block and self.delta)

    @property
    def greedy(self) -> bool:
        """Whether the target's `choices` decide in all rows, and nothing is sampled."""
        return self.sampler.greedy

    def greedy_rows(self, count: int) -> list[bool]:
        """Return for each of `count` rows whether the target's `choices` decide."""
        greedy = [self.greedy] * count
        for group in self.sampler.groups:
            for row in group.rows or ():
                greedy[row] = group.sampler.greedy
        return greedy

    def logits(self, session: Session, tokens: mx.array, history: History) -> mx.array | None:
        """Feed the target's session `tokens` (B, K + 1) int32: each row's last one and its draft.

        Returns:
            Logits (B, K + 1, V), transformed; None if the session's own argmax is all that is
            wanted, and nothing was fed.
        """
        if self.greedy and self.delta == 0 and not self.sampler.transforms:
            return None
        return self.sampler.transformed(session.step(tokens), history)

    def choices(self, draft: Draft, logits: mx.array) -> mx.array:
        """Return the target's greedy choices (B, K + 1) int32, given its logits (B, K + 1, V).

        Drafted tokens stand as far as they agree with the choices, see `num_agreed`. Lenience only
        changes which token counts as the argmax; the rule itself stays exact. Where no token is
        allowed the choice is `NOTHING`.
        """
        choices = lenient_argmax(draft, logits, delta=self.delta)
        return mx.where(nothing_allowed(logits), NOTHING, choices)

    def verdict(self, draft: Draft, logits: mx.array, keys: mx.array | None) -> Verdict:
        """Judge a sampled draft by the target's logits (B, K + 1, V)."""
        if not self.sampler.transforms:
            return self._judge(draft, logits, keys)
        # A draft ends where no token is allowed, and what p is there does not matter.
        nothing = nothing_allowed(logits)
        draft = draft.without(nothing[:, :-1], logits.shape[-1])
        allowed = _at(logits[:, : draft.tokens.shape[1]], draft.tokens) > -mx.inf
        found = self._judge(draft, mx.where(nothing[..., None], 0, logits), keys, allowed)
        none_left = mx.take_along_axis(nothing, found.num_accepted[:, None], axis=1)[:, 0]
        return replace(found, next_token=mx.where(none_left, NOTHING, found.next_token))

    def _judge(
        self,
        draft: Draft,
        logits: mx.array,
        keys: mx.array | None,
        allowed: mx.array | None = None,
    ) -> Verdict:
        probs = self.sampler.probs(logits)
        if self.block:
            return verify_block(draft, probs, keys)
        return verify_tokens(draft, probs, keys, delta=self.delta, allowed=allowed)


def num_agreed(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """Count the first tokens that agree: both rules, where all distributions are one-hot."""
    pairs = zip(drafted, choices, strict=False)
    return next((i for i, (token, best) in enumerate(pairs) if token != best), len(drafted))


def verify_tokens(
    draft: Draft,
    target_probs: mx.array,
    keys: mx.array | None,
    *,
    delta: float = 0.0,
    allowed: mx.array | None = None,
) -> Verdict:
    """The token-wise rule (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    A drafted x is accepted with probability min(1, p(x) / q(x) + delta); after the first
    rejection the next token comes from the residual norm(max(p - q, 0)).

    Args:
        draft: K drafted tokens per row, and the distributions q they were sampled from.
        target_probs: p, (B, K + 1, V) float32.
        keys: (B, 2) uint32, for the acceptance tests and the next token; None if p is one-hot.
        delta: 0 keeps the target's distribution exactly; 1 accepts every drafted token.
        allowed: (B, K) bool, False at drafted tokens that lenience must not accept; None is all
            True.

    Returns:
        A Verdict. With delta 0, the accepted tokens and the next one are distributed as if the
        target had sampled them.
    """
    odds = token_odds(draft, target_probs, delta=delta)
    if allowed is not None:
        odds = replace(odds, chance=mx.where(allowed, odds.chance, 0))
    return _verdict(odds, draft, target_probs, keys)


def verify_block(draft: Draft, target_probs: mx.array, keys: mx.array | None) -> Verdict:
    """Block verification (Sun et al. 2403.10444, algorithm 2): exact, and never accepts less.

    The draft is judged as a whole: a token that p likes less than q does may stand for the sake of
    those after it. In expectation it accepts at least as many tokens as the token-wise rule. For
    arguments and result see `verify_tokens`.
    """
    return _verdict(block_odds(draft, target_probs), draft, target_probs, keys)


def token_odds(draft: Draft, target_probs: mx.array, *, delta: float = 0.0) -> Odds:
    """Return the odds of `verify_tokens`: place i passes if u_i q(x_i) < p(x_i) + delta q(x_i)."""
    p_x = _at(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q_x = _at(draft.dense(target_probs.shape[-1]), draft.tokens)
    # q(x) = 0 marks a place where nothing was drafted: u * 0 < p(x) must not accept it.
    chance = mx.where(q_x > 0, p_x + delta * q_x, 0)
    return Odds(chance, q_x, mx.ones_like(target_probs[..., 0]), in_order=True)


def block_odds(draft: Draft, target_probs: mx.array) -> Odds:
    """Return the odds of `verify_block`: place i passes with probability h_i.

    With w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)) and
    S_i = sum max(w_i p_{i+1} - q_{i+1}, 0), h_i = S_i / (S_i + 1 - w_i). After the last place q is
    a zero row, which makes h_K = w_K.
    """
    p_x = _at(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q_x = _at(draft.dense(target_probs.shape[-1]), draft.tokens)
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
    return Odds(chance, chance + (1 - w[:, 1:]), w, in_order=False)


def residual(
    draft: Draft, target_probs: mx.array, ratios: mx.array, num_accepted: mx.array
) -> mx.array:
    """Return max(w p - q, 0), (B, V) float32, after `num_accepted` (B,) drafted tokens.

    The next token is sampled in proportion to it. After a whole draft q is a zero row, and the
    bonus token comes from p itself.
    """
    place = num_accepted[:, None]
    w_n = mx.take_along_axis(ratios, place, axis=1)
    p_n = mx.take_along_axis(target_probs, place[..., None], axis=1)[:, 0]
    q = _with_bonus(draft, target_probs.shape[-1])
    q_n = mx.take_along_axis(q, place[..., None], axis=1)[:, 0]
    weights = mx.maximum(w_n * p_n - q_n, 0)
    # Rounding can leave only zeros where p and q are equal; sampling from p is then as good.
    empty = mx.sum(weights, axis=-1, keepdims=True) == 0
    return mx.where(empty, p_n, weights)


def _verdict(odds: Odds, draft: Draft, target_probs: mx.array, keys: mx.array | None) -> Verdict:
    if keys is None:
        uniforms = mx.full(draft.tokens.shape, 0.5)
    else:
        uniforms = uniform(place_keys(keys, draft.tokens.shape[1]))
    num_accepted = odds.count_accepted(uniforms)
    weights = residual(draft, target_probs, odds.ratios, num_accepted)
    return Verdict(num_accepted, sample(weights, None if keys is None else final_keys(keys)))


def _with_bonus(draft: Draft, vocab_size: int) -> mx.array:
    """Return q (B, K + 1, V), with a zero row for the place after the draft."""
    return mx.pad(draft.dense(vocab_size), [(0, 0), (0, 1), (0, 0)])


def lenient_argmax(draft: Draft, logits: mx.array, *, delta: float) -> mx.array:
    """Return the target's choices at temperature 0, drafted near-ties as the argmax: (B, K + 1).

    A drafted token counts as the argmax if its probability (at temperature 1) is at least
    (1 - delta) times the largest (2211.17192, appendix A.5, with l = 1 - delta). So greedy decoding
    with delta stays deterministic; delta 0 is exact. The logits are (B, K + 1, V).
    """
    num_draft = draft.tokens.shape[1]
    best = argmax(logits)
    if delta > 0 and num_draft > 0:
        drafted = logits[:, :num_draft].astype(mx.float32)
        margin = math.log1p(-delta) if delta < 1 else -math.inf
        own = _at(drafted, draft.tokens)
        near = (own >= mx.max(drafted, axis=-1) + margin) & (own > -mx.inf)
        if draft.mask is not None:
            near = near & draft.mask
        kept = mx.where(near, draft.tokens, best[:, :num_draft])
        best = mx.concatenate([kept, best[:, num_draft:]], axis=1)
    return best


def _at(values: mx.array, tokens: mx.array) -> mx.array:
    """Take values (B, K, V) at tokens (B, K) -> (B, K)."""
    return mx.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
