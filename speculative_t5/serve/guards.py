"""What stands before the routes, as plain ASGI: the site that asks, the API key, the body's size.

Starlette's BaseHTTPMiddleware would hide from the routes that a client has gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import not_utf8, shown
from .refusals import Refused

PUBLIC = ("/", "/health")  # without a key


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


class SiteGuard:
    """Refuses requests that a browser makes for another site.

    A page anywhere may let its own name point to 127.0.0.1, and then reads what the server here
    answers; the Host header still has that name. And it may send a request blindly, of which
    browsers say that it is cross-site.

    Args:
        app: The application behind it.
        local: Whether the server is reached from this machine only, where Host is checked.
        origins: The sites that may ask; "*" is all.
    """

    def __init__(self, app: ASGIApp, *, local: bool, origins: Collection[str] = ()) -> None:
        self._app = app
        self._local = local
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        await (refused.response if refused else self._app)(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if self._local and not is_local_name(headers.get("host", "localhost")):
            return Refused(
                403, f"the Host header is {shown(headers['host'])}, and this server answers only "
                "to names of its own machine: use localhost, or start it with another --host",
            )  # fmt: skip
        if is_foreign(headers) and scope["method"] == "POST" and not {
            "*", headers.get("origin"),
        }.intersection(self._origins):  # fmt: skip
            origin = headers.get("origin")
            site = f"the site {shown(origin)}" if origin else "another site"
            return Refused(
                403, f"the request comes from {site}, which may not use this server: give "
                "its origin with --cors-origin when starting the server",
            )  # fmt: skip
        return None


def is_foreign(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin sends the request.

    Another port of this machine is one, too. Where it does not say so, its Origin has another host
    than the one that is asked.
    """
    if site := headers.get("sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def is_local_name(host: str) -> bool:
    """Whether a Host header names this machine, with any port."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # of brackets, say
        return False


class KeyGuard:
    """Refuses requests without one of the API keys, except for what is public."""

    def __init__(self, app: ASGIApp, *, keys: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in PUBLIC
        refused = None
        if guarded and not self._knows(Headers(scope=scope).get("authorization", "")):
            refused = Refused(
                401, "the API key is missing or is not valid here: send a valid one as "
                "Authorization: Bearer KEY", code="invalid_api_key",
            )  # fmt: skip
        await (refused.response if refused else self._app)(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # as headers are read
        # All are compared, each in constant time.
        right = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(right) and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> list[str]:
    """Read API keys from a file, one per line; blank lines and those that begin with # have none.

    Raises:
        ValueError: If the file has no key, or a line that cannot be one.
        OSError: If it cannot be read.
    """
    try:
        lines = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is {not_utf8(error)}") from error
    keys = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not line.isascii() or not line.isprintable() or " " in line:
            raise ValueError(
                f"line {number} of {path} is not a key: write one key per line, in printable ASCII "
                "without spaces"
            )
        keys.append(line)
    if not keys:
        raise ValueError(f"{path} has no API key: write one per line, or leave out --api-key-file")
    return keys


async def read_body(request: Request, most: int, seconds: float) -> bytes | None:
    """Read the body of a request; return None if the client has gone.

    Raises:
        Refused: If the body has more than `most` bytes or does not arrive within `seconds`.
    """
    too_large = Refused(
        413, f"the body has more than {most:,} bytes: split the request",
        code="request_too_large", close=True,
    )  # fmt: skip
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        raise Refused(
            408, f"the body did not arrive in {seconds:g} seconds: send it again", close=True
        ) from error
    except ClientDisconnect:
        return None
    return b"".join(parts)


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what is no origin, which a browser would never send.

    Raises:
        ValueError: If there is one.
    """
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (origin != f"{parts.scheme}://{parts.netloc}" or not parts.netloc):
            raise ValueError(
                f"--cors-origin must be *, or a scheme and a host such as https://example.org, "
                f"got {origin!r}"
            )
