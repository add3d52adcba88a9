"""The application: OpenAI's routes, health, metrics and a page, on a `Service`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import shown
from ..generation import Chunk, GenerationOptions
from ..tokenizers import ChatTokenizer, Prompt
from . import requests
from .page import HEADERS, PAGE
from .requests import Refused
from .responses import DONE, PING, Answer, EventStream, as_event, unless_gone
from .server import check_key, check_site, guarded, read_body
from .service import Busy, Call, DecodingFailed, Service, Unavailable, WrongPrompt

CLIENT_GONE = 499  # only in logs and metrics: there is nobody to receive it
COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
PATHS = (COMPLETIONS, CHAT, MODELS, "/health", "/metrics", "/")
PREFIX = "speculative_t5_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Figures of the service: what there is now, and totals without the warm-up.
GAUGES = ("queued", "rows", "seconds_since_round")
HELP = {
    "queued": "Outputs that wait for a row.",
    "rows": "Outputs being decoded.",
    "rounds": "Passes of the target, each for all rows together.",
    "drafted": "Tokens that were drafted.",
    "accepted": "Drafted tokens that were accepted and emitted.",
    "emitted": "Tokens that were emitted, EOS included.",
    "prompt_tokens": "Tokens of prompts.",
    "failures": "Outputs that ended because decoding failed.",
    "seconds_since_round": "Seconds since the last pass of the target, if there was one.",
}
STALLED = 120.0  # seconds without a round while a request waits


@dataclass(frozen=True)
class Settings:
    """How the application answers."""

    model: str  # its name in requests and responses
    defaults: GenerationOptions  # of requests that do not give them
    api_keys: Sequence[str] = ()  # one must come with each request; without any, none is needed
    cors_origins: Sequence[str] = ()  # the sites whose pages may ask; "*" is all
    local: bool = True  # whether only this machine reaches the server: Host headers are checked
    draw_seeds: bool = False  # whether a request without a seed gets a random one
    max_body: int = 2 * 2**20  # bytes
    body_seconds: float = 30.0  # that a body may take
    ping_seconds: float = 15.0  # without an event, after which a stream gets a comment


def make_app(service: Service, settings: Settings) -> Starlette:
    """Return the application for a service that is running, or about to."""
    endpoints = Endpoints(service, settings)
    origins = settings.cors_origins
    middleware = [
        Middleware(counted, registry=endpoints.registry),
        Middleware(guarded, check=partial(check_site, local=settings.local, origins=origins)),
    ]
    if origins:  # before the keys, which browsers do not send when they ask whether they may
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["Retry-After"],
        )  # fmt: skip
        middleware.append(cors)
    if settings.api_keys:
        middleware.append(Middleware(guarded, check=partial(check_key, keys=settings.api_keys)))
    errors = (Refused, Unavailable, ClientDisconnect, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(errors, answer_error)
    app = Starlette(routes=endpoints.routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # paths are as they are
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be answered otherwise."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, Unavailable):
        status, code = (429, "queue_full") if isinstance(error, Busy) else (503, None)
        after = error.retry_after
        headers = None if after is None else {"Retry-After": str(after)}
        error = Refused(status, f"{error}", code=code, headers=headers)
    elif isinstance(error, HTTPException):
        path, allowed = shown(request.url.path), (error.headers or {}).get("Allow")
        message = f"{path} does not take {request.method}: use {allowed}"
        if not allowed:
            phrase = HTTPStatus(error.status_code).phrase.lower()
            message = (
                f"{request.method} {path} is not a route of this server ({phrase}): "
                f"use {', '.join(PATHS)}"
            )
        error = Refused(error.status_code, message, headers=error.headers)
    elif not isinstance(error, Refused):  # the server writes it to its log
        error = Refused(500, "the server failed to answer: see its log")
    return error.response


class Endpoints(Collector):
    """What each route does; as a collector, it turns the service's figures into metrics."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings
        self._model = {
            "id": settings.model, "object": "model", "created": int(time.time()),
            "owned_by": "speculative_t5",
        }  # fmt: skip
        self._began: dict[Call, float] = {}  # in the time of time.monotonic
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(self)
        timed = partial(prometheus.Histogram, buckets=SECONDS, registry=self.registry)
        self._first_token = timed(
            f"{PREFIX}first_token_seconds", "From a request to the first tokens of its outputs."
        )
        self._whole_request = timed(
            f"{PREFIX}request_seconds", "From a request to the end of its outputs."
        )
        self.routes = [
            Route(COMPLETIONS, partial(self._generate, chat=False), methods=["POST"]),
            Route(CHAT, partial(self._generate, chat=True), methods=["POST"]),
            Route(MODELS, self._models),
            Route(MODELS + "/{model:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/", self._page),
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are figures of the service."""
        figures, ready = self._service.figures(), float(self._service.state == "ready")
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 if requests are decoded.", value=ready)
        for name, value in figures.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(PREFIX + name, HELP[name], value=value)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def _one_model(self, request: Request) -> Response:
        requests.check_model(request.path_params["model"], self._settings.model)
        return JSONResponse(self._model)

    async def _health(self, _: Request) -> Response:
        """Say whether requests are decoded: the thread is ready, and moves while any wait."""
        state: str = self._service.state
        figures, now = self._service.figures(), time.monotonic()
        waiting = max((now - began for began in self._began.values()), default=0.0)
        still = min(waiting, figures.get("seconds_since_round", waiting)) > STALLED
        if state == "ready" and figures["queued"] + figures["rows"] and still:
            state = "stalled"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def _metrics(self, _: Request) -> Response:
        text = prometheus.generate_latest(self.registry)
        return Response(text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        settings = self._settings
        body = await read_body(request, settings.max_body, settings.body_seconds)
        fields = requests.parse_body(body)
        options = requests.parse_options(
            fields, settings.model, settings.defaults, draw_seeds=settings.draw_seeds
        )
        prompts = self._of_chat(fields) if chat else requests.parse_prompts(fields)
        try:
            call = self._service.submit(prompts, options)
        except ValueError as error:
            field = "messages" if chat else "prompt"
            param = field if isinstance(error, WrongPrompt) else None
            raise requests.as_refusal(error, param) from error
        answer = Answer(
            settings.model, chat=chat, traced=fields.get("speculative_t5", False),
            num_outputs=call.num_outputs, prompt_tokens=sum(call.prompt_tokens),
        )  # fmt: skip
        if fields.get("stream"):
            usage = fields.get("stream_options", {}).get("include_usage")
            return EventStream(self._parts(call, answer, usage=usage), close=call.cancel)
        try:
            return JSONResponse(await unless_gone(request.receive, self._whole(call, answer)))
        finally:
            call.cancel()

    def _of_chat(self, fields: dict[str, Any]) -> list[Prompt]:
        """Return the one prompt of a chat: the messages if the model has a template for them."""
        messages = requests.parse_messages(fields)
        decoder = self._service.decoder
        if not decoder.model.info.is_decoder_only:
            return [requests.last_of_user(messages)]
        tokenizer = decoder.tokenizer
        if not (isinstance(tokenizer, ChatTokenizer) and tokenizer.has_chat_template):
            raise Refused(400, "the model has no chat template: use /v1/completions")
        return [messages]

    async def _whole(self, call: Call, answer: Answer) -> dict[str, Any]:
        async for _ in self._rounds(call, answer):
            pass
        return answer.whole()

    async def _parts(
        self, call: Call, answer: Answer, *, usage: bool | None
    ) -> AsyncGenerator[tuple[str, bool], None]:
        """Yield the parts of a stream, and whether more will come.

        The last round comes with the end: one write instead of four.
        """
        if opening := answer.opening():
            yield opening, True
        text = ""
        try:
            async with aclosing(self._rounds(call, answer, self._settings.ping_seconds)) as rounds:
                async for added in rounds:
                    text = answer.round(*added) if added else PING
                    if not answer.is_whole:
                        yield text, True
                        text = ""
            text += answer.usage() if usage else ""
        except Refused as failure:
            text = as_event(failure.body)
        yield text + DONE, False

    async def _rounds(
        self, call: Call, answer: Answer, patience: float | None = None
    ) -> AsyncGenerator[tuple[int, Chunk] | None, None]:
        """Add each round to the answer and yield it as `Call.chunks` does.

        Raises:
            Refused: If an output cannot be decoded.
        """
        self._began[call] = began = time.monotonic()
        is_first = True
        try:
            async with aclosing(call.chunks(patience)) as chunks:
                async for added in chunks:
                    if added:
                        if is_first:
                            self._first_token.observe(time.monotonic() - began)
                        is_first = False
                        answer.add(*added)
                        if answer.is_whole:
                            self._whole_request.observe(time.monotonic() - began)
                    yield added
        except DecodingFailed as error:
            stopping = self._service.state in ("stopping", "stopped")
            raise Refused(503 if stopping else 500, f"{error}") from error
        except ValueError as error:
            raise Refused(400, f"{error}") from error
        finally:
            del self._began[call]


def counted(app: ASGIApp, registry: prometheus.CollectorRegistry) -> ASGIApp:
    """Count responses by endpoint and status, those of the guards included."""
    answered = prometheus.Counter(
        f"{PREFIX}requests", "Requests that were answered.", ["endpoint", "status"],
        registry=registry,
    )  # fmt: skip

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, watched)
        finally:
            # A path below an endpoint counts with it; others are one, or clients could name many.
            path = scope["path"]
            known = MODELS if path.startswith(f"{MODELS}/") else path
            answered.labels(known if known in PATHS else "other", str(status)).inc()

    return count
