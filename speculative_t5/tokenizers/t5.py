"""Tokenizers of the T5 family: of a spiece.model, of JSON files, and ByT5's, which needs no file.

Ids are those of transformers, which is not imported.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..decoding import Vocabulary
from ..errors import first_line, read_json
from ..models import T5Config
from .base import VOCABULARIES, as_vocabulary

AGAIN = "download or copy it again"  # ends the messages about damaged files
REPLACE = "copy the tokenizer that belongs to the model there"
SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,4})>")
MAX_SENTINELS = 10_000  # more than any model has, and few enough to list


def load_tokenizer(folder: Path, config: T5Config | None = None) -> T5Tokenizer:
    """Load the tokenizer of a model folder; refuse one that does not fit the config, if given.

    Reads tokenizer.json, or else spiece.model, or else vocab.json and merges.txt (codet5). ByT5
    needs none of them: tokenizer_config.json or config.json names ByT5Tokenizer.
    """
    tokenizer: T5Tokenizer
    if (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file():
        tokenizer = SentencePieceTokenizer(folder)
    elif (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        tokenizer = JSONTokenizer(folder)
    elif _is_bytewise(folder):
        tokenizer = ByteTokenizer(folder)
    else:
        raise ValueError(
            f"no tokenizer in {folder}: expected spiece.model or tokenizer.json; "
            "copy it there from the model that this one was tuned from"
        )
    if config is None:
        return tokenizer
    vocabulary, end = tokenizer.vocabulary, tokenizer.eos_token_id
    if end != config.eos_token_id:
        raise ValueError(
            f"the tokenizer in {folder} has the EOS id {end}, the model {config.eos_token_id} "
            f"(eos_token_id in config.json): {REPLACE}"
        )
    # Sentinels may lie beyond the embedding, and then cannot be used.
    beyond = sum(token >= config.vocab_size for token in vocabulary.special)
    if vocabulary.size - beyond > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {vocabulary.size} pieces, "
            f"the model {config.vocab_size} rows for them (vocab_size in config.json): {REPLACE}"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder seems to hold a tokenizer; the files of pieces are not opened."""
    return any((folder / name).is_file() for name in VOCABULARIES) or _is_bytewise(folder)


def _is_bytewise(folder: Path) -> bool:
    return _read_settings(folder).get("tokenizer_class") == "ByT5Tokenizer"


@contextlib.contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Say of a file that cannot be read that it is not of its kind."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise several types; panics are no Exception
        raise ValueError(f"{path} is not {kind}: {first_line(error)}; {AGAIN}") from error


class ByteTokenizer:
    """ByT5's tokenizer (arXiv 2105.13626): a byte is an id.

    UTF-8 bytes follow three control tokens, and then come sentinels: `extra_ids` of the folder.
    """

    CONTROL = ("<pad>", "</s>", "<unk>")
    EOS, FIRST = 1, 3

    def __init__(self, folder: Path) -> None:
        settings = _read_settings(folder)
        self._sentinels = self.FIRST + 256
        self._special = {name: i for i, name in enumerate(self.CONTROL)}
        for i in range(_num_sentinels(folder, settings, 125)):
            self._special[f"<extra_id_{i}>"] = self._sentinels + i
        self._texts = {i: name for name, i in self._special.items() if i >= self._sentinels}
        self._pattern = _any_of(() if settings.get("split_special_tokens") else self._special)
        bytewise = {f"<0x{i:02X}>": self.FIRST + i for i in range(256)}
        self.eos_token_id = self.EOS
        self.vocabulary = as_vocabulary(bytewise | self._special, self._special.values())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        parts = self._pattern.split(text)
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._special[part])
                continue
            # Control tokens swallow the blanks on both sides.
            part = part.lstrip() if i and parts[i - 1] in self.CONTROL else part
            part = part.rstrip() if parts[i + 1 : i + 2] and parts[i + 1] in self.CONTROL else part
            ids += [self.FIRST + byte for byte in part.encode()]
        return ids if ids[-1:] == [self.EOS] else [*ids, self.EOS]

    def decode(self, ids: Sequence[int]) -> str:
        text = b""
        for token in ids:
            if self.FIRST <= token < self._sentinels:
                text += bytes([token - self.FIRST])
            else:
                text += self._texts.get(token, "").encode()
        return text.decode(errors="replace")


