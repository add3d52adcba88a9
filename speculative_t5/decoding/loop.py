"""The decoding loop: draft, one pass of the target, verify. It handles ids only, never text."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .. import device
from .draft import Contexts, Draft
from .draft_length import Schedule
from .drafters import Drafter
from .faults import RowError, why
from .history import TokenHistory
from .keys import Keys, output_keys, position_keys, round_keys, verdict_keys
from .logprobs import judged
from .outcomes import Outcome
from .protocols import Encoded, LanguageModel, Session, SharingModel
from .results import FinishReason, Logprob, Round, Tally, as_logprobs, counters, read
from .sampling import Groups, Sampler
from .verify import Verified, Verifier

SORTED_BATCHES = 4  # batches of prompts to put in order of length
PREFETCH_TOKENS = 512  # of prompts to encode before there are rows for them
# Between two rounds, as a share of the second one's time. In a longer one, a pass that was begun
# early has got ahead.
LONGEST_PAUSE = 0.1
LONGEST_BETWEEN = 0.3  # part of a round; if more time passes between two, the caller was waiting

Indexed = tuple[int, Sequence[int]]  # index of a prompt, and its ids
StopReasons = Mapping[int, FinishReason]  # ids that end an output, and why it has ended then
# Is called with the next tokens of an output; returns how many to keep if it ends among them.
StopChecker = Callable[[Sequence[int]], int | None]


@dataclass(frozen=True)
class RowOptions:
    """The options of a row, which may differ from those of its neighbours."""

    sampler: Sampler = field(default_factory=Sampler)
    max_tokens: int = 256  # EOS included
    seed: int = 0  # samples depend on it, the request's number and the position
    stop_ids: frozenset[int] = frozenset()  # that end the output, besides those of EOS
    stop_checker: Callable[[], StopChecker] | None = None  # makes one for the output
    drafts: bool = True  # whether tokens are drafted for the row
    start: int | None = None  # token that the decoder reads first; None is the model's own
    # The most probable ids to report at each token, with its own probability; None reports neither.
    logprobs: int | None = None
    prediction: tuple[int, ...] = ()  # what the output is expected to be; drafts may copy it


@dataclass(frozen=True)
class Request:
    """A prompt to decode."""

    index: int  # of the prompt, in the rounds of its output
    source: Sequence[int]  # its ids
    options: RowOptions
    number: int | None = None  # that the row samples under; None is the index


@dataclass(frozen=True)
class Plan:
    """How to decode, for all rows of a batch."""

    drafter: Drafter  # proposes tokens; not started yet
    schedule: Schedule  # chooses how many
    verifier: Verifier  # decides which of them stand
    width: int | None = None  # positions of the target's passes; see `LanguageModel.start`
    sharing: SharingModel | None = None  # the draft model, if it shares the target's encoder
    timed: bool = False  # wait for each draft, to tell its time from that of verifying


def first_context(context: list[int], start: int | None) -> list[int]:
    """Return what an output follows, an initial context or a start token instead of the model's.

    No session has read it yet: the first pass does, of the target and of a draft.
    """
    return context if start is None else [start]


def in_order_of_length(prompts: Iterable[Indexed], window: int) -> Iterator[Indexed]:
    """Sort `window` prompts at a time by length, alternately longest and shortest first."""
    waiting, longest_first = iter(prompts), True
    while part := list(islice(waiting, window)):
        yield from sorted(part, key=lambda prompt: len(prompt[1]), reverse=longest_first)
        longest_first = not longest_first


def stop_reasons(model: LanguageModel, stop_ids: Iterable[int]) -> StopReasons:
    """Return the ids that end a model's outputs; EOS prevails where an id is both."""
    stops: dict[int, FinishReason] = dict.fromkeys(stop_ids, "stop")
    return stops | dict.fromkeys(model.info.eos_token_ids, "eos")


def token_budget(model: LanguageModel, context: Sequence[int], max_tokens: int) -> int:
    """Return how many tokens a row may emit; the last one is never fed to the model."""
    limit = model.info.max_context
    return max_tokens if limit is None else min(max_tokens, limit - len(context) + 1)


