"""Embeddings as OpenAI's clients ask for them, and rankings as Cohere's and Jina's do.

A request is computed in parts, between two rounds of those that decode, so that none waits for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..generation import (
    MONOT5,
    Encoder,
    ranking_prompts,
    ranking_words,
    word_probabilities,
)
from .bodies import BodyReader
from .models import Models
from .requests import Refused, as_refusal, boolean, parse_body, refuse
from .server import path_of, unless_gone
from .service import Loaded, Service, fitted
from .threads import SHARED_THREADS

MOST_TEXTS = 2048  # of a request, as OpenAI has it
MOST_RANKED = 2**22  # of all prompts of a ranking, each of which holds the query
MOST_PART = 512  # tokens that are encoded between two rounds, unless a single text has more
OTHER_NAMES = ("model", "user")
EMBEDDING_FIELDS = (*OTHER_NAMES, "input", "encoding_format", "dimensions")
RANKING_FIELDS = (
    *OTHER_NAMES,
    "query",
    "documents",
    "top_n",
    "return_documents",
    "template",
    "positive",
    "negative",
)
EMBEDDINGS = "/v1/embeddings"
RANKINGS = ("/v1/rerank", "/v2/rerank")


class VectorEndpoints:
    """What the routes of embeddings and rankings do."""

    def __init__(self, models: Models, bodies: BodyReader) -> None:
        self._models, self._bodies = models, bodies

    async def embed(self, request: Request) -> Response:
        """Answer with the embedding of each text, as `Encoder.vectors` makes it."""
        async with self._asked(request, EMBEDDING_FIELDS) as (fields, name, service):
            if "dimensions" in fields:
                expected = "left out, as vectors are as long as the model has them"
                refuse("dimensions", expected, fields["dimensions"])
            form = fields.get("encoding_format", "float")
            if form not in ("float", "base64"):
                refuse("encoding_format", "float or base64", form)
            asked = fields.get("input")
            rows = await _in_thread(lambda: rows_of(encoder_of(service.loaded), asked))
            vectors = await unless_gone(request.receive, embedded(service, rows))
            data = await _in_thread(lambda: listing(vectors, form))
            count = sum(map(len, rows))
            usage = {"prompt_tokens": count, "total_tokens": count}
            about = json.dumps({"object": "list", "model": name, "usage": usage})
            body = f'{about[:-1]}, "data": [{data}]}}'
            return Response(body, media_type="application/json")

    async def rank(self, request: Request) -> Response:
        """Answer with documents, the most relevant first."""
        async with self._asked(request, RANKING_FIELDS) as (fields, name, service):
            texts = documents_of(fields.get("documents"))
            query = _text("query", fields.get("query"))
            names = ("template", MONOT5), ("positive", "true"), ("negative", "false")
            template, *words = (_text(name, fields.get(name, usual)) for name, usual in names)
            check_size(query, template, texts)
            most = fields.get("top_n", max(1, len(texts)))
            if type(most) is not int or most < 1:
                refuse("top_n", "an integer from 1", most)
            returns = boolean("return_documents", fields.get("return_documents", False))
            decoder = service.decoder
            ids = await _in_thread(lambda: ranking_words(decoder, *words))
            prompts = ranking_prompts(query, texts, template)
            rows = await _in_thread(lambda: fitted(decoder.prompts, prompts, "documents"))
            scores = await unless_gone(request.receive, ranked(service, rows, ids))
            order = sorted(range(len(texts)), key=lambda i: -scores[i])[:most]
            results = [
                {"index": i, "relevance_score": scores[i]}
                | ({"document": {"text": texts[i]}} if returns else {})
                for i in order
            ]
            return JSONResponse(
                {
                    "id": f"rerank-{secrets.token_hex(12)}",
                    "model": name,
                    "results": results,
                    "usage": {"total_tokens": sum(map(len, rows))},
                    "meta": {"api_version": {"version": path_of(request.scope).split("/")[1][1:]}},
                }
            )

    @contextlib.asynccontextmanager
    async def _asked(
        self, request: Request, known: Sequence[str]
    ) -> AsyncIterator[tuple[dict[str, Any], str, Service]]:
        """Yield the fields of a request, and its model's name and service, kept for the block."""
        body = await self._bodies.read(request)
        try:
            fields = parse_body(body)
            for name in fields:
                if name not in known:
                    wrong = f"the request has no field {name[:40]!r}: leave it out"
                    raise Refused(400, wrong, param=name[:40])
            served = self._models.find(fields.get("model"))
            async with self._models.use(served) as service:
                yield fields, served.name, service
        except ValueError as error:
            raise as_refusal(error) from error


