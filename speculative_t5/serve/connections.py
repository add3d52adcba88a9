"""Connections: how many there may be, how long one may keep the server waiting, whose turn it is.

uvicorn closes a connection by a timer only after a response, and any byte stops that timer: one
that is silent, or sends its head byte by byte, would stay open for ever, and so would one that
reads no answer. Once a process has no file left, nobody else is answered. What `Connection` reads
and overrides is in part private to uvicorn; the tests of it fail when uvicorn changes that.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .requests import Refused

WANTED_FILES = 8192  # to allow this process, if its hard limit is not lower
# Files that are no connections that `Gate` has let in; a quarter of all, if that is more.
RESERVED_FILES = 80
MIN_CONNECTIONS = 16  # connections, however few files there may be
MAX_LINGERING = 16  # refused connections that may stay until their client has sent its request
LINGER_SECONDS = 1.0  # for which they may
SWEEP_SECONDS = 1.0
LOG_SECONDS = 60.0  # between two lines that say there are no files
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # of accept

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How long a connection may keep the server waiting, in seconds, and what else bounds it."""

    connections: int = 1024  # at a time
    head: float = 10.0  # for the head of a request, from its first byte or the connection's start
    rest: float = 10.0  # for the rest of a body whose request has been answered
    rest_bytes: int = 2**20  # of that rest, which are dropped: clients read answers after sending
    body_bytes: int = 2 * 2**20  # of it where a request may have a body, beside these
    unread: float = 30.0  # in which the client reads nothing of what has been sent to it
    patience: float = 0.1  # after which a connection that keeps the server waiting makes room


class Gate:
    """What the connections of a server share; its methods are called in the event loop.

    Requests that a client sends before it has the answer to an earlier one take turns, one in each
    pass of the event loop, so that they hold up nobody else. Where there are too many connections,
    the one makes room that has for the longest time kept the server waiting, for a head, a body or
    to read an answer, or has waited for such a turn. Where that is less than `patience` seconds,
    the newest is refused.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refused = 0  # connections
        self._all: set[Connection] = set()
        # Refused ones that stay until their client has sent its request, in order.
        self._refusing: dict[Connection, None] = {}
        # Since when connections could make room, in the time of time.monotonic, in order.
        self._waiting: dict[Connection, float] = {}
        self._turns: deque[Connection] = deque()

    def enter(self, connection: Connection) -> None:
        """Take in a new connection, or refuse it."""
        self._all.add(connection)
        if len(self._all) - len(self._refusing) <= self.limits.connections or self._make_room():
            self.wait(connection)
            return
        self.refused += 1
        if len(self._refusing) == MAX_LINGERING:
            first = next(iter(self._refusing))
            self.leave(first)
            first.end()
        self._refusing[connection] = None
        connection.refuse()

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        self._all.discard(connection)
        self._refusing.pop(connection, None)
        self._waiting.pop(connection, None)

    def wait(self, connection: Connection) -> None:
        """Note that a connection could make room from now on, or still can."""
        if connection in self._all:
            self._waiting.setdefault(connection, time.monotonic())

    def work(self, connection: Connection) -> None:
        """Note that a connection is answered and stays."""
        self._waiting.pop(connection, None)

    def _make_room(self) -> bool:
        connection, since = next(iter(self._waiting.items()), (None, 0.0))
        if connection is None or time.monotonic() - since < self.limits.patience:
            return False
        self.leave(connection)
        connection.end()
        return True

    def take_turn(self, connection: Connection) -> None:
        """Let a connection's next request begin in one of the next passes of the event loop."""
        self._turns.append(connection)
        if len(self._turns) == 1:
            connection.loop.call_soon(self._give_turn)

    def _give_turn(self) -> None:
        connection = self._turns.popleft()
        if self._turns:
            connection.loop.call_soon(self._give_turn)
        connection.go_on()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """End, every second, the connections that have kept the server waiting for too long."""
        loop.call_later(SWEEP_SECONDS, self.start, loop)
        now = time.monotonic()
        for connection in [*self._all]:
            connection.check(now)


