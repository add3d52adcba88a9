"""Proof by enumeration that outputs of the loop follow the distribution of whole passes.

Each row of a batch is scripted to have one possible history: the tokens drafted in each round, how
many of them are accepted, and the next token. See `scripted.py`. Neighbours may have other
temperatures, filters and transforms, or be greedy, and lookups draft as well.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from speculative_t5.decoding.sampling import Sampler

import numpy as np
import pytest
from conftest import PAIRS, VARIED, next_logits, unrelated_pair
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPT, ROUNDING, SAMPLED, SIZE, gap, normal, walk


def gap_to_whole_passes(kind: str, num_draft: int) -> float:
    """Return the gap between probabilities in rounds and those of passes over whole sequences."""
    models = unrelated_pair(kind, vocab_size=SIZE)
    gaps = []
    for model, seen in zip(models, walk(*models, num_draft), strict=True):
        for depth in range(2 * num_draft + 2):
            paths = list(product(range(SIZE), repeat=depth))
            whole = normal(SAMPLED.probs(next_logits(model, PROMPT, paths)))
            gaps += [
                np.abs(given - expected).max()
                for path, expected in zip(paths, whole, strict=True)
                for given in seen[path]
            ]
    return float(max(gaps))


@pytest.mark.parametrize("num_draft", [1, 2])
@pytest.mark.parametrize("kind", VARIED)
def test_rounds_have_the_probabilities_of_whole_passes(kind: str, num_draft: int) -> None:
    assert gap_to_whole_passes(kind, num_draft) < ROUNDING


@pytest.mark.parametrize(
    ("num_draft", "batch_size", "rule"), [(1, 400, "token"), (2, 40, "token"), (2, 40, "block")]
)
@pytest.mark.parametrize("kind", VARIED)
def test_loop_outputs_follow_the_targets_distribution(
    kind: str, num_draft: int, batch_size: int, rule: str
) -> None:
    """400 histories at once, or 1,254 that take the rows of others that have ended."""
    assert gap(kind, rule, num_draft, batch_size=batch_size) < ROUNDING


@pytest.mark.parametrize("sampler", [Sampler(0.7, top_k=2), Sampler(2.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("kind", PAIRS)
def test_filtered_loop_outputs_follow_the_filtered_distribution(
    kind: str, sampler: Sampler
) -> None:
    assert gap(kind, sampled=[sampler]) < ROUNDING


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("kind", "rule"), [("t5", "token"), ("qwen3", "block"), ("sharing", "block")]
)
def test_transformed_loop_outputs_follow_the_transformed_distribution(
    kind: str, name: str, rule: str
) -> None:
    """The reference transforms whole sequences; the loop has drafted tokens at each place."""
    assert gap(kind, rule, sampled=[Sampler(1.0, transform=TRANSFORMS[name])]) < ROUNDING


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize(("kind", "rule"), [("t5", "token"), ("t5", "block"), ("sharing", "block")])
def test_what_cannot_follow_an_end_does_not_matter(kind: str, name: str, rule: str) -> None:
    assert gap(kind, rule, sampled=[Sampler(1.0, transform=ENDINGS[name])]) < ROUNDING


UNLIKE = [
    Sampler(1.0),
    Sampler(0.7, top_k=2),
    Sampler(2.0, top_p=0.8),
    Sampler(1.0, transform=TRANSFORMS["together"]),
]
GREEDY = [Sampler(), Sampler(transform=TRANSFORMS["penalty"])]
unlike_gap = partial(gap, sampled=UNLIKE, greedy=GREEDY, prompts=[PROMPT])


@pytest.mark.parametrize("kind", VARIED)
def test_rows_follow_their_own_distributions(kind: str) -> None:
    assert unlike_gap(kind, "token", 1) < ROUNDING


@pytest.mark.parametrize(
    ("kind", "rule"), [("t5", "token"), ("t5", "block"), ("qwen3", "block"), ("sharing", "token")]
)
def test_rows_with_longer_drafts_follow_their_own_distributions(kind: str, rule: str) -> None:
    assert unlike_gap(kind, rule, 2, batch_size=100) < ROUNDING


@pytest.mark.parametrize(
    ("kind", "name", "rule"),
    [("t5", "lookup", "token"), ("t5", "lookup", "block"), *((k, "both", "block") for k in PAIRS)],
)
def test_rows_with_lookups_follow_their_own_distributions(kind: str, name: str, rule: str) -> None:
    assert unlike_gap(kind, rule, 1, name) < ROUNDING


@pytest.mark.parametrize(
    ("name", "rule"), [("model", "token"), ("lookup", "block"), ("both", "block")]
)
def test_rows_that_end_or_cannot_go_on_follow_their_own_distributions(name: str, rule: str) -> None:
    sampled = [Sampler(1.0), *(Sampler(1.0, transform=each) for each in ENDINGS.values())]
    greedy = [Sampler(transform=each) for each in ENDINGS.values()]
    assert (
        unlike_gap("t5", rule, 2, name, batch_size=100, sampled=sampled, greedy=greedy) < ROUNDING
    )


@pytest.mark.parametrize("kind", ["sharing", "qwen3"])
def test_dead_ends_in_batches_follow_their_own_distributions(kind: str) -> None:
    dead = ENDINGS["dead"]
    rows = [Sampler(1.0, transform=dead), Sampler(1.0)], [Sampler(transform=dead)]
    assert unlike_gap(kind, "block", 2, sampled=rows[0], greedy=rows[1]) < ROUNDING


@pytest.mark.parametrize(
    ("name", "rule"), [("model", "block"), ("lookup", "token"), ("both", "block")]
)
def test_rows_that_stop_follow_their_own_distributions(name: str, rule: str) -> None:
    """The same token stops an output, and leaves nothing to follow it."""
    dead = ENDINGS["dead or ended"]
    rows = [Sampler(1.0, transform=dead), Sampler(1.0)], [Sampler(), Sampler(transform=dead)]
    assert unlike_gap("t5", rule, 2, name, sampled=rows[0], greedy=rows[1], stop=2) < ROUNDING
