"""The service: one thread owns the device and decodes the calls of all others, side by side.

Callers submit prompts, each call with options of its own, and read its events as the outputs grow.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from ..decoding import PREFETCH_TOKENS, Batch, Request, Round, RowOptions, Sampler
from ..errors import check_integer, first_line
from ..generation import Chunk, GenerationOptions, SpeculativeDecoder, as_chunk
from ..tokenizers import Detokenizer, Prompt, PromptTooLong, check_prompts

LOADING_SECONDS, STOPPING_SECONDS = 5, 10  # after which to ask again
MOST_SECONDS = 60  # to wait for room in the queue, at most
GRACE = 10.0  # seconds for the thread to end after the time for outputs is over
LAST_ROUND = 2.0  # seconds for it if there is no time; Python may abort if it exits in a round
WARM_UP_TOKENS = 4

FAILED = "decoding failed in the server: see its log"
STOPPED = "the server stopped before the output had ended: wait and send the request again"

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stopping", "failed", "stopped"]


class Unavailable(Exception):
    """The service is loading, is stopping or has failed; the message is one clear line.

    Attributes:
        retry_after: Seconds after which to ask again; None where that would not help.
    """

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Busy(Unavailable):
    """The queue is full."""


class WrongPrompt(ValueError):
    """There is something wrong with a prompt."""


@dataclass(frozen=True)
class Event:
    """One round of one output, or its failure.

    Attributes:
        output: Number of the output: n * (index of the prompt) + number of the sample, for n
            samples of each prompt.
        chunk: What the round added; the last one has a finish reason.
        error: Why the output has failed, in one line fit for a client; no events of it follow.
        refused: Whether what the request asks for is the reason of the failure.
    """

    output: int
    chunk: Chunk | None = None
    error: str | None = None
    refused: bool = False

    @property
    def is_last(self) -> bool:
        """Whether no event of this output follows."""
        return self.error is not None or (
            self.chunk is not None and self.chunk.finish_reason is not None
        )


@dataclass(frozen=True)
class Figures:
    """What there is now, and totals since the start without the warm-up: see `app.HELP`."""

    state: State
    queued: int = 0
    rows: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    prompt_tokens: int = 0
    failures: int = 0
    seconds_since_round: float | None = None


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a call: its request, and what makes its text as it grows."""

    call: Call
    number: int
    request: Request
    detokenizer: Detokenizer | None

    def event(self, done: Round) -> Event:
        """Return the event of a round; a text that cannot be made is a failure of this output."""
        if done.error is not None:
            return Event(self.number, error=done.error, refused=True)
        try:
            return Event(self.number, as_chunk(done, self.detokenizer))
        except Exception:  # it must not end the outputs of other calls
            log.exception("the text of an output cannot be made")
            return Event(self.number, error=FAILED)


@dataclass(eq=False)
class Call:
    """One request being decoded.

    Attributes:
        prompt_tokens: Number of ids of each prompt.
        num_outputs: Samples of all prompts together.
        forget: Takes it out of the service when it is cancelled.
        cancelled: Whether `cancel` has been called.
        waiting: The outputs that have no row yet; guarded by the service's lock.
        queue: Events that have not been read.
    """

    prompt_tokens: list[int]
    num_outputs: int
    forget: Callable[[Call], None]
    cancelled: bool = False
    waiting: deque[Output] = field(default_factory=deque)
    queue: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def events(self, patience: float | None = None) -> AsyncGenerator[Event | None, None]:
        """Yield the events of all outputs until they have ended, or the call is cancelled.

        None comes whenever there has been no event for `patience` seconds. Leaving early cancels
        the call.
        """
        left = self.num_outputs  # that have not ended
        try:
            while left and not self.cancelled:
                try:
                    async with asyncio.timeout(patience):
                        event = await self.queue.get()
                except TimeoutError:
                    yield None
                    continue
                left -= event.is_last
                yield event
        finally:
            if left:
                self.cancel()

    def cancel(self) -> None:
        """End the call; its rows are free within a round."""
        self.cancelled = True
        self.forget(self)


