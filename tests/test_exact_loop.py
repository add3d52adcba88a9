"""The loop by enumeration: its outputs have the law that whole passes of the target give them.

Every history that an output can have is a row of the batch: what is drafted in each round, how
much of it stands, what follows. See `scripted`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

from speculative_t5.decoding.drafters import ModelDrafter
from speculative_t5.decoding.loop import Plan, cut, decode
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.schedule import FixedSchedule
from speculative_t5.decoding.verify import Verifier, residual
from speculative_t5.models import causal
from speculative_t5.models.cache import KVCache

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS, VARIED, next_logits, output_law, tiny
from scripted import DRAWN, PROMPT, Notes, Turn, normal, scripted, walk
from test_exact import accepted_law

SIZE = 3
ROUNDING, WRONG = 1e-5, 1e-4  # what float32 may leave, and what it cannot
PROMPTS = [PROMPT, [2, EOS]]  # of two lengths
Law = dict[tuple[int, ...], float]


def off_whole_passes(kind: str, num_draft: int) -> float:
    """How far what sessions give in rounds is from what passes over whole sequences give."""
    models = [tiny(kind, vocab_size=SIZE, seed=seed) for seed in range(2)]
    gaps = []
    for model, seen in zip(models, walk(*models, num_draft), strict=True):
        for depth in range(2 * num_draft + 2):
            paths = list(product(range(SIZE), repeat=depth))
            whole = normal(DRAWN.probs(next_logits(model, PROMPT, paths)))
            gaps += [
                np.abs(given - expected).max()
                for path, expected in zip(paths, whole, strict=True)
                for given in seen[path]
            ]
    return float(max(gaps))


@pytest.mark.parametrize("num_draft", [1, 2])
@pytest.mark.parametrize("kind", VARIED)
def test_sessions_give_in_rounds_what_whole_passes_give(kind: str, num_draft: int) -> None:
    assert off_whole_passes(kind, num_draft) < ROUNDING


def histories(num_draft: int, max_tokens: int, done: tuple[int, ...] = ()) -> Iterator[list[Turn]]:
    """All ways to come from `done` to an output, with places that the loop does not ask for cut."""
    room = max_tokens - len(done)
    if room == 0 or EOS in done:
        yield []
        return
    count = min(num_draft, room - 1)
    for drafted in product(range(SIZE), repeat=count):
        for accepted, token in product(range(count + 1), range(SIZE)):
            turn = Turn(drafted, accepted, token)
            emitted = tuple(cut([*turn.emitted], frozenset({EOS}), room)[0])
            for rest in histories(num_draft, max_tokens, done + emitted):
                yield [turn, *rest]


@cache
def shuffled_rows(num_draft: int, max_tokens: int) -> tuple[list[list[int]], list[list[Turn]]]:
    """Each history after each prompt; neighbours have little in common."""
    rows = list(product(PROMPTS, histories(num_draft, max_tokens)))
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    return [prompt for prompt, _ in rows], [turns for _, turns in rows]


def laws_of_the_loop(target: Any, plan: Plan, num_draft: int, batch_size: int) -> list[Law]:
    """Of whole outputs after each prompt, added up from all their histories."""
    prompts, turns = shuffled_rows(num_draft, plan.max_tokens)
    outputs = {}
    with scripted(turns) as notes:
        for told in decode(target, enumerate(prompts), plan, batch_size=batch_size):
            if told.finish_reason:
                end = (EOS,) if told.finish_reason == "eos" else ()
                outputs[told.index] = (*told.output, *end)
    masses = chances(turns, notes)
    laws: list[Law] = [defaultdict(float) for _ in PROMPTS]
    for row, output in outputs.items():
        laws[PROMPTS.index(prompts[row])][output] += masses[row]
    return laws


def chances(turns: Sequence[Sequence[Turn]], notes: Notes) -> np.ndarray:
    """The probability of each row's history, (rows,) float64."""
    found = np.ones(len(turns))
    for judged in notes.judged:
        said = [turns[row][r] for row, r in zip(judged.rows, judged.rounds, strict=True)]
        each = np.arange(len(said))
        accepted = np.array([turn.num_accepted for turn in said])
        following = np.array([turn.next_token for turn in said])
        left = residual(judged.draft, judged.p, judged.odds.ratios, mx.array(accepted))
        found[judged.rows] *= accepted_law(judged.odds)[each, accepted]
        found[judged.rows] *= normal(left)[each, following]
    for (row, round_, place), q in notes.drawn.items():
        drafted = turns[row][round_].drafted
        if place < len(drafted):
            found[row] *= q[drafted[place]]
    return found


