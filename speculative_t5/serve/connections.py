"""Connections that end when no request comes, and only as many as there are files for.

uvicorn closes a connection by a timer only after a response, and any byte stops that timer: one
that is silent, or sends a head byte by byte, would stay open for ever. Once the process has no file
left, asyncio fills the log with errors of accept. What `Connection` overrides and reads is in part
private to uvicorn; a test of it fails when uvicorn changes that.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30  # for a request's head, and for the rest of a body after its response
FILES = 8192  # to allow this process, if its hard limit is not lower
RESERVE = 64  # files that are not connections, and connections about to be refused
LEAST = 16  # connections, however few files there may be


class Connection(H11Protocol):
    """Closes itself when it has nothing to answer for too long while a request comes in."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if there are too many, or wait for its first request."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._close_later()

    def data_received(self, data: bytes) -> None:
        """Stop the timer if there is something to answer; otherwise let it run."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._close_never()
        else:
            self._close_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave no timer behind."""
        self._close_never()
        super().connection_lost(exc)

    def _close_later(self) -> None:
        if self._closing is None:
            self._closing = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _close_never(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or only close the connection if there is an answer already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        """Answer in HTTP/1.1 whatever else is offered; uvicorn would log two lines each time."""
        return False


def raise_file_limit() -> None:
    """Let this process open more files, each connection being one; never fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS may have a limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Return how many connections there may be at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(LEAST, (FILES if soft == resource.RLIM_INFINITY else soft) - RESERVE)
