"""Both rules with sampling, and leniency; test_exact.py proves them by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from speculative_t5.decoding.drafters import Draft
from speculative_t5.decoding.sampling import one_hot, position_keys, sample
from speculative_t5.decoding.verify import (
    Acceptance,
    Verdict,
    Verifier,
    block_acceptance,
    decide,
    num_agreed,
    token_acceptance,
)

import mlx.core as mx
import numpy as np
import pytest

Rule = Callable[[Draft, mx.array], Acceptance]
RULES = {"token": token_acceptance, "block": block_acceptance}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def judge(rule: Rule, draft: Draft, p: mx.array, keys: mx.array | None) -> Verdict:
    return decide(rule(draft, p), draft, p, keys)


def row_keys(rows: int, seed: int = 0) -> mx.array:
    return mx.random.split(mx.random.key(seed), rows)


def whole(tokens: mx.array, probs: mx.array) -> Draft:
    """Return a draft with the same number of tokens in every row."""
    return Draft(tokens, [tokens.shape[1]] * tokens.shape[0], probs)


def sample_draft(probs: mx.array, keys: mx.array) -> mx.array:
    """Sample tokens (B, K) from probabilities (B, K, V), as a draft model does."""
    at = position_keys(keys, probs.shape[1])
    return mx.stack([sample(probs[:, i], at[:, i]) for i in range(probs.shape[1])], axis=1)


def sampled_distance(rule: Rule, p: np.ndarray, q: np.ndarray, rows: int = 200_000) -> float:
    """Return the total variation between the first emitted token and p_1, given q (K, V)."""
    draft_keys, keys = row_keys(2 * rows, 7).reshape(2, rows, 2)
    probs = mx.broadcast_to(mx.array(q, dtype=mx.float32), (rows, *q.shape))
    draft = whole(sample_draft(probs, draft_keys), probs)
    target = mx.broadcast_to(mx.array(p, dtype=mx.float32), (rows, *p.shape))
    size = q.shape[1]
    verdict = judge(rule, draft, target, keys)
    first = mx.where(verdict.num_accepted > 0, draft.tokens[:, 0], verdict.next_token)
    counts = np.bincount(np.array(first), minlength=size) / rows
    return float(np.abs(counts - p[0]).sum() / 2)


# The distance's expectation is below sqrt(4 / 200,000) / 2 = 0.0023.
TOLERANCE = 0.006


@each_rule
def test_acceptance_and_the_next_token_are_independent(rule: Rule) -> None:
    p = np.tile([0.4, 0.3, 0.2, 0.1, 0.0], (6, 1))
    q = np.tile([0.1, 0.1, 0.2, 0.3, 0.3], (5, 1))
    assert sampled_distance(rule, p, q) < TOLERANCE


@pytest.mark.parametrize(
    ("token", "delta", "expected"),  # 0.41 / 0.5 = 0.82
    [(1, 0.0, 0), (1, 0.17, 0), (1, 0.19, 1), (2, 0.19, 0), (2, 1.0, 2)],
)
def test_leniency_accepts_near_ties_and_nothing_else(
    token: int, delta: float, expected: int
) -> None:
    logits = mx.log(mx.array([[[0.5, 0.41, 0.09], [0.5, 0.41, 0.09]]]))
    found = Verifier(delta).choices(Draft(mx.array([[token]]), [1]), logits)
    assert found[0, 0].item() == expected


def test_leniency_never_accepts_where_nothing_was_drafted() -> None:
    logits = mx.array([[[0.0, 1.0], [0.0, 1.0]]])
    draft = Draft(mx.array([[0]]), [0])
    assert Verifier(1.0).choices(draft, logits).tolist() == [[1, 1]]


def test_greedy_counts_equal_both_rules_for_one_hot_distributions() -> None:
    """All drafts of up to three tokens out of three, against all targets."""
    targets = list(itertools.product(range(3), repeat=4))
    seen = set()
    for draft in itertools.product(range(3), repeat=3):
        for length in range(4):
            given = Draft(mx.array([draft] * len(targets)), [length] * len(targets))
            found = [num_agreed(draft[:length], target) for target in targets]
            seen.update(found)
            for rule in RULES.values():
                verdict = judge(rule, given, one_hot(mx.array(targets), 3), None)
                assert verdict.num_accepted.tolist() == found
                best = [target[n] for target, n in zip(targets, found, strict=True)]
                assert verdict.next_token.tolist() == best
    assert seen == {0, 1, 2, 3}
