"""uvicorn around the application: who may ask, which connections last, how it starts and stops.

The guards are plain ASGI: Starlette's BaseHTTPMiddleware would hide from the routes that a client
has gone.
"""

import asyncio
import errno
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import decoded, shown
from ..options import OptionError
from .connections import Connection, Gate, Limits, Quiet, most_connections, raise_file_limit
from .models import Models
from .requests import Refused

PUBLIC_PATHS = ("/", "/health", "/languages", "/v2/languages")  # without a key
KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that they close first
LAST_BYTES = 5  # seconds for clients to read responses that have ended
MAX_BACKLOG = 2048  # connections that may wait to be accepted
# Connections at a time: each is a file for some passes of the event loop before `Gate` sees it.
ACCEPTED_AT_ONCE = 8

Worked = TypeVar("Worked")


class Server(uvicorn.Server):
    """Answers from the start, by 503 until the first model is ready, and while it stops.

    The models are started and stopped here; running outputs may take `shutdown_seconds` then.
    `ready` is called once the first one is. There are at most as many connections as the limits
    say, and fewer if this process may not open that many files.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        *,
        shutdown_seconds: float,
        ready: Callable[[], None],
        limits: Limits | None = None,
    ) -> None:
        self.gate = Gate(limits or Limits())
        http: Any = partial(Connection, gate=self.gate)  # uvicorn calls it as it does a class
        # What uvicorn logs by default is not set up here: the metrics count requests. Warnings are
        # a line for each client that sends what is no HTTP, or offers another protocol.
        config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_BYTES,
            backlog=ACCEPTED_AT_ONCE,
        )
        super().__init__(config)
        self._models, self._shutdown_seconds = models, shutdown_seconds
        self._ready: Callable[[], None] | None = ready  # until it has been called

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to load."""
        limits = self.gate.limits
        most = min(limits.connections, most_connections(raise_file_limit()))
        self.gate.limits = replace(limits, connections=most)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(Quiet())
        self.gate.start(loop)
        await super().startup(sockets)
        for listening in sockets or ():  # asyncio takes what it accepts at a time for the backlog
            listening.listen(MAX_BACKLOG)
        self._models.start()

    async def on_tick(self, counter: int) -> bool:
        """Look ten times a second whether the model is ready, or has failed for good."""
        if self._models.failure is not None:
            self.should_exit = True
        elif self._models.state == "ready" and self._ready:
            self._ready()
            self._ready = None
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal, and at once at a second one.

        uvicorn would raise the signal again at the end, and the exit code be that of a failure.
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running outputs end, answering everybody else by 503; then close."""
        await self._models.stop(self._shutdown_seconds, hurried=lambda: self.force_exit)
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; what is not free here is refused."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # localhost has an address of each family, and clients try the older one in any case.
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listening = socket.create_server(address[:2], family=family, backlog=MAX_BACKLOG)
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def guarded(app: ASGIApp, check: Callable[[Scope, Headers], None]) -> ASGIApp:
    """Refuse what a check refuses, which sees a request's scope and headers."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check(scope, Headers(scope=scope))
        except Refused as refused:
            await refused.response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guard


def tidied(app: ASGIApp) -> ASGIApp:
    """Answer at a path whatever slashes are doubled in it, or at its end.

    Clients append a path to the address that they are given, which may end with a slash.
    """

    async def tidy(scope: Scope, receive: Receive, send: Send) -> None:
        path = "/" + "/".join(filter(None, path_of(scope).split("/")))
        await app({**scope, "path": scope.get("root_path", "") + path}, receive, send)

    return tidy


def path_of(scope: Scope) -> str:
    """Return the path of a request below where the application is mounted, as ASGI has it."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def check_site(
    scope: Scope,
    headers: Headers,
    *,
    local: bool,
    origins: Collection[str] = (),
    others: Collection[str] = (),
) -> None:
    """Refuse requests that a browser makes for another site.

    A page anywhere may let its own name point to 127.0.0.1, and then reads what the server here
    answers; the Host header still has that name. And it may send a request blindly, which
    browsers mark as cross-site. This is for POST, and for any method at the paths `others`.
    """
    if local and not is_local_name(headers.get("host", "localhost")):
        raise Refused(
            403,
            f"the Host header is {shown(headers['host'])}, and this server answers only "
            "to names of its own machine: use localhost, or start it with another --host",
        )
    origin = headers.get("origin")
    if site := headers.get("sec-fetch-site"):  # another port of this machine is another site
        foreign = site not in ("same-origin", "none")
    else:  # of a browser that does not say so
        foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
    works = scope["method"] == "POST" or path_of(scope) in others  # and does not only tell
    if works and foreign and not ("*" in origins or origin in origins):
        whose = f"the site {shown(origin)}" if origin else "another site"
        raise Refused(
            403,
            f"the request comes from {whose}, which may not use this server: give "
            "its origin with --cors-origin when starting the server",
        )


def key_of(headers: Headers, keys: Collection[str], given: str = "") -> str | None:
    """Return the API key that a request has, in its headers or as what was given, if any."""
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    found = [given.encode()]
    if scheme.lower() == "bearer":
        found.insert(0, rest.strip().encode("latin-1"))  # as headers are read
    # All are compared, each in constant time.
    had = [key for each in found for key in keys if hmac.compare_digest(each, key.encode()) and key]
    return had[0] if had else None


def check_key(
    scope: Scope, headers: Headers, *, keys: Collection[str], others: Collection[str] = ()
) -> None:
    """Refuse requests without one of the API keys.

    Left out is what is public, and the `others`, whose bodies may have the key.
    """
    if path_of(scope) not in (*PUBLIC_PATHS, *others) and key_of(headers, keys) is None:
        raise Refused(
            401,
            "the API key is missing or is not valid here: send a valid one as "
            "Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def is_local_name(host: str) -> bool:
    """Whether a Host header names this machine, with any port."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # of brackets, say
        return False


def is_key(key: object) -> bool:
    """Whether something can be an API key."""
    return (
        isinstance(key, str)
        and key != ""
        and key.isascii()
        and key.isprintable()
        and " " not in key
    )


def check_keys(keys: Sequence[object]) -> None:
    """Refuse API keys that no request could have, or every one has."""
    if isinstance(keys, str) or not all(map(is_key, keys)):
        raise OptionError(
            "{api_keys} must be a list of texts in printable ASCII without spaces, got others: "
            "leave it out where no key is needed"
        )


def read_keys(path: Path) -> list[str]:
    """Read API keys from a file, one per line; blank lines and comments (#) are skipped."""
    keys = []
    lines = decoded(path.read_bytes(), str(path)).splitlines()
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not is_key(line):
            raise ValueError(
                f"line {number} of {path} is not a key: write one key per line, in printable ASCII "
                "without spaces"
            )
        keys.append(line)
    if not keys:
        raise ValueError(f"{path} has no API key: write one per line, or leave out --api-key-file")
    return keys


async def unless_gone(receive: Receive, work: Awaitable[Worked]) -> Worked:
    """Return what work returns; once the client has gone, cancel it and raise ClientDisconnect."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))  # the work has let go of everything


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what is no origin, which a browser would never send."""
    if isinstance(origins, str):
        raise OptionError("{cors_origins} must be a list of sites, got {!r}: give a list", origins)
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (origin != f"{parts.scheme}://{parts.netloc}" or not parts.netloc):
            raise ValueError(
                f"--cors-origin must be *, or a scheme and a host such as https://example.org, "
                f"got {origin!r}"
            )
