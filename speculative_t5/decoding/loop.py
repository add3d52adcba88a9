"""The one loop: draft, one pass of the target, verify. Integers only; text is for others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import mlx.core as mx
import numpy as np

from .. import device
from .drafters import Draft, Drafter, empty_draft
from .protocols import Encoded, LanguageModel, Session
from .results import FinishReason, Round, Tally
from .sampling import round_keys
from .schedule import Outcome, Schedule
from .verify import Verifier, num_agreed
from .waits import read

WINDOW = 4  # batches of prompts to put in order of length
AHEAD_TOKENS = 512  # of prompts that are encoded ahead of their turn

Request = tuple[int, Sequence[int]]  # index of a prompt, and its ids


@dataclass(frozen=True)
class Plan:
    """How to decode.

    Attributes:
        drafter: Proposes tokens; not started yet.
        schedule: Says how many.
        verifier: Judges them.
        max_tokens: Upper bound on each row's tokens, EOS included.
        seed: Of all draws, which hang on it, the prompt's index and the row's own rounds; None
            where nothing is left to chance.
        ahead: Nothing is drafted: a single row's passes begin before what the last one gave is
            read, so that the device does not wait for the host. One is then for nothing where an
            output ends by EOS.
        timed: Wait for each draft by itself, to tell its time from that of verifying. A round has
            a second wait then, and takes longer.
    """

    drafter: Drafter
    schedule: Schedule
    verifier: Verifier
    max_tokens: int
    seed: int | None = None
    ahead: bool = False
    timed: bool = False


def decode(
    model: LanguageModel, requests: Iterable[Request], plan: Plan, *, batch_size: int
) -> Iterator[Round]:
    """Decode prompts side by side: a `Round` for each row and pass of the target.

    When a row ends, the next prompt takes its place; when there is none, the others close up.

    Args:
        model: The target.
        requests: Prompts, taken a few ahead of when there is room for them.
        plan: How to decode.
        batch_size: Rows at a time, at most.
    """
    waiting = iter(requests)
    first = list(islice(waiting, batch_size))
    if not first:
        return
    batch = _Batch(model, first, plan)
    while batch.rows:
        done = batch.round()
        given = time.perf_counter()
        yield from done
        batch.clock.skip(time.perf_counter() - given)  # what the caller does in between is not ours
        batch.refill(waiting, batch_size)


def in_order_of_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """So many requests at a time by length, down and up by turns."""
    waiting, longest_first = iter(requests), True
    while part := list(islice(waiting, window)):
        yield from sorted(part, key=lambda request: len(request[1]), reverse=longest_first)
        longest_first = not longest_first


class _Batch:
    """Rows that are decoded together."""

    def __init__(self, model: LanguageModel, requests: Sequence[Request], plan: Plan) -> None:
        self.clock = _Clock()
        self._plan = plan
        self._model = model
        self._ends = model.eos_token_ids
        self._ahead: deque[tuple[Request, Encoded]] = deque()  # prompts that wait for a row
        self._begun: mx.array | None = None  # what a pass gives that is under way, (B, 1)
        began = self.clock.read()
        sources = [source for _, source in requests]
        self._session, contexts = model.start(sources)
        plan.drafter.start(sources)
        self.rows = self._new_rows(requests, contexts, began)  # in the session's order

    def round(self) -> list[Round]:
        """One pass of the target, and what it gave each row."""
        device.enter_thread()  # a stream may have begun in another thread, or before a fork
        if self._plan.ahead:
            return self._undrafted()
        plan, contexts = self._plan, [row.context for row in self.rows]
        num_draft = plan.schedule.next(max(row.remaining for row in self.rows))
        draft_keys, verify_keys = self._keys()
        began = time.perf_counter()
        draft = plan.drafter.propose(contexts, num_draft, draft_keys)
        # By its own limit, whatever its neighbours': a row is drafted for as it would be alone.
        draft = draft.limited([row.remaining - 1 for row in self.rows])
        if plan.timed:
            read(draft.tokens)
        drafted = time.perf_counter()
        proposals = verify(self._session, contexts, draft, plan.verifier, verify_keys)
        ended = time.perf_counter()
        asked = [min(num_draft, row.remaining - 1) for row in self.rows]
        now = self.clock.read()
        for row, proposal, count in zip(self.rows, proposals, asked, strict=True):
            row.take(proposal, self._ends, count, now)
        whole = [row.tally for row, n in zip(self.rows, asked, strict=True) if n == num_draft]
        plan.schedule.observe(
            Outcome(
                num_draft,
                [tally.num_drafted[-1] for tally in whole],
                [tally.num_accepted[-1] for tally in whole],
                drafted - began,
                ended - drafted,
            )
        )
        return [row.round() for row in self.rows]

    def _undrafted(self) -> list[Round]:
        """A round without a draft, the pass of the next one begun before this one's is read."""
        plan = self._plan
        plan.schedule.next(max(row.remaining for row in self.rows))
        began, given = time.perf_counter(), self._begun
        if given is None:
            self._session.truncate([len(row.context) - 1 for row in self.rows])
            last = [row.context[-1:] for row in self.rows]
            given = self._pass(mx.array(last, dtype=mx.int32), later=0)
        self._begun = None
        # Of several rows one ends every few rounds, and what was begun for all would be dropped.
        if len(self.rows) == 1 and self.rows[0].remaining > 1:
            self._begun = self._pass(given, later=1)
            mx.async_eval(self._begun)
        tokens, now = read(given), self.clock.read()
        for row, (token,) in zip(self.rows, tokens, strict=True):
            row.take(Proposal([], 0, 0, token), self._ends, 0, now)
        none = [0] * len(self.rows)
        plan.schedule.observe(Outcome(0, none, none, 0.0, time.perf_counter() - began))
        return [row.round() for row in self.rows]

    def _pass(self, tokens: mx.array, *, later: int) -> mx.array:
        """What follows tokens (B, 1), so many rounds later than this one: (B, 1) int32."""
        verifier = self._plan.verifier
        if verifier.greedy:  # lenient or not: there is no draft to be lenient about
            return self._session.step_argmax(tokens)
        _, keys = self._keys(later)
        draft = empty_draft(len(self.rows))
        return verifier.verdict(draft, self._session.step(tokens), keys).next_token[:, None]

    def refill(self, waiting: Iterator[Request], batch_size: int) -> None:
        """Give rows that have ended to waiting prompts; drop those that none is left for."""
        free = [i for i, row in enumerate(self.rows) if row.finish_reason]
        if free:
            self._begun = None  # it is of these rows, too
        while free and self._look_ahead(waiting, batch_size):
            count = min(len(free), len(self._ahead))
            taken, free = free[:count], free[count:]
            next_up = [self._ahead.popleft() for _ in taken]
            requests = [request for request, _ in next_up]
            contexts = self._session.replace(taken, [encoded for _, encoded in next_up])
            self._plan.drafter.replace(taken, [source for _, source in requests])
            new = self._new_rows(requests, contexts, self.clock.read())
            for i, row in zip(taken, new, strict=True):
                self.rows[i] = row
        kept = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if 0 < len(kept) < len(self.rows):
            self._session.select(kept)
            self._plan.drafter.select(kept)
        self.rows = [self.rows[i] for i in kept]

    def _look_ahead(self, waiting: Iterator[Request], batch_size: int) -> bool:
        """Have the next prompts encoded, if there are any: a few together take less time."""
        if not self._ahead:
            requests, tokens = [], 0
            for request in islice(waiting, batch_size):
                requests.append(request)
                tokens += len(request[1])
                if tokens >= AHEAD_TOKENS:
                    break
            if requests:
                encoded = self._session.encode([source for _, source in requests])
                self._ahead.extend(zip(requests, encoded, strict=True))
        return bool(self._ahead)

    def _new_rows(
        self, requests: Sequence[Request], contexts: Sequence[list[int]], began: float
    ) -> list[_Row]:
        return [
            _Row(index, context, self._room(context), began)
            for (index, _), context in zip(requests, contexts, strict=True)
        ]

    def _room(self, context: Sequence[int]) -> int:
        """Tokens that a row may emit: what is left of the model's context, and one never read."""
        asked, limit = self._plan.max_tokens, self._model.max_context
        return asked if limit is None else min(asked, limit - len(context) + 1)

    def _keys(self, later: int = 0) -> tuple[mx.array | None, mx.array | None]:
        """Keys for drafting and for verdicts, (B, 2) uint32 each, so many rounds from this one."""
        seed = self._plan.seed
        if seed is None:
            return None, None
        of_rows = [round_keys(seed, r.index, r.tally.rounds + later) for r in self.rows]
        keys = mx.array(np.stack(of_rows))
        return keys[:, 0], keys[:, 1]


