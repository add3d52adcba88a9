"""Proof by enumeration that rows with options of their own follow their own distributions.

As in test_exact_loop.py each row has one possible history. Here neighbours have other temperatures,
filters and transforms, or are greedy, and lookups draft as well.
"""

from __future__ import annotations

from functools import partial

from speculative_t5.decoding.sampling import Sampler

import pytest
import scripted
from conftest import PAIRS, VARIED
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPT, ROUNDING

SAMPLED = [
    Sampler(1.0),
    Sampler(0.7, top_k=2),
    Sampler(2.0, top_p=0.8),
    Sampler(1.0, transform=TRANSFORMS["together"]),
]
GREEDY = [Sampler(), Sampler(transform=TRANSFORMS["penalty"])]
gap = partial(scripted.gap, sampled=SAMPLED, greedy=GREEDY, prompts=[PROMPT])


@pytest.mark.parametrize("kind", VARIED)
def test_rows_follow_their_own_distributions(kind: str) -> None:
    assert gap(kind, "token", 1) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", PAIRS)
def test_rows_with_longer_drafts_follow_their_own_distributions(kind: str, rule: str) -> None:
    assert gap(kind, rule, 2, batch_size=100) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("kind", "name"), [("t5", "lookup"), *((kind, "both") for kind in PAIRS)])
def test_rows_with_lookups_follow_their_own_distributions(kind: str, name: str, rule: str) -> None:
    assert gap(kind, rule, 1, name) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["model", "lookup", "both"])
def test_rows_that_end_or_cannot_go_on_follow_their_own_distributions(name: str, rule: str) -> None:
    sampled = [Sampler(1.0), *(Sampler(1.0, transform=each) for each in ENDINGS.values())]
    greedy = [Sampler(transform=each) for each in ENDINGS.values()]
    assert gap("t5", rule, 2, name, batch_size=100, sampled=sampled, greedy=greedy) < ROUNDING


@pytest.mark.parametrize("kind", ["sharing", "qwen3"])
def test_dead_ends_in_batches_follow_their_own_distributions(kind: str) -> None:
    dead = ENDINGS["dead"]
    rows = [Sampler(1.0, transform=dead), Sampler(1.0)], [Sampler(transform=dead)]
    assert gap(kind, "block", 2, sampled=rows[0], greedy=rows[1]) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["model", "lookup", "both"])
def test_rows_that_stop_follow_their_own_distributions(name: str, rule: str) -> None:
    """The same token stops an output, and leaves nothing to follow it."""
    dead = ENDINGS["dead or ended"]
    rows = [Sampler(1.0, transform=dead), Sampler(1.0)], [Sampler(), Sampler(transform=dead)]
    assert gap("t5", rule, 2, name, sampled=rows[0], greedy=rows[1], stop=2) < ROUNDING
