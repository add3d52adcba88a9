"""Text -> ids, and ids -> text, all at once or as they come."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import sentencepiece as spm

from ..decoding import Vocabulary
from ..errors import first_line, refuse_pointer
from ..models import T5Config

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
Message = Mapping[str, str]  # of a chat: "role" and "content"
AGAIN = "download or copy it again"
FITTING = "copy there the tokenizer that belongs to the model"
_EXTRA_ID = re.compile(r"<extra_id_(0|[1-9][0-9]{0,4})>")
MAX_EXTRA = 10_000  # sentinels: more than any model has, and few enough to be listed


class Tokenizer(Protocol):
    """Text at the two ends of the engine.

    A tokenizer whose vocabulary may lack characters has an attribute `unknown_id`, the id that
    stands for them. `load` adds an attribute `prefix`: what the model's config.json wants before
    each text, see `read_prefix`.
    """

    @property
    def vocabulary(self) -> Vocabulary:
        """What tells this tokenizer from another."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, as a model of its own takes them: T5's with EOS at the end."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; control tokens and vocabulary padding have none."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that can put chats into a form of the model's."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat, up to where the model's answer begins.

        Raises:
            ValueError: If the template refuses the messages.
        """


class T5Tokenizer(Tokenizer, Protocol):
    """A tokenizer of the T5 family."""

    @property
    def eos_token_id(self) -> int:
        """The id that it puts at the end of a text."""


def unknown_characters(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> str:
    """The characters of a text that the vocabulary lacks, each once; `ids` are the text's."""
    unknown = getattr(tokenizer, "unknown_id", None)
    if unknown is None or unknown not in ids:
        return ""
    # Tokenizers normalize, too: some characters are there only when put together.
    characters = dict.fromkeys("".join(unicodedata.normalize("NFKC", text).split()))
    return "".join(c for c in characters if unknown in tokenizer.encode(c))


def read_prefix(folder: Path) -> str:
    """What a model's config.json wants before each prompt, its top-level `prefix`; "" for nothing.

    Raises:
        ValueError: If it is not a string.
    """
    path = folder / "config.json"
    prefix = (_read_object(path) if path.is_file() else {}).get("prefix")
    if prefix is not None and not isinstance(prefix, str):
        raise ValueError(f"prefix in {path} is {prefix!r}, expected a string")
    return prefix or ""