class SentencePieceTokenizer:
    """A folder's spiece.model and the tokens added to it, such as T5's <extra_id_0>, ...

    It normalizes as transformers does, in another way than sentencepiece (combining marks, U+0085),
    unless there are pieces of bytes, which transformers does not know.
    """

    def __init__(self, folder: Path) -> None:
        import sentencepiece

        path, settings = folder / "spiece.model", _read_settings(folder)
        self._normalizer: Any = None
        with _reading(path, "a SentencePiece model"):
            stored = path.read_bytes()
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=stored)
            self._names = [self._pieces.id_to_piece(i) for i in range(len(self._pieces))]
            charsmap = _field(_field(stored, 3), 2)  # of normalizer_spec
            if charsmap and self._pieces.piece_to_id("<0x00>") == self._pieces.unk_id():
                from tokenizers import normalizers

                # A sequence can be pickled; what is in it cannot.
                self._normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap)])
                # The last of two such fields counts: an empty one.
                self._pieces.load_from_serialized_proto(stored + b"\x1a\x02\x12\x00")
        self.eos_token_id = int(self._pieces.eos_id())
        self.unknown_id = int(self._pieces.unk_id())
        added, special = self._find_added(folder, settings)
        control = {
            name: i
            for i, name in enumerate(self._names)
            if self._pieces.is_control(i) or self._pieces.is_unknown(i)
        }
        self._special = {*control.values(), *(added[text] for text in special)}
        self._read = control | added  # the tokens that a text may spell
        if settings.get("split_special_tokens"):
            self._read = {t: i for t, i in added.items() if i not in self._special}
        self._pattern = _any_of(self._read)
        self._texts = {
            i: text
            for text, i in added.items()
            if i not in self._special or SENTINEL.fullmatch(text)
        }
        names = {name: i for i, name in enumerate(self._names)}
        self.vocabulary: Vocabulary = as_vocabulary(names | added, self._special)

    def _find_added(
        self, folder: Path, settings: Mapping[str, Any]
    ) -> tuple[dict[str, int], set[str]]:
        """Find the tokens beside the pieces, and which are special: sentinels go backwards."""
        listed, special = _read_added_tokens(folder, settings)
        added = {
            text: token
            for text, token in listed.items()
            if token >= len(self._names) or SENTINEL.fullmatch(text)
        }
        default = 0 if any(map(SENTINEL.fullmatch, listed)) else 100
        count = _num_sentinels(folder, settings, default)
        for i in range(count):
            added.setdefault(f"<extra_id_{i}>", len(self._names) + count - 1 - i)
        return added, {text for text in added if text in special or SENTINEL.fullmatch(text)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._pattern.split(text)):
            if i % 2:  # a token between two stretches of text, which loses the spaces beside it
                ids.append(self._read[part])
            else:
                if self._normalizer is not None:
                    part = " ".join(self._normalizer.normalize_str(part).split())
                ids += self._pieces.encode(part)
        return [*ids, self.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        shown = ["x"]  # sentencepiece would strip all spaces from the beginning, and not one
        for token in ids:
            if token in self._texts:
                shown.append(f" {self._texts[token]}")
            elif token < len(self._names) and token not in self._special:
                shown.append(self._names[token])
        return str(self._pieces.decode(shown))[1:].removeprefix(" ")


def _field(message: bytes, number: int) -> bytes:
    """Return a field of a message in protobuf's encoding; b"" if there is none."""
    at = 0
    while at < len(message):
        if message[at] == 10 and message[at + 1] < 128:  # a piece: they are many, and short
            at += 2 + message[at + 1]
            continue
        key, at = _varint(message, at)
        if key & 7 == 0:
            _, at = _varint(message, at)
            continue
        size, at = {1: (8, at), 5: (4, at)}.get(key & 7) or _varint(message, at)
        if key >> 3 == number:
            return message[at : at + size]
        at += size
    return b""


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and where it ends."""
    value = shift = 0
    while message[at] >= 128:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1


class JSONTokenizer:
    """A folder's tokenizer.json, or the byte-level BPE in its vocab.json and merges.txt."""

    def __init__(self, folder: Path) -> None:
        settings = _read_settings(folder)
        defaults = {"pad": "<pad>", "eos": "</s>", "bos": "<s>", "unk": "<unk>"}
        names = {
            role: _token_text(settings.get(f"{role}_token")) or default
            for role, default in defaults.items()
        }
        path = folder / "tokenizer.json"
        if not path.exists():
            path = folder / "vocab.json"
        with _reading(path, "a tokenizer"):
            import tokenizers

            self._backend: Any = (
                _read_bpe(folder, settings)
                if path.name == "vocab.json"
                else tokenizers.Tokenizer.from_file(str(path))
            )
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        found = {role: self._backend.token_to_id(name) for role, name in names.items()}
        if found["eos"] is None:
            raise ValueError(
                f"{path} has no piece {names['eos']} for the end of a text: "
                "name the one it has as eos_token in tokenizer_config.json"
            )
        self.eos_token_id: int = found["eos"]
        self.unknown_id: int | None = found.pop("unk")
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        special |= {token for token in found.values() if token is not None}
        self._shown = {  # of the added tokens
            i for i, token in added.items() if i not in special or SENTINEL.fullmatch(token.content)
        }
        self._hidden = (special | {self.unknown_id}) - self._shown
        self._space: int | None = self._backend.token_to_id("\u2581")
        self.vocabulary: Vocabulary = as_vocabulary(self._backend.get_vocab(), special)

    def encode(self, text: str) -> list[int]:
        ids = list(self._backend.encode(text).ids)
        return ids if ids[-1:] == [self.eos_token_id] else [*ids, self.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        shown: list[int] = []
        for token in ids:
            if token in self._shown and shown and self._space is not None:
                shown.append(self._space)  # an added token swallows the spaces before it
            if token not in self._hidden:
                shown.append(token)
        return str(self._backend.decode(shown, skip_special_tokens=False))


T5Tokenizer = ByteTokenizer | SentencePieceTokenizer | JSONTokenizer


def _read_bpe(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Build RoBERTa's byte-level BPE, which puts <s> before a text and </s> after it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Backend(model)
    prefix = bool(settings.get("add_prefix_space"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    control = ("<s>", "</s>", "<pad>", "<unk>", "<mask>")
    backend.add_special_tokens([name for name in control if backend.token_to_id(name) is not None])
    # Each gets the next free id, so they are added in the order of their ids.
    added = sorted(_read_added_tokens(folder, settings)[0].items(), key=lambda item: item[1])
    for name, token in added:
        backend.add_tokens([AddedToken(name, normalized=True)])
        if backend.token_to_id(name) != token:
            raise ValueError(f"{name} is to be {token}, which is not the next free id")
    start, end = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    if start is None or end is None:
        raise ValueError("it has no <s> and </s>")
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", end), ("<s>", start), add_prefix_space=prefix
    )
    return backend


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; what is not in it may be in config.json, such as the class."""
    return _read_object(folder / "config.json") | _read_object(folder / "tokenizer_config.json")


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path, AGAIN) if path.is_file() else {}


def _read_added_tokens(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[dict[str, int], set[str]]:
    """Read the ids of tokens added to a tokenizer by text, and which texts decoding leaves out."""
    listed = _read_object(folder / "added_tokens.json")
    decoder = settings.get("added_tokens_decoder")
    special = set()
    for token, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if (text := _token_text(entry)) and re.fullmatch(r"[0-9]{1,9}", token):
            listed[text] = int(token)
            if isinstance(entry, dict) and entry.get("special"):
                special.add(text)
    added = {t: token for t, token in listed.items() if t and type(token) is int and token >= 0}
    return added, special


def _token_text(token: Any) -> str | None:
    """Return the text of an entry of tokenizer_config.json: a string, or an object with one."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _num_sentinels(folder: Path, settings: Mapping[str, Any], default: int) -> int:
    """Return how many sentinels (<extra_id_0>, ...) there are: `extra_ids` in the settings."""
    count = settings.get("extra_ids")
    if count is None:
        return default
    if type(count) is not int or not 0 <= count <= MAX_SENTINELS:
        raise ValueError(
            f"extra_ids in {folder / 'tokenizer_config.json'} is {count!r}, "
            f"expected an integer from 0 to {MAX_SENTINELS}"
        )
    return count


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that splits a text at these texts, and keeps them; the longest first."""
    names = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(names)})" if names else r"(?!)()")
