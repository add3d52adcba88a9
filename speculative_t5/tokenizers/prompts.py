"""Prompts to the ids that a model reads; prompts that are too long are refused or cut."""

import contextlib
import copy
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import cast

from ..decoding import LanguageModel, ModelInfo
from ..errors import check_utf8, shown
from ..options import OptionError, check_integer, option_error
from .base import ChatTokenizer, Message, Tokenizer, unknown_characters
from .languages import Languages

MAX_TOKEN_CHARACTERS = 64  # the longest pieces of T5 have 16, but spaces are joined

# Text; source ids, ending with EOS for a T5; or a chat.
Prompt = str | Sequence[int] | Sequence[Message]


class PromptTooLong(OptionError):
    """A prompt has more tokens than the model reads: what was found, and what to do."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}: {advice}")
        self._found, self._advice = found, advice
        self.args = (found, advice)  # from which a copy in another process is made

    def put_before(self, place: str) -> None:
        super().put_before(place)
        self._found = place + self._found
        self.args = (self._found, self._advice)

    @property
    def found(self) -> str:
        """The message without the advice, for callers who have their own."""
        return OptionError(self._found).spelled()


@dataclass(frozen=True)
class Source:
    """A prompt as the model reads it."""

    ids: list[int]  # ending with EOS for a T5
    cut: int = 0  # tokens that were cut off
    unknown: str = ""  # the characters of the text that the vocabulary lacks, each once
    trained: int | None = None  # the most that the model was trained on, if it says so


@dataclass(frozen=True)
class InfoOnly:
    """What is left of a model where no weights are."""

    info: ModelInfo


@dataclass
class PromptEncoder:
    """Encodes prompts for one model."""

    model: LanguageModel
    tokenizer: Tokenizer | None  # None if all prompts are ids
    _: KW_ONLY
    prefix: str | None = None  # goes before each text that lacks it; None for the tokenizer's
    to: str | None = None  # the language to translate to, which decides the prefix
    from_: str | None = None  # and that of the text, where the model has to be told
    chat: bool = False  # whether to format a text prompt as a chat
    max_source_length: int | None = None  # in tokens; None for the model's own limit
    truncate: bool = False  # whether to cut a longer prompt instead of refusing it; not a chat

    def __post_init__(self) -> None:
        # Codes of the source, "" where it is not known, and the target of a translation.
        self.languages: tuple[str, str] | None = None
        if self.max_source_length is not None:
            self.max_source_length = check_integer("max_source_length", self.max_source_length, 2)
        limit = self.model.info.max_context
        if limit is not None and (self.max_source_length or 0) > limit:
            expected = f"at most {limit}, all that the model reads"
            raise option_error("max_source_length", expected, self.max_source_length)
        if self.truncate and self.model.info.is_decoder_only:
            raise OptionError(
                "{truncate} cuts a prompt's end, which a decoder-only model goes on from: leave it "
                "out"
            )
        if self.chat and self.truncate:
            raise OptionError(
                "{truncate} would cut into the {chat} template: leave one of them out"
            )
        if self.to is not None:
            self._set_languages(self.to)
        elif self.from_ is not None:
            raise OptionError("{from_} is {!r}, and {to} is missing: give both", self.from_)
        if self.prefix is None:
            self.prefix = getattr(self.tokenizer, "prefix", "")
        self.trained_length: int | None = getattr(self.tokenizer, "trained_length", None)
        if not isinstance(self.prefix, str):
            raise option_error("prefix", "a string or None", self.prefix)
        check_utf8("prefix", self.prefix)
        if self.chat:
            self._chat_tokenizer()  # refused at once if there is none

    def _set_languages(self, to: str) -> None:
        """Take the prefix from the languages that the tokenizer's model translates between."""
        if self.prefix is not None:
            raise OptionError(
                "{to} is {!r} and {prefix} is {!r}, and both go before the prompt: leave out "
                "one of them",
                to,
                self.prefix,
            )
        if self.tokenizer is None:
            raise OptionError("{to} is for prompts as text, which need a tokenizer: give one")
        languages = getattr(self.tokenizer, "languages", Languages())
        self.languages = languages.pair(to, self.from_)
        self.prefix = languages.prefix(to, self.from_)

    def without_model(self) -> "PromptEncoder":
        """Return the same without the model's weights, for another process."""
        other = copy.copy(self)
        other.model = cast(LanguageModel, InfoOnly(self.model.info))
        return other

    def translating(self, to: str, from_: str | None = None) -> "PromptEncoder":
        """Return the same for prompts that are translated; see `Languages` for errors."""
        return replace(self, prefix=None, to=to, from_=from_ or self.from_)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt of any length; for errors see `SpeculativeDecoder.encode`."""
        if isinstance(prompt, str):
            ids = self._text_ids(prompt)
        else:
            parts = _parts_of_prompt(prompt)
            if any(isinstance(part, Mapping) for part in parts):
                ids = self._chat_tokenizer().encode_chat(cast(Sequence[Message], parts))
            else:
                ids = _as_ids(parts)
        if not ids:
            raise ValueError("the prompt is empty: give some ids")
        size = self.model.info.vocab_size
        bad = [i for i in ids if not 0 <= i < size]
        if bad:
            raise ValueError(f"prompt ids must be from 0 to {size - 1}, got {bad[0]}")
        return ids

    def fit(self, prompt: Prompt) -> Source:
        """Encode a prompt and cut it, if it may be cut, to what the model can read."""
        limit, unknown = self.max_source_length or self.model.info.max_source_length, ""
        if self._is_long_text(prompt, limit):
            found = f"the prompt has {len(prompt)} characters, and {limit} tokens is all that"
            raise self._too_long(found, chat=self.chat)
        if self._is_long_list(prompt, limit):
            self.ids(prompt[:limit])  # refused if it is no list of ids
            found = f"the prompt has {len(prompt)} tokens, more than the {limit} that"
            raise self._too_long(found, chat=False)
        ids = self.ids(prompt)
        if isinstance(prompt, str) and self.tokenizer is not None:
            unknown = unknown_characters(self.tokenizer, prompt, ids)
        if len(ids) <= limit:
            return Source(ids, 0, unknown, self.trained_length)
        chat = self.chat or any(isinstance(part, Mapping) for part in prompt)
        if self.truncate and not chat:
            kept = keep_beginning(ids, limit, self.model.info.special_tokens)
            return Source(kept, len(ids) - limit, unknown, self.trained_length)
        found = f"the prompt has {len(ids)} tokens, more than the {limit} that"
        raise self._too_long(found, chat=chat)

    def _is_long_text(self, prompt: Prompt, limit: int) -> bool:
        """Whether a prompt is a text whose tokens are surely too many, and take long to count."""
        if not isinstance(prompt, str) or self.truncate:
            return False
        return len(prompt) > limit * MAX_TOKEN_CHARACTERS

    def _is_long_list(self, prompt: Prompt, limit: int) -> bool:
        """Whether a prompt is a list of so many ids that checking each would take long."""
        if not isinstance(prompt, list) or self.truncate:
            return False
        return len(prompt) > limit and not isinstance(prompt[0], Mapping)

    def _too_long(self, found: str, *, chat: bool) -> PromptTooLong:
        """Return the error for a prompt, with who sets the limit and what to do."""
        own = self.max_source_length is not None
        limit = "{max_source_length} allows" if own else "the model is made for"
        if chat or self.model.info.is_decoder_only:
            advice = "split it"
        else:
            advice = (
                "use {rewrite} to split it, {truncate} to cut it, or {max_source_length} to allow "
                "more"
            )
        return PromptTooLong(f"{found} {limit}", advice)

    def _text_ids(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise ValueError("the prompt is empty: give some text")
        check_utf8("the prompt", prompt)
        prefix = self.prefix or ""
        prompt = prompt if prompt.startswith(prefix) else prefix + prompt
        if self.chat:
            return self._chat_tokenizer().encode_chat([{"role": "user", "content": prompt}])
        if self.tokenizer is None:
            raise ValueError(
                "a prompt as text needs a tokenizer, and this decoder has none: give ids"
            )
        return self.tokenizer.encode(prompt)

    def _chat_tokenizer(self) -> ChatTokenizer:
        if not isinstance(self.tokenizer, ChatTokenizer):
            raise OptionError(
                "a chat needs a tokenizer with a chat template, and this decoder has none: "
                "leave {chat} out"
            )
        if not self.tokenizer.has_chat_template:
            raise OptionError(
                "the model's tokenizer has no chat template: leave {chat} out, or choose a model "
                "that is tuned for chats"
            )
        return self.tokenizer


def check_prompts(prompts: object) -> None:
    """Refuse anything but a collection of prompts, for example a single one."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of them, got {shown(prompts)}")


def keep_beginning(ids: list[int], limit: int, special: Collection[int]) -> list[int]:
    """Shorten to `limit` ids: the first ones, then the special one that a text may end with."""
    end = ids[-1:] if ids[-1] in special else []
    return [*ids[: limit - len(end)], *end]


def _parts_of_prompt(prompt: object) -> list[object]:
    if not isinstance(prompt, bytes | bytearray | Mapping):
        with contextlib.suppress(TypeError):  # raised for a number, which has no parts
            return list(cast(Iterable[object], prompt))
    raise _no_prompt(shown(prompt))


def _as_ids(parts: list[object]) -> list[int]:
    ids = []
    for part in parts:
        try:
            ids.append(operator.index(part))  # type: ignore[arg-type]
        except TypeError as error:
            raise _no_prompt(f"a list that holds {shown(part)}") from error
    return ids


def _no_prompt(found: str) -> ValueError:
    return ValueError(
        "a prompt must be text, a list of ids or a list of messages (each with role and "
        f"content), got {found}"
    )
