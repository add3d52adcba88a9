"""The routes of whole texts: a process works on each, and asks for what only the server has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..decoding import Logprob
from ..generation import Chunk, Generation, GenerationOptions
from . import languagetool, libretranslate, requests
from .bodies import BodyReader
from .models import Models
from .requests import Refused
from .sentences import KeptOutputs, SentenceCache, key_of_sentence
from .server import key_of, unless_gone
from .service import Service
from .settings import Settings
from .text_worker import TEXT_ROUTES, Abilities, Task, as_body
from .texts import SENTENCES_TOGETHER, Facts
from .workers import Unfinished, Worker

LONG_TEXT_BYTES = 10_000  # bytes of a body from which a text is long
COMPUTING_SECONDS = 60.0  # that a text may take without what the model does for it
PAUSE_SECONDS = 0.1  # seconds before asking again for room in the queue

LANGUAGE_ROUTES = {
    "/v2/languages": languagetool.languages_corrected,
    "/languages": libretranslate.languages_translated,
}

log = logging.getLogger(__name__)


class TextEndpoints:
    """What the routes of whole texts do."""

    def __init__(self, models: Models, settings: Settings, bodies: BodyReader) -> None:
        self._models, self._settings, self._bodies = models, settings, bodies
        self._cache = SentenceCache(settings.sentence_bytes, settings.api_keys)

    async def answer(self, path: str, request: Request) -> Response:
        """Answer for a whole text, by a process that nobody else waits for."""
        settings = self._settings
        kind = request.headers.get("content-type", "")
        query = request.scope["query_string"].decode("latin-1")
        try:
            body = await self._bodies.read(request)
            task = Task(path, body, kind, COMPUTING_SECONDS, settings.max_text, query)
            done = await unless_gone(request.receive, self._done(task, request))
            return Response(done, media_type="application/json")
        except Refused as refused:  # in the form that clients of these routes show
            return JSONResponse({"error": str(refused)}, refused.status, refused.headers)

    async def _done(self, task: Task, request: Request) -> bytes:
        """Return the answer to a text, as JSON."""
        keys = self._settings.api_keys

        def kept_for(given: str) -> KeptOutputs:
            holder = key_of(request.headers, keys, given)
            if keys and holder is None:
                raise Refused(403, "the API key is missing or is not valid here: send a valid one")
            return self._cache.of(holder)

        models = [
            Abilities(name, tokenizer.corrects, tokenizer.languages)
            for name, tokenizer in (await self._models.tokenizers()).items()
        ]
        async with contextlib.AsyncExitStack() as stack:
            size = len(task.body) + len(task.query)
            lent = self._models.workers.lent(is_long=size >= LONG_TEXT_BYTES)
            worker = await stack.enter_async_context(lent)
            if worker.num_models != len(models):
                worker.send("models", models)
                worker.num_models = len(models)
            conversation = TextConversation(self._models, worker, stack, kept_for)
            try:
                async with asyncio.timeout(self._settings.text_seconds):
                    return await conversation.run(task)
            except TimeoutError:
                return conversation.cut_short(
                    f"it was not done within {self._settings.text_seconds:g} seconds"
                )
            except Unfinished as unfinished:
                return conversation.cut_short(str(unfinished))
            except EOFError as error:
                log.error("the process for a text has ended: %s", error)
                raise Refused(500, "the server failed to answer: see its log") from error

    async def languages(self, path: str, _: Request) -> Response:
        """Answer with the languages of all models, in the form of a protocol."""
        found: dict[str, Any] = {}
        for tokenizer in (await self._models.tokenizers()).values():
            for each in LANGUAGE_ROUTES[path](tokenizer):
                found.setdefault(each.get("longCode", each["code"]), each)
        return JSONResponse([*found.values()])


class TextConversation:
    """What the server and a process say to each other about one text; see `text_worker`."""

    def __init__(
        self,
        models: Models,
        worker: Worker,
        stack: contextlib.AsyncExitStack,
        kept_for: Callable[[str], KeptOutputs],
    ) -> None:
        self._models, self._worker, self._stack, self._kept_for = models, worker, stack, kept_for
        self._kept: KeptOutputs  # for the holder of the key that was given
        self._service: Service | None = None
        self._model: tuple[str, int] = ("", 0)  # its name, and how often it has been loaded
        self._has_begun = False  # whether sentences of it have been answered
        self._path = ""
        self._answer: dict[str, Any] = {}  # the parts of it so far
        self._replies: dict[str, Callable[..., Awaitable[Any]]] = {
            "key": self._key,
            "use": self._use,
            "outputs": self._outputs,
            "log_probabilities": self._log_probabilities,
        }

    async def run(self, task: Task) -> bytes:
        """Return the answer to a text, as JSON.

        Raises:
            Refused: If there is none.
            Unfinished: If it takes too long.
            EOFError: If the process ends.
        """
        self._path = task.path
        self._worker.send("text", task)
        while True:
            kind, *found = await self._next(task.seconds)
            if kind == "answer":
                return cast(bytes, found[0])
            if kind == "refused":
                raise Refused.again(found[0])
            if kind == "failed":
                log.error("the work on a text has failed\n%s", found[0])
                raise Refused(500, "the server failed to answer: see its log")
            if kind == "part":
                self._add(found[0])
                continue
            try:
                self._worker.send("reply", await self._replies[kind](*found))
            except (Refused, ValueError) as error:
                refused = error if isinstance(error, Refused) else requests.as_refusal(error)
                if refused.status == 503 and self._has_begun:
                    raise Unfinished(refused.reason) from error
                self._worker.send("refused", refused.keywords)

    def cut_short(self, reason: str) -> bytes:
        """Return the answer as far as there is one."""
        if not (TEXT_ROUTES[self._path].partly and self._answer):
            raise Refused(
                503, f"the text cannot be answered ({reason}): send it in parts, one by one"
            )
        warnings = {"incompleteResults": True, "incompleteResultsReason": reason}
        warnings = self._answer.get("warnings", {}) | warnings
        matches = sorted(self._answer["matches"], key=lambda match: match["offset"])
        return as_body(self._answer | {"warnings": warnings, "matches": matches})

    async def _next(self, most: float) -> tuple[Any, ...]:
        """Return the next message of the process, which may compute for some seconds in all."""
        try:
            async with asyncio.timeout(max(0.0, most - self._worker.seconds)):
                return await self._worker.receive()
        except TimeoutError as error:
            raise Unfinished(f"it took more than {most:g} seconds to read") from error

    def _add(self, part: dict[str, Any]) -> None:
        matches = self._answer.setdefault("matches", [])
        matches.extend(part.get("matches", ()))
        self._answer |= part | {"matches": matches}

    async def _key(self, given: str) -> None:
        self._kept = self._kept_for(given)

    async def _use(self, name: object) -> Facts | None:
        """Load a model, and return what the process has to know of it, if it does not."""
        served = self._models.find(name)
        self._service = service = await self._stack.enter_async_context(self._models.use(served))
        self._model = served.name, served.loads
        decoder, known = service.decoder, self._worker.known
        if known.get(served.name) == served.loads:
            return None
        known[served.name] = served.loads
        prompts = decoder.prompts.without_model()
        return Facts(prompts, decoder.min_probability, min(SENTENCES_TOGETHER, service.max_queue))

    async def _outputs(
        self, sources: Sequence[list[int]], options: GenerationOptions
    ) -> list[Generation]:
        """Return the outputs of some sentences, of which those that are not kept are decoded."""
        if options.temperature:  # an output depends on its place among those that are decoded
            return await self._decoded(sources, options)
        kept = self._kept
        keys = [key_of_sentence(self._model, options, source) for source in sources]
        outputs = [kept.get(key) for key in keys]
        left = [n for n, output in enumerate(outputs) if output is None]
        self._has_begun |= len(left) < len(sources)
        if left:
            decoded = await self._decoded([sources[n] for n in left], options)
            for n, output in zip(left, decoded, strict=True):
                outputs[n] = output
                kept.keep(keys[n], output, len(sources[n]))
        return [output for output in outputs if output is not None]

    async def _decoded(
        self, sources: Sequence[list[int]], options: GenerationOptions
    ) -> list[Generation]:
        """Decode some sentences; only the first ones of a text are refused by a full queue."""
        assert self._service
        while True:
            try:
                call = self._service.submit(sources, options)
                break
            except Refused as refused:
                if refused.status != 429 or not self._has_begun:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)
        self._has_begun = True
        chunks: list[list[Chunk]] = [[] for _ in sources]
        async for added in call.chunks():
            if added:
                chunks[added[0]].append(added[1])
        return [*map(_joined, chunks)]

    async def _log_probabilities(
        self, source: Sequence[int], tokens: Sequence[int]
    ) -> list[Logprob]:
        assert self._service
        found = self._service.compute(lambda made: made.log_probabilities(source, tokens))
        return await asyncio.wrap_future(found)


def _joined(chunks: Sequence[Chunk]) -> Generation:
    text = "".join(chunk.text for chunk in chunks)
    reason = chunks[-1].finish_reason
    assert reason is not None
    tokens = [token for chunk in chunks for token in chunk.tokens]
    judged = chunks[-1].logprobs is not None
    logprobs = tuple(each for chunk in chunks for each in chunk.logprobs or ())
    stats = chunks[-1].stats
    return Generation(text, tokens, reason, stats, logprobs=logprobs if judged else None)
