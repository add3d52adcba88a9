"""Draft lengths: the schedule's expectations, choices and learning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from speculative_t5.decoding.draft_length import (
    MAX_DRAFT,
    PROBE_SHARE,
    TYPICAL_RATE,
    AdaptiveSchedule,
    Calibration,
    Counts,
    FixedSchedule,
    Outcome,
    rate_of_others,
)

import numpy as np
import pytest


def outcome(num_draft: int, accepted: Sequence[int], drafted: Sequence[int] = ()) -> Outcome:
    return Outcome(num_draft, drafted or [num_draft] * len(accepted), accepted, 0.0, 0.0)


@cache
def counted(rate: float, rounds: int = 10_000, num_draft: int = MAX_DRAFT) -> Counts:
    """Return counts of drafts whose tokens are each accepted with the same probability."""
    rng = np.random.default_rng(0)
    passed = np.cumprod(rng.random((rounds, num_draft)) < rate, axis=1).sum(axis=1)
    counts = Counts()
    counts.add(outcome(num_draft, passed.tolist()))
    return counts


def calibration(
    counts: Counts, *, draft: float = 0.1, verify: float = 0.02, num_prompts: int = 1000
) -> Calibration:
    """Make a pass over one token take a second; `verify` and `draft` are per further token."""
    return Calibration(
        tuple(draft * k for k in range(MAX_DRAFT + 1)),
        tuple(1 + verify * k for k in range(2 * MAX_DRAFT + 1)),
        tuple(map(tuple, counts.values)),
        num_prompts,
    )


def speed_by_theory(rate: float, draft: float, verify: float) -> np.ndarray:
    """(1 - a^(K + 1)) / (1 - a) / (1 + K c) for K = 0 to MAX_DRAFT (2211.17192, theorem 3.8)."""
    k = np.arange(MAX_DRAFT + 1)
    speed: np.ndarray = (1 - rate ** (k + 1)) / (1 - rate) / (1 + k * (draft + verify))
    return speed


def test_a_fixed_length_leaves_room_for_the_targets_token() -> None:
    schedule = FixedSchedule(5)
    assert [schedule.next(remaining) for remaining in (9, 6, 5, 2, 1)] == [5, 5, 4, 1, 0]


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_expected_tokens_follow_the_rate(rate: float) -> None:
    accepts, drafts = (counts := counted(rate)).expected(counts.pooled())
    theory = np.cumsum(rate ** np.arange(1, MAX_DRAFT + 1))
    np.testing.assert_allclose(accepts[1:], theory, rtol=0.05)
    np.testing.assert_allclose(drafts, np.arange(MAX_DRAFT + 1), rtol=1e-3)
    assert accepts[0] == drafts[0] == 0


@pytest.mark.parametrize(
    ("asked", "drafted", "accepted", "expected"),
    [
        (6, 6, 3, {1: (1, 1), 2: (2, 2), 3: (3, 3), 4: (3, 4), 6: (3, 6)}),  # the fourth never is
        (3, 5, 4, {2: (3, 4), 3: (4, 5)}),  # a drafter that adds two tokens to those asked for
        (8, 2, 2, {8: (2, 2)}),  # and one that drafts fewer
    ],
)
def test_places_have_rates_of_their_own(
    asked: int, drafted: int, accepted: int, expected: dict[int, tuple[int, int]]
) -> None:
    counts = Counts()
    counts.add(outcome(asked, [accepted] * 10_000, [drafted] * 10_000))
    accepts, drafts = counts.expected(counts.pooled())
    for length, found in expected.items():
        assert (accepts[length], drafts[length]) == pytest.approx(found, abs=0.05)


@pytest.mark.parametrize("draft", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.8, 0.95])
def test_the_length_is_as_good_as_the_best_by_theory(rate: float, draft: float) -> None:
    schedule = AdaptiveSchedule(calibration(counted(rate), draft=draft))
    speed = speed_by_theory(rate, draft, 0.02)
    assert speed[schedule.next(1000)] > 0.97 * speed.max()
    assert min(speed) < 0.9 * speed.max()


def test_a_calibration_counts_more_the_more_prompts_it_has() -> None:
    def expected(rate: float, num_prompts: int) -> float:
        return rate_of_others(calibration(counted(rate), num_prompts=num_prompts))

    for rate in (0.02, 0.4, 0.95):
        one, few, many = (expected(rate, n) for n in (1, 4, 1000))
        assert many == pytest.approx(rate, abs=0.02)
        assert abs(one - TYPICAL_RATE) <= abs(few - TYPICAL_RATE) <= abs(many - TYPICAL_RATE)
    assert expected(0.4, 1) > 0.5
    assert expected(0.02, 1) < 0.3
    assert AdaptiveSchedule(calibration(counted(0.01), draft=0.4, num_prompts=1)).next(99) == 0


def test_a_step_in_the_costs_is_seen() -> None:
    """Passes over up to 6 tokens cost the same, and longer ones three times as much."""
    costs = tuple(1.0 if length <= 6 else 3.0 for length in range(1, 2 * MAX_DRAFT + 2))
    counts = tuple(map(tuple, counted(0.9).values))
    schedule = AdaptiveSchedule(Calibration((0.0,) * (MAX_DRAFT + 1), costs, counts, 1000))
    assert schedule.next(1000) == 5


def test_it_learns_from_rounds() -> None:
    schedule = AdaptiveSchedule(calibration(counted(0.8)))
    before = schedule.next(1000)
    assert [schedule.next(remaining) for remaining in (3, 2, 1)] == [2, 1, 0], "there is no room"
    for _ in range(40):
        schedule.observe(outcome(before, [before]))
    assert schedule.next(1000) > before
    for _ in range(200):
        schedule.observe(outcome(schedule.next(1000), [0]))
    assert schedule.next(1000) == 0
    for _ in range(150):
        length = schedule.next(1000)
        schedule.observe(outcome(length, [length]))
    assert schedule.next(1000) >= 3, "it probes"
    assert AdaptiveSchedule(schedule.calibration).next(1000) == before


@pytest.mark.parametrize("draft", [0.03, 0.5])
def test_it_stops_drafting_and_probes_later_and_later(draft: float) -> None:
    """Probes are so rare that they cost little, and rarer after each failure, up to a limit."""
    schedule = AdaptiveSchedule(calibration(counted(0.001), draft=draft))
    probes = []
    for round_ in range(2000):
        length = schedule.next(1000)
        if length:
            probes.append(round_)
        schedule.observe(outcome(length, [0]))
    gaps = np.diff([-1, *probes]) - 1
    assert gaps[0] == pytest.approx((draft + 0.02) / PROBE_SHARE, abs=1)
    np.testing.assert_allclose(gaps[1:4] / gaps[:3], 2, rtol=0.2)
    assert len(gaps) > 4 and (gaps[4:] == gaps[3]).all()
