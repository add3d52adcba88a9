"""The decoding loop: draft, one pass of the target, verify. It handles ids only, never text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise

import mlx.core as mx
import numpy as np

from .. import device
from .draft import Draft, empty_draft
from .plan import OwnRequest, Plan, Request
from .protocols import Agree, Encoded, LanguageModel, Session, alone
from .results import Round
from .rows import Proposal, Row, ends_of, room
from .sampling import RowSamplers, round_keys
from .schedule import Outcome
from .transform import History
from .verify import Verifier, num_agreed
from .waits import read

AHEAD_TOKENS = 512  # of prompts to encode before there are rows for them


def decode(
    model: LanguageModel,
    requests: Iterable[Request | OwnRequest],
    plan: Plan,
    *,
    batch_size: int,
) -> Iterator[Round]:
    """Decode prompts side by side, and yield a `Round` for each row and pass of the target.

    When one of at most `batch_size` rows ends, the next prompt takes its place; a few are taken
    from `requests` before there is a row for them. When there is none, the batch shrinks.

    Raises:
        ValueError: If the options of a row forbid every token that could come next.
    """
    waiting = iter(requests)
    batch = Batch(model, plan)
    batch.add(list(islice(waiting, batch_size)))
    while batch.rows:
        done = batch.round()
        for each in done:
            if each.error is not None:
                raise ValueError(each.error)
        paused = time.perf_counter()
        yield from done
        batch.clock.skip(time.perf_counter() - paused)  # the caller's time is not ours
        batch.refill(waiting, batch_size)


class Batch:
    """Rows that are decoded together; requests may join and leave between any two rounds.

    The session and the drafter have the rows in the same order. After an exception of any method
    the batch cannot be used any more, nor can the plan's drafter before it begins another one.

    Attributes:
        rows: Those that are being decoded, and those that have ended until `add` or `drop`.
        clock: Seconds since the batch was made.
    """

    def __init__(self, model: LanguageModel, plan: Plan) -> None:
        self.rows: list[Row] = []
        self.clock = _Clock()
        self._plan = plan
        self._model = model
        self._session: Session | None = None  # None as long as there are no rows
        self._waiting: deque[tuple[Request | OwnRequest, Encoded]] = deque()  # without a row yet
        self._next_tokens: mx.array | None = None  # (B, 1) int32 of a pass that was begun early

    def add(self, requests: Sequence[Request | OwnRequest]) -> None:
        """Let requests join, in the places of rows that have ended and in new ones.

        Ended rows whose places are not needed are dropped.
        """
        began = self.clock.read()
        if requests and self._session is None:
            self._start(requests, began)
        elif requests:
            self._place(requests, self._encode(requests), began)
        self.drop()

    def end(self, rows: Collection[Row]) -> None:
        """End rows at once; their places are free for others."""
        for row in rows:
            row.stopped = True

    def drop(self) -> None:
        """Drop the rows that have ended."""
        kept = [i for i, row in enumerate(self.rows) if not row.ended]
        if not kept:
            self._session = None
        elif len(kept) < len(self.rows):
            self._select(kept)
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            self._changed()

    def round(self) -> list[Round]:
        """Draft, run the target once, verify, and return what each row emits."""
        with device.turn():  # a stream may have begun in another thread, or before a fork
            return self._round()

    def _round(self) -> list[Round]:
        plan, rows, session = self._plan, self.rows, self._session
        assert session is not None
        num_draft = plan.schedule.next(1 + max(row.limit for row in rows))
        began = drafted = time.perf_counter()
        if plan.ahead:
            proposals = self._plain(session)
        else:
            draft_keys, verify_keys = self._keys()
            contexts = [row.context for row in rows]
            draft = plan.drafter.propose(contexts, num_draft, draft_keys)
            # Each row by its own limit: its draft is the same whatever its neighbours are.
            draft = draft.limited([row.limit for row in rows])
            if plan.timed:
                read(draft.tokens)
            drafted = time.perf_counter()
            history = History(contexts, [row.start for row in rows], draft.tokens)
            proposals = verify(
                session, history, draft, plan.verifier, verify_keys, agree=plan.agree
            )
        ended, now = time.perf_counter(), self.clock.read()
        whole = [row for row in rows if row.limit >= num_draft]  # had room for the whole draft
        for row, proposal in zip(rows, proposals, strict=True):
            row.take(proposal, num_draft, now)
        counts = [row.num_drafted for row in whole], [row.num_accepted for row in whole]
        plan.schedule.observe(Outcome(num_draft, *counts, drafted - began, ended - drafted))
        return [row.round() for row in rows]

    def _plain(self, session: Session) -> list[Proposal]:
        """Run the target without a draft, and begin the next pass before this one is read."""
        tokens, self._next_tokens = self._next_tokens, None
        if tokens is None:
            session.truncate([len(row.context) - 1 for row in self.rows])
            last = [row.context[-1:] for row in self.rows]
            tokens = self._step(session, mx.array(last, dtype=mx.int32), later=0)
        # Of several rows one ends every few rounds, and a pass begun for all would be wasted.
        if len(self.rows) == 1 and self.rows[0].remaining > 1:
            self._next_tokens = self._step(session, tokens, later=1)
            mx.async_eval(self._next_tokens)
        return [Proposal([], 0, 0, token) for (token,) in read(tokens)]

    def _step(self, session: Session, tokens: mx.array, *, later: int) -> mx.array:
        """Return the tokens after `tokens` (B, 1), (B, 1) int32, `later` rounds from this one."""
        verifier = self._plan.verifier
        if verifier.greedy:  # lenient or not: there is no draft to be lenient about
            return session.step_argmax(tokens)
        _, keys = self._keys(later)
        draft = empty_draft(len(self.rows))  # nothing is transformed, see `Plan.ahead`
        return verifier.verdict(draft, session.step(tokens), keys).next_token[:, None]

    def refill(self, waiting: Iterator[Request | OwnRequest], batch_size: int) -> None:
        """Give rows that have ended to waiting prompts; drop those that are left over."""
        while (free := len(self._free())) and self._encode_next(waiting, batch_size):
            next_up = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            requests, encoded = zip(*next_up, strict=True)
            self._place(requests, encoded, self.clock.read())
        self.drop()

    def _encode_next(self, waiting: Iterator[Request | OwnRequest], batch_size: int) -> bool:
        """Have the next prompts encoded, if there are any: a few together take less time."""
        if not self._waiting:
            requests, tokens = [], 0
            for request in islice(waiting, batch_size):
                requests.append(request)
                tokens += len(request[1])
                if tokens >= AHEAD_TOKENS:
                    break
            if requests:
                self._waiting.extend(zip(requests, self._encode(requests), strict=True))
        return bool(self._waiting)

    def _start(self, requests: Sequence[Request | OwnRequest], began: float) -> None:
        """Begin with requests for all rows."""
        plan, sources = self._plan, [source for _, source, *_ in requests]
        with device.turn():
            if plan.sharing is None:
                self._session, contexts = self._model.start(sources, width=plan.width)
                plan.drafter.start(sources)
            else:
                both = plan.sharing.start_both(sources, width=plan.width)
                self._session, draft_session, contexts = both
                plan.drafter.start(sources, draft_session)
        self.rows = self._new_rows(requests, contexts, began)
        self._changed()

    def _encode(self, requests: Sequence[Request | OwnRequest]) -> list[Encoded]:
        assert self._session is not None
        with device.turn():
            return self._session.encode([source for _, source, *_ in requests])

    def _place(
        self,
        requests: Sequence[Request | OwnRequest],
        encoded: Sequence[Encoded],
        began: float,
    ) -> None:
        """Give requests the places of rows that have ended, and then new ones."""
        assert self._session is not None
        places, count = self._free()[: len(requests)], len(self.rows)
        added = range(count, count + len(requests) - len(places))
        if added:
            self._select([*range(count), *[0] * len(added)])  # copies of a row, replaced below
            places += added
        with device.turn():
            contexts = self._session.replace(places, encoded)
            self._plan.drafter.replace(places, [source for _, source, *_ in requests])
        new = self._new_rows(requests, contexts, began)
        for place, row in zip(places, new, strict=True):
            self.rows[place : place + 1] = [row]
        self._changed()

    def _free(self) -> list[int]:
        """Return the places of rows that have ended."""
        return [i for i, row in enumerate(self.rows) if row.ended]

    def _select(self, rows: Sequence[int]) -> None:
        assert self._session is not None
        with device.turn():
            self._session.select(rows)
            self._plan.drafter.select(rows)

    def _changed(self) -> None:
        """Forget what was prepared for other rows than those of now."""
        self._next_tokens = None  # it was begun for these rows, too
        samplers = self._plan.verifier.sampler
        if isinstance(samplers, RowSamplers):
            samplers.assign([row.options.sampler for row in self.rows])

    def _new_rows(
        self,
        requests: Sequence[Request | OwnRequest],
        contexts: Sequence[list[int]],
        began: float,
    ) -> list[Row]:
        rows = []
        for request, context in zip(requests, contexts, strict=True):
            options = self._plan.options_of(request)
            ends = ends_of(self._model, options.stop_ids)
            most = room(self._model, context, options.max_tokens)
            rows.append(Row(request[0], context, options, ends, most, began))
        return rows

    def _keys(self, later: int = 0) -> tuple[mx.array | None, mx.array | None]:
        """Return keys for drafting and for verdicts, (B, 2) uint32 each, `later` rounds on."""
        of_rows = [row.seeds(later) for row in self.rows]
        if not any(of_rows):
            return None, None
        unused = np.zeros((2, 2), dtype=np.uint32)  # of rows in which nothing is sampled
        keys = mx.array(np.stack([round_keys(*seeds) if seeds else unused for seeds in of_rows]))
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
    *,
    agree: Agree = alone,
) -> list[Proposal]:
    """Run the target over the last token and the draft, and read the verdict on each row.

    `history` has the rows' contexts, and the draft's tokens.
    """
    contexts = history.contexts
    session.truncate([len(context) - 1 for context in contexts])
    tokens = mx.array([[context[-1]] for context in contexts], dtype=mx.int32)
    if draft.tokens.shape[1]:
        tokens = mx.concatenate([tokens, draft.tokens], axis=1)
    logits = verifier.logits(session, tokens, history)
    greedy = verifier.greedy_rows(len(contexts))
    parts: dict[str, mx.array] = {"drafted": draft.tokens}
    if logits is None:
        parts["choices"] = session.step_argmax(tokens)
    elif any(greedy):
        parts["choices"] = verifier.choices(draft, logits)
    if logits is not None and not all(greedy):
        verdict = verifier.verdict(draft, logits, keys)
        parts["verdict"] = mx.stack([verdict.num_accepted, verdict.next_token], axis=1)
    # The round's only wait: one array holds all that the host has to know.
    rows = read(agree(mx.concatenate([*parts.values()], axis=1)))
    ends = list(accumulate(part.shape[1] for part in parts.values()))
    proposals = []
    for row, length, is_greedy in zip(rows, draft.lengths, greedy, strict=True):
        found = {name: row[a:b] for name, (a, b) in zip(parts, pairwise([0, *ends]), strict=True)}
        drafted = found["drafted"]
        if is_greedy:
            num_accepted = num_agreed(drafted[:length], found["choices"])
            next_token = found["choices"][num_accepted]
        else:
            num_accepted, next_token = found["verdict"]
        proposals.append(Proposal(drafted, length, num_accepted, next_token))
    return proposals
