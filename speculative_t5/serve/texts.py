"""Whole texts: their sentences join the batch of a service, beside what others ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast
from urllib.parse import parse_qsl

from ..documents import Breaks, Document, RewriteOptions, identifier
from ..errors import first_line
from ..generation import Chunk, Generation, GenerationOptions, SpeculativeDecoder
from .requests import MOST_FIELDS, Refused, parse_body, refuse
from .service import Service

TOGETHER = 16  # sentences of a text that wait or are decoded at a time
SURE, WORDS = 0.9, 5  # of a text in another language: probability, and words
PAUSE = 0.1  # seconds before asking again for room in the queue


class Remote:
    """A decoder for `Document`, whose outputs a service makes. Used in a thread of its own.

    Attributes that are not here are those of the decoder: they need no device.
    """

    is_steady = True  # and no beams are searched, which would hold up what others decode

    def __init__(self, service: Service, decoder: SpeculativeDecoder) -> None:
        self._service, self._decoder = service, decoder
        self._loop = asyncio.get_running_loop()
        self._running: Future[Any] | None = None
        self._begun = self._left = False

    def __getattr__(self, name: str) -> Any:
        if self._left:
            raise Refused(499, "the client has left: send the request again")
        return getattr(self._decoder, name)

    def translate(self, to: str, from_: str | None) -> None:
        """Let prompts be translated from now on; see `SpeculativeDecoder.translating`."""
        self._decoder = self._decoder.translating(to, from_)

    def document(self, text: str, options: RewriteOptions, breaks: Breaks = "wrapped") -> Document:
        """Return a text whose sentences this decoder decodes."""
        return Document(cast(SpeculativeDecoder, self), text, options, breaks)

    def leave(self) -> None:
        """End what the thread waits for, which ends the thread; to be called in the event loop."""
        self._left = True
        if self._running:
            self._running.cancel()

    def iter_batch(
        self, prompts: Iterable[tuple[int, list[int]]], *, batch_size: None = None, **options: Any
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the output for each prompt with its index; see `SpeculativeDecoder.iter_batch`."""
        waiting, own = [*prompts], GenerationOptions(**options)

        def outputs() -> Iterator[tuple[int, Generation]]:
            most = min(TOGETHER, self._service.max_queue)
            for start in range(0, len(waiting), most):
                some = waiting[start : start + most]
                found = self._wait(self._outputs([ids for _, ids in some], own))
                yield from zip((index for index, _ in some), found, strict=True)

        return outputs()

    def log_probabilities(
        self, source: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[float, dict[int, float]]]:
        """See `SpeculativeDecoder.log_probabilities`."""
        self._running = self._service.compute(lambda made: made.log_probabilities(source, tokens))
        return cast(list[tuple[float, dict[int, float]]], self._running.result())

    def _wait(self, work: Coroutine[Any, Any, list[Generation]]) -> list[Generation]:
        self._running = running = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._left:
            running.cancel()
        return running.result()

    async def _outputs(
        self, sources: Sequence[list[int]], options: GenerationOptions
    ) -> list[Generation]:
        """Decode some sentences; only the first ones of a text are refused by a full queue."""
        while True:
            try:
                call = self._service.submit(sources, options)
                break
            except Refused as refused:
                if refused.status != 429 or not self._begun:
                    raise
            await asyncio.sleep(PAUSE)
        self._begun = True
        chunks: list[list[Chunk]] = [[] for _ in sources]
        async for added in call.chunks():
            if added:
                chunks[added[0]].append(added[1])
        return [*map(_joined, chunks)]


def _joined(chunks: Sequence[Chunk]) -> Generation:
    text = "".join(chunk.text for chunk in chunks)
    reason = chunks[-1].finish_reason
    assert reason is not None
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return Generation(text, tokens, reason, chunks[-1].stats)


def detected(text: str, codes: Iterable[str]) -> tuple[str, float]:
    """Return which of some languages a text is in, or which other one if it surely is.

    With it comes how probable that is.
    """
    asked = {code.partition("-")[0]: code for code in codes}
    found, probability = identifier().classify(text)
    if found in asked or (probability >= SURE and len(text.split()) >= WORDS):
        return asked.get(found, found), float(probability)
    known = [code for code in asked if code in identifier().labels] or [*asked]
    if len(known) > 1:
        found, probability = identifier(*known).classify(text)
        return asked[found], float(probability)
    return asked[known[0]], 1 - float(probability)


def parse_fields(body: bytes, kind: str) -> dict[str, Any]:
    """Return the fields of a form or a JSON object, whichever a body is by its content type."""
    if kind.casefold().startswith("application/json") or body.lstrip().startswith(b"{"):
        return parse_body(body)
    try:
        return dict(
            parse_qsl(
                body.decode(), keep_blank_values=True, errors="strict",
                max_num_fields=MOST_FIELDS,
            )
        )  # fmt: skip
    except ValueError as error:
        raise Refused(
            400, f"the form cannot be read ({first_line(error)}): send at most {MOST_FIELDS} "
            "fields, in UTF-8 and escaped",
        ) from error  # fmt: skip


def text_field(fields: dict[str, Any], name: str) -> str:
    """Return a field that has to be there, as text."""
    found = fields.get(name)
    if not isinstance(found, str):
        refuse(name, "text", found)
    return found
