"""What is learned from rounds: what is accepted of drafts, and what passes cost."""

import random
from dataclasses import replace
from statistics import fmean

from speculative_t5.decoding import outcomes
from speculative_t5.decoding.outcomes import (
    LENGTHS,
    MAX_DRAFT,
    PLAIN_KIND,
    CostCurve,
    Outcome,
    RunRates,
    kind_of,
)

import numpy as np
import pytest
from scripted import outcome


@pytest.mark.parametrize(
    ("asked", "drafted", "accepted", "expected"),
    [
        # The fourth never is, so 2 are drafted twice for each four tokens.
        (6, 6, 3, {1: (1, 1), 2: (1, 1), 3: (3, 1), 4: (3, 1), 6: (3, 1)}),
        (9, 2, 2, {9: (2, 0)}),  # a drafter that finds no more than two
    ],
)
def test_places_in_a_run_have_rates_of_their_own(
    asked: int, drafted: int, accepted: int, expected: dict[int, tuple[int, int]]
) -> None:
    rates = RunRates()
    rates.add([outcome(asked, [accepted] * 10_000, [drafted] * 10_000)], 1)
    tokens, chances = (dict(zip(LENGTHS, each, strict=True)) for each in rates.expected())
    for length, found in expected.items():
        assert (tokens[length] - 1, chances[length]) == pytest.approx(found, abs=0.05)


def test_a_lookup_that_seldom_finds_goes_on_once_it_has_found() -> None:
    """It finds something in half of the first rounds, and then nearly all of it is right."""
    rates = RunRates()
    rates.add([outcome(9, [9] * 5000 + [0] * 5000, [9] * 5000 + [0] * 5000)], 1)
    tokens, chances = (dict(zip(LENGTHS, each, strict=True)) for each in rates.expected())
    assert tokens[9] > 8 and chances[9] == pytest.approx(0.5, rel=0.01)
    assert tokens[MAX_DRAFT] > 25, "longer drafts are expected to go on like this"