class Connection(H11Protocol):
    """A connection that a gate lets in, and that ends when its client lets it wait too long."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        gate: Gate,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._gate = gate
        # In the time of time.monotonic: since when the head, the rest of a body and reading take.
        self._head: float | None = None
        self._rest: float | None = None
        self._unread: float | None = None
        self._unsent = 0  # bytes at the last check
        self._dropped = 0  # bytes of the rest of a body
        self._refused = self._has_turn = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, unless the gate refuses the connection."""
        super().connection_made(transport)
        self._head = time.monotonic()
        self._gate.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the gate."""
        self._gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what comes, but only so much of what is dropped."""
        if self._refused:  # what the client wanted; now it reads why it gets no answer
            self.transport.close()
            return
        if self._rest is not None:
            self._dropped += len(data)
            limits, may_have = self._gate.limits, self.scope["method"] == "POST"
            if self._dropped > limits.rest_bytes + may_have * limits.body_bytes:
                self.end()
                return
        super().data_received(data)

    def handle_events(self) -> None:
        """Begin requests; the next one of several takes its turn."""
        if self._has_turn:
            return
        super().handle_events()
        self._note()

    def on_response_complete(self) -> None:
        """Go on with the client's next request in its turn."""
        self._has_turn = True
        super().on_response_complete()
        self._has_turn = False
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._has_turn = True
            self.flow.pause_reading()
            self._gate.take_turn(self)
        self._note()

    def go_on(self) -> None:
        """Begin the request whose turn it is."""
        self._has_turn = False
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.handle_events()

    def _note(self) -> None:
        """Note whether the connection could make room, and how long its head and body take."""
        now = time.monotonic()
        answering = self.cycle is not None and not self.cycle.response_complete
        receives = self.conn.their_state is h11.SEND_BODY
        if answering and not receives and not self.flow.write_paused:
            self._gate.work(self)
        else:
            self._gate.wait(self)
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        if answering or receives or self._has_turn or not begun:
            self._head = None
        else:
            self._head = self._head or now
        self._rest = (self._rest or now) if receives and not answering else None
        if self._rest is None:
            self._dropped = 0

    def pause_writing(self) -> None:
        """Note that the client has to read."""
        super().pause_writing()
        self._note()

    def resume_writing(self) -> None:
        """Note that it has read."""
        super().resume_writing()
        self._note()

    def check(self, now: float) -> None:
        """End the connection if its client has taken too long for anything."""
        limits, unsent = self._gate.limits, self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._unread = None
        elif self._unread is None:
            self._unread = now
        self._unsent = unsent
        if self._unread is not None and now - self._unread >= limits.unread:
            self.transport.abort()  # closing would wait until all has been read
        elif self._refused and self._head and now - self._head >= LINGER_SECONDS:
            self.end()
        elif self._head and now - self._head >= limits.head:
            self.late()
        elif self._rest and now - self._rest >= limits.rest:
            self.end()

    def end(self) -> None:
        """Close the connection, without waiting for a client that does not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def late(self) -> None:
        """Close the connection because no head has come; if a part of one has, say so."""
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            wrong = f"the head did not arrive in {self._gate.limits.head:g} seconds: send it again"
            self._answer(Refused(408, wrong))
        self.end()

    def refuse(self) -> None:
        """Answer that there are too many connections; the request itself is not heeded."""
        self._refused = True
        most, headers = self._gate.limits.connections, {"Retry-After": "1"}
        wrong = f"the server has {most} connections, which is the most: wait and try again"
        self._answer(Refused(503, wrong, code="too_many_connections", headers=headers))

    def _answer(self, refused: Refused) -> None:
        """Send an answer to no request."""
        response = refused.response
        headers = [*response.raw_headers, (b"connection", b"close")]
        body = h11.Data(data=bytes(response.body))
        for event in (h11.Response(status_code=refused.status, headers=headers), body):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or only close the connection if there is an answer already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.end()


def raise_file_limit() -> int:
    """Let this process open more files, and return how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS may have a limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft


def most_connections(files: int) -> int:
    """Return how many connections a process may have that may open a number of files."""
    return max(MIN_CONNECTIONS, files - max(RESERVED_FILES, files // 4))


class Quiet:
    """Handles what asyncio reports: that there is no file for a connection by a line a minute.

    asyncio then tries again after a second, several times, and each fails if the server has been
    closed by then; that says nothing to anybody.
    """

    def __init__(self) -> None:
        self._said = -LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ValueError) and "_start_serving" in context.get("message", ""):
            log.debug("the server was closed while it waited to accept again")
        elif not (isinstance(error, OSError) and error.errno in NO_FILES):
            loop.default_exception_handler(dict(context))
        elif loop.time() - self._said >= LOG_SECONDS:
            self._said = loop.time()
            log.warning("no connection can be accepted (%s): raise ulimit -n", error.strerror)