class _Clock:
    """Seconds since it was made, but for those to skip."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def read(self) -> float:
        return time.perf_counter() - self._started

    def skip(self, seconds: float) -> None:
        self._started += seconds


@dataclass(frozen=True)
class Proposal:
    """One row's draft and the verdict on it."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    next_token: int


def verify(
    session: Session,
    contexts: list[list[int]],
    draft: Draft,
    verifier: Verifier,
    keys: mx.array | None,
) -> list[Proposal]:
    """One pass of the target over the last token and the draft, and the verdicts on it."""
    session.truncate([len(context) - 1 for context in contexts])
    tokens = mx.array([context[-1:] for context in contexts], dtype=mx.int32)
    width = draft.tokens.shape[1]
    if width:
        tokens = mx.concatenate([tokens, draft.tokens], axis=1)
    if verifier.greedy:
        told = verifier.choices(draft, session, tokens)
    else:
        verdict = verifier.verdict(draft, session.step(tokens), keys)
        told = mx.stack([verdict.num_accepted, verdict.next_token], axis=1)
    # The only wait of a round: one array, so that reading it is one, too.
    rows = read(mx.concatenate([draft.tokens, told], axis=1))
    proposals = []
    for row, length in zip(rows, draft.lengths, strict=True):
        drafted, answer = row[:width], row[width:]
        if verifier.greedy:
            num_accepted = num_agreed(drafted[:length], answer)
            next_token = answer[num_accepted]
        else:
            num_accepted, next_token = answer
        proposals.append(Proposal(drafted, length, num_accepted, next_token))
    return proposals


