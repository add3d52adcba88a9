"""From events of decoding to OpenAI's responses, whole or as server-sent events.

`completion_tokens` counts what was emitted, EOS included, as `Stats.emitted` does. A request with
`"speculative_t5": true` also gets, in each choice, the tokens with their origins and the statistics
so far.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding import FinishReason, Stats
from ..generation import Chunk

REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = "data: [DONE]\n\n"


@dataclass
class Collected:
    """One output so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[dict[str, str]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Add one round."""
        self.texts.append(chunk.text)
        self.tokens += tokens_of(chunk)
        self.stats = chunk.stats
        if chunk.finish_reason:
            self.finish_reason = REASONS[chunk.finish_reason]


def tokens_of(chunk: Chunk) -> list[dict[str, str]]:
    """Return each token of a round with its origin."""
    pairs = zip(chunk.pieces, chunk.origins, strict=False)
    return [{"text": text, "origin": origin} for text, origin in pairs]


@dataclass
class Answer:
    """Makes the responses to one request: whole, or the chunks of a stream.

    Attributes:
        model: Its name.
        chat: Whether it answers a chat.
        traced: Whether choices show tokens with their origins, and statistics.
    """

    model: str
    chat: bool
    traced: bool
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, outputs: Sequence[Collected], prompt_tokens: int) -> dict[str, Any]:
        """Return the response with all outputs."""
        choices = []
        for index, output in enumerate(outputs):
            text = "".join(output.texts)
            choice: dict[str, Any] = {
                "index": index, "logprobs": None, "finish_reason": output.finish_reason,
            }  # fmt: skip
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice | self._trace(output.tokens, output.stats))
        usage = usage_of(outputs, prompt_tokens)
        return self._object("chat.completion", choices) | {"usage": usage}

    def opening(self, num_outputs: int) -> str:
        """Return what a stream begins with: the roles of a chat's answers."""
        if not self.chat:
            return ""
        delta = {"role": "assistant", "content": ""}
        return "".join(self._part(index, delta, None) for index in range(num_outputs))

    def round(self, index: int, chunk: Chunk) -> str:
        """Return what a stream gets of one round of one output."""
        more = self._trace(tokens_of(chunk), chunk.stats)
        sent = self._part(index, {"content": chunk.text}, None, more)
        if chunk.finish_reason:
            sent += self._part(index, {}, REASONS[chunk.finish_reason])
        return sent

    def usage(self, outputs: Sequence[Collected], prompt_tokens: int) -> str:
        """Return the chunk of a stream that has the numbers of tokens."""
        usage = usage_of(outputs, prompt_tokens)
        return as_event(self._object("chat.completion.chunk", []) | {"usage": usage})

    def _part(
        self,
        index: int,
        delta: dict[str, str],
        reason: str | None,
        more: dict[str, Any] | None = None,
    ) -> str:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return as_event(self._object("chat.completion.chunk", [choice | (more or {})]))

    def _object(self, chat_kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": chat_kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _trace(self, tokens: list[dict[str, str]], stats: Stats) -> dict[str, Any]:
        if not self.traced:
            return {}
        names = ("rounds", "drafted", "accepted", "emitted", "seconds")
        numbers = {name: getattr(stats, name) for name in names}
        return {"speculative_t5": {"tokens": tokens, "stats": numbers}}


def usage_of(outputs: Sequence[Collected], prompt_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens."""
    emitted = sum(output.stats.emitted for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": emitted,
        "total_tokens": prompt_tokens + emitted,
    }


def as_event(value: dict[str, Any]) -> str:
    """Return a value as one server-sent event."""
    # In ASCII: some clients take U+2028, and other ends of lines in Unicode, for those of events.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
