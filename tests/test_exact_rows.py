"""Proof by enumeration that rows with options of their own follow their own distributions.

As in test_exact_loop.py each row has one possible history. Here neighbours have other temperatures,
filters and transforms, or are greedy, and lookups draft as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from speculative_t5.decoding.drafters import CombinedDrafter, Drafter, LookupDrafter
from speculative_t5.decoding.model_drafter import ModelDrafter
from speculative_t5.decoding.plan import OwnRequest, Plan
from speculative_t5.decoding.rows import RowOptions, Stopper, cut
from speculative_t5.decoding.sampling import RowSamplers, Sampler
from speculative_t5.decoding.schedule import FixedSchedule
from speculative_t5.decoding.verify import Verifier
from speculative_t5.models import SharingDraft

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS, KINDS, PAIRS, VARIED, output_distribution, unrelated_pair
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPT, Output, Turn, loop_outputs, scripted
from test_exact_loop import MAX_TOKENS, ROUNDING, SIZE, WRONG, Distribution, chances

SAMPLED = [
    Sampler(1.0),
    Sampler(0.7, top_k=2),
    Sampler(2.0, top_p=0.8),
    Sampler(1.0, transform=TRANSFORMS["together"]),
]
GREEDY = [Sampler(), Sampler(transform=TRANSFORMS["penalty"])]
OF_EACH_GREEDY = 40  # rows, among the others


def make_drafter(name: str, target: Any, draft: Any, samplers: RowSamplers) -> Drafter:
    by_model = ModelDrafter(draft, samplers, SIZE)
    if name == "model":
        return by_model
    lookup = make_lookup(target)
    return lookup if name == "lookup" else CombinedDrafter(by_model, lookup, target.eos_token_ids)


def make_lookup(target: Any) -> LookupDrafter:
    ends, special = target.eos_token_ids, target.special_tokens
    return LookupDrafter(ends, special, is_decoder_only=target.is_decoder_only)


def drafts(name: str, target: Any, done: Output, num_draft: int) -> Iterator[Output]:
    """Yield all drafts that may follow an output, as far as there is room for them."""
    room = MAX_TOKENS - len(done) - 1
    before = PROMPT if target.is_decoder_only else [0]
    by_model = 0 if name == "lookup" else min(num_draft, room)
    for first in product(range(SIZE), repeat=by_model):
        more: list[int] = []
        if name != "model" and EOS not in first and by_model < room:
            lookup = make_lookup(target)
            lookup.start([PROMPT])
            (more,) = lookup.find([[*before, *done]], num_draft, [first])
        yield (*first, *more)[:room]


def histories(name: str, target: Any, num_draft: int, done: Output = ()) -> Iterator[list[Turn]]:
    """Yield all ways from `done` to a whole output."""
    room = MAX_TOKENS - len(done)
    if room == 0 or EOS in done:
        yield []
        return
    for drafted in drafts(name, target, done, num_draft):
        for accepted, token in product(range(len(drafted) + 1), range(SIZE)):
            turn = Turn(drafted, accepted, token)
            emitted = tuple(cut([*turn.emitted], {EOS: "eos"}, room)[0])
            for rest in histories(name, target, num_draft, done + emitted):
                yield [turn, *rest]


def stopper(stop: int | None) -> Callable[[], Stopper]:
    """Return what makes a `Stopper` that ends an output after a token."""
    return lambda: lambda tokens: 1 + tokens.index(stop) if stop in tokens else None


def gap(
    kind: str,
    rule: str,
    num_draft: int,
    name: str = "model",
    *,
    batch_size: int = 40,
    sampled: Sequence[Sampler] = SAMPLED,
    greedy: Sequence[Sampler] = GREEDY,
    stop: int | None = None,
) -> float:
    """Return the largest gap between the distribution of a row and that of its own options.

    There are rows of all histories for each of `sampled`, and among them some that are greedy. All
    outputs end after the token `stop`, as they do after stop strings.
    """
    target, draft = unrelated_pair(kind, vocab_size=SIZE)
    samplers = RowSamplers()
    plan = Plan(
        make_drafter(name, target, draft, samplers),
        FixedSchedule(num_draft),
        Verifier(samplers, block=rule == "block"),
        sharing=draft if isinstance(draft, SharingDraft) and name != "lookup" else None,
    )
    unscripted = [Turn((0,) * num_draft, 0, 0)] * MAX_TOKENS
    kinds = [*sampled, *greedy]
    rows = list(product(range(len(sampled)), histories(name, target, num_draft)))
    rows += [*product(range(len(sampled), len(kinds)), [unscripted] * OF_EACH_GREEDY)]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    requests = [
        OwnRequest(i, PROMPT, RowOptions(kinds[number], MAX_TOKENS, seed=0, stopper=stopper(stop)))
        for i, (number, _) in enumerate(rows)
    ]
    turns = [turns for _, turns in rows]
    with scripted(turns) as notes:
        outputs = loop_outputs(target, requests, plan, batch_size)
    masses = chances(notes, turns, [number for number, _ in rows])
    found: list[Distribution] = [defaultdict(float) for _ in kinds]
    for row, (number, _) in enumerate(rows):
        mass = 1 / OF_EACH_GREEDY if kinds[number].greedy else masses[row]
        found[number][outputs[row]] += mass
    gaps = []
    for sampler, distribution in zip(kinds, found, strict=True):
        expected: Distribution = defaultdict(float)
        for output, mass in output_distribution(target, PROMPT, MAX_TOKENS, sampler).items():
            expected[output[: 1 + output.index(stop)] if stop in output else output] += mass
        assert {output for output in distribution if distribution[output]} <= expected.keys()
        gaps += [abs(distribution[output] - expected[output]) for output in expected]
    return float(max(gaps))


@pytest.mark.parametrize("kind", VARIED)
def test_rows_follow_their_own_distributions(kind: str) -> None:
    assert gap(kind, "token", 1) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", PAIRS)
def test_rows_with_longer_drafts_follow_their_own_distributions(kind: str, rule: str) -> None:
    assert gap(kind, rule, 2, batch_size=100) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("kind", "name"), [*product(KINDS, ["lookup", "both"]), ("sharing", "both")]
)
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


# Planted bugs.

assign = RowSamplers.assign


def assigned_to_neighbours(self: RowSamplers, samplers: list[Sampler]) -> None:
    """Give each row the sampler of the next one."""
    assign(self, samplers[1:] + samplers[:1])


def in_the_order_of_groups(self: RowSamplers, logits: mx.array) -> mx.array:
    """Leave the target's probabilities in the order of samplers."""
    return mx.concatenate([group.sampler.probs(group.take(logits)) for group in self.groups])


@pytest.mark.parametrize(
    ("method", "bug"), [("assign", assigned_to_neighbours), ("probs", in_the_order_of_groups)]
)
@pytest.mark.parametrize("kind", PAIRS)
def test_planted_bugs_that_mix_samplers_up_leave_a_gap(
    kind: str, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowSamplers, method, bug)
    assert gap(kind, "token", 1, greedy=()) > WRONG