@pytest.mark.parametrize("length", [3, 5, 9, 14])
def test_drafts_of_any_length_promise_the_same_of_all_others(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a text with easy and hard stretches, where short ones see more of the easy ones.

    By places in a draft, those of 14 would promise 5 % less of those of 5 than these give.
    """
    monkeypatch.setattr(outcomes, "COUNT_MEMORY", 1.0)
    rng, is_right = random.Random(0), list[bool]()
    for _ in range(1500):
        rate = rng.choice((0.97, 0.8))
        is_right += [rng.random() < rate for _ in range(60)]

    def rounds(num_draft: int) -> list[Outcome]:
        done, at, num_right = list[Outcome](), 0, 0
        while at + num_draft < len(is_right):
            accepted = [*is_right[at : at + num_draft], False].index(False)
            done.append(replace(outcome(num_draft, [accepted]), num_right=[num_right]))
            at += accepted + 1
            num_right = num_right + accepted + 1 if accepted == num_draft else 0
        return done

    rates = RunRates()
    rates.add(rounds(length), 1)
    expected = dict(zip(LENGTHS, rates.expected()[0], strict=True))
    for other in (1, 3, 5, 9, 14):
        found = 1 + fmean(each.num_accepted[0] for each in rounds(other))
        assert expected[other] == pytest.approx(found, rel=0.04), other


def test_a_few_drafts_that_are_accepted_whole_do_not_promise_that_any_is() -> None:
    rates = RunRates()
    rates.add([outcome(7, [7])] * 3, 3)
    tokens = dict(zip(LENGTHS, rates.expected()[0], strict=True))
    assert tokens[7] > 6.3 and tokens[MAX_DRAFT] < 20


def test_what_an_unused_draft_gives_is_not_forgotten_but_doubted() -> None:
    rates = RunRates()
    rates.add([outcome(5, [0])] * 20, 20)
    before, recent = rates.expected()[0], rates.recent
    rates.add([], 1000)
    np.testing.assert_array_equal(rates.expected()[0], before)
    assert recent > 10 and rates.recent < 1


def drafting(length: int) -> int:
    """Return the kind of a round in which the first share finds a draft of this length."""
    return kind_of(0, LENGTHS.index(length))


def cost(costs: CostCurve, length: int) -> float:
    return float(costs.costs(0)[LENGTHS.index(length)])


def test_costs_follow_the_machine_and_keep_their_ratios() -> None:
    costs = CostCurve([1.0])
    kinds = (PLAIN_KIND, 1.0), (drafting(5), 2.0), (drafting(9), 2.5)
    for speed in (0.01, 0.02):
        for _ in range(40):
            costs.observe([(kind, speed * times) for kind, times in kinds])
        assert (cost(costs, 5), cost(costs, 9)) == pytest.approx((2, 2.5), rel=0.02)
    for _ in range(60):
        costs.observe([(drafting(5), 0.08)])  # the machine is busy, and no other length is in use
    assert cost(costs, 5) == pytest.approx(2, rel=0.05)
    assert cost(costs, 5) < cost(costs, 7) <= cost(costs, 9) < cost(costs, 14)


def test_what_one_length_shows_moves_its_neighbours_and_narrows_their_doubt() -> None:
    costs = CostCurve([1.0, 0.0])
    before, doubts = costs.mean.copy(), np.diag(costs.covariance).copy()
    for _ in range(10):
        costs.observe([(PLAIN_KIND, 0.01), (drafting(9), 0.015)])  # half of what the guess says
    moved, narrowed = before - costs.mean, doubts - np.diag(costs.covariance)
    near, far, other = drafting(11), drafting(1), kind_of(1, LENGTHS.index(9))
    assert moved[drafting(9)] > moved[near] > moved[far] > 0.1 and moved[other] > 0.1
    assert narrowed[near] > narrowed[other] > 0 and (narrowed[1:] > 0).all()


def test_a_shorter_pass_costs_no_more_than_a_longer_one() -> None:
    """Another program took the time of the rounds with the shorter one."""
    costs = CostCurve([1.0])
    for _ in range(30):
        costs.observe([(PLAIN_KIND, 0.01), (drafting(9), 0.02)])
        costs.observe([(PLAIN_KIND, 0.01), (drafting(4), 0.04)])
    assert cost(costs, 4) == cost(costs, 9) < 2.3


def test_rounds_of_one_length_alone_say_nothing_about_it() -> None:
    costs = CostCurve([1.0])
    costs.observe([(drafting(1), 0.01)] * 3 + [(drafting(5), 0.02)] + [(drafting(1), 0.01)] * 3)
    before, known = costs.mean.copy(), costs.doubts([drafting(1)], drafting(5))
    costs.observe([(drafting(5), 0.02)] * 100)
    costs.observe([(drafting(5), 0.03)] * 100)
    np.testing.assert_allclose(costs.mean, before, atol=0.02)
    assert costs.doubts([drafting(1)], drafting(5)) > known, "it is doubted with time"


def test_a_round_that_took_too_long_by_chance_changes_little() -> None:
    costs = CostCurve([1.0])
    for _ in range(50):
        costs.observe([(PLAIN_KIND, 0.01), (drafting(5), 0.02)])
    costs.observe([(drafting(5), 2.0)])
    assert cost(costs, 5) == pytest.approx(2, rel=0.05)


def test_a_look_that_takes_surprisingly_long_counts_less_and_is_followed_by_another() -> None:
    costs = CostCurve([1.0])
    costs.observe([(drafting(1), 0.01)] * 8)
    doubt = costs.doubts([drafting(5)], drafting(1))
    costs.observe([(drafting(5), 1.0)] + [(drafting(1), 0.01)] * 5)
    assert cost(costs, 5) / cost(costs, 1) < 4
    assert costs.doubts([drafting(5)], drafting(1)) > 0.4 * doubt
    for _ in range(4):
        costs.observe([(drafting(5), 0.02)] + [(drafting(1), 0.01)] * 5)
    assert cost(costs, 5) / cost(costs, 1) == pytest.approx(2, rel=0.1)


def test_a_cost_that_seemed_too_high_or_too_low_is_learned_anew() -> None:
    for first in (0.015, 0.03):
        costs = CostCurve([1.0])
        for seen, looks in ((first, 3), (0.02, 20)):
            for _ in range(looks):
                costs.observe([(drafting(1), 0.01)] * 5 + [(drafting(5), seen)])
        assert cost(costs, 5) / cost(costs, 1) == pytest.approx(2, rel=0.15), first
