"""The application: OpenAI's routes, health, metrics and a page, on a `Service`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..errors import shown
from ..generation import Chunk, GenerationOptions
from ..tokenizers import ChatTokenizer, Prompt
from .metrics import Counted, Metrics, Stopwatch
from .page import HEADERS, PAGE
from .requests import (
    Refused,
    Wanted,
    as_refusal,
    check_model,
    last_of_user,
    parse_body,
    parse_messages,
    parse_prompts,
    parse_wanted,
)
from .responses import DONE, Answer, EventStream, Write, as_event, unless_gone
from .server import Guard, check_key, check_site, read_body
from .service import Busy, Call, Event, Service, Unavailable, WrongPrompt

CLIENT_GONE = 499  # only in logs and metrics: there is nobody to receive it
PATHS = {
    "/v1/completions": ("POST", "completions"),
    "/v1/chat/completions": ("POST", "chat"),
    "/v1/models": ("GET", "models"),
    "/health": ("GET", "health"),
    "/metrics": ("GET", "metrics"),
    "/": ("GET", "page"),
}
STALLED = 120.0  # seconds without a round while a request waits


@dataclass(frozen=True)
class Settings:
    """How the application answers.

    Attributes:
        model: The name of the model in requests and responses.
        defaults: The options of requests that do not give them.
        api_keys: One of them must come with each request; without any, none is needed.
        cors_origins: The sites whose pages may ask; "*" is all.
        local: Whether only this machine reaches the server, so that Host headers are checked.
        most_tokens: The most that a request may ask for as `max_tokens`.
        draw_seeds: Whether a request without a seed gets one by chance.
        max_body: The longest body, in bytes.
        body_seconds: How long a body may take.
        ping_seconds: After how long without an event a stream gets a comment.
    """

    model: str
    defaults: GenerationOptions
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    local: bool = True
    most_tokens: int = 4096
    draw_seeds: bool = False
    max_body: int = 2 * 2**20
    body_seconds: float = 30.0
    ping_seconds: float = 15.0


def make_app(service: Service, settings: Settings) -> Starlette:
    """Return the application for a service that is running, or about to."""
    endpoints = Endpoints(service, settings)
    routes = [
        Route(path, getattr(endpoints, name), methods=[method])
        for path, (method, name) in PATHS.items()
    ]
    routes.append(Route("/v1/models/{model:path}", endpoints.model))
    origins = settings.cors_origins
    middleware = [
        Middleware(Counted, metrics=endpoints.measured, endpoints=PATHS),
        Middleware(Guard, check=partial(check_site, local=settings.local, origins=origins)),
    ]
    if origins:  # before the keys, which browsers do not send when they ask whether they may
        methods, exposed = ["GET", "POST"], ["Retry-After"]
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"],
            expose_headers=exposed,
        )  # fmt: skip
        middleware.append(cors)
    if settings.api_keys:
        middleware.append(Middleware(Guard, check=partial(check_key, keys=settings.api_keys)))
    handlers: dict[Any, Any] = dict.fromkeys(
        (Refused, Unavailable, HTTPException, Exception), answer_error
    )
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # paths are as they are
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be answered otherwise."""
    if isinstance(error, Refused):
        return error.response
    if isinstance(error, Unavailable):
        status, code = (429, "queue_full") if isinstance(error, Busy) else (503, None)
        return Refused(status, f"{error}", code=code, retry_after=error.retry_after).response
    if not isinstance(error, HTTPException):  # the server writes it to its log
        return Refused(500, "the server failed to answer: see its log").response
    path, allowed = shown(request.url.path), (error.headers or {}).get("Allow")
    if allowed:
        message = f"{path} does not take {request.method}: use {allowed}"
    else:
        phrase = HTTPStatus(error.status_code).phrase.lower()
        message = (
            f"{request.method} {path} is not a route of this server ({phrase}): "
            f"use {', '.join(PATHS)}"
        )
    return Refused(error.status_code, message, headers=error.headers).response


