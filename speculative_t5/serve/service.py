"""The interface of the service that decodes for all clients; its implementation goes here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..generation import Chunk, GenerationOptions, SpeculativeDecoder
from ..tokenizers import Prompt

State = Literal["loading", "ready", "stopping", "failed", "stopped"]


class Busy(Exception):
    """Raised when the queue is full."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(Exception):
    """Raised while loading, when stopping, and after a failure."""

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Event:
    """One round of one output of a call."""

    output: int
    chunk: Chunk | None = None
    error: str | None = None


@dataclass(frozen=True)
class Figures:
    """Totals since the start."""

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


class Call(Protocol):
    """One request being decoded."""

    prompt_tokens: list[int]
    num_outputs: int

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def cancel(self) -> None: ...


class Service:
    """Decodes for all clients in one thread."""

    state: State
    failure: str | None
    decoder: SpeculativeDecoder

    def __init__(
        self,
        load: Callable[[], SpeculativeDecoder],
        *,
        batch_size: int = 16,
        max_queue: int = 256,
    ) -> None: ...

    def start(self) -> None: ...

    def submit(self, prompts: Sequence[Prompt], options: GenerationOptions) -> Call:
        raise NotImplementedError

    def figures(self) -> Figures:
        raise NotImplementedError

    async def stop(self, seconds: float) -> None: ...