def gap(
    kind: str,
    rule: str = "block",
    num_draft: int = 2,
    batch_size: int = 40,
    sampler: Sampler = DRAWN,
    delta: float = 0.0,
) -> float:
    """Between the loop's law of outputs of up to 3 tokens and the target's."""
    target, draft = (tiny(kind, vocab_size=SIZE, seed=seed) for seed in range(2))
    drafter = ModelDrafter(draft, sampler, SIZE)
    verifier = Verifier(sampler, block=rule == "block", delta=delta)
    plan = Plan(drafter, FixedSchedule(num_draft), verifier, max_tokens=3, seed=0)
    laws = laws_of_the_loop(target, plan, num_draft, batch_size)
    gaps = []
    for prompt, law in zip(PROMPTS, laws, strict=True):
        expected = output_law(target, prompt, 3, sampler)
        assert law.keys() == expected.keys()
        gaps += [abs(law[output] - expected[output]) for output in law]
    return float(max(gaps))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("num_draft", "batch_size"), [(1, 400), (2, 40)])
@pytest.mark.parametrize("kind", VARIED)
def test_outputs_of_the_loop_have_the_targets_law(
    kind: str, num_draft: int, batch_size: int, rule: str
) -> None:
    """400 and 1,254 rows: all at once, or given to others as they end."""
    assert gap(kind, rule, num_draft, batch_size) < ROUNDING


@pytest.mark.parametrize("sampler", [Sampler(0.7, top_k=2), Sampler(2.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("kind", VARIED)
def test_filtered_outputs_of_the_loop_have_the_filtered_law(kind: str, sampler: Sampler) -> None:
    assert gap(kind, sampler=sampler) < ROUNDING


# Planted bugs.


def without_truncation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "truncate", lambda self, lengths: None)


def with_one_length(patch: pytest.MonkeyPatch) -> None:
    """Rows that are rewound alike, as in mlx-lm's own caches."""
    truncate = KVCache.truncate
    patch.setattr(
        KVCache, "truncate", lambda self, lengths: truncate(self, [min(lengths)] * len(lengths))
    )


def with_the_first_positions(patch: pytest.MonkeyPatch) -> None:
    """New tokens of all rows have the positions of the first one's."""
    make = causal._Layer.__init__

    def bug(self: Any, buffers: Any, at: Any, lengths: Any, count: int) -> None:
        make(self, buffers, at, lengths, count)
        self.offset = lengths[0]

    patch.setattr(causal._Layer, "__init__", bug)


def with_a_view_of_all(patch: pytest.MonkeyPatch) -> None:
    """What neighbours are longer by is seen, too."""
    patch.setattr(causal._Layer, "make_mask", lambda self, count, **_: "causal")


BUGS = [without_truncation, with_one_length, with_the_first_positions, with_a_view_of_all]
PLANTED = [(kind, bug) for kind in VARIED for bug in (BUGS[:2] if kind == "t5" else BUGS)]


@pytest.mark.parametrize(("kind", "bug"), PLANTED)
def test_both_checks_fail_for_planted_bugs(
    kind: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert off_whole_passes(kind, 1) > WRONG
    assert gap(kind, num_draft=1) > WRONG


def with_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    """When rows are dropped, others are kept."""
    select = KVCache.select

    def bug(self: KVCache, rows: Sequence[int]) -> None:
        lengths = [self.lengths[row] for row in rows]
        select(self, range(len(rows)))
        self.lengths = lengths

    patch.setattr(KVCache, "select", bug)


def with_the_last_prompt(patch: pytest.MonkeyPatch) -> None:
    """Rows that are given to another prompt go on after what they hold."""

    def bug(self: KVCache, rows: Sequence[int], new: KVCache, new_rows: Sequence[int]) -> None:
        for row, new_row in zip(rows, new_rows, strict=True):
            self.lengths[row] = new.lengths[new_row]
        self.reserve(0)

    patch.setattr(KVCache, "replace", bug)


MIXED = [(kind, with_the_first_rows) for kind in VARIED]
MIXED += [(kind, with_the_last_prompt) for kind in VARIED if kind != "t5"]


@pytest.mark.parametrize(("kind", "bug"), MIXED)
def test_the_law_fails_if_rows_are_mixed_up(
    kind: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert gap(kind, num_draft=1, batch_size=200) > WRONG


@pytest.mark.parametrize("kind", VARIED)
def test_the_law_fails_for_a_little_delta(kind: str) -> None:
    assert gap(kind, "token", delta=0.1) > WRONG
