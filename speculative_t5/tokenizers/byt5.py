"""ByT5's tokenizer (arXiv 2105.13626), which needs no file of pieces: a byte is an id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..decoding import Vocabulary
from .base import as_vocabulary
from .files import SENTINEL, num_sentinels


class ByteTokenizer:
    """UTF-8 bytes after three control tokens, then sentinels: `extra_ids` of the folder."""

    PAD, EOS, UNK, FIRST = 0, 1, 2, 3

    def __init__(self, folder: Path) -> None:
        self._sentinels = self.FIRST + 256
        self._size = self._sentinels + num_sentinels(folder, 125)

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
        for i, part in enumerate(SENTINEL.split(text)):
            token = self._sentinels + int(part) if i % 2 else 0
            if i % 2 and token < self._size:
                ids.append(token)
            else:
                part = f"<extra_id_{part}>" if i % 2 else part
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
