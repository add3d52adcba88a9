"""From events of decoding to OpenAI's responses, whole or as server-sent events.

`completion_tokens` counts what was emitted, EOS included, as `Stats.emitted` does. A request with
`"speculative_t5": true` also gets, in each choice, the tokens with their origins and the statistics
so far.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..decoding import FinishReason, Stats
from ..generation import Chunk

T = TypeVar("T")
REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = "data: [DONE]\n\n"
PING = ": ping\n\n"


class Answer:
    """Makes the responses to one request: whole, or the chunks of a stream.

    Args:
        model: Its name.
        chat: Whether it answers a chat.
        traced: Whether choices show tokens with their origins, and statistics.
        num_outputs: How many outputs it has.
        prompt_tokens: Ids of all prompts together.
    """

    def __init__(
        self, model: str, *, chat: bool, traced: bool, num_outputs: int, prompt_tokens: int
    ) -> None:
        self._chat = chat
        self._traced = traced
        self._prompt_tokens = prompt_tokens
        self._left = num_outputs
        self._texts: list[list[str]] = [[] for _ in range(num_outputs)]
        self._tokens: list[list[dict[str, str]]] = [[] for _ in range(num_outputs)]
        self._stats = [Stats()] * num_outputs
        self._reasons: list[str | None] = [None] * num_outputs
        self._object = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_whole(self) -> bool:
        """Whether all outputs have ended."""
        return self._left == 0

    @property
    def is_empty(self) -> bool:
        """Whether no output has a round."""
        return not any(self._texts)

    def add(self, index: int, chunk: Chunk) -> None:
        """Add one round of one output."""
        self._texts[index].append(chunk.text)
        self._stats[index] = chunk.stats
        if self._traced:
            self._tokens[index] += tokens_of(chunk)
        if chunk.finish_reason:
            self._reasons[index] = REASONS[chunk.finish_reason]
            self._left -= 1

    def whole(self) -> dict[str, Any]:
        """Return the response with all outputs."""
        choices = []
        for index, parts in enumerate(self._texts):
            text = "".join(parts)
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append({
                "index": index, "logprobs": None, "finish_reason": self._reasons[index],
                **({"message": message} if self._chat else {"text": text}),
                **self._trace(self._tokens[index], self._stats[index]),
            })  # fmt: skip
        return self._object | {"choices": choices, "usage": self._usage()}

    def opening(self) -> str:
        """Return what a stream begins with: the roles of a chat's answers."""
        if not self._chat:
            return ""
        delta = {"role": "assistant", "content": ""}
        return "".join(self._part(index, delta) for index in range(len(self._texts)))

    def round(self, index: int, chunk: Chunk) -> str:
        """Return what a stream gets of one round of one output."""
        more = self._trace(tokens_of(chunk), chunk.stats)
        sent = self._part(index, {"content": chunk.text}, **more)
        if chunk.finish_reason:
            sent += self._part(index, {}, finish_reason=REASONS[chunk.finish_reason])
        return sent

    def usage(self) -> str:
        """Return the chunk of a stream that has the numbers of tokens."""
        return self._event([], usage=self._usage())

    def _part(self, index: int, delta: dict[str, str], **more: Any) -> str:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, **more}
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return self._event([choice])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else self._object["object"]
        return as_event(self._object | {"object": kind, "choices": choices, **more})

    def _trace(self, tokens: list[dict[str, str]], stats: Stats) -> dict[str, Any]:
        if not self._traced:
            return {}
        names = ("rounds", "drafted", "accepted", "emitted", "seconds")
        numbers = {name: getattr(stats, name) for name in names}
        return {"speculative_t5": {"tokens": tokens, "stats": numbers}}

    def _usage(self) -> dict[str, int]:
        emitted = sum(stats.emitted for stats in self._stats)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": emitted,
            "total_tokens": self._prompt_tokens + emitted,
        }


def tokens_of(chunk: Chunk) -> list[dict[str, str]]:
    """Return each token of a round with its origin."""
    pairs = zip(chunk.pieces, chunk.origins, strict=False)
    return [{"text": text, "origin": origin} for text, origin in pairs]


def as_event(value: dict[str, Any]) -> str:
    """Return a value as one server-sent event."""
    # In ASCII: some clients take U+2028, and other ends of lines in Unicode, for those of events.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of work, which is cancelled, for None, once the client has gone."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))  # the work has let go of everything


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, ended as soon as the client has gone.

    Args:
        parts: Yields texts of events, and whether more will come; it is cancelled when the client
            goes.
        close: Called at the end, whatever it is.
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
            await unless_gone(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for text, more in parts:
                await send({
                    "type": "http.response.body", "body": text.encode(), "more_body": more,
                })  # fmt: skip
