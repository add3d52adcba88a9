"""The application: OpenAI's routes and answers, health, metrics and a page, on a `Service`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
from . import languagetool, libretranslate, logprobs, requests
from .models import Models, Served
from .page import HEADERS, PAGE
from .requests import Refused
from .server import check_key, check_site, guarded, is_key, read_body
from .service import NOW, Call, Service
from .texts import Remote, parse_fields

Found = TypeVar("Found")

CLIENT_GONE = 499  # only in logs and metrics: there is nobody to receive it
MODELS = "/v1/models"
PREFIX = "speculative_t5_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Figures of services: what there is now, and totals without the warm-up.
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
MOST_TEXTS = 64  # whole texts being answered; further ones wait

REASONS: dict[str | None, str] = {"eos": "stop", "stop": "stop", "length": "length"}
STATISTICS = ("rounds", "drafted", "accepted", "emitted", "seconds")
DONE = "data: [DONE]\n\n"
PING = ": ping\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Settings:
    """How the application answers."""

    defaults: GenerationOptions  # of requests that do not give them
    api_keys: Sequence[str] = ()  # one must come with each request; without any, none is needed
    cors_origins: Sequence[str] = ()  # the sites whose pages may ask; "*" is all
    local: bool = True  # whether only this machine reaches the server: Host headers are checked
    draw_seeds: bool = False  # whether a request without a seed gets a random one
    max_body: int = 2 * 2**20  # bytes
    body_seconds: float = 30.0  # that a body may take
    ping_seconds: float = 15.0  # without an event, after which a stream gets a comment


def make_app(models: Models, settings: Settings) -> Starlette:
    """Return the application for models that are being loaded, or about to be."""
    endpoints = Endpoints(models, settings)
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
        check = partial(check_key, keys=settings.api_keys, others=TEXTS)
        middleware.append(Middleware(guarded, check=check))
    errors = (Refused, ClientDisconnect, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(errors, answer_error)
    app = Starlette(routes=endpoints.routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # paths are as they are
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be answered otherwise."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):
        path, allowed = shown(request.url.path), (error.headers or {}).get("Allow")
        message = f"{path} does not take {request.method}: use {allowed}"
        if not allowed:
            message = (
                f"{request.method} {path} is not a route of this server ({error.detail.lower()}): "
                f"use {', '.join(PATHS)}"
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
        self._threads = ThreadPoolExecutor(MOST_TEXTS, "texts")
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
            *(Route(path, partial(self._generate, kind), methods=["POST"])
              for path, kind in ANSWERS.items()),
            *(Route(path, partial(self._answer_text, path), methods=["POST"]) for path in TEXTS),
            *(Route(path, partial(self._languages, path)) for path in LANGUAGES),
            Route(MODELS, self._all_models),
            Route(MODELS + "/{model:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/", self._page),
        ]  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are figures of the services."""
        figures, ready = self._models.figures(), float(self._models.state == "ready")
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 if requests are decoded.", value=ready)
        for name, value in figures.items():
            family = GaugeMetricFamily if name in NOW else CounterMetricFamily
            yield family(PREFIX + name, HELP[name], value=value)

    async def _all_models(self, _: Request) -> Response:
        found = [await self._described(each) for each in self._models.models.values()]
        return JSONResponse({"object": "list", "data": found})

    async def _one_model(self, request: Request) -> Response:
        served = self._models.find(request.path_params["model"])
        return JSONResponse(await self._described(served))

    async def _described(self, served: Served) -> dict[str, Any]:
        """Return what there is to know of a model, and in which languages it does what."""
        tokenizer = await served.tokenizer()
        return {
            "id": served.name, "object": "model", "created": self._created,
            "owned_by": "speculative_t5", "loaded": served.service is not None,
            "corrects": [*dict.fromkeys(e["code"] for e in languagetool.languages(tokenizer))],
            "translates": libretranslate.languages(tokenizer),
        }  # fmt: skip

    async def _languages(self, path: str, _: Request) -> Response:
        found: dict[str, Any] = {}
        for served in self._models.models.values():
            for each in LANGUAGES[path](await served.tokenizer()):
                found.setdefault(each.get("longCode", each["code"]), each)
        return JSONResponse([*found.values()])

    async def _health(self, _: Request) -> Response:
        """Say whether requests are decoded."""
        state = self._models.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def _metrics(self, _: Request) -> Response:
        text = prometheus.generate_latest(self.registry)
        return Response(text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    async def _generate(self, kind: type[Completion], request: Request) -> ASGIApp:
        """Let a request's call join, and return what sends its answer."""
        settings = self._settings
        body = await read_body(request, settings.max_body, settings.body_seconds)
        async with contextlib.AsyncExitStack() as stack:
            try:
                fields = requests.parse_body(body)
                served = self._models.find(fields.get("model"))
                service = await stack.enter_async_context(self._models.use(served))
                answer = kind(fields, served.name, service, settings)
            except ValueError as error:
                raise requests.as_refusal(error) from error
            return partial(self._answer, answer, stack.pop_all())

    async def _answer_text(self, path: str, request: Request) -> Response:
        """Answer for a whole text, in a thread that the decoding of others does not wait for."""
        settings = self._settings
        body = await read_body(request, settings.max_body, settings.body_seconds)
        remote = None
        try:
            fields = parse_fields(body, request.headers.get("content-type", ""))
            keys, given = settings.api_keys, (fields.get("api_key") or fields.get("apiKey") or "")
            if keys and not is_key(request.headers, keys, given=str(given)):
                raise Refused(403, "the API key is missing or is not valid here: send a valid one")
            async with self._models.use(await self._chosen(path, fields)) as service:
                remote = Remote(service, service.decoder)
                work = partial(TEXTS[path][0], fields, remote)
                thread = asyncio.get_running_loop().run_in_executor(self._threads, work)
                return JSONResponse(await unless_gone(request.receive, thread))
        except (Refused, ValueError) as error:  # in the form that clients of these routes show
            refused = error if isinstance(error, Refused) else requests.as_refusal(error)
            return JSONResponse({"error": str(refused)}, refused.status, refused.headers)
        finally:
            if remote:
                remote.leave()

    async def _chosen(self, path: str, fields: dict[str, Any]) -> Served:
        """Return the model that a request for a text names, or the first that can answer it."""
        if "model" in fields:
            return self._models.find(fields["model"])
        _, fits, languages = TEXTS[path]
        able = []
        for served in self._models.models.values():
            tokenizer = await served.tokenizer()
            if await asyncio.to_thread(fits, fields, tokenizer):
                return served
            if languages(tokenizer):
                able.append(served)
        if not able:
            raise Refused(404, f"no model of this server does what {path} is for: see {MODELS}")
        return able[0]  # which says what it lacks

    async def _answer(
        self, answer: Completion, stack: contextlib.AsyncExitStack,
        scope: Scope, receive: Receive, send: Send,
    ) -> None:  # fmt: skip
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
        await write(text + DONE, more=False)

    async def _decode(
        self, answer: Completion, write: Callable[[str], Awaitable[None]] | None = None
    ) -> str:
        """Add each round to the answer; write its events as well, but return those of the last."""
        began, events = self._began[answer.call], ""
        async for added in answer.call.chunks(self._settings.ping_seconds if write else None):
            if added:
                if not any(answer.chunks):
                    self._first_token.observe(time.monotonic() - began)
                number, chunk = added
                answer.chunks[number].append(chunk)
            if write and not (added and answer.top is not None):
                events = answer.round(*added) if added else PING
                if answer.call.left:
                    await write(events)
        if answer.top is not None:  # all rounds come with the end
            await answer.explain()
        if write and answer.top is not None:
            events = "".join(
                answer.round(i, chunk) for i, each in enumerate(answer.chunks) for chunk in each
            )
        self._whole_request.observe(time.monotonic() - began)
        return events


class Completion:
    """Lets a request join, and makes the response to it, whole or as the events of a stream.

    This is OpenAI's protocol for completions. Choices show tokens with their origins, and the
    statistics so far, if the request says so. `completion_tokens` counts what was emitted, EOS
    included, as `Stats.emitted` does.
    """

    field = "prompt"  # of a request, with what is to be decoded
    prefix, kind, part_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, fields: dict[str, Any], model: str, service: Service, settings: Settings
    ) -> None:
        options = requests.parse_options(fields, settings.defaults, draw_seeds=settings.draw_seeds)
        self._service, self._samples = service, options.num_return_sequences
        self.top = requests.number_of_top(fields, chat=self.field == "messages")
        self.call = service.submit(self.prompts(fields, service), options, self.field)
        self.chunks: list[list[Chunk]] = [[] for _ in range(self.call.left)]
        self.streams = fields.get("stream", False)
        self._closes = fields.get("stream_options", {}).get("include_usage")
        self._explained: list[list[logprobs.Token]] = []  # of each output, if they are asked for
        self._shown = [0] * self.call.left  # tokens of each output in the events so far
        self._traced = fields.get("speculative_t5", False)
        self._about = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }

    def prompts(self, fields: dict[str, Any], service: Service) -> list[Prompt]:
        return requests.parse_prompts(fields)

    def output(self, text: str) -> dict[str, Any]:
        """Return what a choice has of an output that has ended."""
        return {"text": text}

    def likely(self, tokens: Sequence[logprobs.Token]) -> dict[str, Any]:
        """Return what a choice has of the probabilities of tokens."""
        return logprobs.as_completion(tokens)

    def part(self, **delta: str) -> dict[str, Any]:
        """Return what an event has of a part of an output."""
        return {"text": delta.get("content", "")}

    async def explain(self) -> None:
        """Find how probable the tokens of outputs that have ended are, and which ones are most."""
        for number, chunks in enumerate(self.chunks):
            source = self.call.sources[number // self._samples]
            self._explained.append(await logprobs.explain(self._service, source, chunks, self.top))

    def _logprobs(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        """Return what is shown of the tokens of some rounds, the next ones of an output."""
        if self.top is None:
            return None
        start = self._shown[index]
        self._shown[index] += sum(len(chunk.tokens) for chunk in chunks)
        return self.likely(self._explained[index][start : self._shown[index]])

    def whole(self) -> dict[str, Any]:
        """Return the response with all outputs."""
        choices = []
        for index, chunks in enumerate(self.chunks):
            text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
            own = {"finish_reason": REASONS[reason], **self.output(text), **self._trace(chunks)}
            choices.append({"index": index, "logprobs": self._logprobs(index, chunks), **own})
        return self._about | {"choices": choices, "usage": self._usage()}

    def opening(self) -> str:
        """Return what a stream begins with."""
        return ""

    def round(self, index: int, chunk: Chunk) -> str:
        """Return what a stream gets of one round of one output."""
        own = self.part(content=chunk.text) | self._trace([chunk])
        sent = self._choice(index, **own, logprobs=self._logprobs(index, [chunk]))
        if chunk.finish_reason:
            sent += self._choice(index, **self.part(), finish_reason=REASONS[chunk.finish_reason])
        return sent

    def closing(self) -> str:
        """Return what a stream ends with: the numbers of tokens, if the request says so."""
        return self._event([], usage=self._usage()) if self._closes else ""

    def _choice(self, index: int, **own: Any) -> str:
        return self._event([{"index": index, "logprobs": None, "finish_reason": None, **own}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return as_event(self._about | {"object": self.part_kind, "choices": choices, **more})

    def _trace(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the tokens of some rounds with their origins, if they are shown."""
        if not self._traced:
            return {}
        tokens = [
            {"text": text, "origin": origin}
            for chunk in chunks
            for text, origin in zip(chunk.pieces, chunk.origins, strict=False)
        ]
        numbers = {name: getattr(chunks[-1].stats, name) for name in STATISTICS}
        return {"speculative_t5": {"tokens": tokens, "stats": numbers}}

    def _usage(self) -> dict[str, int]:
        read = self.call.prompt_tokens
        emitted = sum(chunks[-1].stats.emitted for chunks in self.chunks)
        total = read + emitted
        return {"prompt_tokens": read, "completion_tokens": emitted, "total_tokens": total}


class Chat(Completion):
    """The same in OpenAI's protocol for chats."""

    field = "messages"
    prefix, kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def prompts(self, fields: dict[str, Any], service: Service) -> list[Prompt]:
        """Return the one prompt of a chat: the messages if the model has a template for them."""
        messages, decoder = requests.parse_messages(fields), service.decoder
        tokenizer = decoder.tokenizer
        if isinstance(tokenizer, ChatTokenizer) and tokenizer.has_chat_template:
            return [messages]
        return [requests.last_of_user(messages)]

    def output(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def likely(self, tokens: Sequence[logprobs.Token]) -> dict[str, Any]:
        return logprobs.as_chat(tokens)

    def part(self, **delta: str) -> dict[str, Any]:
        return {"delta": delta}

    def opening(self) -> str:
        """Return the roles of the answers."""
        own = self.part(role="assistant", content="")
        return "".join(self._choice(index, **own) for index in range(len(self.chunks)))


ANSWERS = {"/v1/completions": Completion, "/v1/chat/completions": Chat}  # by path
# What answers a request for a text, whether a model can, and what says in which languages.
Fields = dict[str, Any]
TEXTS: dict[
    str, tuple[Callable[[Fields, Remote], Any], Callable[[Fields, Any], bool], Callable[[Any], Any]]
] = {
    "/v2/check": (languagetool.check, languagetool.fits, languagetool.languages),
    "/translate": (libretranslate.translate, libretranslate.fits, libretranslate.languages),
    "/detect": (libretranslate.detect, lambda *_: True, bool),
}
LANGUAGES = {"/v2/languages": languagetool.languages, "/languages": libretranslate.languages}
PATHS = (*ANSWERS, *TEXTS, *LANGUAGES, MODELS, "/health", "/metrics", "/")


def as_event(value: dict[str, Any]) -> str:
    """Return a value as one server-sent event."""
    # In ASCII: some clients take U+2028, and other ends of lines in Unicode, for those of events.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def unless_gone(receive: Receive, work: Awaitable[Found]) -> Found:
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
