"""Leniency, and greedy rows; test_exact.py has the rules by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

from speculative_t5.decoding.drafters import Draft
from speculative_t5.decoding.sampling import one_hot
from speculative_t5.decoding.verify import (
    Verifier,
    block_acceptance,
    decide,
    num_agreed,
    token_acceptance,
)

import mlx.core as mx
import pytest

RULES: dict[str, Any] = {"token": token_acceptance, "block": block_acceptance}


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
                p = one_hot(mx.array(targets), 3)
                verdict = decide(rule(given, p), given, p, None)
                assert verdict.num_accepted.tolist() == found
                best = [target[n] for target, n in zip(targets, found, strict=True)]
                assert verdict.next_token.tolist() == best
    assert seen == {0, 1, 2, 3}