class Row:
    """One output: its tokens so far, and what they cost."""

    def __init__(
        self,
        model: LanguageModel,
        drafter: Drafter,
        request: Request,
        context: list[int],
        began: float,
    ) -> None:
        options = request.options
        self._models = model, drafter
        self.request, self.index = request, request.index
        # What it samples by, whatever the batch: a seed, and the number of its prompt.
        self.seed = options.seed, self.index if request.number is None else request.number
        self.context = first_context(context, options.start)
        self.start = len(context)  # of the output, after the initial context
        self.ends = stop_reasons(model, options.stop_ids)
        self.remaining = token_budget(model, context, options.max_tokens)  # that may be emitted
        self.began = began
        self.stop_checker = options.stop_checker() if options.stop_checker else None
        self.tally = Tally()
        # Of all that was emitted, if they are asked for.
        self.logprobs: list[Logprob] | None = None if options.logprobs is None else []
        self.num_right = 0  # tokens in a row, up to now, that drafts got right
        self.finish_reason: FinishReason | None = None
        self.stopped = False  # ended from outside, or because no token can follow
        self.broken = False  # it has met NaN, which its caches may hold

    @property
    def ended(self) -> bool:
        return self.stopped or self.finish_reason is not None

    @property
    def limit(self) -> int:
        """The most tokens to draft: a round emits one more."""
        return self.remaining - 1 if self.request.options.drafts else 0

    def emit(self, found: Verified, num_drafted: int, num_draft: int, now: float) -> Round:
        """Emit the tokens that stand, unless a cut leaves fewer."""
        tokens = found.tokens
        if not tokens or tokens[0] < 0:  # in a round of its own: the row may have ended before
            self.stopped, self.broken = True, bool(tokens)
            transform = self.request.options.sampler.transform
            processed = transform is not None and bool(transform.processors)
            error = why(tokens, *self._models, processed=processed)
            return Round(self.index, [], 0, self.tally.stats(now - self.began), error=error)
        asked = min(num_draft, self.limit)
        emitted, self.finish_reason = cut(tokens, self.ends, self.remaining)
        end_id = None if self.finish_reason in (None, "length") else emitted[-1]
        if self.stop_checker:
            stand = self.stop_checker(emitted if end_id is None else emitted[:-1])
            if stand is not None:
                emitted, self.finish_reason, end_id = emitted[:stand], "stop", None
        self.context += emitted
        self.remaining -= len(emitted)
        num_accepted = min(found.num_accepted, len(emitted))
        logprobs = None
        if self.logprobs is not None and found.logprobs is not None:
            logprobs = found.logprobs[: len(emitted)]
            self.logprobs += logprobs
        self.tally.add(asked, num_drafted, num_accepted, len(emitted))
        accepted_whole = num_accepted > 0 and num_accepted == asked
        self.num_right = self.num_right + len(emitted) if accepted_whole else 0
        reason = self.finish_reason
        stats = self.tally.stats(now - self.began, final=reason is not None)
        output = self.context[self.start :] if reason else []
        if end_id is not None:
            output, emitted = output[:-1], emitted[:-1]
        return Round(
            self.index,
            emitted,
            num_accepted,
            stats,
            reason,
            output,
            end_id,
            logprobs=logprobs,
            output_logprobs=self.logprobs if reason else None,
        )


def cut(tokens: list[int], ends: StopReasons, limit: int) -> tuple[list[int], FinishReason | None]:
    """End `tokens` after the first of `ends` or after `limit` tokens; return why, if they end."""
    tokens = tokens[:limit]
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1], ends[token]
    return tokens, "length" if len(tokens) == limit else None


def decode(
    model: LanguageModel, requests: Iterable[Request], plan: Plan, *, batch_size: int
) -> Iterator[Round]:
    """Decode prompts side by side, and yield a `Round` for each row and pass of the target.

    When one of at most `batch_size` rows ends, the next prompt takes its place, or the batch
    shrinks. A few requests are taken before there is a row for them.

    Raises:
        RowError: If the options of a row forbid every token that could come next, or the logits
            of a model are NaN.
    """
    waiting = iter(requests)
    batch = Batch(model, plan)
    batch.add(list(islice(waiting, batch_size)))
    while batch.rows:
        done = batch.round()
        for each in done:
            if each.error is not None:
                raise RowError(each.index, each.error)
        with batch.watch.paused():  # the caller's time is not ours
            yield from done
        batch.refill(waiting, batch_size)


