"""The routes of whole texts: which model answers, and in which form its errors come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from . import languagetool, libretranslate, requests
from .models import MODELS, Models, Served
from .requests import Refused
from .server import is_key, read_body, unless_gone
from .settings import Settings
from .texts import Remote, parse_fields

MOST_TEXTS = 64  # whole texts being answered; further ones wait

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


class TextEndpoints:
    """What the routes of whole texts do."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._threads = ThreadPoolExecutor(MOST_TEXTS, "texts")

    async def answer(self, path: str, request: Request) -> Response:
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

    async def languages(self, path: str, _: Request) -> Response:
        """Answer with the languages of all models, in the form of a protocol."""
        found: dict[str, Any] = {}
        for served in self._models.models.values():
            for each in LANGUAGES[path](await served.tokenizer()):
                found.setdefault(each.get("longCode", each["code"]), each)
        return JSONResponse([*found.values()])
