"""Rounds by script, which sets the drafted tokens, how many are accepted, and the next token.

The script replaces sampling and nothing else: drafters, sessions and the loop are those of
decoding. The distributions that they would have sampled from are recorded. `gap` scripts each
possible history as a row of a batch, and compares the sum over all with the target's distribution.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice, product
from typing import Any
from unittest.mock import patch

from speculative_t5.decoding import (
    CombinedDrafter,
    Draft,
    Drafter,
    ExpectingDrafter,
    LookupDrafter,
    ModelDrafter,
    model_drafter,
    verify,
)
from speculative_t5.decoding import loop as engine
from speculative_t5.decoding.draft_length import FixedSchedule, Schedule
from speculative_t5.decoding.history import NO_TOKEN
from speculative_t5.decoding.keys import final_keys
from speculative_t5.decoding.loop import Plan, Request, RowOptions, StopChecker, cut
from speculative_t5.decoding.outcomes import Outcome
from speculative_t5.decoding.rules import Acceptance, Verdict, residual
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.verify import Verifier
from speculative_t5.models import SharingDraft

import mlx.core as mx
import numpy as np
from conftest import EOS, output_distribution, output_logits, tiny, unrelated_pair

# Side by side; others take the rows of those that have ended. MLX's RoPE on CUDA takes no more of
# heads as small as these models'.
ROWS = 64
PLACES = 256  # a key holds the row, and the round times this with the place added


class Lengths(Schedule):
    """Draft lengths that are given, in turn, and what came of them."""

    def __init__(self, *lengths: int) -> None:
        self._lengths, self.outcomes = cycle(lengths), list[Outcome]()

    def next(self, remaining: int, rows: int = 1) -> int:
        return min(next(self._lengths), remaining - 1)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


@dataclass(frozen=True)
class Turn:
    """One round of one row; places beyond `drafted` get an arbitrary token."""

    drafted: tuple[int, ...]
    num_accepted: int
    next_token: int
    copied: bool = False  # from a prediction, in the place of what a model drafts

    @property
    def emitted(self) -> tuple[int, ...]:
        return (*self.drafted[: self.num_accepted], self.next_token)


@dataclass(frozen=True)
class Judged:
    """One call of the rule: numbers of the rows and of their rounds, what it saw and was told."""

    rows: list[int]
    rounds: list[int]
    num_accepted: list[int]
    next_token: list[int]
    acceptance: Acceptance
    draft: Draft
    p: mx.array


@dataclass
class Notes:
    """The distributions that tokens would have been sampled from."""

    # By row, round and place: of a drafted token, (V,) float64.
    sampled: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)  # one for each pass of the target
    rounds: Counter[int] = field(default_factory=Counter)  # how many each row has had


def round_keys(seed: int, row: int, round_: int) -> np.ndarray:
    return np.array([[row, round_ * PLACES]] * 2, dtype=np.uint32)


Output = tuple[int, ...]  # with EOS, or `NO_TOKEN` where no token could follow


def loop_outputs(target: Any, requests: Iterable[Request], plan: Plan) -> dict[int, Output]:
    """Return the output of each index, decoded as `decode` does, which would stop at a dead end."""
    found: dict[int, Output] = defaultdict(tuple)
    waiting = iter(requests)
    batch = engine.Batch(target, plan)
    batch.add(list(islice(waiting, ROWS)))
    while batch.rows:
        for done in batch.round():
            end = [NO_TOKEN] if done.error else [] if done.end_id is None else [done.end_id]
            found[done.index] += (*done.tokens, *end)
        batch.refill(waiting, ROWS)
    return found


@contextmanager
def scripted(turns: Sequence[Sequence[Turn]]) -> Iterator[Notes]:
    """Make `turns[i]` the rounds of row i; a dead end may take one more, without a script."""
    notes = Notes()
    turns = [[*rounds, Turn((), 0, 0)] for rounds in turns]

    def read(keys: mx.array) -> list[tuple[int, int, int]]:
        return [(row, *divmod(rest, PLACES)) for row, rest in keys.tolist()]  # type: ignore

    def sample(weights: mx.array, keys: mx.array) -> mx.array:
        tokens = []
        for (row, round_, place), q in zip(read(keys), normal(weights), strict=True):
            if len(turns[row]) == 1:  # a greedy row, which has no script
                tokens.append(int(q.argmax()))
                continue
            drafted = turns[row][round_].drafted
            token = drafted[place] if place < len(drafted) else 0
            if turns[row][round_].copied:  # the model drafts something else
                tokens.append((token + 1) % SIZE)
                continue
            notes.sampled[row, round_, place] = q
            tokens.append(token)
        return mx.array(tokens, dtype=mx.int32)

    def verdict(acceptance: Acceptance, draft: Draft, p: mx.array, keys: mx.array) -> Verdict:
        rows, rounds, _ = zip(*read(final_keys(keys[:, -1])), strict=True)  # twice is not at all
        said = [
            turns[row][min(r, len(turns[row]) - 1)] for row, r in zip(rows, rounds, strict=True)
        ]
        accepted, following = [t.num_accepted for t in said], [t.next_token for t in said]
        notes.judged.append(Judged([*rows], [*rounds], accepted, following, acceptance, draft, p))
        notes.rounds.update(rows)
        return Verdict(mx.array(accepted, dtype=mx.int32), mx.array(following, dtype=mx.int32))

    with (
        patch.object(model_drafter, "sample", sample),
        patch.object(verify, "decide", verdict),
        patch.object(engine, "round_keys", round_keys),
    ):
        yield notes


def normal(weights: mx.array) -> np.ndarray:
    """Rescale rows to sum to 1 in float64."""
    rows = np.array(weights, np.float64)
    return rows / rows.sum(axis=-1, keepdims=True)


PROMPT, SAMPLED = [2, 2, 1], Sampler(1.0)


MAX_TOKENS = 3
SIZE = 3  # of the vocabulary
PROMPTS = (PROMPT, [2, EOS])  # of two lengths
PREDICTION = (2, 2, EOS)  # of "expected" outputs, with a lookup of two tokens at least
ROUNDING = 1e-5  # a gap that float32 may leave
OF_EACH_GREEDY = 40  # rows, among the others


def drafts(
    name: str, target: Any, prompt: list[int], done: Output, num_draft: int
) -> Iterator[Output]:
    """Yield all drafts that may follow an output, as far as its budget goes."""
    budget = MAX_TOKENS - len(done) - 1
    if copied := expected(name, target, prompt, done, min(num_draft, budget)):
        yield copied
        return
    by_model = 0 if name == "lookup" else min(num_draft, budget)
    for first in product(range(SIZE), repeat=by_model):
        more: list[int] = []
        if name in ("lookup", "both") and EOS not in first and by_model < budget:
            lookup = LookupDrafter(target.info)
            lookup.start([prompt])
            before = prompt if target.info.is_decoder_only else [0]
            (more,) = lookup.find([[*before, *done]], num_draft, [first])
        yield (*first, *more)[:budget]


def expected(name: str, target: Any, prompt: list[int], done: Output, num_draft: int) -> Output:
    """Return what is copied from the prediction, if the output goes on as that does."""
    if name != "expected" or num_draft == 0:
        return ()
    lookup = LookupDrafter(target.info, 2)
    lookup.start([prompt])
    lookup.expect(0, PREDICTION)
    before = prompt if target.info.is_decoder_only else [0]
    (found,) = lookup.find([[*before, *done]], num_draft, [()])
    return tuple(found)


def histories(
    name: str, target: Any, prompt: list[int], num_draft: int, done: Output = ()
) -> Iterator[list[Turn]]:
    """Yield all ways from `done` to a whole output, each drafted token of which was asked for."""
    budget = MAX_TOKENS - len(done)
    if budget == 0 or EOS in done:
        yield []
        return
    for drafted in drafts(name, target, prompt, done, num_draft):
        for accepted, token in product(range(len(drafted) + 1), range(SIZE)):
            budget_now = min(num_draft, budget - 1)
            copied = bool(expected(name, target, prompt, done, budget_now))
            turn = Turn(drafted, accepted, token, copied)
            emitted = tuple(cut([*turn.emitted], {EOS: "eos"}, budget)[0])
            for rest in histories(name, target, prompt, num_draft, done + emitted):
                yield [turn, *rest]


@cache
def histories_of(name: str, kind: str, num_draft: int) -> list[list[list[Turn]]]:
    """Return all histories after each prompt."""
    target = tiny(kind, vocab_size=SIZE)
    return [[*histories(name, target, prompt, num_draft)] for prompt in PROMPTS]


def chances(notes: Notes, turns: Sequence[Sequence[Turn]], groups: Sequence[Any]) -> np.ndarray:
    """Return the probability of each row's history, (rows,) float64.

    Histories that differ only after a dead end are one: the first of them in each group has the
    probability, the others have 0.
    """
    found = np.ones(len(turns))
    for judged in notes.judged:
        accepted, following = mx.array(judged.num_accepted), mx.array(judged.next_token)
        left = residual(judged.draft, judged.p, judged.acceptance.ratios, accepted)
        each = np.arange(len(judged.rows))
        chance = distribution_of_accepted(judged.acceptance)[each, np.array(accepted)]
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


def distribution_of_accepted(acceptance: Acceptance) -> np.ndarray:
    """Return the distribution (rows, K + 1) of the number of accepted tokens.

    It adds up every combination of passing and failing places. Each place has a threshold; the
    counting gets a number in the middle of either side.
    """
    chance, total = np.array(acceptance.chance), np.array(acceptance.total)
    rows, k = chance.shape
    sure = chance >= total
    threshold = np.where(sure, chance > 0, chance / np.where(sure, 1, total))
    mass = np.zeros((rows, k + 1))
    for passing in product([True, False], repeat=k):
        uniform = np.where(passing, threshold / 2, (threshold + 1) / 2)
        weight = np.where(passing, threshold, 1 - threshold).prod(axis=1)
        count = np.array(
            acceptance.count_accepted(mx.array(uniform, dtype=acceptance.chance.dtype))
        )
        mass[np.arange(rows), count] += weight
    return mass


def draft_gaps(
    notes: Notes, draft: Any, rows: Sequence[tuple[list[int], Sequence[Turn]]]
) -> list[float]:
    """Return gaps between the distributions of drafted tokens and those of whole passes."""
    seen: dict[Any, list[tuple[Output, np.ndarray]]] = defaultdict(list)
    for (row, round_, place), q in notes.sampled.items():
        prompt, turns = rows[row]
        if round_ < len(turns) and place < len(turns[round_].drafted):
            before = sum((turn.emitted for turn in turns[:round_]), ())
            masks = place % draft.info.block  # after the last token of the block before
            drafted = turns[round_].drafted[: place - masks]
            after = (*before, *drafted, *range(SIZE, SIZE + masks))
            seen[tuple(prompt), len(after)].append((after, q))
    gaps = []
    for (prompt, _), pairs in seen.items():
        outputs, found = zip(*pairs, strict=True)
        passes = (outputs[at : at + ROWS] for at in range(0, len(outputs), ROWS))
        logits = [output_logits(draft, list(prompt), [*some])[:, -1] for some in passes]
        expected = normal(SAMPLED.probs(mx.concatenate(logits)))
        gaps.append(float(np.abs(np.array(found) - expected).max()))
    return gaps


def stop_checker(stop: int | None) -> Callable[[], StopChecker]:
    """Return what makes a `StopChecker` that ends an output after a token."""
    return lambda: lambda tokens: 1 + tokens.index(stop) if stop in tokens else None


def gap(
    kind: str,
    rule: str = "block",
    num_draft: int = 2,
    drafter: str = "model",
    *,
    sampled: Sequence[Sampler] = (SAMPLED,),
    greedy: Sequence[Sampler] = (),
    prompts: Sequence[list[int]] = (PROMPT,),
    stop: int | None = None,
    whole: bool = False,
) -> float:
    """Return the largest gap between the distribution of a row and that of its own options.

    There are rows of all histories for each prompt and sampler, in random order, so that neighbours
    differ; and some that are greedy. All outputs end after the token `stop`, as they do after stop
    strings. If `whole`, the draft's distributions are compared with those of whole passes, too.
    """
    target, draft = unrelated_pair(kind, vocab_size=SIZE)
    by_model, lookup = ModelDrafter(draft, SIZE), LookupDrafter(target.info)
    both = CombinedDrafter(by_model, lookup, FixedSchedule(num_draft).split)
    expecting = ExpectingDrafter(by_model, LookupDrafter(target.info, 2))
    drafters: dict[str, Drafter] = {"model": by_model, "lookup": lookup, "both": both}
    drafters["expected"] = expecting
    prediction = PREDICTION if drafter == "expected" else ()
    sharing = draft if isinstance(draft, SharingDraft) and drafter != "lookup" else None
    verifier = Verifier(rule=rule)
    plan = Plan(drafters[drafter], FixedSchedule(num_draft), verifier, sharing=sharing)
    samplers = [*sampled, *greedy]
    known = dict(zip(map(tuple, PROMPTS), histories_of(drafter, kind, num_draft), strict=True))
    rows: list[tuple[tuple[int, int], list[Turn]]] = []
    for i, prompt in enumerate(prompts):
        rows += [((n, i), turns) for n in range(len(sampled)) for turns in known[tuple(prompt)]]
        rows += [((n, i), []) for n in range(len(sampled), len(samplers))] * OF_EACH_GREEDY
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    checker = stop_checker(stop)
    own = [
        RowOptions(s, MAX_TOKENS, seed=0, stop_checker=checker, prediction=prediction)
        for s in samplers
    ]
    requests = [Request(row, prompts[i], own[n]) for row, ((n, i), _) in enumerate(rows)]
    groups, turns = zip(*rows, strict=True)
    with scripted(turns) as notes:
        outputs = loop_outputs(target, requests, plan)
    masses = chances(notes, turns, groups)
    gaps = draft_gaps(notes, draft, [(prompts[i], own) for (_, i), own in rows]) if whole else []
    found: dict[tuple[int, int], dict[Output, float]] = defaultdict(lambda: defaultdict(float))
    for row, group in enumerate(groups):
        mass = 1 / OF_EACH_GREEDY if samplers[group[0]].greedy else masses[row]
        found[group][outputs[row]] += mass
    for (n, i), distribution in found.items():
        expected: dict[Output, float] = defaultdict(float)
        for output, mass in output_distribution(
            target, prompts[i], MAX_TOKENS, samplers[n]
        ).items():
            expected[output[: 1 + output.index(stop)] if stop in output else output] += mass
        assert {output for output in distribution if distribution[output]} <= expected.keys()
        gaps += [abs(distribution[output] - expected[output]) for output in expected]
    return float(max(gaps))


def outcome(num_draft: int, accepted: Sequence[int], drafted: Sequence[int] = ()) -> Outcome:
    """Return a round with costs of 1 for a pass over one token, and 0.1 for each token more."""
    drafted = drafted or [num_draft] * len(accepted)
    length = 1 + max(drafted)
    seconds = 1 + 0.1 * (length - 1)
    return Outcome(num_draft, drafted, accepted, 0, seconds, len(accepted), length)