@dataclass
class _Row:
    """One prompt: its context and the target's tokens so far, and what they cost."""

    index: int
    context: list[int]
    remaining: int  # tokens that it may still emit
    began: float
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0  # until the end of the last round
    finish_reason: FinishReason | None = None
    emitted: list[int] = field(default_factory=list)  # in the last round

    def take(self, proposal: Proposal, ends: frozenset[int], num_draft: int, now: float) -> None:
        """Emit what stands of a proposal; a cut may leave fewer tokens than were accepted."""
        tokens = [*proposal.tokens[: proposal.num_accepted], proposal.next_token]
        self.emitted, self.finish_reason = cut(tokens, ends, self.remaining)
        self.context += self.emitted
        self.remaining -= len(self.emitted)
        num_emitted = len(self.emitted)
        num_accepted = min(proposal.num_accepted, num_emitted)
        self.tally.add(num_draft, proposal.num_drafted, num_accepted, num_emitted)
        self.seconds = now - self.began

    def round(self) -> Round:
        """The last round, as the caller sees it."""
        shown = self.emitted[:-1] if self.finish_reason == "eos" else self.emitted
        stats, output = self.tally.stats(self.seconds), []
        if self.finish_reason:
            before = self.context[: -len(self.emitted)]
            output = before[len(self.context) - stats.emitted :] + shown
        accepted = self.tally.num_accepted[-1]
        return Round(self.index, shown, accepted, stats, self.finish_reason, output)


def cut(
    tokens: list[int], ends: frozenset[int], limit: int
) -> tuple[list[int], FinishReason | None]:
    """End `tokens` after the first EOS or after `limit` tokens, and say which, if either."""
    tokens = tokens[:limit]
    if not ends.isdisjoint(tokens):
        end = next(place for place, token in enumerate(tokens) if token in ends)
        return tokens[: end + 1], "eos"
    return tokens, "length" if len(tokens) == limit else None
