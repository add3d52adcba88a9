"""What clients receive when a request fails: a status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse


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
    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, self.headers)


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
