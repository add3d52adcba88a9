"""The roles that a tokenizer plays, what every kind shares, and ids to text as rounds emit them."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ..decoding import Vocabulary
from .cleaning import CleanUp

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)

# Those that hold pieces, and not only settings.
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")

# A token of madlad400's for a language, and not for a script or a region; nor Gemma's <2mass>.
LANGUAGE_TOKEN = re.compile(r"<2([a-z]{2,3}(?:_[A-Z][A-Za-z]+)*)>")

Message = Mapping[str, str]  # of a chat: "role" and "content"


class Tokenizer(Protocol):
    """Turns text into ids, and ids into text.

    One whose vocabulary may lack characters has an attribute `unknown_id`, the id that stands for
    them. One that leaves spaces out of its texts (`clean_up_tokenization_spaces`) has `cleans_up`
    and a method `decode_as_it_is`, which leaves none out. `load` adds others: `prefix`, the text
    that goes before each prompt; `languages`, those that the model translates; and
    `trained_length`, the tokens of the longest sources that it was trained on, or None.
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
        """Return the ids of a chat, up to where the answer begins, or raise ValueError."""


def as_vocabulary(ids: Mapping[str, int], special: Iterable[int]) -> Vocabulary:
    """Identify a tokenizer by its pieces' ids and its special tokens."""
    lines = sorted(f"{i} {piece}" for piece, i in ids.items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    languages = (found[1] for piece in ids if (found := LANGUAGE_TOKEN.fullmatch(piece)))
    return Vocabulary(len(ids), digest, frozenset(special), tuple(sorted(languages)))


def unknown_characters(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> str:
    """Return the characters of a text, given its ids, that the vocabulary lacks, each once."""
    unknown = getattr(tokenizer, "unknown_id", None)
    if unknown is None or unknown not in ids:
        return ""
    # Tokenizers normalize, too: some characters are known only once they are composed.
    characters = dict.fromkeys("".join(unicodedata.normalize("NFKC", text).split()))
    return "".join(c for c in characters if unknown in tokenizer.encode(c))


class Detokenizer:
    """Decodes ids one at a time: the parts joined are the text of all ids.

    Each call decodes only the last few ids again. Text that ends within a character (a byte-level
    piece) is held back until the rest of it has arrived, or until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        cleans_up = getattr(tokenizer, "cleans_up", False)
        name = "decode_as_it_is" if cleans_up else "decode"
        self._decode: Callable[[Sequence[int]], str] = getattr(tokenizer, name)
        self._clean = CleanUp() if cleans_up else None
        self._ids: list[int] = []  # the ids that the next call decodes again
        self._shown = 0  # how many of them, from the first, have been returned
        self._before = ""  # the text returned for those

    def add(self, token: int) -> str:
        """Return the text that this id adds."""
        return self._cleaned(self._decoded(token))

    def finish(self) -> str:
        """Return the text still held back."""
        text = self._decode(self._ids)
        added = text[len(self._before) :]
        self._shown, self._before = len(self._ids), text
        return self._cleaned(added) + (self._clean.finish() if self._clean else "")

    def _cleaned(self, text: str) -> str:
        return self._clean.add(text) if self._clean else text

    def _decoded(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        added = text[len(self._before) :]
        new = self._ids[self._shown :]
        last = self._decode(new)
        # Decoding strips leading spaces, so the ids decoded again must begin with visible text.
        if last.strip():
            self._ids, text = new, last
        elif len(self._ids) > 16 and len(new) == 1:
            # An output may end in thousands of blanks: the first id, which begins with visible text
            # unless the output has none, and the last ones stand for all of them.
            del self._ids[1:-8]
            text = self._decode(self._ids)
        self._shown, self._before = len(self._ids), text
        return added


def pieces(tokens: Sequence[int], detokenizer: Detokenizer, *, end: bool) -> tuple[str, ...]:
    """Return the text that each id adds; at the `end` the last one includes what was held back."""
    texts = [detokenizer.add(token) for token in tokens]
    if end and (rest := detokenizer.finish()):
        texts = [*texts[:-1], "".join(texts[-1:]) + rest]
    return tuple(texts)
