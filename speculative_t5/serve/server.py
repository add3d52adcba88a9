"""uvicorn around the application: when it says that it is ready, and how it stops."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from .connections import Connection, raise_file_limit
from .service import Service

KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that they close first
LAST_BYTES = 5  # seconds for clients to read responses that have ended
BACKLOG = 2048  # connections that may wait to be accepted
ACCEPTED = 8  # connections at a time; until one is refused, it is a file that is open


class Server(uvicorn.Server):
    """Answers from the start, by 503 until the service is ready, and while it stops.

    Args:
        app: The application.
        service: What it decodes with; started and stopped here.
        shutdown_seconds: How long running outputs may take once the server is to stop.
        ready: Called once the service is.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        *,
        shutdown_seconds: float = 30.0,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        # What uvicorn logs by default is not set up here: the metrics count requests.
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_BYTES, backlog=ACCEPTED,
        )  # fmt: skip
        super().__init__(config)
        self._service = service
        self._shutdown_seconds = shutdown_seconds
        self._ready = ready
        self._announced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to load."""
        raise_file_limit()
        await super().startup(sockets)
        for listening in sockets or ():  # asyncio takes what it accepts at a time for the backlog
            listening.listen(BACKLOG)
        self._service.start()

    async def on_tick(self, counter: int) -> bool:
        """Look ten times a second whether the service is ready, or has failed for good."""
        if self._service.failure is not None:
            self.should_exit = True
        elif self._service.state == "ready" and not self._announced:
            self._announced = True
            self._ready()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal, and at once at a second one.

        uvicorn would raise the signal again at the end, and the exit code be that of a failure.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running outputs end, answering everybody else by 503; then close."""
        # Loading may take long, as when a model is downloaded, and no output waits for it.
        seconds = 0.0 if self._service.state == "loading" else self._shutdown_seconds
        stopping = asyncio.ensure_future(self._service.stop(seconds))
        while not (await asyncio.wait((stopping,), timeout=0.1))[0]:
            if self.force_exit:
                stopping.cancel()
                await asyncio.wait((stopping,))
        if not stopping.cancelled():
            stopping.result()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        ValueError: If there is no such address here, or another program listens there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # localhost has an address of each family, and clients try the older one in any case.
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # Connections inherit it; asyncio sets it only where a socket names its protocol. Without it
        # the parts of a response wait for each other, about 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(
            f"--host must be an address or a name of this machine, got {host!r}"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            wrong = "is used by another program: choose another --port, or stop that program"
        elif error.errno == errno.EACCES:
            wrong = "is reserved for administrators: choose a --port of at least 1024"
        else:
            wrong = "cannot be listened on: choose a --host that is an address of this machine"
        raise ValueError(f"port {port} of {host} {wrong}") from error
