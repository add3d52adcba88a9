"""The decoding loop: draft, one pass of the target, verify. It handles ids only, never text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx
import numpy as np

from .. import device
from .draft import Draft, empty_draft
from .drafters import Drafter
from .protocols import Encoded, LanguageModel, Session, SharingModel
from .results import Round
from .rows import Proposal, Row, Stopper, ends_of, room
from .sampling import round_keys
from .schedule import Outcome, Schedule
from .transform import NOTHING_LEFT, History, nothing_allowed
from .verify import Verifier, num_agreed
from .waits import read

WINDOW = 4  # batches of prompts to put in order of length
AHEAD_TOKENS = 512  # of prompts to encode before there are rows for them

Request = tuple[int, Sequence[int]]  # index of a prompt, and its ids


@dataclass(frozen=True)
class Plan:
    """How to decode.

    Attributes:
        drafter: Proposes tokens; not started yet.
        max_tokens: Upper bound on each row's tokens, EOS included.
        seed: Samples depend on it, the prompt's index and the row's round, and on nothing else;
            None where nothing is sampled.
        ahead: Nothing is drafted and no logits are transformed, and a single row's next pass
            begins before the last one's token is read, so that the device does not wait for the
            host. It is wasted after an EOS.
        width: Positions of every pass of the target, padding included; see `LanguageModel.start`.
        sharing: The draft model, if it shares the target's encoder.
        stop_ids: Ids that end an output, besides those of EOS.
        stopper: Makes a `Stopper` for each output.
        timed: Wait for each draft, to tell its time from that of verifying. A round then has a
            second wait, and takes longer.
    """

    drafter: Drafter
    schedule: Schedule
    verifier: Verifier
    max_tokens: int
    seed: int | None = None
    ahead: bool = False
    width: int | None = None
    sharing: SharingModel | None = None
    stop_ids: frozenset[int] = frozenset()
    stopper: Callable[[], Stopper] | None = None
    timed: bool = False


def decode(
    model: LanguageModel, requests: Iterable[Request], plan: Plan, *, batch_size: int
) -> Iterator[Round]:
    """Decode prompts side by side, and yield a `Round` for each row and pass of the target.

    When one of at most `batch_size` rows ends, the next prompt takes its place; a few are taken
    from `requests` before there is a row for them. When there is none, the batch shrinks.
    """
    waiting = iter(requests)
    first = list(islice(waiting, batch_size))
    if not first:
        return
    batch = _Batch(model, first, plan)
    while batch.rows:
        done = batch.round()
        paused = time.perf_counter()
        yield from done
        batch.clock.skip(time.perf_counter() - paused)  # the caller's time is not ours
        batch.refill(waiting, batch_size)


def in_order_of_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """Sort `window` requests at a time by length, alternately longest and shortest first."""
    waiting, longest_first = iter(requests), True
    while part := list(islice(waiting, window)):
        yield from sorted(part, key=lambda request: len(request[1]), reverse=longest_first)
        longest_first = not longest_first


class _Batch:
    """Rows that are decoded together; the session and the drafter have them in the same order."""

    def __init__(self, model: LanguageModel, requests: Sequence[Request], plan: Plan) -> None:
        self.clock = _Clock()
        self._plan = plan
        self._model = model
        self._ends = ends_of(model, plan.stop_ids)
        self._waiting: deque[tuple[Request, Encoded]] = deque()  # encoded, but without a row yet
        self._next_tokens: mx.array | None = None  # (B, 1) int32 of a pass that was begun early
        began = self.clock.read()
        sources = [source for _, source in requests]
        with device.turn():
            if plan.sharing is None:
                self._session, contexts = model.start(sources, width=plan.width)
                plan.drafter.start(sources)
            else:
                both = plan.sharing.start_both(sources, width=plan.width)
                self._session, draft_session, contexts = both
                plan.drafter.start(sources, draft_session)
        self.rows = self._new_rows(requests, contexts, began)

    def round(self) -> list[Round]:
        """Draft, run the target once, verify, and return what each row emits."""
        with device.turn():  # a stream may have begun in another thread, or before a fork
            return self._round()

    def _round(self) -> list[Round]:
        plan, rows = self._plan, self.rows
        num_draft = plan.schedule.next(max(row.remaining for row in rows))
        began = drafted = time.perf_counter()
        if plan.ahead:
            proposals = self._plain()
        else:
            draft_keys, verify_keys = self._keys()
            contexts = [row.context for row in rows]
            draft = plan.drafter.propose(contexts, num_draft, draft_keys)
            # Each row by its own limit: its draft is the same whatever its neighbours are.
            draft = draft.limited([row.remaining - 1 for row in rows])
            if plan.timed:
                read(draft.tokens)
            drafted = time.perf_counter()
            history = History(contexts, [row.start for row in rows], draft.tokens)
            proposals = verify(self._session, history, draft, plan.verifier, verify_keys)
        ended, now = time.perf_counter(), self.clock.read()
        whole = [row for row in rows if row.remaining > num_draft]  # had room for the whole draft
        for row, proposal in zip(rows, proposals, strict=True):
            row.take(proposal, num_draft, self._ends, now)
        counts = [row.num_drafted for row in whole], [row.num_accepted for row in whole]
        plan.schedule.observe(Outcome(num_draft, *counts, drafted - began, ended - drafted))
        return [row.round() for row in rows]

    def _plain(self) -> list[Proposal]:
        """Run the target without a draft, and begin the next pass before this one is read."""
        tokens, self._next_tokens = self._next_tokens, None
        if tokens is None:
            self._session.truncate([len(row.context) - 1 for row in self.rows])
            last = [row.context[-1:] for row in self.rows]
            tokens = self._step(mx.array(last, dtype=mx.int32), later=0)
        # Of several rows one ends every few rounds, and a pass begun for all would be wasted.
        if len(self.rows) == 1 and self.rows[0].remaining > 1:
            self._next_tokens = self._step(tokens, later=1)
            mx.async_eval(self._next_tokens)
        return [Proposal([], 0, 0, token) for (token,) in read(tokens)]

    def _step(self, tokens: mx.array, *, later: int) -> mx.array:
        """Return the tokens after `tokens` (B, 1), (B, 1) int32, `later` rounds from this one."""
        verifier = self._plan.verifier
        if verifier.greedy:  # lenient or not: there is no draft to be lenient about
            return self._session.step_argmax(tokens)
        _, keys = self._keys(later)
        draft = empty_draft(len(self.rows))  # nothing is transformed, see `Plan.ahead`
        return verifier.verdict(draft, self._session.step(tokens), keys).next_token[:, None]

    def refill(self, waiting: Iterator[Request], batch_size: int) -> None:
        """Give rows that have ended to waiting prompts; drop those that are left over."""
        free = [i for i, row in enumerate(self.rows) if row.finish_reason]
        if free:
            self._next_tokens = None  # it was begun for these rows, too
        while free and self._encode_next(waiting, batch_size):
            count = min(len(free), len(self._waiting))
            taken, free = free[:count], free[count:]
            next_up = [self._waiting.popleft() for _ in taken]
            requests = [request for request, _ in next_up]
            with device.turn():
                contexts = self._session.replace(taken, [encoded for _, encoded in next_up])
                self._plan.drafter.replace(taken, [source for _, source in requests])
            new = self._new_rows(requests, contexts, self.clock.read())
            for i, row in zip(taken, new, strict=True):
                self.rows[i] = row
        kept = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if 0 < len(kept) < len(self.rows):
            with device.turn():
                self._session.select(kept)
                self._plan.drafter.select(kept)
        self.rows = [self.rows[i] for i in kept]

    def _encode_next(self, waiting: Iterator[Request], batch_size: int) -> bool:
        """Have the next prompts encoded, if there are any: a few together take less time."""
        if not self._waiting:
            requests, tokens = [], 0
            for request in islice(waiting, batch_size):
                requests.append(request)
                tokens += len(request[1])
                if tokens >= AHEAD_TOKENS:
                    break
            if requests:
                with device.turn():
                    encoded = self._session.encode([source for _, source in requests])
                self._waiting.extend(zip(requests, encoded, strict=True))
        return bool(self._waiting)

    def _new_rows(
        self, requests: Sequence[Request], contexts: Sequence[list[int]], began: float
    ) -> list[Row]:
        model, most, make = self._model, self._plan.max_tokens, self._plan.stopper
        return [
            Row(index, context, len(context), room(model, context, most), began, make and make())
            for (index, _), context in zip(requests, contexts, strict=True)
        ]

    def _keys(self, later: int = 0) -> tuple[mx.array | None, mx.array | None]:
        """Return keys for drafting and for verdicts, (B, 2) uint32 each, `later` rounds on."""
        seed = self._plan.seed
        if seed is None:
            return None, None
        of_rows = [round_keys(seed, r.index, r.tally.rounds + later) for r in self.rows]
        keys = mx.array(np.stack(of_rows))
        return keys[:, 0], keys[:, 1]


class _Clock:
    """Seconds since it was made, less those that were skipped."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def read(self) -> float:
        return time.perf_counter() - self._started

    def skip(self, seconds: float) -> None:
        self._started += seconds


