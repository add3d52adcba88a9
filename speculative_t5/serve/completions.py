"""OpenAI's answers: a request for outputs joins a service, and becomes a response or a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..generation import Chunk
from ..tokenizers import ChatTokenizer, Prompt
from . import logprobs, requests
from .service import Service
from .settings import Settings

FINISH_REASONS: dict[str | None, str] = {"eos": "stop", "stop": "stop", "length": "length"}
STATISTICS_SHOWN = ("rounds", "drafted", "accepted", "emitted", "seconds")


class Completion:
    """Lets a request join, and makes the response to it, whole or as the events of a stream.

    This is OpenAI's protocol for completions. Choices show tokens with their origins, and the
    statistics so far, if the request says so. `completion_tokens` counts what was emitted, EOS
    included, as `Stats.emitted` does.
    """

    field = "prompt"  # of a request, with what is to be decoded
    prefix, kind, part_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        fields: dict[str, Any],
        model: str,
        service: Service,
        settings: Settings,
        prompts: list[Prompt] | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        options = requests.parse_options(fields, settings.defaults, draw_seeds=settings.draw_seeds)
        top = requests.number_of_top(fields, chat=self.field == "messages")
        options = replace(options, logprobs=top, prediction=prediction)
        self._prediction = Counter(prediction)
        found = prompts or self.prompts(fields, service)
        self.call = service.submit(found, options, self.field)
        self.chunks: list[list[Chunk]] = [[] for _ in range(self.call.left)]
        self.streams = fields.get("stream", False)
        self._closes = fields.get("stream_options", {}).get("include_usage")
        self._scored: list[logprobs.ScoredOutput] = []  # of each output, if they are asked for
        if top is not None:
            tokenizer = service.decoder.tokenizer
            assert tokenizer is not None
            self._scored = [logprobs.ScoredOutput(tokenizer) for _ in self.chunks]
        self._traced = fields.get("speculative_t5", False)
        self._about = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }

    @classmethod
    def prompts(cls, fields: dict[str, Any], service: Service) -> list[Prompt]:
        """Return what is to be decoded."""
        return requests.parse_prompts(fields)

    def output(self, text: str) -> dict[str, Any]:
        """Return what a choice has of an output that has ended."""
        return {"text": text}

    def likely(self, tokens: Sequence[logprobs.ScoredToken]) -> dict[str, Any]:
        """Return what a choice has of the probabilities of tokens."""
        return logprobs.as_completion(tokens)

    def part(self, **delta: str) -> dict[str, Any]:
        """Return what an event has of a part of an output."""
        return {"text": delta.get("content", "")}

    async def add(self, number: int, chunk: Chunk) -> None:
        """Take what a round adds to an output."""
        self.chunks[number].append(chunk)
        if self._scored:  # in a thread: each of the most probable tokens is made text
            await asyncio.to_thread(self._scored[number].add, chunk)

    def _judged(self, index: int, *, added: bool = False) -> dict[str, Any] | None:
        """Return how probable an output's tokens are, or those just added, if that is asked for."""
        if not self._scored:
            return None
        output = self._scored[index]
        return self.likely(output.added if added else output.tokens)

    def whole(self) -> dict[str, Any]:
        """Return the response with all outputs."""
        choices = []
        for index, chunks in enumerate(self.chunks):
            text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
            own = {
                "finish_reason": FINISH_REASONS[reason],
                **self.output(text),
                **self._trace(chunks),
            }
            choices.append({"index": index, "logprobs": self._judged(index), **own})
        return self._about | {"choices": choices, "usage": self._usage()}

    def opening(self) -> str:
        """Return what a stream begins with."""
        return ""

    def round(self, index: int, chunk: Chunk) -> str:
        """Return what a stream gets of one round of one output."""
        own = self.part(content=chunk.text) | self._trace([chunk])
        sent = self._choice(index, **own, logprobs=self._judged(index, added=True))
        if chunk.finish_reason:
            sent += self._choice(
                index, **self.part(), finish_reason=FINISH_REASONS[chunk.finish_reason]
            )
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
        numbers = {name: getattr(chunks[-1].stats, name) for name in STATISTICS_SHOWN}
        return {"speculative_t5": {"tokens": tokens, "stats": numbers}}

    def _usage(self) -> dict[str, Any]:
        read = self.call.prompt_tokens
        emitted = sum(chunks[-1].stats.emitted for chunks in self.chunks)
        usage = {
            "prompt_tokens": read,
            "completion_tokens": emitted,
            "total_tokens": read + emitted,
        }
        if not self._prediction:
            return usage
        found = [num_in_common(self._prediction, _emitted(chunks)) for chunks in self.chunks]
        total = self._prediction.total()
        details = {
            "accepted_prediction_tokens": sum(found),
            "rejected_prediction_tokens": sum(total - each for each in found),
        }
        return usage | {"completion_tokens_details": details}


class Chat(Completion):
    """The same in OpenAI's protocol for chats."""

    field = "messages"
    prefix, kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @classmethod
    def prompts(cls, fields: dict[str, Any], service: Service) -> list[Prompt]:
        """Return the one prompt of a chat: the messages if the model has a template for them."""
        messages, decoder = requests.parse_messages(fields), service.decoder
        tokenizer = decoder.tokenizer
        if isinstance(tokenizer, ChatTokenizer) and tokenizer.has_chat_template:
            return [messages]
        return [requests.last_of_user(messages)]

    def output(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def likely(self, tokens: Sequence[logprobs.ScoredToken]) -> dict[str, Any]:
        return logprobs.as_chat(tokens)

    def part(self, **delta: str) -> dict[str, Any]:
        return {"delta": delta}

    def opening(self) -> str:
        """Return the roles of the answers."""
        own = self.part(role="assistant", content="")
        return "".join(self._choice(index, **own) for index in range(len(self.chunks)))


def _emitted(chunks: Sequence[Chunk]) -> list[int]:
    """Return all tokens of an output, and what ended it."""
    tokens = [token for each in chunks for token in each.tokens]
    return [*tokens, *(each.end_id for each in chunks[-1:] if each.end_id is not None)]


def num_in_common(prediction: Counter[int], output: Sequence[int]) -> int:
    """Return how many tokens of a prediction an output has, wherever they stand."""
    return sum(min(count, prediction[token]) for token, count in Counter(output).items())


ANSWER_OF_PATH = {"/v1/completions": Completion, "/v1/chat/completions": Chat}  # by path


def as_event(value: dict[str, Any]) -> str:
    """Return a value as one server-sent event."""
    # In ASCII: some clients take U+2028, and other ends of lines in Unicode, for those of events.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
