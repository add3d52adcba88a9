"""Responses that come piece by piece, and clients that leave before the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Write = Callable[[str], Awaitable[None]]
PING = ": ping\n\n"


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


class EventStream(Response):
    """Server-sent events, ended as soon as the client has gone.

    Args:
        produce: Writes the events, and returns the last of them, which are sent with the end of the
            response; it is cancelled when the client goes.
        close: Called at the end, whatever it is.
        ping_seconds: After how long without an event there is a comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Write], Coroutine[Any, Any, str]],
        *,
        close: Callable[[], None],
        ping_seconds: float,
    ) -> None:
        self._produce = produce
        self._close = close
        self._ping_seconds = ping_seconds
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        """Send the response, with a comment whenever nothing else has been sent for a while."""
        now = asyncio.get_running_loop().time
        latest, sending = now(), asyncio.Lock()

        async def write(text: str, more: bool = True) -> None:
            nonlocal latest
            latest = now()
            body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            async with sending:
                await send(body)

        async def ping() -> None:
            while True:
                await asyncio.sleep(max(0.0, latest + self._ping_seconds - now()))
                if now() - latest >= self._ping_seconds:
                    await write(PING)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pinging = asyncio.create_task(ping())
        try:
            last = await self._produce(write)
        finally:
            pinging.cancel()
            await asyncio.wait((pinging,))
        await write(last, more=False)