class Endpoints:
    """What each route does."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings
        self._created = int(time.time())
        self._running: set[Stopwatch] = set()
        self.measured = Metrics(service)

    async def completions(self, request: Request) -> Response:
        """Continue or rewrite one or several prompts."""
        return await self._generate(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._generate(request, chat=True)

    async def models(self, _: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        check_model(request.path_params["model"], self._settings.model)
        return JSONResponse(self._model)

    async def health(self, _: Request) -> Response:
        """Say whether requests are decoded: the thread is ready, and moves while any wait."""
        figures = self._service.figures()
        state: str = figures.state
        since, now = figures.seconds_since_round, time.monotonic()
        waiting = max((now - each.began for each in self._running), default=0.0)
        still = since is None or since > STALLED
        if state == "ready" and figures.queued + figures.rows and waiting > STALLED and still:
            state = "stalled"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        """Show the metrics."""
        return Response(self.measured.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def page(self, _: Request) -> Response:
        """Show the page."""
        return HTMLResponse(PAGE, headers=HEADERS)

    @property
    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model, "object": "model", "created": self._created,
            "owned_by": "speculative_t5",
        }  # fmt: skip

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        settings = self._settings
        body = await read_body(request, settings.max_body, settings.body_seconds)
        if body is None:
            return Response(status_code=CLIENT_GONE)
        fields = parse_body(body)
        wanted = parse_wanted(
            fields, settings.model, settings.defaults, most_tokens=settings.most_tokens,
            draw_seeds=settings.draw_seeds,
        )  # fmt: skip
        prompts = self._of_chat(fields) if chat else parse_prompts(fields)
        call = self._submit(prompts, wanted.options, "messages" if chat else "prompt")
        answer = Answer(
            settings.model, chat=chat, traced=wanted.traced, num_outputs=call.num_outputs,
            prompt_tokens=sum(call.prompt_tokens),
        )  # fmt: skip
        if wanted.stream:
            return EventStream(
                lambda write: self._stream(call, answer, wanted, write),
                close=call.cancel, ping_seconds=settings.ping_seconds,
            )  # fmt: skip
        try:
            whole = await unless_gone(request.receive, self._whole(call, answer))
        finally:
            call.cancel()
        return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)

    def _of_chat(self, fields: dict[str, Any]) -> list[Prompt]:
        """Return the one prompt of a chat: the messages if the model has a template for them."""
        messages = parse_messages(fields)
        decoder = self._service.decoder
        if not decoder.model.is_decoder_only:
            return [last_of_user(messages)]
        tokenizer = decoder.tokenizer
        if not (isinstance(tokenizer, ChatTokenizer) and tokenizer.has_chat_template):
            raise Refused(400, "the model has no chat template: use /v1/completions")
        return [messages]

    def _submit(self, prompts: list[Prompt], options: GenerationOptions, param: str) -> Call:
        try:
            return self._service.submit(prompts, options)
        except ValueError as error:
            wrong = param if isinstance(error, WrongPrompt) else None
            raise as_refusal(error, wrong) from error

    async def _whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        async for _ in self._rounds(call, answer):
            pass
        return answer.whole()

    async def _stream(self, call: Call, answer: Answer, wanted: Wanted, write: Write) -> str:
        """Write the events of a call, and return those that end the stream.

        The last round comes with the end: one write instead of four.
        """
        if opening := answer.opening():
            await write(opening)
        text = ""
        try:
            async with aclosing(self._rounds(call, answer)) as rounds:
                async for index, chunk in rounds:
                    text = answer.round(index, chunk)
                    if not answer.is_whole:
                        await write(text)
        except Refused as failure:
            return as_event(failure.body) + DONE
        return text + (answer.usage() if wanted.usage else "") + DONE

    async def _rounds(self, call: Call, answer: Answer) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield each round of a call with the number of its output, and add it to the answer.

        Raises:
            Refused: If an output fails, or has no end.
        """
        watch = Stopwatch(self.measured)
        self._running.add(watch)
        try:
            async with aclosing(aiter(call)) as events:
                async for event in events:
                    if event.chunk is None:
                        raise self._failure(event)
                    watch.saw_tokens()
                    answer.add(event.output, event.chunk)
                    if answer.is_whole:
                        watch.ended()
                    yield event.output, event.chunk
            if not answer.is_whole:
                raise self._failure(None)
        finally:
            self._running.discard(watch)

    def _failure(self, event: Event | None) -> Refused:
        """Return the refusal for outputs that ended by an error, or without an end."""
        if event and event.refused:
            return Refused(400, event.error or "")
        stopping = self._service.state in ("stopping", "stopped")
        text = event and event.error
        text = text or "decoding ended before the output did: send the request again"
        return Refused(503 if stopping else 500, text)
