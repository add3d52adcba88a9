"""What callers of a `Service` hold: a call, its events, and why there may be none."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..decoding import Request, Round
from ..generation import Chunk, ChunkMaker

FAILED = "decoding failed in the server: see its log"

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stopping", "failed", "stopped"]


class Busy(Exception):
    """The queue is full.

    Attributes:
        retry_after: Seconds until there should be room for the call.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WrongPrompt(ValueError):
    """There is something wrong with a prompt."""


class Unavailable(Exception):
    """The service is loading, is stopping or has failed; the message is one clear line.

    Attributes:
        retry_after: Seconds after which to ask again; None where that would not help.
    """

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
    """Totals since the start, without rehearsals.

    Attributes:
        queued: Outputs that wait for a row.
        rows: Outputs that are being decoded.
        rounds: Passes of the target, each for all rows together.
        drafted: Tokens proposed.
        accepted: Proposed tokens that were accepted and emitted.
        emitted: Tokens emitted, EOS included.
        prompt_tokens: Of all calls that were accepted.
        failures: Outputs that ended because decoding failed.
        seconds_since_round: Since the end of the last round, rehearsals included; None before it.
    """

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


class Output:
    """One output of a call: its request, and its text as it grows."""

    def __init__(self, call: Call, number: int, request: Request, maker: ChunkMaker) -> None:
        self.call = call
        self.number = number
        self.request = request
        self._maker = maker

    def event(self, done: Round) -> Event:
        """Return the event of a round; a text that cannot be made is a failure of this output."""
        if done.error is not None:
            return Event(self.number, error=done.error, refused=True)
        try:
            return Event(self.number, self._maker.chunk(done))
        except Exception:  # it must not end the outputs of other calls
            log.exception("the text of an output cannot be made")
            return self.failed(FAILED)

    def failed(self, error: str) -> Event:
        """Return the event of a failure."""
        return Event(self.number, error=error)


class Call:
    """One request being decoded: an asynchronous iterator over the events of its outputs.

    It ends when all outputs have ended, or when the call is cancelled. Leaving the iteration early
    cancels it.

    Attributes:
        prompt_tokens: Number of ids of each prompt.
        num_outputs: Samples of all prompts together.
        cancelled: Whether `cancel` has been called.
        waiting: The outputs that have no row yet; guarded by the service's lock.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        prompt_tokens: list[int],
        num_outputs: int,
        forget: Callable[[Call], None],
    ) -> None:
        self.loop = loop
        self.prompt_tokens = prompt_tokens
        self.num_outputs = num_outputs
        self.cancelled = False
        self.waiting: deque[Output] = deque()
        self._forget = forget
        self._left = num_outputs  # that have not ended; of the event loop's thread
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: cancelled

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        try:
            while self._left:
                event = await self._events.get()
                if event is None:
                    return
                self._left -= event.is_last
                yield event
        finally:
            if self._left:
                self.cancel()

    def cancel(self) -> None:
        """End the call from any thread, once; its rows are free within a round."""
        if not self.cancelled:
            self.cancelled = True
            self._forget(self)
            post(self.loop, self._events.put_nowait, None)

    def put(self, event: Event) -> None:
        """Take an event; called in the event loop's thread."""
        self._events.put_nowait(event)


def deliver(events: Iterable[tuple[Output, Event]]) -> None:
    """Send events to the calls of their outputs: one message to each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Event]]] = {}
    for output, event in events:
        by_loop.setdefault(output.call.loop, []).append((output.call, event))
    for loop, own in by_loop.items():
        if not post(loop, _put_all, own):
            for call, _ in own:
                call.cancelled = True  # nobody listens


def _put_all(events: Sequence[tuple[Call, Event]]) -> None:
    for call, event in events:
        call.put(event)


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], argument: object) -> bool:
    """Call a function in a loop's thread; return False if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True
