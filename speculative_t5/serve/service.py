"""The service: one thread owns the device and decodes the calls of all others, side by side."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, TypeVar

import mlx.core as mx

from ..decoding import NOTHING_LEFT, PREFETCH_TOKENS, Batch, Request, Round, RowError
from ..errors import first_line
from ..generation import Chunk, Encoder, GenerationOptions, SpeculativeDecoder, as_chunk
from ..options import check_integer
from ..tokenizers import Detokenizer, Prompt, PromptEncoder, PromptTooLong, check_prompts
from .requests import MOST_OUTPUT_TOKENS, Refused
from .threads import SHARED_THREADS

LOADING_SECONDS, STOPPING_SECONDS = 5, 10  # after which to ask again
MAX_RETRY_SECONDS = 60  # to wait for room in the queue, at most
GRACE_SECONDS = 10.0  # for the thread to end after the time for outputs is over
LAST_ROUND_SECONDS = (
    2.0  # seconds for it if there is no time; Python may abort if it exits in a round
)

LONGEST_PREDICTION = 16 * MOST_OUTPUT_TOKENS  # characters of a prediction that are read

DECODING_FAILED = "decoding failed in the server: see its log"
# Why nothing is decoded now; a text that was begun is answered with it, as far as it went.
IS_LOADING = "the model is being loaded"
IS_BROKEN = "the server cannot decode any more"
IS_STOPPING = "the server is stopping"
HAS_STOPPED = "the server stopped before the output had ended"

log = logging.getLogger(__name__)

CURRENT_FIGURES = ("queued", "rows", "jobs", "seconds_since_round")  # figures that are no totals

State = Literal["loading", "ready", "stopping", "failed", "stopped"]
Answer = TypeVar("Answer")


Loaded = SpeculativeDecoder | Encoder
RoundResult = Chunk | Refused  # what a round adds to an output, or why none follows


@dataclass(frozen=True, eq=False)
class CallOutput:
    """One output of a call: its request, and what makes its text as it grows."""

    call: Call
    number: int
    request: Request
    detokenizer: Detokenizer | None


@dataclass(eq=False)
class Call:
    """One request being decoded."""

    sources: list[list[int]]  # ids of each prompt
    left: int  # outputs that have not ended, as far as they have been read
    changed: threading.Condition  # the service's, which guards the next two
    cancelled: bool = False
    waiting: deque[CallOutput] = field(default_factory=deque)  # that have no row yet
    # Results that have not been read, with the numbers of their outputs.
    queue: asyncio.Queue[tuple[int, RoundResult]] = field(default_factory=asyncio.Queue)

    @property
    def prompt_tokens(self) -> int:
        """How many ids all prompts have."""
        return sum(map(len, self.sources))

    async def chunks(
        self, patience: float | None = None
    ) -> AsyncGenerator[tuple[int, Chunk] | None, None]:
        """Yield what rounds add to outputs until all have ended, or the call is cancelled.

        Each chunk comes with the number of its output, the samples of a prompt one after another.
        None comes whenever there has been no round for `patience` seconds. Leaving early, as by an
        error, cancels the call.

        Raises:
            Refused: If an output cannot be decoded, or the options leave it no token.
        """
        try:
            while self.left and not self.cancelled:
                try:
                    async with asyncio.timeout(patience):
                        number, result = await self.queue.get()
                except TimeoutError:
                    yield None
                    continue
                if not isinstance(result, Chunk):
                    raise result
                self.left -= result.finish_reason is not None
                yield number, result
        finally:
            if self.left:
                self.cancel()

    def cancel(self) -> None:
        """End the call; its rows are free within a round."""
        with self.changed:
            self.cancelled = True
            self.waiting.clear()
            self.changed.notify_all()


class Service:
    """Decodes calls in one batch that they join and leave as they come and go.

    Each call has options of its own. What it gets does not depend on its neighbours, up to
    rounding: it is what `SpeculativeDecoder.generate_batch` gives for its prompts with the same
    options.

    `load` makes the decoder, in the thread that owns the device; or an encoder alone, which decodes
    nothing, and only computes. There are `batch_size` rows, of which a steady decoder has one.
    Calls wait in a queue of `max_queue` outputs, and take turns: each gets a row for one of its
    outputs, then the next call does.
    """

    def __init__(
        self, load: Callable[[], Loaded], *, batch_size: int = 16, max_queue: int = 256
    ) -> None:
        self._load = load
        self._batch_size = check_integer("batch_size", batch_size, 1)
        self.max_queue = check_integer("max_queue", max_queue, 1)
        self._loaded: Loaded | None = None
        self._running_in_thread: Future[None] | None = None
        self._numbers = count()  # of outputs, as indices of their requests
        # Guards all that follows; notified when there is something to do or the state changes.
        self._changed = threading.Condition()
        self.state: State = "loading"
        # Why nothing is decoded any more: the error of `load`, or a RuntimeError of one line.
        self.failure: BaseException | None = None
        self._calls: deque[Call] = deque()  # with outputs that wait, the next one first
        # What is computed between rounds, and where the answers go.
        self._jobs: deque[tuple[Future[Any], Callable[[Any], Any]]] = deque()
        self._running: dict[int, CallOutput] = {}  # by the index of the request
        self._deadline = math.inf  # of all outputs, in the time of time.monotonic
        self._last_round: float | None = None  # in the same time
        self._busy, self._ended = 0.0, 0  # seconds of rounds, and outputs that ended in them
        self._totals = Counter(
            rounds=0, drafted=0, accepted=0, emitted=0, prompt_tokens=0, failures=0
        )

    def start(self) -> None:
        """Start to load the model; to be called in the event loop that is to use the service."""
        self._loop = asyncio.get_running_loop()
        self._running_in_thread = SHARED_THREADS.run(self._run)

    @property
    def is_running(self) -> bool:
        """Whether the thread has begun and has not ended."""
        return self._running_in_thread is not None and not self._running_in_thread.done()

    @property
    def loaded(self) -> Loaded:
        """What has been loaded; Refused is raised before."""
        if self._loaded is None:
            raise self._unavailable()
        return self._loaded

    @property
    def decoder(self) -> SpeculativeDecoder:
        """The decoder, once it has been loaded; Refused is raised before, and for an encoder."""
        loaded = self.loaded
        if isinstance(loaded, Encoder):
            raise Refused(
                400,
                f"{loaded.model.name} is an encoder alone, which generates nothing: choose another "
                "model, or use /v1/embeddings",
                param="model",
            )
        return loaded

    def submit(
        self, prompts: Sequence[Prompt], options: GenerationOptions, field: str = "prompt"
    ) -> Call:
        """Let a call join; to be called in the service's event loop.

        Raises:
            Refused: If a prompt is wrong, which comes from this field of the request; if the
                service is not ready; or if the queue has no room, before anything is tokenized.
            ValueError: If an option is wrong.
        """
        check_prompts(prompts)
        options.check_stream(several=True)
        samples = options.num_return_sequences
        wanted = len(prompts) * samples
        if wanted > self.max_queue:
            raise ValueError(
                f"the request asks for {wanted} outputs, and the queue holds {self.max_queue}: "
                "split the request"
            )
        self._check_room(wanted)
        decoder = self.decoder
        sources = fitted(decoder.prompts, prompts, field)
        own = decoder.engine.bind(options)
        call = Call(sources, wanted, self._changed)
        for number in range(wanted):
            source = sources[number // samples]
            request = Request(next(self._numbers), source, own, number)
            detokenizer = options.detokenizer(decoder.tokenizer)
            call.waiting.append(CallOutput(call, number, request, detokenizer))
        with self._changed:
            self._check_room(wanted)  # the state may have changed
            self._totals["prompt_tokens"] += call.prompt_tokens
            self._calls.append(call)
            self._changed.notify_all()
        return call

    async def fitted(self, prompts: Sequence[Prompt], field: str = "prompt") -> list[Prompt]:
        """Return ids for prompts that are long, made in another thread, to be submitted then.

        Errors are those of `submit`.
        """
        check_prompts(prompts)
        self._check_room(min(len(prompts), self.max_queue))
        fit = partial(fitted, self.decoder.prompts, prompts, field)
        return [*await asyncio.wrap_future(SHARED_THREADS.run(fit))]

    async def predicted(self, text: str) -> tuple[int, ...]:
        """Return the ids of what outputs are expected to be, made in another thread.

        There are no more than an output may have.
        """
        engine, text = self.decoder.engine, text[:LONGEST_PREDICTION]
        found = await asyncio.wrap_future(SHARED_THREADS.run(partial(engine.predicted, text)))
        return found[:MOST_OUTPUT_TOKENS]

    def compute(self, job: Callable[[Any], Answer]) -> Future[Answer]:
        """Let the thread that owns the device compute something short, between two rounds.

        The job is given what was loaded.

        Raises:
            Refused: If the service is not ready; the future has it if the service ends before.
        """
        found: Future[Answer] = Future()
        with self._changed:
            if self.state != "ready":
                raise self._unavailable()
            self._jobs.append((found, job))
            self._changed.notify_all()
        return found

    def figures(self) -> dict[str, float]:
        """Return what there is now, and totals since the start, see `app.FIGURE_HELP`."""
        with self._changed:
            found: dict[str, float] = {"queued": self._queued, "rows": len(self._running)}
            found["jobs"] = len(self._jobs)
            found |= self._totals
            if self._last_round is not None:
                found["seconds_since_round"] = time.monotonic() - self._last_round
            return found

    async def stop(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new calls, and end when the others have ended, or in an error after a time.

        As soon as `hurried` returns True, they end in that error after the round. The thread is not
        joined in a helper thread, for which asyncio would wait.
        """
        until = time.monotonic() + seconds
        with self._changed:
            if self.state in ("loading", "ready"):
                self.state = "stopping"
            self._deadline = until
            self._changed.notify_all()
        until += GRACE_SECONDS
        while self.is_running and (now := time.monotonic()) < until:
            if hurried():
                self._deadline = min(self._deadline, now)
                until = min(until, now + LAST_ROUND_SECONDS)
            await asyncio.sleep(0.05)
        self._end("stopped")  # nothing, unless the thread hangs or never began

    def _check_room(self, wanted: int) -> None:
        """Refuse a call of more outputs than the queue has room for."""
        with self._changed:
            if self.state != "ready":
                raise self._unavailable()
            lacking = self._queued + wanted - self.max_queue
            if lacking > 0:
                seconds = math.ceil(lacking * self._busy / max(self._ended, 1))
                seconds = min(max(1, seconds), MAX_RETRY_SECONDS)
                wrong = (
                    f"the queue holds {self.max_queue} outputs, {self._queued} wait already, and "
                    f"the request asks for {wanted}: wait and send the request again"
                )
                headers = {"Retry-After": str(seconds)}
                raise Refused(429, wrong, code="queue_full", headers=headers)

    @property
    def _queued(self) -> int:
        """How many outputs wait for a row."""
        return sum(len(call.waiting) for call in self._calls)

    def _unavailable(self) -> Refused:
        if self.state == "loading":
            headers = {"Retry-After": str(LOADING_SECONDS)}
            message = f"{IS_LOADING}: wait until it is ready"
            return Refused(503, message, reason=IS_LOADING, headers=headers)
        if self.state == "failed":
            return Refused(503, f"{IS_BROKEN}: see its log", reason=IS_BROKEN)
        return stopping()

    # In the thread that owns the device:

    def _run(self) -> None:
        try:
            self._load_and_serve()
            self._end("stopped")
        except BaseException as error:
            # A model whose logits are NaN says so in a line; everything else is a fault here.
            if self._loaded is not None and not isinstance(error, RowError):
                log.exception("the decoding thread has ended")
                error = RuntimeError(first_line(error))
            self.failure = error
            self._end("failed")
        self._forget()

    def _load_and_serve(self) -> None:
        self._loaded = loaded = self._load()
        if isinstance(loaded, SpeculativeDecoder) and loaded.is_steady:
            self._batch_size = 1
        batch = self._warm_up()
        with self._changed:
            if self.state == "loading":
                self.state = "ready"
        self._serve(batch)

    def _forget(self) -> None:
        """Let go of the model here, where its functions were compiled: other threads leave them."""
        self._loaded = None
        gc.collect()
        mx.clear_cache()

    def _warm_up(self) -> Batch | None:
        """Decode a short prompt, greedily and by sampling, and return an empty batch.

        An encoder, which has none, encodes one.
        """
        if isinstance(self.loaded, Encoder):
            self.loaded.vectors([[self.loaded.model.info.eos_token_id]])
            return None
        info = self.decoder.model.info
        prompts = [[info.vocab_size // 2, info.eos_token_id]]
        for temperature in (0.0, 1.0):
            self.decoder.generate_batch(prompts, max_tokens=4, temperature=temperature)
            self._last_round = time.monotonic()
        return Batch(self.decoder.model, self.decoder.engine.plan(expects=True))

    def _serve(self, batch: Batch | None) -> None:
        """Decode until the service is stopped."""
        while self._wait():
            try:
                self._compute()
                if batch:
                    self._decode(batch)
            except Exception:  # the server goes on; the log has it, and callers get errors
                log.exception("a round has failed")
                self._end()
                batch = self._warm_up()

    def _decode(self, batch: Batch) -> None:
        """Let calls join and leave, and decode a round of those that are there."""
        joining = self._join()
        batch.end([row for row in batch.rows if row.index not in self._running])
        batch.add(joining)
        if batch.rows:
            began = time.monotonic()
            self._emit(batch.round(), began)

    def _wait(self) -> bool:
        """Wait for something to decode; return whether there is any, and time for it."""
        with self._changed:
            while not (self._calls or self._running or self._jobs or self.state != "ready"):
                self._changed.wait()
            over = self.state == "stopped" or time.monotonic() >= self._deadline
            return not over and bool(self._calls or self._running or self._jobs)

    def _compute(self) -> None:
        """Do one of the jobs, so that rounds go on between them."""
        with self._changed:
            found, job = self._jobs.popleft() if self._jobs else (None, None)
        if found and job and found.set_running_or_notify_cancel():
            try:
                found.set_result(job(self.loaded))
            except Exception as error:  # it is the caller's, and ends nothing else
                found.set_exception(error)

    def _join(self) -> list[Request]:
        """Forget outputs of cancelled calls, and give free rows to waiting ones.

        Prompts are encoded as they join, while others wait: only some of them join at a time.
        """
        with self._changed:
            kept = {i: output for i, output in self._running.items() if not output.call.cancelled}
            joining: list[CallOutput] = []
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
        results = [*map(result_of, outputs, rounds)]
        with self._changed:
            self._last_round = time.monotonic()
            self._busy += self._last_round - began
            self._totals["rounds"] += 1
            for done, result in zip(rounds, results, strict=True):
                if not isinstance(result, Chunk) or result.finish_reason:
                    del self._running[done.index]
                    self._ended += 1
                if isinstance(result, Chunk):
                    _, drafted, accepted = done.stats.last_round
                    emitted = len(done.tokens) + (done.end_id is not None)
                    self._totals.update(drafted=drafted, accepted=accepted, emitted=emitted)
                else:
                    self._totals["failures"] += result.status == 500
        self._send([*zip(outputs, results, strict=True)])

    def _end(self, state: State | None = None) -> None:
        """End running outputs in an error; with a state, in any thread, those that wait, too."""
        refusal = stopped if state == "stopped" else failed
        with self._changed:
            outputs, self._running = [*self._running.values()], {}
            jobs: list[Future[Any]] = []
            if state:
                outputs += [output for call in self._calls for output in call.waiting]
                self._calls.clear()
                jobs = [found for found, _ in self._jobs]
                self._jobs.clear()
                self.state = self.state if self.state in ("failed", "stopped") else state
                self._changed.notify_all()
            if refusal is failed:
                self._totals["failures"] += len(outputs)
        for found in jobs:
            if found.set_running_or_notify_cancel():
                found.set_exception(refusal())
        self._send([(output, refusal()) for output in outputs])

    def _send(self, results: Sequence[tuple[CallOutput, RoundResult]]) -> None:
        """Send results to the calls of their outputs, all in one message to the event loop."""

        def put() -> None:
            for output, result in results:
                output.call.queue.put_nowait((output.number, result))

        if results:
            self._loop.call_soon_threadsafe(put)


def fitted(reader: PromptEncoder, prompts: Sequence[Prompt], field: str) -> list[list[int]]:
    """Return the ids of prompts, which come from a field of a request; refuse wrong ones."""
    try:
        return [reader.fit(prompt).ids for prompt in prompts]
    except PromptTooLong as error:
        wrong = f"{error.found}: split the text, or start the server with --truncate"
        raise Refused(400, wrong, param=field) from error
    except ValueError as error:
        raise Refused(400, str(error), param=field) from error


def stopping() -> Refused:
    """Return the refusal of a server that stops."""
    headers = {"Retry-After": str(STOPPING_SECONDS)}
    return Refused(503, f"{IS_STOPPING}: use another one", reason=IS_STOPPING, headers=headers)


def failed() -> Refused:
    """Return the refusal of an output that cannot go on by a fault of the server."""
    return Refused(500, DECODING_FAILED)


def stopped() -> Refused:
    """Return the refusal of an output that a server began, and has no time to end."""
    message = f"{HAS_STOPPED}: wait and send the request again"
    return Refused(503, message, reason=HAS_STOPPED)


def result_of(output: CallOutput, done: Round) -> RoundResult:
    """Return what a round adds to an output; a text that cannot be made ends this output alone."""
    if done.error is not None:
        return Refused(400 if done.error == NOTHING_LEFT else 500, done.error)
    try:
        return as_chunk(done, output.detokenizer)
    except Exception:  # it must not end the outputs of other calls
        log.exception("the text of an output cannot be made")
        return failed()