class Service:
    """Decodes calls in one batch that they join and leave as they come and go.

    Each call has options of its own. What it gets does not depend on its neighbours, up to
    rounding: it is what `SpeculativeDecoder.generate_batch` gives for its prompts with the same
    options. If the decoder's `num_draft` is "auto", it is what the default number gives.

    Calls wait in a queue of `max_queue` outputs, and take turns: each gets a row for one of its
    outputs, then the next call does.

    Args:
        load: Makes the decoder; called in the thread that owns the device.
        batch_size: The most rows; a steady decoder has one.
        max_queue: The most outputs that wait for a row.

    Attributes:
        state: What it does now.
        failure: Why nothing is decoded any more, in one line; None while all is well.
        load_error: The error of `load`, if that is why.
    """

    def __init__(
        self, load: Callable[[], SpeculativeDecoder], *, batch_size: int = 16, max_queue: int = 256
    ) -> None:
        self._load = load
        self._batch_size = check_integer("batch_size", batch_size, 1)
        self._max_queue = check_integer("max_queue", max_queue, 1)
        self._decoder: SpeculativeDecoder | None = None
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._numbers = count()  # of outputs, as indices of their requests
        # Guards all that follows; notified when there is something to do or the state changes.
        self._changed = threading.Condition()
        self.state: State = "loading"
        self.failure: str | None = None
        self.load_error: BaseException | None = None
        self._calls: deque[Call] = deque()  # with outputs that wait, the next one first
        self._running: dict[int, Output] = {}  # by the index of the request
        self._deadline = math.inf  # of all outputs, in the time of time.monotonic
        self._last_round: float | None = None  # in the same time
        self._busy, self._ended = 0.0, 0  # seconds of rounds, and outputs that ended in them
        self._totals: Counter[str] = Counter()  # by attributes of Figures

    def start(self) -> None:
        """Start the thread, which loads the model and decodes a short prompt before all calls.

        To be called in the event loop that is to use the service.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has begun and has not ended."""
        return self._thread.is_alive()

    @property
    def decoder(self) -> SpeculativeDecoder:
        """The decoder, once it has been loaded; Unavailable is raised before."""
        if self._decoder is None:
            raise self._unavailable()
        return self._decoder

    def submit(self, prompts: Sequence[Prompt], options: GenerationOptions) -> Call:
        """Let a call join; to be called in the service's event loop.

        Raises:
            Busy: If there is no room in the queue; nothing has been tokenized then.
            Unavailable: If the service is not ready.
            WrongPrompt: If there is something wrong with a prompt.
            ValueError: If there is something wrong with an option.
        """
        check_prompts(prompts)
        check_options(options)
        prompts = list(prompts)
        samples = options.num_return_sequences
        wanted = len(prompts) * samples
        if not wanted:
            raise ValueError("the request has no prompt: give at least one")
        if wanted > self._max_queue:
            raise ValueError(
                f"the request asks for {wanted} outputs, and the queue holds {self._max_queue}: "
                "split the request"
            )
        self._check_room(wanted)
        decoder = self.decoder
        sources = [encoded(decoder, prompt, options.max_tokens) for prompt in prompts]
        own = decoder.bind(options)
        call = Call([*map(len, sources)], wanted, self._forget)
        for number in range(wanted):
            source = sources[number // samples]
            request = Request(next(self._numbers), source, own, number)
            detokenizer = options.detokenizer(decoder.tokenizer)
            call.waiting.append(Output(call, number, request, detokenizer))
        with self._changed:
            if self.state != "ready":
                raise self._unavailable()
            self._totals["prompt_tokens"] += sum(call.prompt_tokens)
            self._calls.append(call)
            self._changed.notify_all()
        return call

    def figures(self) -> Figures:
        """Return the totals since the start."""
        with self._changed:
            since = None if self._last_round is None else time.monotonic() - self._last_round
            return Figures(
                state=self.state,
                queued=self._queued,
                rows=len(self._running),
                seconds_since_round=since,
                **self._totals,
            )

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, and end when the others have ended, or in an error after a time.

        If it is cancelled, they end in that error after the round.
        """
        with self._changed:
            if self.state in ("loading", "ready"):
                self.state = "stopping"
            self._deadline = min(self._deadline, time.monotonic() + seconds)
            self._changed.notify_all()
        try:
            await self._wait_for_thread(seconds + GRACE)
        except asyncio.CancelledError:
            with self._changed:
                self._deadline = time.monotonic()
            await self._wait_for_thread(LAST_ROUND)
            raise
        finally:
            self._end_all("stopped", STOPPED)  # nothing, unless the thread hangs or never began

    async def _wait_for_thread(self, seconds: float) -> None:
        """Wait until the thread has ended, at most for some seconds.

        It is not joined in another thread, for which asyncio would wait to the end.
        """
        until = time.monotonic() + seconds
        while self.is_running and time.monotonic() < until:
            await asyncio.sleep(0.05)

    def _check_room(self, wanted: int) -> None:
        """Refuse a call of more outputs than the queue has room for."""
        with self._changed:
            if self.state != "ready":
                raise self._unavailable()
            lacking = self._queued + wanted - self._max_queue
            if lacking > 0:
                seconds = math.ceil(lacking * self._busy / max(self._ended, 1))
                raise Busy(
                    f"the queue holds {self._max_queue} outputs, {self._queued} wait already, and "
                    f"the request asks for {wanted}: wait and send the request again",
                    min(max(1, seconds), MOST_SECONDS),
                )

    @property
    def _queued(self) -> int:
        """How many outputs wait for a row."""
        return sum(len(call.waiting) for call in self._calls)

    def _unavailable(self) -> Unavailable:
        if self.state == "loading":
            message = "the model is being loaded: wait until it is ready"
            return Unavailable(message, LOADING_SECONDS)
        if self.state == "failed":
            return Unavailable("the server cannot decode any more: see its log")
        return Unavailable("the server is stopping: use another one", STOPPING_SECONDS)

    def _forget(self, call: Call) -> None:
        """Take a cancelled call's outputs out of the queue; its rows end before the next round."""
        with self._changed:
            call.waiting.clear()
            self._changed.notify_all()

    # In the thread that owns the device:

    def _run(self) -> None:
        try:
            self._decoder = decoder = self._load()
            if decoder.is_steady:
                self._batch_size = 1
            self._warm_up()
            with self._changed:
                if self.state == "loading":
                    self.state = "ready"
            self._serve()
            self._end_all("stopped", STOPPED)
        except BaseException as error:
            if self._decoder is None:
                self.load_error = error
            else:
                log.exception("the decoding thread has ended")
            self.failure = first_line(error)
            self._end_all("failed", FAILED)

    def _warm_up(self) -> None:
        """Decode a short prompt, greedily and by sampling."""
        decoder = self.decoder
        source = [decoder.model.info.vocab_size // 2, decoder.model.info.eos_token_id]
        for sampler in (Sampler(), Sampler(1.0)):
            own = RowOptions(sampler, WARM_UP_TOKENS, None if sampler.greedy else 0)
            batch = self._new_batch()
            batch.add([Request(0, source, own)])
            while batch.rows:
                batch.round()
                batch.drop()
                self._last_round = time.monotonic()

    def _new_batch(self) -> Batch:
        return Batch(self.decoder.model, self.decoder.plan())

    def _serve(self) -> None:
        """Decode until the service is stopped."""
        batch = self._new_batch()
        while self._wait():
            try:
                joining = self._join()
                batch.end([row for row in batch.rows if row.index not in self._running])
                batch.add(joining)
                if batch.rows:
                    began = time.monotonic()
                    self._emit(batch.round(), began)
            except Exception:  # the server goes on; the log has it, and callers get errors
                log.exception("a round has failed")
                self._fail_running()
                batch = self._new_batch()
                self._warm_up()

    def _wait(self) -> bool:
        """Wait until there is something to decode; return whether there is, and time for it."""
        with self._changed:
            while not (self._calls or self._running or self.state != "ready"):
                self._changed.wait()
            over = self.state == "stopped" or time.monotonic() >= self._deadline
            return not over and bool(self._calls or self._running)

    def _join(self) -> list[Request]:
        """Forget outputs of cancelled calls, and give their rows and others to waiting ones.

        Prompts are encoded as they join, while others wait: only some of them join at a time.
        """
        with self._changed:
            kept = {i: output for i, output in self._running.items() if not output.call.cancelled}
            joining: list[Output] = []
            with_rows = {output.call for output in kept.values()}
            tokens = 0
            while free := self._batch_size - len(kept) - len(joining):
                # The last free row is kept for a call that has none: others may hold theirs long.
                ready = (c for c in self._calls if c.waiting and (free > 1 or c not in with_rows))
                call = next(ready, None)
                if call is None:
                    break
                tokens += len(call.waiting[0].request.source)
                if joining and tokens > PREFETCH_TOKENS:
                    break
                joining.append(call.waiting.popleft())
                with_rows.add(call)
                self._calls.remove(call)
                self._calls.append(call)
            self._calls = deque(call for call in self._calls if call.waiting)
            self._running = kept | {output.request.index: output for output in joining}
            return [output.request for output in joining]

    def _emit(self, rounds: Sequence[Round], began: float) -> None:
        """Send what a round, which began at that time, gave each row to its call."""
        outputs = [self._running[done.index] for done in rounds]
        events = [output.event(done) for output, done in zip(outputs, rounds, strict=True)]
        with self._changed:
            self._last_round = time.monotonic()
            self._busy += self._last_round - began
            self._totals["rounds"] += 1
            for done, output, event in zip(rounds, outputs, events, strict=True):
                if event.is_last:
                    del self._running[output.request.index]
                    self._ended += 1
                if event.chunk is None:
                    self._totals["failures"] += not event.refused
                    continue
                _, drafted, accepted = done.stats.last_round
                emitted = len(done.tokens) + (done.end_id is not None)
                self._totals.update(drafted=drafted, accepted=accepted, emitted=emitted)
        self._send(outputs, events)

    def _fail_running(self) -> None:
        """End the outputs of a batch that has failed."""
        with self._changed:
            outputs, self._running = [*self._running.values()], {}
            self._totals["failures"] += len(outputs)
        self._send(outputs, [Event(output.number, error=FAILED) for output in outputs])

    def _end_all(self, state: State, error: str) -> None:
        """End all outputs, those that wait as well, and take no more; in any thread."""
        with self._changed:
            if self.state not in ("failed", "stopped"):
                self.state = state
            waiting = [output for call in self._calls for output in call.waiting]
            outputs, self._running = [*self._running.values(), *waiting], {}
            for call in self._calls:
                call.waiting.clear()
            self._calls.clear()
            if state == "failed":
                self._totals["failures"] += len(outputs)
            self._changed.notify_all()
        self._send(outputs, [Event(output.number, error=error) for output in outputs])

    def _send(self, outputs: Sequence[Output], events: Sequence[Event]) -> None:
        """Send events to the calls of their outputs, all in one message to the event loop."""

        def put() -> None:
            for output, event in zip(outputs, events, strict=True):
                output.call.queue.put_nowait(event)

        if outputs:
            self._loop.call_soon_threadsafe(put)


def encoded(decoder: SpeculativeDecoder, prompt: Prompt, max_tokens: int) -> list[int]:
    """Return a prompt's ids, for an output of `max_tokens`."""
    try:
        return decoder.fit(prompt, max_tokens).ids
    except PromptTooLong as error:
        raise WrongPrompt(
            f"{error.found}: split the text, or start the server with --truncate"
        ) from error
    except ValueError as error:
        raise WrongPrompt(str(error)) from error


def check_options(options: GenerationOptions) -> None:
    """Refuse what outputs that are sent as they grow, or that come from outside, cannot have."""
    if options.num_beams != 1:
        raise ValueError(
            f"a server has no beam search, got num_beams {options.num_beams}: leave it out"
        )
    if options.scores:
        raise ValueError("a server gives no scores, which need finished outputs: leave scores out")
    if options.logits_processors:
        raise ValueError("a server takes no logits_processors: leave them out")
