"""The roles that a tokenizer plays, and what every kind of tokenizer shares."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ..decoding import Vocabulary

Message = Mapping[str, str]  # of a chat: "role" and "content"


class Tokenizer(Protocol):
    """Turns text into ids, and ids into text.

    A tokenizer whose vocabulary may lack characters has an attribute `unknown_id`, the id that
    stands for them. `load` adds an attribute `prefix`, see `read_prefix`.
    """

    @property
    def vocabulary(self) -> Vocabulary:
        """Identifies the tokenizer: two with equal vocabularies give the same ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a T5's end with EOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; control tokens and vocabulary padding have none."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that formats chats as its model expects them."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat, up to where the model's answer begins.

        Raises:
            ValueError: If the template refuses the messages.
        """


class T5Tokenizer(Tokenizer, Protocol):
    """A tokenizer of the T5 family."""

    @property
    def eos_token_id(self) -> int:
        """The id at the end of every text."""


def as_vocabulary(ids: Mapping[str, int], special: Iterable[int]) -> Vocabulary:
    """Identify a tokenizer by its pieces' ids and its special tokens."""
    lines = sorted(f"{i} {piece}" for piece, i in ids.items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Vocabulary(len(ids), digest, frozenset(special))


def unknown_characters(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> str:
    """Return the characters of a text, given its ids, that the vocabulary lacks, each once."""
    unknown = getattr(tokenizer, "unknown_id", None)
    if unknown is None or unknown not in ids:
        return ""
    # Tokenizers normalize, too: some characters are known only once they are composed.
    characters = dict.fromkeys("".join(unicodedata.normalize("NFKC", text).split()))
    return "".join(c for c in characters if unknown in tokenizer.encode(c))
