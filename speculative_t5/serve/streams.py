"""Responses that come piece by piece, and clients that leave before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Write = Callable[[str], Awaitable[None]]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of work, which is cancelled, for None, once the client has gone."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))  # the work has let go of everything


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_pauses(events: AsyncIterable[T], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield the events as they come, and None whenever none has come for `seconds`."""
    iterator = aiter(events)
    while True:
        coming = asyncio.ensure_future(anext(iterator))
        try:
            while not (await asyncio.wait((coming,), timeout=seconds))[0]:
                yield None
            event = coming.result()
        except StopAsyncIteration:
            return
        finally:
            coming.cancel()
        yield event


class EventStream(Response):
    """Server-sent events, ended as soon as the client has gone.

    Args:
        produce: Writes the events; it is cancelled when the client goes.
        close: Called at the end, whatever it is.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Write], Coroutine[Any, Any, None]],
        *,
        close: Callable[[], None],
    ) -> None:
        self._produce = produce
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}

        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def whole() -> None:
            await send(start)
            await self._produce(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, whole())
        finally:
            self._close()
