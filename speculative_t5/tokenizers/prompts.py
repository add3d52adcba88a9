"""Prompts to the ids that a model reads; prompts that are too long are refused or cut."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ..decoding import LanguageModel
from ..errors import check_integer, check_utf8
from .base import ChatTokenizer, Message, Tokenizer, unknown_characters

CHARACTERS = 64  # of a token, at most; the longest pieces of T5 have 16, but spaces are joined

# Text; source ids, ending with EOS for a T5; or a chat.
Prompt = str | Sequence[int] | Sequence[Message]


class PromptTooLong(ValueError):
    """A prompt has more tokens than the model reads; `found` says so without any advice."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}: {advice}")
        self.found = found


@dataclass(frozen=True)
class Source:
    """A prompt as the model reads it."""

    ids: list[int]  # ending with EOS for a T5
    cut: int = 0  # tokens that were cut off
    unknown: str = ""  # the characters of the text that the vocabulary lacks, each once


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        model: The model that reads the ids.
        tokenizer: None if all prompts are ids.
        prefix: Goes before each text prompt that does not begin with it; None for the prefix
            that the tokenizer was loaded with, if any.
        chat: Whether to format a text prompt as a chat.
        max_source_length: The longest prompt in tokens; None for the model's own limit.
        truncate: Whether to cut a longer prompt instead of refusing it; not with `chat`.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        *,
        prefix: str | None = None,
        chat: bool = False,
        max_source_length: int | None = None,
        truncate: bool = False,
    ) -> None:
        if max_source_length is not None:
            max_source_length = check_integer("max_source_length", max_source_length, 2)
        limit = model.info.max_context
        if limit is not None and (max_source_length or 0) > limit:
            raise ValueError(
                f"max_source_length must be at most {limit}, all that the model reads, "
                f"got {max_source_length}"
            )
        if chat and truncate:
            raise ValueError("truncate would cut into the chat template: leave one of them out")
        if prefix is None:
            prefix = getattr(tokenizer, "prefix", "")
        if not isinstance(prefix, str):
            raise ValueError(f"prefix must be a string or None, got {prefix!r}")
        check_utf8("prefix", prefix)
        self.prefix = prefix
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_source_length = max_source_length
        self._truncate = truncate
        if chat:
            self._chat_tokenizer()  # refused at once if there is none

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model reads."""
        return self._model.info.vocab_size

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt of any length; for errors see `SpeculativeDecoder.encode`."""
        if isinstance(prompt, str):
            ids = self._text_ids(prompt)
        else:
            parts = _parts(prompt)
            if any(isinstance(part, Mapping) for part in parts):
                ids = self._chat_tokenizer().encode_chat(cast(Sequence[Message], parts))
            else:
                ids = _as_ids(parts)
        if not ids:
            raise ValueError("the prompt is empty: give some ids")
        size = self._model.info.vocab_size
        bad = [i for i in ids if not 0 <= i < size]
        if bad:
            raise ValueError(f"prompt ids must be from 0 to {size - 1}, got {bad[0]}")
        return ids

    def fit(self, prompt: Prompt, max_tokens: int) -> Source:
        """Encode a prompt and cut it, if it may be cut, to what the model can read.

        A cut prompt leaves room for `max_tokens` of output; one that may not be cut is refused.
        """
        limit, unknown = self._longest(max_tokens), ""
        if isinstance(prompt, str) and len(prompt) > limit * CHARACTERS and not self._truncate:
            # Its tokens would take long to count.
            found = f"the prompt has {len(prompt)} characters, and {limit} tokens is all that"
            raise self._too_long(found, chat=self._chat)
        ids = self.ids(prompt)
        if isinstance(prompt, str) and self._tokenizer is not None:
            unknown = unknown_characters(self._tokenizer, prompt, ids)
        if len(ids) <= limit:
            return Source(ids, 0, unknown)
        chat = self._chat or any(isinstance(part, Mapping) for part in prompt)
        if self._truncate and not chat:
            special = self._model.info.special_tokens
            decoder_only = self._model.info.is_decoder_only
            kept = keep_end(ids, limit, special) if decoder_only else keep_beginning(ids, limit)
            return Source(kept, len(ids) - limit, unknown)
        found = f"the prompt has {len(ids)} tokens, more than the {limit} that"
        raise self._too_long(found, chat=chat)

    def _too_long(self, found: str, *, chat: bool) -> PromptTooLong:
        """Return the error for a prompt, with who sets the limit and what to do."""
        own = self._max_source_length is not None
        limit = "max_source_length allows" if own else "the model is made for"
        cut = "truncate=True (--truncate) to cut it, or"
        if chat:
            advice = "split it"
        elif self._model.info.is_decoder_only:
            advice = f"use {cut} split it"
        else:
            advice = (
                f"use rewrite (the command document) to split it, {cut} max_source_length=N "
                "(--max-source-length N) to allow more"
            )
        return PromptTooLong(f"{found} {limit}", advice)

    def _longest(self, max_tokens: int) -> int:
        """Return the most tokens of a prompt; cutting leaves a decoder-only model room to go on."""
        limit = self._model.info.max_context
        if self._truncate and self._max_source_length is None and limit is not None:
            return max(limit // 2, min(limit, limit - max_tokens + 1))
        return self._max_source_length or self._model.info.max_source_length

    def _text_ids(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise ValueError("the prompt is empty: give some text")
        check_utf8("the prompt", prompt)
        prompt = prompt if prompt.startswith(self.prefix) else self.prefix + prompt
        if self._chat:
            return self._chat_tokenizer().encode_chat([{"role": "user", "content": prompt}])
        if self._tokenizer is None:
            raise ValueError(
                "a prompt as text needs a tokenizer, and this decoder has none: give ids"
            )
        return self._tokenizer.encode(prompt)

    def _chat_tokenizer(self) -> ChatTokenizer:
        if not isinstance(self._tokenizer, ChatTokenizer):
            raise ValueError(
                "a chat needs a decoder-only model's tokenizer, and this decoder has none: "
                "leave chat out"
            )
        if not self._tokenizer.has_chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template: leave chat out, or choose a model "
                "that is tuned for chats"
            )
        return self._tokenizer


def check_prompts(prompts: object) -> None:
    """Refuse anything but a collection of prompts, for example a single one."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of them, got {_describe(prompts)}")


def keep_beginning(ids: list[int], limit: int) -> list[int]:
    """Shorten to `limit` ids: the first ones, then the EOS at the end."""
    return [*ids[: limit - 1], ids[-1]]


def keep_end(ids: list[int], limit: int, special: Collection[int]) -> list[int]:
    """Shorten to `limit` ids: the last ones, after the special one that a text may begin with."""
    begin = ids[:1] if ids[0] in special and limit > 1 else []
    return [*begin, *ids[len(begin) - limit :]]


def _parts(prompt: object) -> list[object]:
    if not isinstance(prompt, bytes | bytearray | Mapping):
        with contextlib.suppress(TypeError):  # raised for a number, which has no parts
            return list(cast(Iterable[object], prompt))
    raise _no_prompt(_describe(prompt))


def _as_ids(parts: list[object]) -> list[int]:
    ids = []
    for part in parts:
        try:
            ids.append(operator.index(part))  # type: ignore[arg-type]
        except TypeError as error:
            raise _no_prompt(f"a list that holds {_describe(part)}") from error
    return ids


def _no_prompt(found: str) -> ValueError:
    return ValueError(
        "a prompt must be text, a list of ids or a list of messages (each with role and "
        f"content), got {found}"
    )


def _describe(value: object) -> str:
    """Describe a value in a few words."""
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"