class Lap(NamedTuple):
    """What a round took."""

    draft_seconds: float
    verify_seconds: float
    between_seconds: float  # from the round before it to this one, in the loop and in its caller
    typical: bool  # whether other rounds with such a pass take as long


class Stopwatch:
    """Times the rounds of a batch, each from `begin` to `end`."""

    def __init__(self) -> None:
        self._started = time.perf_counter()  # moved later by pauses
        # When the present round began, when its draft was made, and when the last round ended.
        self._began = self._drafted = self._ended = 0.0
        self._left = self._between = 0.0  # when the loop last left a round, and for how long
        self._begun_early = False  # whether the round's pass had begun before it
        self._extra_work = counters.extra_work  # when the last round ended

    def seconds(self) -> float:
        """Return the time since the batch was made, without pauses."""
        return time.perf_counter() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let time pass that does not count."""
        began = time.perf_counter()
        yield
        self._started += time.perf_counter() - began

    def leave(self) -> None:
        """Leave a round, whose results the caller gets."""
        self._left = time.perf_counter()

    def enter(self) -> None:
        """Enter the next round, which may still have to wait for its turn on the device."""
        self._between = time.perf_counter() - self._left if self._left else 0.0

    def begin(self, *, begun_early: bool) -> None:
        """Begin a round, whose pass may have begun in the round before."""
        self._began = self._drafted = time.perf_counter()
        self._begun_early = begun_early

    def drafted(self) -> None:
        """Note that the round's draft is made."""
        self._drafted = time.perf_counter()

    def end(self, *, begins_next: bool) -> Lap:
        """End a round, in which the next one's pass may have begun.

        Its time is not typical if there was more to do than in most rounds, if it has run one pass
        more or less than the one it reads, or if that pass also ran in a pause.
        """
        ended = time.perf_counter()
        typical = counters.extra_work == self._extra_work and self._begun_early == begins_next
        if self._begun_early:
            typical &= self._began - self._ended < LONGEST_PAUSE * (ended - self._began)
        self._ended, self._extra_work = ended, counters.extra_work
        waits = self._between > LONGEST_BETWEEN * (ended - self._began)
        between = 0.0 if waits else self._between
        return Lap(self._drafted - self._began, ended - self._drafted, between, typical)


