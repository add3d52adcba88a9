"""Tokenizers in a spiece.model, as most of the T5 family have; read by sentencepiece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..decoding import Vocabulary
from ..errors import first_line
from .base import as_vocabulary
from .files import (
    DOWNLOAD_AGAIN,
    SENTINEL,
    any_of,
    num_sentinels,
    read_added_tokens,
    read_settings,
)


class SentencePieceTokenizer:
    """A folder's spiece.model and the tokens added to it, such as T5's <extra_id_0>, ...

    Ids are those of transformers. For one thing, it normalizes in another way than sentencepiece
    (combining marks, U+0085), unless there are pieces of bytes, which it does not know.
    """

    def __init__(self, folder: Path) -> None:
        import sentencepiece

        path = folder / "spiece.model"
        self._normalizer: Any = None
        try:
            stored = path.read_bytes()
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=stored)
            self._names = [self._pieces.id_to_piece(i) for i in range(len(self._pieces))]
            charsmap = _field(_field(stored, 3), 2)  # of normalizer_spec
            if charsmap and self._pieces.piece_to_id("<0x00>") == self._pieces.unk_id():
                from tokenizers.normalizers import Precompiled

                self._normalizer = Precompiled(charsmap)
                # The last of two such fields counts: an empty one.
                self._pieces.load_from_serialized_proto(stored + b"\x1a\x02\x12\x00")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the libraries raise several types; panics are no Exception
            raise ValueError(
                f"{path} is not a SentencePiece model: {first_line(error)}; {DOWNLOAD_AGAIN}"
            ) from error
        self._control = {
            name: i
            for i, name in enumerate(self._names)
            if self._pieces.is_control(i) or self._pieces.is_unknown(i)
        }
        self._added, special = self._find_added(folder)
        self._special = {*self._control.values(), *(self._added[text] for text in special)}
        self._read = self._control | self._added  # the tokens that a text may spell
        if read_settings(folder).get("split_special_tokens"):
            self._read = {t: i for t, i in self._added.items() if i not in self._special}
        self._pattern = any_of(self._read)
        self._texts = {
            i: text
            for text, i in self._added.items()
            if i not in self._special or SENTINEL.fullmatch(text)
        }

    def _find_added(self, folder: Path) -> tuple[dict[str, int], set[str]]:
        """Find the tokens beside the pieces, and which of them are special.

        T5's sentinels follow the pieces in reverse order.
        """
        listed, special = read_added_tokens(folder)
        added = {
            text: token
            for text, token in listed.items()
            if token >= len(self._names) or SENTINEL.fullmatch(text)
        }
        count = num_sentinels(folder, 0 if any(map(SENTINEL.fullmatch, listed)) else 100)
        for i in range(count):
            added.setdefault(f"<extra_id_{i}>", len(self._names) + count - 1 - i)
        return added, {text for text in added if text in special or SENTINEL.fullmatch(text)}

    @property
    def vocabulary(self) -> Vocabulary:
        ids = {name: i for i, name in enumerate(self._names)}
        return as_vocabulary(ids | self._added, self._special)

    @property
    def eos_token_id(self) -> int:
        return int(self._pieces.eos_id())

    @property
    def unknown_id(self) -> int:
        """The id of text that has no piece."""
        return int(self._pieces.unk_id())

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
