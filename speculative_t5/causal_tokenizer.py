"""Tokenizers of decoder-only models: transformers reads them, and puts chats into their form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .session import Vocabulary
from .tokenizer import Message, as_vocabulary


class CausalTokenizer:
    """The tokenizer that transformers makes of a folder; nothing in the folder is run.

    Args:
        folder: With tokenizer.json, or whatever other files its kind has.

    Raises:
        ValueError: If there is none, or the files are damaged.
    """

    def __init__(self, folder: Path) -> None:
        import transformers  # takes a second or two

        transformers.logging.set_verbosity_error()
        try:
            self._backend: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # what it raises differs by kind and version
            raise ValueError(
                f"no tokenizer can be made of {folder} ({first_line(error)}): "
                "copy its files there from the model that this one was tuned from"
            ) from error
        ids: dict[str, int] = self._backend.get_vocab()
        added = self._backend.added_tokens_decoder.items()
        special = {*self._backend.all_special_ids, *(i for i, token in added if token.special)}
        self._known = frozenset(ids.values())
        self._vocabulary = as_vocabulary(ids, sorted(special))

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def eos_token_id(self) -> int | None:
        """The id that stands for an end; None if there is none. Texts do not get it."""
        token: int | None = self._backend.eos_token_id
        return token

    def encode(self, text: str) -> list[int]:
        """Ids of the text, with what the tokenizer puts before it."""
        ids: list[int] = self._backend.encode(text)
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat in the form the model was tuned on, up to where its answer begins.

        Raises:
            ValueError: If the model has no chat template, or the template refuses the messages.
        """
        for message in messages:
            texts = [message.get(key) for key in ("role", "content")]
            if not all(isinstance(text, str) for text in texts):
                found = [f"{type(value).__name__} for {key}" for key, value in message.items()]
                raise ValueError(
                    "a message must be a text for role and one for content, "
                    f"got {', '.join(found) or 'nothing'}"
                )
        if not self._backend.chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template: leave chat out, or choose a model "
                "that is tuned for chats"
            )
        try:
            ids: list[int] = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:  # the template's own, and those of the library that fills it in
            raise ValueError(
                f"the model's chat template refuses these messages ({first_line(error)}): "
                "give others, or leave chat out"
            ) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; control tokens and vocabulary padding have none."""
        text: str = self._backend.decode(
            [token for token in ids if token in self._known],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text


def first_line(error: Exception) -> str:
    """The first line of a message, or what kind of error it is if it has none."""
    return str(error).strip().partition("\n")[0].rstrip(" :.") or type(error).__name__
