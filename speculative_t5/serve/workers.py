"""The processes that work on whole texts, as the server has them: started, lent, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import first_line
from .requests import Refused
from .service import stopping

MOST_SHORT, MOST_LONG = 4, 3  # processes for texts; each takes about 120 MB
NICE_SHORT, NICE_LONG = 5, 15  # the server goes first, and then short texts
MOST_WAITING = 64  # short texts, and as many long ones, that may wait for one
IDLE_SHORT, IDLE_LONG = 2, 1  # processes that are kept while there is nothing to do
FAIR_SECONDS = 5.0  # that a process may compute while others wait for one and none is free
LEAVING_SECONDS = 2.0  # for a process to end a text whose answer nobody waits for any more
GOING_ON_SECONDS = 2.0  # that a process may go on computing when the server stops
BUSY_SECONDS = 5  # after which to ask again
WAITING_LOOK = 0.1  # seconds between two looks at those who wait
LAST_KINDS = ("answer", "refused", "failed")  # what the last message about a text begins with
CLIENT_HAS_LEFT = Refused(499, "the client has left: send the request again").keywords
SERVER_STOPS = "the server is stopping"

# The length of a message as multiprocessing's connections have it: one of 2 GB and more after -1.
MESSAGE_HEAD, LONG_MESSAGE_HEAD = struct.Struct("!i"), struct.Struct("!Q")
# The child gets the server's own path, as multiprocessing's processes do.
WORKER_CODE = """
import sys
sys.path[:] = {path!r}
from speculative_t5.serve.text_worker import work_on_texts
work_on_texts()
"""

log = logging.getLogger(__name__)


class Unfinished(Exception):
    """Raised where the work on a text is cut short; its message says why."""


def default_command() -> list[str]:
    """Return the command of a process, to which the number of its socket is added."""
    return [sys.executable, "-c", WORKER_CODE.format(path=sys.path)]


def start_process(command: Sequence[str], number: int) -> subprocess.Popen[bytes]:
    """Start a process that has a socket by its number."""
    computes_nothing = {
        "OMP_NUM_THREADS": "1",
        "SPECULATIVE_T5_NATIVE": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [*command, str(number)],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the server
        env=os.environ | computes_nothing,
    )


class Worker:
    """One process, its socket, and how long it has computed for its present text."""

    def __init__(self, command: Sequence[str], *, is_long: bool) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                nice = NICE_LONG if is_long else NICE_SHORT
                self._process = start_process([*command, str(nice)], theirs.fileno())
        except OSError:
            ours.close()
            raise
        self._socket = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.num_models = 0  # of which it has been told what they do
        self.known: dict[str, int] = {}  # those whose facts it has, and of which loading
        self.cut_for: str | None = None  # why it was ended
        self.is_long = is_long  # whether its texts are
        self.owes = False  # whether it has a text whose last message has not come
        self.asks = False  # whether it waits for a reply
        self.is_ready = False  # whether it has said that it can be told of a text
        self._size: int | None = None  # of the message that is being read, once it is known
        self._computed, self._since = 0.0, math.inf  # seconds for this text; since when it goes on

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def seconds(self) -> float:
        """How long it has computed for its present text, without what the server did for it."""
        return self._computed + self.going_on

    @property
    def going_on(self) -> float:
        """For how long the server has waited for its next message."""
        return max(0.0, time.monotonic() - self._since)

    async def begin(self) -> None:
        """Wait until it is ready, and count what it computes from here on."""
        self._computed = 0.0
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._socket)
        if not self.is_ready:
            await self._read()
            self.is_ready = True

    def cut(self, reason: str) -> None:
        """End the process; who waits for it gets Unfinished with the reason."""
        self.cut_for = self.cut_for or reason
        self._process.kill()

    def send(self, kind: str, value: Any) -> None:
        """Send a message; this does not wait until the process has read it."""
        assert self._streams
        self.owes, self.asks = self.owes or kind == "text", False
        data = pickle.dumps((kind, value))
        if len(data) > 0x7FFFFFFF:
            head = MESSAGE_HEAD.pack(-1) + LONG_MESSAGE_HEAD.pack(len(data))
        else:
            head = MESSAGE_HEAD.pack(len(data))
        self._streams[1].write(head + data)

    async def receive(self) -> tuple[Any, ...]:
        """Return its next message.

        Raises:
            Unfinished: If it was ended from here.
            EOFError: If it ended by itself.
        """
        self._since = time.monotonic()
        try:
            found: tuple[Any, ...] = pickle.loads(await self._read())
        finally:
            self._computed, self._since = self.seconds, math.inf
        self.owes = found[0] not in LAST_KINDS
        self.asks = self.owes and found[0] != "part"
        return found

    async def _read(self) -> bytes:
        """Return the bytes of a message; whoever is cancelled here may be followed by another."""
        assert self._streams
        reader, _ = self._streams
        try:
            if self._size is None:
                (self._size,) = MESSAGE_HEAD.unpack(await reader.readexactly(MESSAGE_HEAD.size))
            if self._size < 0:
                (self._size,) = LONG_MESSAGE_HEAD.unpack(
                    await reader.readexactly(LONG_MESSAGE_HEAD.size)
                )
            data = await reader.readexactly(self._size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if self.cut_for:
                raise Unfinished(self.cut_for) from error
            raise EOFError(f"process {self.pid} has ended") from error
        self._size = None
        return data

    async def close(self) -> None:
        """End the process and its socket, and wait for that."""
        self._process.kill()
        if self._streams:
            self._streams[1].close()
        else:
            self._socket.close()
        while self.is_alive:
            await asyncio.sleep(0.01)


@dataclass(eq=False)
class Waiting:
    """A text that waits for a process."""

    is_long: bool
    worker: asyncio.Future[Worker] = field(default_factory=asyncio.Future)


class Workers:
    """Lends processes to texts, one each, in the order in which they come.

    Those for long texts have a lower priority than those for short ones. All are started when they
    are needed; with `ahead` there is always one for a short text that waits. Where all are lent and
    a text waits, one that has only computed for `FAIR_SECONDS` is ended.
    """

    def __init__(self, *, ahead: bool = False, command: Sequence[str] | None = None) -> None:
        self._ahead, self._command = ahead, command or default_command()
        self._idle: deque[Worker] = deque()
        self._lent: set[Worker] = set()
        self._waiting: deque[Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()  # that end the work on texts, or processes
        self._is_stopping = False

    def start(self) -> None:
        """Start a process, so that the first text does not wait for it."""
        self._start_ahead()

    @contextlib.asynccontextmanager
    async def lent(self, *, is_long: bool) -> AsyncIterator[Worker]:
        """Lend a process for the block.

        Raises:
            Refused: If too many texts wait, the server stops, or no process can be started.
        """
        worker = await self._take(is_long)
        try:
            await _begin(worker)
            yield worker
        finally:
            self._begin(self._take_back(worker))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, is_long: bool) -> Worker:
        if self._is_stopping:
            raise stopping()
        if sum(waiting.is_long == is_long for waiting in self._waiting) >= MOST_WAITING:
            raise Refused(
                503,
                f"{MOST_WAITING} texts wait already: wait and send the request again",
                headers={"Retry-After": str(BUSY_SECONDS)},
            )
        waiting = Waiting(is_long)
        self._waiting.append(waiting)
        self._grant()
        try:
            while not waiting.worker.done():
                await asyncio.wait((waiting.worker,), timeout=WAITING_LOOK)
                self._make_way()
            return waiting.worker.result()
        except asyncio.CancelledError:
            if waiting.worker.done() and not waiting.worker.exception():
                self._lent.discard(worker := waiting.worker.result())
                self._idle.append(worker)
                self._grant()
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _grant(self) -> None:
        """Give processes to those who wait, as far as there are any."""
        for waiting in [*self._waiting]:
            try:
                worker = self._free_one(waiting.is_long)
            except OSError as error:
                waiting.worker.set_exception(_not_started(error))
            else:
                if worker is None:
                    continue
                self._lent.add(worker)
                waiting.worker.set_result(worker)
            self._waiting.remove(waiting)
        self._start_ahead()

    def _free_one(self, is_long: bool) -> Worker | None:
        """Return a process that has nothing to do, a new one if need be and there may be more.

        The last one that came back is surely ready.
        """
        for worker in [each for each in reversed(self._idle) if each.is_long == is_long]:
            self._idle.remove(worker)
            if worker.is_alive:
                return worker
            self._begin(worker.close())
        lent = sum(worker.is_long == is_long for worker in self._lent)
        may_start = lent < (MOST_LONG if is_long else MOST_SHORT)
        return Worker(self._command, is_long=is_long) if may_start else None

    def _start_ahead(self) -> None:
        """Start a process for the next short text, if none waits for it."""
        short = [worker for worker in (*self._idle, *self._lent) if not worker.is_long]
        waits = any(worker in self._idle for worker in short)
        if self._ahead and not waits and len(short) < MOST_SHORT and not self._is_stopping:
            with contextlib.suppress(OSError):  # who needs it is told
                self._idle.append(Worker(self._command, is_long=False))

    def _make_way(self) -> None:
        """End a process that has only computed for some time, if a text waits for it."""
        for is_long in (False, True):
            waiting = sum(each.is_long == is_long for each in self._waiting)
            lent = [worker for worker in self._lent if worker.is_long == is_long]
            going_on = [worker for worker in lent if not worker.cut_for]
            if len(lent) - len(going_on) >= waiting:  # enough of them end
                continue
            slowest = max(going_on, key=lambda worker: worker.going_on)
            if slowest.going_on > FAIR_SECONDS:
                slowest.cut("it held up other texts")

    async def _take_back(self, worker: Worker) -> None:
        """Let a process be lent again, once it has ended the work on a text."""
        try:
            async with asyncio.timeout(LEAVING_SECONDS):
                while worker.owes and not worker.cut_for:
                    if worker.asks:
                        worker.send("refused", CLIENT_HAS_LEFT)
                    await worker.receive()
        except (TimeoutError, Unfinished, EOFError):
            worker.cut(SERVER_STOPS)
        except Exception:  # or the pool would wait for it for ever
            log.exception("a process for texts sends what cannot be read")
            worker.cut(SERVER_STOPS)
        # A client that left while the socket was opened has closed it.
        usable = worker.is_alive and worker.is_ready and not (worker.owes or worker.cut_for)
        idle = sum(each.is_long == worker.is_long for each in self._idle)
        kept = IDLE_LONG if worker.is_long else IDLE_SHORT
        if not usable or self._is_stopping or idle >= kept and not self._waiting:
            await worker.close()
        else:
            self._idle.append(worker)
        self._lent.discard(worker)
        self._grant()

    async def stop(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Refuse new texts, and end when the others have ended.

        The rest is cut short after a time, at once if `hurried` returns True, and earlier where a
        process computes and waits for no output.
        """
        self._is_stopping = True
        for waiting in self._waiting:
            waiting.worker.set_exception(stopping())
        self._waiting.clear()
        until = time.monotonic() + seconds
        while self._lent:
            late = hurried() or time.monotonic() >= until
            for worker in self._lent:
                if late or worker.going_on > GOING_ON_SECONDS:
                    worker.cut(SERVER_STOPS)
            await asyncio.sleep(0.05)
        await asyncio.gather(*(worker.close() for worker in self._idle), *self._tasks)
        self._idle.clear()


async def _begin(worker: Worker) -> None:
    try:
        await worker.begin()
    except Unfinished as error:
        raise stopping() from error
    except EOFError as error:
        log.error("a process for texts cannot be started: %s", error)
        raise Refused(500, "the server failed to answer: see its log") from error


def _not_started(error: OSError) -> Refused:
    return Refused(
        503,
        f"no process for the text can be started ({first_line(error)}): wait and send the request "
        "again",
        headers={"Retry-After": str(BUSY_SECONDS)},
    )