def verify(
    session: Session,
    history: History,
    draft: Draft,
    verifier: Verifier,
    keys: mx.array | None,
) -> list[Proposal]:
    """Run the target over the last token and the draft, and read the verdict on each row.

    `history` has the rows' contexts, and the draft's tokens.
    """
    contexts = history.contexts
    session.truncate([len(context) - 1 for context in contexts])
    tokens = mx.array([[context[-1]] for context in contexts], dtype=mx.int32)
    width = draft.tokens.shape[1]
    if width:
        tokens = mx.concatenate([tokens, draft.tokens], axis=1)
    logits = verifier.logits(session, tokens, history)
    if logits is None:
        verdicts = session.step_argmax(tokens)
    elif verifier.greedy:
        verdicts = verifier.choices(draft, logits)
    else:
        verdict = verifier.verdict(draft, logits, keys)
        verdicts = mx.stack([verdict.num_accepted, verdict.next_token], axis=1)
    parts = [draft.tokens, verdicts]
    if logits is not None and verifier.sampler.transform:
        parts.append(nothing_allowed(logits).astype(mx.int32))
    # The round's only wait: one array holds all that the host has to know.
    rows = read(mx.concatenate(parts, axis=1))
    proposals = []
    for row, length in zip(rows, draft.lengths, strict=True):
        drafted, answer = row[:width], row[width : width + verdicts.shape[1]]
        nothing = row[width + verdicts.shape[1] :]
        if verifier.greedy:
            num_accepted = num_agreed(drafted[:length], answer)
            next_token = answer[num_accepted]
        else:
            num_accepted, next_token = answer
        if nothing and nothing[num_accepted]:
            raise ValueError(NOTHING_LEFT)
        proposals.append(Proposal(drafted, length, num_accepted, next_token))
    return proposals
