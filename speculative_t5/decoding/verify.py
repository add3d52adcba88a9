"""Verification: pure functions that decide which drafted tokens stand and what follows them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import mlx.core as mx

from .drafters import Draft
from .faults import BROKEN_DRAFT
from .logits import NOTHING, TokenHistory, nothing_allowed
from .protocols import Session
from .results import Broadcast, identity, read
from .sampling import Groups, Keys, drawn, final_keys, position_keys, uniform

Rule = Literal["coupled", "token", "block"]


class Verdict(NamedTuple):
    """The decision on a draft."""

    num_accepted: mx.array  # drafted tokens accepted in each row, (B,) int32
    # After them, (B,) int32; `NOTHING` where none is allowed, or what marks NaN (`faults`).
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


@dataclass(frozen=True)
class Verifier:
    """The rule in use, from the target's session to the tokens that a round emits."""

    delta: float = 0.0  # leniency; 0 is exact
    rule: Rule = "coupled"  # where tokens are sampled; only "token" allows a delta
    broadcast: Broadcast = identity  # applied to what a round has found

    def verify(
        self, session: Session, history: TokenHistory, draft: Draft, groups: Groups, keys: Keys
    ) -> list[tuple[list[int], int]]:
        """Run the target over each row's last token and its draft, and read the verdicts.

        By the coupled rule, `keys` are those of the positions that the draft and the next token
        have in the output, (B, K + 1, 2), and of the draft as well; by the others, those of rows.

        Returns:
            For each row the accepted tokens with the next one, which is missing where no token can
            follow, and the number of accepted ones. A row whose logits are NaN has what marks them
            alone, in the round that begins there.
        """
        contexts = history.contexts
        session.truncate([len(context) - 1 for context in contexts])
        tokens = mx.array([[context[-1]] for context in contexts], dtype=mx.int32)
        if draft.tokens.shape[1]:
            tokens = mx.concatenate([tokens, draft.tokens], axis=1)
        parts = [draft.tokens]
        if groups.greedy and self.delta == 0 and not groups.transforms:
            parts.append(session.step_argmax(tokens))
        else:
            logits = groups.transformed(session.step(tokens), history)
            if self.is_coupled or any(groups.greedy_rows):
                parts.append(self.choices(draft, logits, groups, keys))
            if keys is not None and not self.is_coupled:
                parts.append(mx.stack([*self.verdict(draft, logits, groups, keys)], axis=1))
        # A single wait: this array holds all that the host has to know.
        rows = read(self.broadcast(mx.concatenate(parts, axis=1)))
        width, found = draft.tokens.shape[1], []
        for row, length, is_greedy in zip(rows, draft.lengths, groups.greedy_rows, strict=True):
            if is_greedy or self.is_coupled:
                choices = row[width : 2 * width + 1]
                num_accepted = num_agreed(row[:length], choices)
                next_token = choices[num_accepted]
            else:
                num_accepted, next_token = row[-2:]
            if next_token == BROKEN_DRAFT:  # what was accepted would not be exact
                num_accepted = 0
            ends = next_token == NOTHING or (next_token < NOTHING and num_accepted > 0)
            found.append(([*row[:num_accepted], *([] if ends else [next_token])], num_accepted))
        return found

    @property
    def is_coupled(self) -> bool:
        return self.rule == "coupled"

    def choices(self, draft: Draft, logits: mx.array, groups: Groups, keys: Keys) -> mx.array:
        """Return the target's own choices (B, K + 1) int32, given its logits (B, K + 1, V).

        Drafted tokens stand as far as they agree with the choices, see `num_agreed`. By the coupled
        rule rows that sample choose, too: a position's choice is the best id once noise is added,
        which depends on the position alone and which the draft was chosen with as well (Daliri et
        al. 2408.07978). So the output is the same with any draft or none. In greedy rows a drafted
        token counts as the choice if its probability (at temperature 1) is at least (1 - delta)
        times the largest (2211.17192, appendix A.5, with l = 1 - delta). Where no token is allowed
        the choice is `NOTHING`.
        """
        num_draft = draft.tokens.shape[1]
        choices = groups.choose(logits, keys if self.is_coupled else None)
        if self.delta > 0 and num_draft > 0:
            drafted = logits[:, :num_draft].astype(mx.float32)
            margin = math.log1p(-self.delta) if self.delta < 1 else -math.inf
            own = _at(drafted, draft.tokens)
            near = (own >= mx.max(drafted, axis=-1) + margin) & (own > -mx.inf)
            near = near & (draft.tokens >= 0)
            if draft.mask is not None:
                near = near & draft.mask
            kept = mx.where(near, draft.tokens, choices[:, :num_draft])
            choices = mx.concatenate([kept, choices[:, num_draft:]], axis=1)
        return mx.where(nothing_allowed(logits), NOTHING, choices)

    def verdict(self, draft: Draft, logits: mx.array, groups: Groups, keys: mx.array) -> Verdict:
        """Judge a sampled draft by the target's logits (B, K + 1, V), given keys of rows (B, 2)."""
        nothing = allowed = None
        if groups.transforms:
            # A draft ends where no token is allowed, and what p is there does not matter.
            nothing = nothing_allowed(logits)
            dense = draft.dense(logits.shape[-1])
            draft = replace(draft, probs=mx.where(nothing[:, :-1, None], 0, dense))
            allowed = _at(logits[:, : draft.tokens.shape[1]], draft.tokens) > -mx.inf
            logits = mx.where(nothing[..., None], 0, logits)
        probs = groups.probs(logits)
        if self.rule == "block":
            acceptance = block_acceptance(draft, probs)
        else:
            acceptance = token_acceptance(draft, probs, delta=self.delta, allowed=allowed)
        num_accepted, next_token = decide(acceptance, draft, probs, keys)
        if nothing is not None:
            none_left = mx.take_along_axis(nothing, num_accepted[:, None], axis=1)[:, 0]
            next_token = mx.where(none_left, NOTHING, next_token)
        if draft.probs is not None:
            is_broken = mx.any(mx.isnan(draft.probs[..., 0]), axis=1)
            next_token = mx.where(is_broken, BROKEN_DRAFT, next_token)
        return Verdict(num_accepted, next_token)


