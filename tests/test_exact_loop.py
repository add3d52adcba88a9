"""Proof by enumeration that outputs of the loop follow the distribution of whole passes.

Each row of a batch is scripted to have one possible history: the tokens drafted in each round, how
many of them are accepted, and the next token. See `scripted.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from speculative_t5.decoding.model_drafter import ModelDrafter
from speculative_t5.decoding.plan import Plan, Request
from speculative_t5.decoding.rows import RowOptions, cut
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.schedule import FixedSchedule
from speculative_t5.decoding.transform import History
from speculative_t5.decoding.verify import Verifier, residual
from speculative_t5.generation.outputs import Several
from speculative_t5.models import SharingDraft, causal
from speculative_t5.models.cache import KVCache

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS, PAIRS, VARIED, next_logits, output_distribution, unrelated_pair
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPT, SAMPLED, Notes, Turn, loop_outputs, normal, scripted, walk
from test_exact import distribution_of_accepted

SIZE = 3
MAX_TOKENS = 3
ROUNDING, WRONG = 1e-5, 1e-4  # a gap that float32 may leave, and one that it cannot
PROMPTS = [PROMPT, [2, EOS]]  # of two lengths
Distribution = dict[tuple[int, ...], float]


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


def histories(num_draft: int, max_tokens: int, done: tuple[int, ...] = ()) -> Iterator[list[Turn]]:
    """Yield all ways from `done` to a whole output, each drafted token of which was asked for."""
    room = max_tokens - len(done)
    if room == 0 or EOS in done:
        yield []
        return
    count = min(num_draft, room - 1)
    for drafted in product(range(SIZE), repeat=count):
        for accepted, token in product(range(count + 1), range(SIZE)):
            turn = Turn(drafted, accepted, token)
            emitted = tuple(cut([*turn.emitted], {EOS: "eos"}, room)[0])
            for rest in histories(num_draft, max_tokens, done + emitted):
                yield [turn, *rest]


@cache
def shuffled_rows(num_draft: int, max_tokens: int) -> tuple[list[list[int]], list[list[Turn]]]:
    """Return each history after each prompt, shuffled, so that neighbours differ."""
    rows = list(product(PROMPTS, histories(num_draft, max_tokens)))
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    return [prompt for prompt, _ in rows], [turns for _, turns in rows]


def distributions_of_the_loop(
    target: Any, plan: Plan, num_draft: int, batch_size: int, several: bool
) -> list[Distribution]:
    """Return the distribution of outputs after each prompt: the sum over all histories.

    Each is decoded for a prompt of its own, or as one of several outputs of the prompt.
    """
    prompts, turns = shuffled_rows(num_draft, MAX_TOKENS)
    requests: Iterable[Request] = enumerate(prompts)
    if several:
        order = sorted(range(len(prompts)), key=lambda row: PROMPTS.index(prompts[row]))
        prompts, turns = [prompts[row] for row in order], [turns[row] for row in order]
        requests = Several(len(prompts) // len(PROMPTS), None).repeated(enumerate(PROMPTS))
    with scripted(turns) as notes:
        outputs = loop_outputs(target, requests, plan, batch_size)
    masses = chances(notes, turns, [*map(PROMPTS.index, prompts)])
    found: list[Distribution] = [defaultdict(float) for _ in PROMPTS]
    for row, output in outputs.items():
        found[PROMPTS.index(prompts[row])][output] += masses[row]
    return found


def chances(notes: Notes, turns: Sequence[Sequence[Turn]], groups: Sequence[Any]) -> np.ndarray:
    """Return the probability of each row's history, (rows,) float64.

    Histories that differ only after a dead end are one: the first of them in each group has the
    probability, the others have 0.
    """
    found = np.ones(len(turns))
    for judged in notes.judged:
        accepted, following = mx.array(judged.num_accepted), mx.array(judged.next_token)
        left = residual(judged.draft, judged.p, judged.odds.ratios, accepted)
        each = np.arange(len(judged.rows))
        chance = distribution_of_accepted(judged.odds)[each, np.array(accepted)]
        chance *= normal(left)[each, np.array(following)]
        # A round without a script ends the row whatever is sampled in it.
        known = [r < len(turns[row]) for row, r in zip(judged.rows, judged.rounds, strict=True)]
        found[judged.rows] *= np.where(known, chance, 1.0)
    for (row, round_, place), q in notes.sampled.items():
        drafted = turns[row][round_].drafted if round_ < len(turns[row]) else ()
        if place < len(drafted):
            found[row] *= q[drafted[place]]
    decoded = [tuple(own[: notes.rounds[row]]) for row, own in enumerate(turns)]
    first = {key: row for row, key in reversed([*enumerate(zip(groups, decoded, strict=True))])}
    again = np.ones(len(turns), bool)
    again[[*first.values()]] = False
    return np.where(again, 0.0, found)


def gap(
    kind: str,
    rule: str = "block",
    num_draft: int = 2,
    batch_size: int = 40,
    sampler: Sampler = SAMPLED,
    delta: float = 0.0,
    several: bool = False,
) -> float:
    """Return the gap between the loop's distribution of up to 3 tokens and the target's."""
    target, draft = unrelated_pair(kind, vocab_size=SIZE)
    drafter = ModelDrafter(draft, sampler, SIZE)
    verifier = Verifier(sampler, block=rule == "block", delta=delta)
    sharing = draft if isinstance(draft, SharingDraft) else None
    schedule = FixedSchedule(num_draft)
    plan = Plan(drafter, schedule, verifier, RowOptions(sampler, 3, seed=0), sharing=sharing)
    found = distributions_of_the_loop(target, plan, num_draft, batch_size, several)
    gaps = []
    for prompt, distribution in zip(PROMPTS, found, strict=True):
        expected = output_distribution(target, prompt, 3, sampler)
        likely = {output for output in distribution if distribution[output]}
        assert likely <= expected.keys() <= distribution.keys()
        gaps += [abs(distribution[output] - expected[output]) for output in expected]
    return float(max(gaps))


@pytest.mark.parametrize(
    ("num_draft", "batch_size", "rule"), [(1, 400, "token"), (2, 40, "token"), (2, 40, "block")]
)
@pytest.mark.parametrize("kind", VARIED)
def test_loop_outputs_follow_the_targets_distribution(
    kind: str, num_draft: int, batch_size: int, rule: str
) -> None:
    """400 histories at once, or 1,254 that take the rows of others that have ended."""
    assert gap(kind, rule, num_draft, batch_size) < ROUNDING


@pytest.mark.parametrize("sampler", [Sampler(0.7, top_k=2), Sampler(2.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("kind", PAIRS)
def test_filtered_loop_outputs_follow_the_filtered_distribution(
    kind: str, sampler: Sampler
) -> None:
    assert gap(kind, sampler=sampler) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", VARIED)
def test_several_outputs_follow_the_targets_distribution(kind: str, rule: str) -> None:
    assert gap(kind, rule, several=True) < ROUNDING


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("kind", "rule"), [("t5", "token"), ("qwen3", "block"), ("sharing", "block")]
)
def test_transformed_loop_outputs_follow_the_transformed_distribution(
    kind: str, name: str, rule: str
) -> None:
    """The reference transforms whole sequences; the loop has drafted tokens at each place."""
    assert gap(kind, rule, sampler=Sampler(1.0, transform=TRANSFORMS[name])) < ROUNDING


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize(("kind", "rule"), [("t5", "token"), ("t5", "block"), ("sharing", "block")])
def test_what_cannot_follow_an_end_does_not_matter(kind: str, name: str, rule: str) -> None:
    assert gap(kind, rule, sampler=Sampler(1.0, transform=ENDINGS[name])) < ROUNDING


# Planted bugs.

truncate, select, make_layer = KVCache.truncate, KVCache.select, causal._Layer.__init__


def without_truncation(self: KVCache, lengths: Sequence[int]) -> None:
    """Leave rejected tokens in the cache."""


def with_one_length(self: KVCache, lengths: Sequence[int]) -> None:
    """Rewind all rows to one length, as mlx-lm's own caches do."""
    truncate(self, [min(lengths)] * len(lengths))


