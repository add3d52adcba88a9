"""What clients receive when a request fails: a status and OpenAI's error object."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

UNREAD_BYTES, UNREAD_SECONDS = 16 * 2**20, 5.0  # of a body, to read after its refusal


class Refused(Exception):
    """Raised for a request that is not answered; the client gets the message.

    Args:
        status: The status of the response.
        message: One line: what was wrong, what was found, what to do.
        param: The field of the request that is wrong.
        code: A word for programs, such as "model_not_found".
        retry_after: After how many seconds the same request may succeed.
        close: Whether the connection ends with the response, as when a body was not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.close = close
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if close:
            self.headers["Connection"] = "close"
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_object(self.status, str(self), self.param, self.code)

    @property
    def response(self) -> Response:
        """The whole response."""
        make = LastResponse if self.close else JSONResponse
        return make(self.body, self.status, self.headers)


class LastResponse(JSONResponse):
    """Answers before a body has been read, and then reads more of it before the connection ends.

    A connection that is closed with something unread is reset, and many clients then lose the
    response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_SECONDS):
                await _skip(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _skip(receive: Receive) -> None:
    """Read the rest of a body, up to `UNREAD_BYTES`."""
    left = UNREAD_BYTES
    while left > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        left -= len(message["body"])


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