def encoder_of(loaded: Loaded) -> Encoder:
    """Return the encoder that a model is or has."""
    return loaded if isinstance(loaded, Encoder) else Encoder.of(loaded)


def rows_of(encoder: Encoder, asked: object) -> list[list[int]]:
    """Return the ids of what is to be embedded: a text, ids, or a list of either."""
    several: list[Any] = asked if isinstance(asked, list) else [asked]
    if isinstance(asked, list) and asked and all(type(each) is int for each in asked):
        several = [asked]
    if not 1 <= len(several) <= MOST_TEXTS:
        refuse("input", f"from 1 to {MOST_TEXTS} texts, or lists of ids", len(several))
    for each in several:
        is_list = isinstance(each, list) and all(type(i) is int for i in each)
        if not isinstance(each, str) and not is_list:
            refuse("input", "a text, a list of texts, or lists of ids", each)
    if encoder.modules.lower_case:
        several = [each.lower() if isinstance(each, str) else each for each in several]
    return fitted(encoder.prompts, several, "input")


async def embedded(service: Service, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the vector (D,) float32 of each row, computed in parts."""

    def part_of(some: list[Sequence[int]]) -> Any:
        return lambda loaded: [np.array(each) for each in encoder_of(loaded).vectors(some)]

    return await _in_parts(service, rows, part_of)


async def ranked(
    service: Service, rows: Sequence[Sequence[int]], words: tuple[int, int]
) -> list[float]:
    """Return the probability of the first of two words as the output of each row begins."""

    def part_of(some: list[Sequence[int]]) -> Any:
        return lambda decoder: word_probabilities(decoder, some, words)

    return await _in_parts(service, rows, part_of)


async def _in_parts(service: Service, rows: Sequence[Sequence[int]], part_of: Any) -> list[Any]:
    """Compute something of all rows, a few of similar length at a time; return it in order."""
    found: dict[int, Any] = {}
    for group in parts_of_rows(rows):
        job = part_of([rows[i] for i in group])
        answers = await asyncio.wrap_future(service.compute(job))
        found |= zip(group, answers, strict=True)
    return [found[i] for i in range(len(rows))]


def parts_of_rows(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the indices of rows to compute together: at most `MOST_PART` tokens with padding."""
    groups: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        if groups and (len(groups[-1]) + 1) * len(rows[i]) <= MOST_PART:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def check_size(query: str, template: str, documents: Sequence[str]) -> None:
    """Refuse a ranking whose prompts, each of which holds the query, have too many characters."""
    size = (len(query) + len(template)) * len(documents) + sum(map(len, documents))
    if size > MOST_RANKED:
        raise Refused(
            413,
            f"query, template and documents make {size:,} characters, and {MOST_RANKED:,} are read "
            "at a time: split the request",
        )


def documents_of(found: object) -> list[str]:
    """Return the documents of a request: texts, or objects with one."""
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_TEXTS:
        refuse("documents", f"a list of 1 to {MOST_TEXTS} texts", found)
    return [
        _text("documents", each.get("text") if isinstance(each, Mapping) else each)
        for each in found
    ]


def _text(name: str, found: object) -> str:
    if not isinstance(found, str):
        refuse(name, "text", found)
    return found


def listing(vectors: Sequence[np.ndarray], form: str) -> str:
    """Return the records of embeddings as JSON, made one by one, as a thread holds up others."""
    return ", ".join(
        json.dumps({"object": "embedding", "index": i, "embedding": _as_sent(vector, form)})
        for i, vector in enumerate(vectors)
    )


def _as_sent(vector: np.ndarray, form: str) -> list[float] | str:
    """Return a vector as numbers, or as the base64 of float32, little end first."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(each) for each in vector]


async def _in_thread(work: Any) -> Any:
    """Do what may take long, as tokenizing does, while others are answered."""
    return await asyncio.wrap_future(SHARED_THREADS.run(work))
