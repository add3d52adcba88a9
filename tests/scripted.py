"""Rounds by script, which sets the drafted tokens, how many are accepted, and the next token.

The script replaces sampling and nothing else: drafters, sessions and the loop are those of
decoding. The distributions that they would have sampled from are recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product
from typing import Any
from unittest.mock import patch

from speculative_t5.decoding import loop as engine
from speculative_t5.decoding import model_drafter as drafting
from speculative_t5.decoding import verify
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.model_drafter import ModelDrafter
from speculative_t5.decoding.plan import OwnRequest, Plan, Request
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.sampling import sample as real_sample
from speculative_t5.decoding.transform import NOTHING, History
from speculative_t5.decoding.verify import Odds, Verdict, Verifier
from speculative_t5.models import SharingDraft

import mlx.core as mx
import numpy as np
from conftest import unrelated_pair

PLACES = 256  # a key holds the row, and the round times this with the place added


@dataclass(frozen=True)
class Turn:
    """One round of one row; places beyond `drafted` get an arbitrary token."""

    drafted: tuple[int, ...]
    num_accepted: int
    next_token: int

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
    odds: Odds
    draft: Draft
    p: mx.array


@dataclass
class Notes:
    """The distributions that tokens would have been sampled from.

    Attributes:
        sampled: By row, round and place: the distribution of a drafted token, (V,) float64.
        judged: One entry for each pass of the target.
        rounds: How many rounds each row has had.
    """

    sampled: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)
    rounds: Counter[int] = field(default_factory=Counter)


def round_keys(seed: int, row: int, round_: int) -> np.ndarray:
    return np.array([[row, round_ * PLACES]] * 2, dtype=np.uint32)


Output = tuple[int, ...]  # with EOS, or `NOTHING` where no token could follow


def loop_outputs(
    target: Any, requests: Iterable[Request | OwnRequest], plan: Plan, batch_size: int
) -> dict[int, Output]:
    """Return the output of each index, decoded as `decode` does, which would stop at a dead end."""
    found: dict[int, Output] = defaultdict(tuple)
    waiting = iter(requests)
    batch = engine.Batch(target, plan)
    batch.add(list(islice(waiting, batch_size)))
    while batch.rows:
        for done in batch.round():
            end = [NOTHING] if done.error else [] if done.end_id is None else [done.end_id]
            found[done.index] += (*done.tokens, *end)
        batch.refill(waiting, batch_size)
    return found


@contextmanager
def scripted(turns: Sequence[Sequence[Turn]]) -> Iterator[Notes]:
    """Make `turns[i]` the rounds of row i; a dead end may take one more, without a script."""
    notes = Notes()
    turns = [[*rounds, Turn((), 0, 0)] for rounds in turns]

    def read(keys: mx.array) -> list[tuple[int, int, int]]:
        return [(row, *divmod(rest, PLACES)) for row, rest in keys.tolist()]  # type: ignore

    def sample(weights: mx.array, keys: mx.array | None) -> mx.array:
        if keys is None:  # of greedy rows, which have no script
            return real_sample(weights, None)
        tokens = []
        for (row, round_, place), q in zip(read(keys), normal(weights), strict=True):
            notes.sampled[row, round_, place] = q
            drafted = turns[row][round_].drafted
            tokens.append(drafted[place] if place < len(drafted) else 0)
        return mx.array(tokens, dtype=mx.int32)

    def verdict(odds: Odds, draft: Draft, p: mx.array, keys: mx.array) -> Verdict:
        rows, rounds, _ = zip(*read(keys), strict=True)
        said = [turns[row][round_] for row, round_ in zip(rows, rounds, strict=True)]
        accepted, following = [t.num_accepted for t in said], [t.next_token for t in said]
        notes.judged.append(Judged([*rows], [*rounds], accepted, following, odds, draft, p))
        notes.rounds.update(rows)
        return Verdict(mx.array(accepted, dtype=mx.int32), mx.array(following, dtype=mx.int32))

    with (
        patch.object(drafting, "sample", sample),
        patch.object(verify, "_verdict", verdict),
        patch.object(engine, "round_keys", round_keys),
    ):
        yield notes


def normal(weights: mx.array) -> np.ndarray:
    """Rescale rows to sum to 1 in float64."""
    rows = np.array(weights, np.float64)
    return rows / rows.sum(axis=-1, keepdims=True)


PROMPT, SAMPLED = [2, 2, 1], Sampler(1.0)
Seen = dict[tuple[int, ...], list[np.ndarray]]  # after each sequence of tokens


def walk(target: Any, draft: Any, num_draft: int) -> tuple[Seen, Seen]:
    """Return p and q after each sequence of up to 2 K + 1 tokens, as rounds compute them.

    Each of the longest sequences is a row of one batch. Rows differ in how many of K drafted tokens
    are right; the others are rejected and removed from the caches.
    """
    size, depth = target.vocab_size, 2 * num_draft + 1
    paths = list(product(range(size), repeat=depth))
    turns = [walk_turns(path, num_draft, row, size) for row, path in enumerate(paths)]
    prompts = [PROMPT] * len(paths)
    with scripted(turns) as notes:
        drafter = ModelDrafter(draft, SAMPLED, size)
        if isinstance(draft, SharingDraft):
            session, draft_session, contexts = draft.start_both(prompts)
            drafter.start(prompts, draft_session)
        else:
            session, contexts = target.start(prompts)
            drafter.start(prompts)
        starts = [len(context) for context in contexts]
        for round_ in range(max(map(len, turns))):
            keys = mx.array(np.stack([round_keys(0, row, round_)[0] for row in range(len(paths))]))
            proposed = drafter.propose(contexts, num_draft, keys)
            history = History(contexts, starts, proposed.tokens)
            proposals = engine.verify(session, history, proposed, Verifier(SAMPLED), keys)
            for context, proposal in zip(contexts, proposals, strict=True):
                context += [*proposal.tokens[: proposal.num_accepted], proposal.next_token]
    p, q = defaultdict(list), defaultdict(list)
    for judged in notes.judged:
        for row, round_, given in zip(judged.rows, judged.rounds, normal(judged.p), strict=True):
            before = sum((turn.emitted for turn in turns[row][:round_]), ())
            right = turns[row][round_].emitted[:-1]
            for place in range(len(right) + 1):
                after = (*before, *right[:place])
                if len(after) <= depth:
                    p[after].append(given[place])
                    if place < num_draft:
                        q[after].append(notes.sampled[row, round_, place])
    return p, q


def walk_turns(path: tuple[int, ...], num_draft: int, row: int, size: int) -> list[Turn]:
    """Return rounds that emit a path, the same number of rounds for each path."""
    path += (0,) * (len(path) + 1) * (num_draft + 1)
    turns, at = [], 0
    for round_ in range(2 * num_draft + 2):
        right = (row + round_) % (num_draft + 1)
        wrong = tuple((token + 1) % size for token in path[at + right : at + num_draft])
        turns.append(Turn(path[at : at + right] + wrong, right, path[at + right]))
        at += right + 1
    return turns


@cache
def trees(kind: str, size: int, num_draft: int, seed: int) -> tuple[list[np.ndarray], ...]:
    """Return the distributions of two tiny models, (V ** d, V) float64 at depth d, see `walk`.

    The draft's are one level less deep than the target's.
    """
    models = unrelated_pair(kind, vocab_size=size, seeds=(2 * seed, 2 * seed + 1))
    return tuple(
        [
            np.stack([seen[path][0] for path in product(range(size), repeat=depth)])
            for depth in range(2 * num_draft + 2 - role)
        ]
        for role, seen in enumerate(walk(*models, num_draft))
    )
