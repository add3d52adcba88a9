"""The application: OpenAI's routes and answers, health, metrics and a page, on a `Service`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
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
from . import languagetool, libretranslate, requests
from .bodies import BodyReader
from .completions import ANSWER_OF_PATH, Completion, as_event
from .models import MODELS_PATH, Models, Served
from .page import PAGE_HEADERS, PAGE_HTML
from .requests import Refused
from .server import check_key, check_site, guarded, path_of, tidied, unless_gone
from .service import CURRENT_FIGURES, Call
from .settings import Settings
from .text_routes import LANGUAGE_ROUTES, TEXT_ROUTES, TextEndpoints
from .vectors import EMBEDDINGS, RANKINGS, VectorEndpoints

STOPPED_WITHIN = 10.0  # seconds that running outputs may take when another server stops
LONG_BODY = 20_000  # bytes of a body from which prompts are long
CLIENT_GONE = 499  # only in logs and metrics: there is nobody to receive it
METRIC_PREFIX = "speculative_t5_"
SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Figures of services: what there is now, and totals without the warm-up.
FIGURE_HELP = {
    "queued": "Outputs that wait for a row.",
    "rows": "Outputs being decoded.",
    "jobs": "Parts of embeddings and rankings that wait.",
    "rounds": "Passes of the target, each for all rows together.",
    "drafted": "Tokens that were drafted.",
    "accepted": "Drafted tokens that were accepted and emitted.",
    "emitted": "Tokens that were emitted, EOS included.",
    "prompt_tokens": "Tokens of prompts.",
    "failures": "Outputs that ended because decoding failed.",
    "seconds_since_round": "Seconds since the last pass of the target, if there was one.",
}

DONE_EVENT = "data: [DONE]\n\n"
PING_EVENT = ": ping\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def make_app(models: Models, settings: Settings, *, waits: bool = False) -> Starlette:
    """Return the application for models that are being loaded, or about to be.

    It is plain ASGI: a server other than ours starts and stops the models by its lifespan, whose
    start waits for the first model if it `waits`, and fails if that cannot be loaded. Otherwise
    requests get status 503 until then.
    """
    endpoints = Endpoints(models, settings)
    origins = settings.cors_origins
    middleware = [
        Middleware(of_requests(tidied)),
        Middleware(of_requests(counted), registry=endpoints.registry),
        Middleware(
            of_requests(guarded),
            check=partial(check_site, local=settings.local, origins=origins, others=TEXT_ROUTES),
        ),
    ]
    if origins:  # before the keys, which browsers do not send when they ask whether they may
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
        middleware.append(cors)
    if settings.api_keys:
        check = partial(check_key, keys=settings.api_keys, others=TEXT_ROUTES)
        middleware.append(Middleware(of_requests(guarded), check=check))
    errors = (Refused, ClientDisconnect, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(errors, answer_error)
    app = Starlette(
        routes=endpoints.routes,
        middleware=middleware,
        exception_handlers=handlers,
        lifespan=partial(started, models, waits),
    )
    app.router.redirect_slashes = False  # they are tidied
    return app


@contextlib.asynccontextmanager
async def started(models: Models, waits: bool, _: Starlette) -> AsyncIterator[None]:
    """Start the models for a server that asks for it, and stop them with it: any but `Server`.

    uvicorn heeds no signal until this has yielded, and listens then.
    """
    models.start()
    try:
        if waits:
            await models.loaded()
        yield
    finally:
        await models.stop(STOPPED_WITHIN)


def of_requests(middleware: Callable[..., ASGIApp]) -> Callable[..., ASGIApp]:
    """Let a middleware see requests over HTTP alone; what else ASGI has, as a lifespan, passes."""

    def made(app: ASGIApp, **options: Any) -> ASGIApp:
        own = middleware(app, **options)

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            await (own if scope["type"] == "http" else app)(scope, receive, send)

        return call

    return made


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be answered otherwise."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        path, allowed = shown(path_of(request.scope)), (error.headers or {}).get("Allow")
        method = request.method if len(request.method) < 10 else shown(request.method)
        message = f"{path} does not take {method}: use {allowed}"
        if not allowed:
            message = (
                f"{method} {path} is not a route of this server ({error.detail.lower()}): "
                f"use {', '.join(KNOWN_PATHS)}"
            )
        error = Refused(error.status_code, message, headers=error.headers)
    elif not isinstance(error, Refused):  # the server writes it to its log
        error = Refused(500, "the server failed to answer: see its log")
    return error.response


class Endpoints(Collector):
    """What each route does; as a collector, it turns the services' figures into metrics."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models = models
        self._settings = settings
        self._created = int(time.time())
        self._bodies = BodyReader(settings)
        texts = TextEndpoints(models, settings, self._bodies)
        self._began: dict[Call, float] = {}  # in the time of time.monotonic
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(self)
        timed = partial(prometheus.Histogram, buckets=SECONDS_BUCKETS, registry=self.registry)
        self._first_token = timed(
            f"{METRIC_PREFIX}first_token_seconds",
            "From a request to the first tokens of its outputs.",
        )
        self._whole_request = timed(
            f"{METRIC_PREFIX}request_seconds", "From a request to the end of its outputs."
        )
        outputs = [
            Route(path, partial(self._generate, kind), methods=["POST"])
            for path, kind in ANSWER_OF_PATH.items()
        ]
        whole_texts = [
            Route(path, partial(texts.answer, path), methods=route.methods)
            for path, route in TEXT_ROUTES.items()
        ]
        vectors = VectorEndpoints(models, self._bodies)
        rankings = [Route(path, vectors.rank, methods=["POST"]) for path in RANKINGS]
        languages = [Route(path, partial(texts.languages, path)) for path in LANGUAGE_ROUTES]
        self.routes = [
            *outputs,
            *whole_texts,
            *languages,
            Route(EMBEDDINGS, vectors.embed, methods=["POST"]),
            *rankings,
            Route(MODELS_PATH, self._all_models),
            Route(MODELS_PATH + "/{model:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/", self._page),
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are figures of the services."""
        figures, ready = self._models.figures(), float(self._models.state == "ready")
        yield GaugeMetricFamily(f"{METRIC_PREFIX}ready", "1 if requests are decoded.", value=ready)
        for name, value in figures.items():
            family = GaugeMetricFamily if name in CURRENT_FIGURES else CounterMetricFamily
            yield family(METRIC_PREFIX + name, FIGURE_HELP[name], value=value)

    async def _all_models(self, _: Request) -> Response:
        try:
            tokenizers = await self._models.tokenizers()
        except Refused:  # their names are known all the same
            tokenizers = {}
        models = self._models.models.values()
        found = [self._described(each, tokenizers.get(each.name)) for each in models]
        return JSONResponse({"object": "list", "data": found})

    async def _one_model(self, request: Request) -> Response:
        served = self._models.find(request.path_params["model"])
        return JSONResponse(self._described(served, await served.tokenizer()))

    def _described(self, served: Served, tokenizer: Any) -> dict[str, Any]:
        """Return what there is to know of a model, and in which languages it does what.

        Of one whose tokenizer cannot be had, which is None, there is none that it does anything in.
        """
        corrected = [] if tokenizer is None else languagetool.languages_corrected(tokenizer)
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "speculative_t5",
            "loaded": served.service is not None and not served.is_loading,
            "corrects": [*dict.fromkeys(each["code"] for each in corrected)],
            "translates": []
            if tokenizer is None
            else libretranslate.languages_translated(tokenizer),
        }

    async def _health(self, _: Request) -> Response:
        """Say whether requests are decoded."""
        state = self._models.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def _metrics(self, _: Request) -> Response:
        text = prometheus.generate_latest(self.registry)
        return Response(text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(PAGE_HTML, headers=PAGE_HEADERS)

    async def _generate(self, kind: type[Completion], request: Request) -> ASGIApp:
        """Let a request's call join, and return what sends its answer."""
        settings = self._settings
        body = await self._bodies.read(request)
        async with contextlib.AsyncExitStack() as stack:
            try:
                fields = requests.parse_body(body)
                served = self._models.find(fields.get("model"))
                service = await stack.enter_async_context(self._models.use(served))
                prompts, prediction = None, requests.parse_prediction(fields)
                ids = await service.predicted(prediction) if prediction else ()
                if len(body) >= LONG_BODY:  # others would wait for its tokens
                    prompts = await service.fitted(kind.prompts(fields, service), kind.field)
                answer = kind(fields, served.name, service, settings, prompts, ids)
            except ValueError as error:
                raise requests.as_refusal(error) from error
            return partial(self._answer, answer, stack.pop_all())

    async def _answer(
        self,
        answer: Completion,
        stack: contextlib.AsyncExitStack,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send an answer, whole or as a stream; its call ends with it or with its client."""
        self._began[answer.call] = time.monotonic()
        try:
            if answer.streams:
                with contextlib.suppress(ClientDisconnect):
                    await unless_gone(receive, self._stream(answer, send))
            else:
                await unless_gone(receive, self._decode(answer))
                await JSONResponse(answer.whole())(scope, receive, send)
        finally:
            answer.call.cancel()
            del self._began[answer.call]
            await stack.aclose()

    async def _stream(self, answer: Completion, send: Send) -> None:
        """Send events; the last round comes with the end: one write instead of four."""

        async def write(text: str, *, more: bool = True) -> None:
            body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            await send(body)

        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        if opening := answer.opening():
            await write(opening)
        try:
            text = await self._decode(answer, write) + answer.closing()
        except Refused as failure:
            text = as_event(failure.body)
        await write(text + DONE_EVENT, more=False)

    async def _decode(
        self, answer: Completion, write: Callable[[str], Awaitable[None]] | None = None
    ) -> str:
        """Add each round to the answer; write its events as well, but return those of the last."""
        began, events = self._began[answer.call], ""
        async for added in answer.call.chunks(self._settings.ping_seconds if write else None):
            if added:
                if not any(answer.chunks):
                    self._first_token.observe(time.monotonic() - began)
                await answer.add(*added)
            if write:
                events = answer.round(*added) if added else PING_EVENT
                if answer.call.left:
                    await write(events)
        self._whole_request.observe(time.monotonic() - began)
        return events


KNOWN_PATHS = (
    *ANSWER_OF_PATH,
    *TEXT_ROUTES,
    *LANGUAGE_ROUTES,
    EMBEDDINGS,
    *RANKINGS,
    MODELS_PATH,
    "/health",
    "/metrics",
    "/",
)


def counted(app: ASGIApp, registry: prometheus.CollectorRegistry) -> ASGIApp:
    """Count responses by endpoint and status, those of the guards included."""
    answered = prometheus.Counter(
        f"{METRIC_PREFIX}requests",
        "Requests that were answered.",
        ["endpoint", "status"],
        registry=registry,
    )

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
            path = path_of(scope)
            known = MODELS_PATH if path.startswith(f"{MODELS_PATH}/") else path
            answered.labels(known if known in KNOWN_PATHS else "other", str(status)).inc()

    return count
