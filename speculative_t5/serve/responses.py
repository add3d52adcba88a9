"""From chunks of outputs to OpenAI's responses, whole or as server-sent events.

`completion_tokens` counts what was emitted, EOS included, as `Stats.emitted` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..decoding import FinishReason
from ..generation import Chunk

T = TypeVar("T")
REASONS: dict[FinishReason | None, str] = {"eos": "stop", "stop": "stop", "length": "length"}
STATISTICS = ("rounds", "drafted", "accepted", "emitted", "seconds")
DONE = "data: [DONE]\n\n"
PING = ": ping\n\n"


class Answer:
    """Makes the response to one request, whole or as the events of a stream.

    If it is `traced`, choices show tokens with their origins, and the statistics so far.
    """

    def __init__(
        self, model: str, *, chat: bool, traced: bool, num_outputs: int, prompt_tokens: int
    ) -> None:
        self._chat = chat
        self._traced = traced
        self._prompt_tokens = prompt_tokens
        self._left = num_outputs
        self._chunks: list[list[Chunk]] = [[] for _ in range(num_outputs)]
        self._about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_whole(self) -> bool:
        """Whether all outputs have ended."""
        return self._left == 0

    def add(self, index: int, chunk: Chunk) -> None:
        """Add one round of one output."""
        self._chunks[index].append(chunk)
        self._left -= chunk.finish_reason is not None

    def whole(self) -> dict[str, Any]:
        """Return the response with all outputs."""
        choices = []
        for index, chunks in enumerate(self._chunks):
            text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
            message = {"role": "assistant", "content": text, "refusal": None}
            own = {"message": message} if self._chat else {"text": text}
            more = {"finish_reason": REASONS[reason], **own, **self._trace(chunks)}
            choices.append({"index": index, "logprobs": None, **more})
        return self._about | {"choices": choices, "usage": self._usage()}

    def opening(self) -> str:
        """Return what a stream begins with: the roles of a chat's answers."""
        if not self._chat:
            return ""
        delta = {"role": "assistant", "content": ""}
        return "".join(self._part(index, delta) for index in range(len(self._chunks)))

    def round(self, index: int, chunk: Chunk) -> str:
        """Return what a stream gets of one round of one output."""
        sent = self._part(index, {"content": chunk.text}, **self._trace([chunk]))
        if chunk.finish_reason:
            sent += self._part(index, {}, finish_reason=REASONS[chunk.finish_reason])
        return sent

    def usage(self) -> str:
        """Return the event of a stream that has the numbers of tokens."""
        return self._event([], usage=self._usage())

    def _part(self, index: int, delta: dict[str, str], **more: Any) -> str:
        own = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": index, "logprobs": None, "finish_reason": None} | more | own
        return self._event([choice])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else self._about["object"]
        return as_event(self._about | {"object": kind, "choices": choices, **more})

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
        emitted = sum(chunks[-1].stats.emitted for chunks in self._chunks)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": emitted,
            "total_tokens": self._prompt_tokens + emitted,
        }


def as_event(value: dict[str, Any]) -> str:
    """Return a value as one server-sent event."""
    # In ASCII: some clients take U+2028, and other ends of lines in Unicode, for those of events.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work.

    Raises:
        ClientDisconnect: Once the client has gone; the work has been cancelled then.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))  # the work has let go of everything


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, ended as soon as the client has gone.

    `parts` yields texts of events, and whether more will come; it is cancelled when the client
    goes. `close` is called at the end in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self, parts: AsyncGenerator[tuple[str, bool], None], *, close: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for text, more in parts:
                body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
                await send(body)