def num_agreed(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """Count the first tokens that agree: all rules, where all distributions are one-hot.

    Marks of NaN (`faults`) agree with nothing.
    """
    pairs = zip(drafted, choices, strict=False)
    return next(
        (i for i, (token, best) in enumerate(pairs) if token != best or token < 0), len(drafted)
    )


def token_acceptance(
    draft: Draft, target_probs: mx.array, *, delta: float = 0.0, allowed: mx.array | None = None
) -> Acceptance:
    """The token-wise rule (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

    A drafted x is accepted with probability min(1, p(x) / q(x) + delta), if all before it are.
    With delta 0, the tokens are distributed as if the target had sampled them; delta 1 accepts
    every drafted token, except where `allowed` (B, K) bool is False. p is (B, K + 1, V) float32.
    """
    p_x = _at(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q_x = _at(draft.dense(target_probs.shape[-1]), draft.tokens)
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
    """Sample how many drafted tokens stand, and the next one, given keys of rows (B, 2)."""
    uniforms = uniform(position_keys(keys, draft.tokens.shape[1]))
    num_accepted = acceptance.count_accepted(uniforms)
    weights = residual(draft, target_probs, acceptance.ratios, num_accepted)
    return Verdict(num_accepted, drawn(weights, final_keys(keys)))


def _with_bonus(draft: Draft, vocab_size: int) -> mx.array:
    """Return q (B, K + 1, V), with a zero row for the position after the draft."""
    return mx.pad(draft.dense(vocab_size), [(0, 0), (0, 1), (0, 0)])


def _at(values: mx.array, tokens: mx.array) -> mx.array:
    """Take values (B, K, V) at tokens (B, K) -> (B, K)."""
    return mx.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