class Batch:
    """Rows that are decoded together; requests may join and leave between any two rounds.

    The session and the drafter have the rows in the same order. After an exception the batch cannot
    be used any more, nor can the plan's drafter before it begins another one.
    """

    def __init__(self, model: LanguageModel, plan: Plan) -> None:
        self.rows: list[Row] = []  # those that have ended, too, until `add` or `drop`
        self.outcome: Outcome | None = None  # of the last round
        self.watch = Stopwatch()
        self._plan = plan
        self._model = model
        self._session: Session | None = None  # None as long as there are no rows
        self._waiting: deque[tuple[Request, Encoded]] = deque()  # without a row yet
        # Of the present rows:
        self._groups = Groups([])
        self._output_keys = mx.zeros((0, 2), dtype=mx.uint32)  # of rows, where any are sampled
        self._async = False  # whether a next pass without a draft may begin before one is read
        self._begun: mx.array | None = None  # what `_step` gave of a pass that was begun early
        self._meanwhile: Callable[[], None] | None = None  # what the host does in its waits

    def add(self, requests: Sequence[Request]) -> None:
        """Let requests join."""
        began = self.watch.seconds()
        with device.turn():
            # Their places are not for others: a weight of 0 does not hide NaN in a cache.
            self._keep([i for i, row in enumerate(self.rows) if not row.broken])
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
        self._keep([i for i, row in enumerate(self.rows) if not row.ended])

    def _keep(self, kept: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(kept) == len(self.rows):
            return
        if kept:
            with device.turn():
                self._select(kept)
        else:
            self._session = None
        self.rows = [self.rows[i] for i in kept]
        self._changed()

    def refill(self, waiting: Iterator[Request], batch_size: int) -> None:
        """Give rows that have ended to waiting prompts; drop those that are left over."""
        with device.turn():
            while (free := len(self._free())) and self._encode_next(waiting, batch_size):
                next_up = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
                requests, encoded = zip(*next_up, strict=True)
                self._place(requests, encoded, self.watch.seconds())
            self.drop()

    def round(self) -> list[Round]:
        """Draft, run the target once, verify, and return what each row emits."""
        plan, rows, session = self._plan, self.rows, self._session
        assert session is not None
        self.watch.enter()
        limits = [row.limit for row in rows]
        num_right = [row.num_right for row in rows]
        num_draft = plan.schedule.next(1 + max(limits), len(rows))
        with device.turn():  # a stream may have begun in another thread, or before a fork
            self.watch.begin(begun_early=self._begun is not None)
            contexts = [row.context for row in rows]
            keys = self._draft_keys(num_draft)
            draft = plan.drafter.propose(contexts, num_draft, self._groups, keys)
            if self._async and num_draft == 0:
                verdicts = self._plain(session)
            else:
                self._begun = None
                # Each row by its own limit: its draft is the same whatever its neighbours are.
                longest = max(draft.lengths)
                kept = longest if longest == num_draft else plan.schedule.kept(longest)
                draft = draft.limited([min(limit, kept) for limit in limits])
                verdicts = self._verified(session, contexts, draft)
        now = self.watch.seconds()
        done = [
            row.emit(verdict, length, num_draft, now)
            for row, verdict, length in zip(rows, verdicts, draft.lengths, strict=True)
        ]
        lap = self.watch.end(begins_next=self._begun is not None)
        # The rows that could use the whole draft.
        whole = [i for i, limit in enumerate(limits) if limit >= num_draft]
        self.outcome = Outcome(
            num_draft,
            num_drafted=[draft.lengths[i] for i in whole],
            num_accepted=[done[i].num_accepted for i in whole],
            num_right=[num_right[i] for i in whole],
            draft_seconds=lap.draft_seconds,
            verify_seconds=lap.verify_seconds,
            between_seconds=lap.between_seconds,
            rows=len(rows),
            length=1 + draft.tokens.shape[1],
            typical=lap.typical and not plan.timed,
        )
        plan.schedule.observe(self.outcome)
        self.watch.leave()
        return done

    def _verified(self, session: Session, contexts: Contexts, draft: Draft) -> list[Verified]:
        """Run the target over a draft, and return what stands of it, see `Verifier.verify`."""
        if self._plan.timed:
            read(draft.tokens)
        self.watch.drafted()
        history = TokenHistory(contexts, [row.start for row in self.rows], draft.tokens)
        keys = self._verdict_keys(draft.tokens.shape[1])
        verify = self._plan.verifier.verify
        return verify(session, history, draft, self._groups, keys, self._meanwhile)

    def _plain(self, session: Session) -> list[Verified]:
        """Run the target without a draft, and begin the next pass before this one is read."""
        found, self._begun = self._begun, None
        if found is None:
            session.truncate([len(row.context) - 1 for row in self.rows])
            last = [row.context[-1:] for row in self.rows]
            found = self._step(session, mx.array(last, dtype=mx.int32), later=0)
        # Of several rows one ends every few rounds, and a pass begun for all would be wasted.
        if len(self.rows) == 1 and self.rows[0].remaining > 1:
            self._begun = self._step(session, found[:, :1], later=1)
            mx.async_eval(self._begun)
        tokens = read(found, self._meanwhile)
        return [
            Verified([token], 0, None if top is None else as_logprobs([numbers], top))
            for (token, *numbers), top in zip(tokens, self._groups.tops, strict=True)
        ]

    def _step(self, session: Session, tokens: mx.array, *, later: int) -> mx.array:
        """Run the target over `tokens` (B, 1), `later` rounds from this one.

        Returned is (B, 1 + N) int32: the next tokens, and what `judged` has of them, if anything.
        """
        groups, top = self._groups, self._groups.top
        if groups.greedy and not top:  # lenient or not: there is no draft to be lenient about
            judges = top is not None
            found = session.step_logprobs(tokens)[:, 0] if judges else session.step_argmax(tokens)
        else:
            logits = session.step(tokens)
            found = groups.choose(logits, None if groups.greedy else self._positions(1, later))
            if top is not None:
                found = mx.concatenate([found, judged(logits, found, top)[:, 0]], axis=1)
        return self._plan.verifier.broadcast(found)

    def _encode_next(self, waiting: Iterator[Request], batch_size: int) -> bool:
        """Encode the next prompts, if there are any: a few together take less time."""
        if not self._waiting:
            requests, tokens = [], 0
            for request in islice(waiting, batch_size):
                requests.append(request)
                tokens += len(request.source)
                if tokens >= PREFETCH_TOKENS:
                    break
            if requests:
                self._waiting.extend(zip(requests, self._encode(requests), strict=True))
        return bool(self._waiting)

    def _encode(self, requests: Sequence[Request]) -> list[Encoded]:
        assert self._session is not None
        return self._session.encode([request.source for request in requests])

    def _start(self, requests: Sequence[Request], began: float) -> None:
        """Begin with requests for all rows."""
        plan, sources = self._plan, [request.source for request in requests]
        if plan.sharing is None:
            self._session, contexts = self._model.start(sources, width=plan.width)
            plan.drafter.start(sources)
        else:
            both = plan.sharing.start_both(sources, width=plan.width)
            self._session, draft_session, contexts = both
            plan.drafter.start(sources, draft_session)
        pairs = zip(requests, contexts, strict=True)
        self.rows = [Row(self._model, plan.drafter, *pair, began) for pair in pairs]
        for place, request in enumerate(requests):
            if request.options.prediction:
                plan.drafter.expect(place, request.options.prediction)
        self._changed()

    def _place(self, requests: Sequence[Request], encoded: Sequence[Encoded], began: float) -> None:
        """Give requests the places of rows that have ended, and then new ones."""
        assert self._session is not None
        places, count = self._free()[: len(requests)], len(self.rows)
        added = range(count, count + len(requests) - len(places))
        if added:
            self._select([*range(count), *[0] * len(added)])  # copies of a row, replaced below
            places += added
        contexts = self._session.replace(places, encoded)
        self._plan.drafter.replace(places, [request.source for request in requests])
        for place, request, context in zip(places, requests, contexts, strict=True):
            row = Row(self._model, self._plan.drafter, request, context, began)
            self.rows[place : place + 1] = [row]
            if request.options.prediction:
                self._plan.drafter.expect(place, request.options.prediction)
        self._changed()

    def _free(self) -> list[int]:
        """Return the places of rows that have ended."""
        return [i for i, row in enumerate(self.rows) if row.ended]

    def _select(self, rows: Sequence[int]) -> None:
        assert self._session is not None
        self._session.select(rows)
        self._plan.drafter.select(rows)

    def _changed(self) -> None:
        """Group the present rows, and forget what was prepared for the previous ones."""
        self._begun = None  # it was begun for the previous rows, too
        every = [row.request.options for row in self.rows]
        self._groups = Groups(
            [options.sampler for options in every], [options.logprobs for options in every]
        )
        if not self._groups.greedy:
            self._output_keys = mx.array(np.stack([output_keys(*row.seed) for row in self.rows]))
        # On a CPU T5's compiled passes leave the host little to do meanwhile.
        pays = self._model.info.is_decoder_only or not device.on_cpu()
        own_tokens = self._groups.greedy or self._plan.verifier.is_coupled
        self._async = pays and own_tokens and not self._groups.transforms
        think = self._plan.schedule.think
        self._meanwhile = think and partial(think, len(self.rows))

    def _draft_keys(self, num_draft: int) -> Keys:
        """Return a key for each position of a draft, (B, K, 2)."""
        if self._groups.greedy:
            return None
        if self._plan.verifier.is_coupled:
            return self._positions(num_draft)
        return position_keys(self._round_keys()[:, 0], num_draft)

    def _verdict_keys(self, num_drafted: int) -> Keys:
        """Return a key for each position of a draft and for the next token, (B, K + 1, 2)."""
        if self._groups.greedy:
            return None
        if self._plan.verifier.is_coupled:
            return self._positions(num_drafted + 1)
        return verdict_keys(self._round_keys()[:, 1], num_drafted)

    def _positions(self, count: int, later: int = 0) -> mx.array:
        """Return keys of each row's positions, `later` from the next on, (B, count, 2)."""
        starts = [len(row.context) - row.start + later for row in self.rows]
        return position_keys(self._output_keys, count, starts)

    def _round_keys(self) -> mx.array:
        rows = [round_keys(*row.seed, row.tally.rounds) for row in self.rows]
        return mx.array(np.stack(rows))