def load_tokenizer(folder: Path, config: T5Config | None = None) -> T5Tokenizer:
    """The tokenizer of a model folder, which must fit the model's config if that is given.

    That of spiece.model, or of tokenizer.json where there is none, or of vocab.json and merges.txt
    (codet5); or bytes, which need no such file, where tokenizer_config.json names ByT5Tokenizer.

    Raises:
        ValueError: If the folder has none of them, the file cannot be read, or it does not fit.
    """
    tokenizer = _find_tokenizer(folder)
    if config is None:
        return tokenizer
    vocabulary, end = tokenizer.vocabulary, tokenizer.eos_token_id
    if end != config.eos_token_id:
        raise ValueError(
            f"the tokenizer in {folder} ends a text by {end}, the model by {config.eos_token_id} "
            f"(eos_token_id in config.json): {FITTING}"
        )
    # Sentinels may go beyond the embedding, and then cannot be used.
    beyond = sum(token >= config.vocab_size for token in vocabulary.special)
    if vocabulary.size - beyond > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {vocabulary.size} pieces, "
            f"the model {config.vocab_size} rows for them (vocab_size in config.json): {FITTING}"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer in a folder, as far as can be told by the names of files."""
    files = ("spiece.model", "tokenizer.json", "vocab.json")
    bytes_alone = _settings(folder).get("tokenizer_class") == "ByT5Tokenizer"
    return bytes_alone or any((folder / name).is_file() for name in files)


def _find_tokenizer(folder: Path) -> T5Tokenizer:
    refuse_pointers(folder)
    if (folder / "spiece.model").is_file():
        return SentencePieceTokenizer(folder)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return JSONTokenizer(folder)
    if _settings(folder).get("tokenizer_class") == "ByT5Tokenizer":
        return ByteTokenizer(folder)
    raise ValueError(
        f"no tokenizer in {folder}: expected spiece.model or tokenizer.json; "
        "copy it there from the model that this one was tuned from"
    )


def refuse_pointers(folder: Path) -> None:
    """Refuse a folder of which Git LFS has not fetched a tokenizer's files.

    Raises:
        ValueError: Naming the first of them.
    """
    for name in (*TOKENIZER_FILES, "tokenizer.model"):
        if (folder / name).is_file():
            refuse_pointer(folder / name)


class SentencePieceTokenizer:
    """A spiece.model and the tokens added to it, T5's sentinels <extra_id_0>, ... among them."""

    def __init__(self, folder: Path) -> None:
        path = folder / "spiece.model"
        try:
            self._pieces = spm.SentencePieceProcessor(model_file=str(path))
            self._num_pieces: int = self._pieces.get_piece_size()
            self._ids = {self._pieces.id_to_piece(i): i for i in range(self._num_pieces)}
        # TypeError is raised for a path that is not UTF-8, ValueError for a piece that is not.
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model: {first_line(error)}; {AGAIN}"
            ) from error
        self._added = self._find_added(folder)
        self._texts = {token: text for text, token in self._added.items()}
        names = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(names)})" if names else r"(?!)()")

    def _find_added(self, folder: Path) -> dict[str, int]:
        """Tokens beside the pieces; T5's sentinels follow the pieces, the first one last."""
        listed = _added_tokens(folder)
        added = {
            text: token
            for text, token in listed.items()
            if token >= self._num_pieces or _EXTRA_ID.fullmatch(text)
        }
        count = _num_extra(folder, 0 if any(map(_EXTRA_ID.fullmatch, listed)) else 100)
        for i in range(count):
            added.setdefault(f"<extra_id_{i}>", self._num_pieces + count - 1 - i)
        return added

    @property
    def vocabulary(self) -> Vocabulary:
        special = [
            i
            for i in range(self._num_pieces)
            if self._pieces.is_control(i) or self._pieces.is_unknown(i)
        ]
        return as_vocabulary(self._ids | self._added, [*special, *self._texts])

    @property
    def eos_token_id(self) -> int:
        return int(self._pieces.eos_id())

    @property
    def unknown_id(self) -> int:
        """The id of what there is no piece for."""
        return int(self._pieces.unk_id())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        # Odd places of the split hold the added tokens.
        parts = self._pattern.split(text)
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(self._added[part])
            else:
                # Added tokens take the spaces before them along.
                ids += self._pieces.encode(part.rstrip() if place + 1 < len(parts) else part)
        return [*ids, self.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token < self._num_pieces and token not in self._texts:
                run.append(token)
                continue
            texts += [self._pieces.decode(run)] if run else []
            run = []
            texts += [self._texts[token]] if token in self._texts else []
        texts += [self._pieces.decode(run)] if run else []
        return " ".join(texts)


class JSONTokenizer:
    """A tokenizer.json, or the byte-level BPE of a vocab.json and merges.txt."""

    def __init__(self, folder: Path) -> None:
        settings = _settings(folder)
        names = {
            role: _content(settings.get(f"{role}_token")) or default
            for role, default in (("pad", "<pad>"), ("eos", "</s>"), ("bos", "<s>"))
        }
        unknown = _content(settings.get("unk_token")) or "<unk>"
        path = folder / "tokenizer.json"
        if not path.exists():
            path = folder / "vocab.json"
        try:
            self._backend = _read_json(path) if path.name != "vocab.json" else _read_bpe(folder)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # nothing narrower is raised, and panics are no Exceptions
            raise ValueError(f"{path} is not a tokenizer: {first_line(error)}; {AGAIN}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        found = {role: self._backend.token_to_id(name) for role, name in names.items()}
        if found["eos"] is None:
            raise ValueError(
                f"{path} has no piece {names['eos']} for the end of a text: "
                "name the one it has as eos_token in tokenizer_config.json"
            )
        self._eos: int = found["eos"]
        self._control = {token for token in found.values() if token is not None}
        self.unknown_id: int | None = self._backend.token_to_id(unknown)

    @property
    def vocabulary(self) -> Vocabulary:
        added = self._backend.get_added_tokens_decoder()
        special = [i for i, token in added.items() if token.special]
        return as_vocabulary(self._backend.get_vocab(), [*self._control, *special])

    @property
    def eos_token_id(self) -> int:
        return self._eos

    def encode(self, text: str) -> list[int]:
        ids = list(self._backend.encode(text).ids)
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos]

    def decode(self, ids: Sequence[int]) -> str:
        shown = [i for i in ids if i not in self._control]
        return str(self._backend.decode(shown, skip_special_tokens=False))


def _read_json(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    return Backend.from_file(str(path))


def _read_bpe(folder: Path) -> Any:
    """RoBERTa's byte-level BPE, which puts <s> before a text and </s> after it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Backend(model)
    prefix = bool(_settings(folder).get("add_prefix_space"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    control = ("<s>", "</s>", "<pad>", "<unk>", "<mask>")
    backend.add_special_tokens([name for name in control if backend.token_to_id(name) is not None])
    # Each gets the next free id, so that their order is what counts.
    added = sorted(_added_tokens(folder).items(), key=lambda item: item[1])
    for text, token in added:
        backend.add_tokens([AddedToken(text, normalized=True)])
        if backend.token_to_id(text) != token:
            raise ValueError(f"{text} is to be {token}, which is not the next free id")
    start, end = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    if start is None or end is None:
        raise ValueError("it has no <s> and </s>")
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", end), ("<s>", start), add_prefix_space=prefix
    )
    return backend


class ByteTokenizer:
    """byt5's (arXiv 2105.13626): UTF-8 bytes after three control tokens, then sentinels."""

    PAD, EOS, UNK, FIRST = 0, 1, 2, 3

    def __init__(self, folder: Path) -> None:
        self._sentinels = self.FIRST + 256
        self._size = self._sentinels + _num_extra(folder, 125)

    @property
    def vocabulary(self) -> Vocabulary:
        names = ["<pad>", "</s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        names += [f"<extra_id_{i}>" for i in range(self._size - self._sentinels)]
        special = [*range(self.FIRST), *range(self._sentinels, self._size)]
        return as_vocabulary({name: i for i, name in enumerate(names)}, special)

    @property
    def eos_token_id(self) -> int:
        return self.EOS

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(_EXTRA_ID.split(text)):
            token = self._sentinels + int(part) if place % 2 else 0
            if place % 2 and token < self._size:
                ids.append(token)
            else:
                part = f"<extra_id_{part}>" if place % 2 else part
                ids += [self.FIRST + byte for byte in part.encode()]
        return [*ids, self.EOS]

    def decode(self, ids: Sequence[int]) -> str:
        text = b""
        for token in ids:
            if self.FIRST <= token < self._sentinels:
                text += bytes([token - self.FIRST])
            elif self._sentinels <= token < self._size:
                text += f"<extra_id_{token - self._sentinels}>".encode()
        return text.decode(errors="replace")


class Detokenizer:
    """Ids -> text, piece by piece: the parts joined are the text of all ids.

    Only the last few ids are decoded again at each call. Text that ends within a character (a
    byte-level piece) is held back until the rest of it has come, or `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those decoded again: some that are out already,
        self._shown = 0  # so many of them,
        self._before = ""  # with this text; and those held back

    def add(self, token: int) -> str:
        """Text that this id adds."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        added = text[len(self._before) :]
        new = self._ids[self._shown :]
        last = self._tokenizer.decode(new)
        # Decoding strips leading spaces, so what is decoded again must begin with something to see.
        if last.strip():
            self._ids, text = new, last
        elif new == [token] and self._ids[-3:] == [token] * 3:
            # An output may end in thousands of line breaks: two of them stand for more.
            del self._ids[-1]
            text = self._tokenizer.decode(self._ids)
        self._shown, self._before = len(self._ids), text
        return added

    def finish(self) -> str:
        """Text still held back."""
        text = self._tokenizer.decode(self._ids)
        added = text[len(self._before) :]
        self._shown, self._before = len(self._ids), text
        return added


def pieces(tokens: Sequence[int], detokenizer: Detokenizer, *, end: bool) -> tuple[str, ...]:
    """What each of these ids adds to a text; at its end with what was still held back."""
    texts = [detokenizer.add(token) for token in tokens]
    if end and (rest := detokenizer.finish()):
        texts = [*texts[:-1], "".join(texts[-1:]) + rest]
    return tuple(texts)


def _content(token: Any) -> str | None:
    """A token in tokenizer_config.json: a string, or an object that has one."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _read_object(path) if path.is_file() else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; {AGAIN}") from error
    return read if isinstance(read, dict) else {}


def _num_extra(folder: Path, default: int) -> int:
    count = _settings(folder).get("extra_ids")
    if count is None:
        return default
    if type(count) is not int or not 0 <= count <= MAX_EXTRA:
        raise ValueError(
            f"extra_ids in {folder / 'tokenizer_config.json'} is {count!r}, "
            f"expected an integer from 0 to {MAX_EXTRA}"
        )
    return count


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens that were added to a tokenizer, and their ids, from either place that lists them."""
    path = folder / "added_tokens.json"
    listed = _read_object(path) if path.is_file() else {}
    decoder = _settings(folder).get("added_tokens_decoder")
    for token, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if (text := _content(entry)) and re.fullmatch(r"[0-9]{1,9}", token):
            listed[text] = int(token)
    return {t: token for t, token in listed.items() if t and type(token) is int and token >= 0}


def as_vocabulary(ids: Mapping[str, int], special: Sequence[int]) -> Vocabulary:
    """What tells a tokenizer of these pieces from others."""
    lines = sorted(f"{i} {piece}" for piece, i in ids.items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Vocabulary(len(ids), digest, frozenset(special))