def with_the_first_positions(
    self: Any, buffers: Any, at: Any, lengths: Any, *a: Any, **b: Any
) -> None:
    """Give new tokens of all rows the positions of the first row's."""
    make_layer(self, buffers, at, lengths, *a, **b)
    self.offset = lengths[0]


def with_a_view_of_all(self: Any, count: int, **_: Any) -> str:
    """Let rows attend beyond their own length."""
    return "causal"


OF_CACHES = [(KVCache, "truncate", bug) for bug in (without_truncation, with_one_length)]
OF_LAYERS = [
    (causal._Layer, "__init__", with_the_first_positions),
    (causal._Layer, "make_mask", with_a_view_of_all),
]
PLANTED = [(kind, *bug) for kind in ("t5", "sharing") for bug in OF_CACHES]
PLANTED += [(kind, *bug) for kind in ("gpt2", "qwen3") for bug in OF_CACHES + OF_LAYERS]


@pytest.mark.parametrize(("kind", "owner", "method", "bug"), PLANTED)
def test_planted_bugs_of_caches_leave_a_gap(
    kind: str, owner: Any, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, bug)
    assert gap_to_whole_passes(kind, 1) > WRONG
    assert gap(kind, num_draft=1) > WRONG


def with_the_first_rows(self: KVCache, rows: Sequence[int]) -> None:
    """Keep the wrong rows when some are dropped."""
    lengths = [self.lengths[row] for row in rows]
    select(self, range(len(rows)))
    self.lengths = lengths


def with_the_last_prompt(
    self: KVCache, rows: Sequence[int], new: KVCache, new_rows: Sequence[int]
) -> None:
    """Keep the old contents of rows that are given to another prompt."""
    for row, new_row in zip(rows, new_rows, strict=True):
        self.lengths[row] = new.lengths[new_row]
    self.reserve(0)


MIXED = [(kind, "select", with_the_first_rows) for kind in PAIRS]


@pytest.mark.parametrize(
    ("kind", "method", "bug"), [*MIXED, ("qwen3", "replace", with_the_last_prompt)]
)
def test_planted_bugs_that_mix_rows_up_leave_a_gap(
    kind: str, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, method, bug)
    assert gap(kind, num_draft=1, batch_size=200) > WRONG


@pytest.mark.parametrize("name", [n for n in TRANSFORMS if n not in ("bias", "suppress")])
def test_planted_transform_that_forgets_drafted_tokens_leaves_a_gap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Sampler, logits: mx.array, history: History) -> mx.array:
        assert self.transform
        before = replace(history, drafted=history.drafted[:, :0])
        each = [self.transform(logits[:, i : i + 1], before) for i in range(logits.shape[1])]
        return mx.concatenate(each, axis=1)

    monkeypatch.setattr(Sampler, "transformed", forgetful)
    assert gap("t5", sampler=Sampler(1.0, transform=TRANSFORMS[name])) > WRONG


@pytest.mark.parametrize("kind", PAIRS)
def test_planted_delta_leaves_a_gap(kind: str) -> None:
    assert gap(kind, "token", delta=0.1) > WRONG
