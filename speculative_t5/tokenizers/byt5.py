"""ByT5's tokenizer (arXiv 2105.13626), which needs no file of pieces: a byte is an id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..decoding import Vocabulary
from .base import as_vocabulary
from .files import any_of, num_sentinels, read_settings


class ByteTokenizer:
    """UTF-8 bytes after three control tokens, then sentinels: `extra_ids` of the folder."""

    CONTROL = ("<pad>", "</s>", "<unk>")
    EOS, FIRST = 1, 3

    def __init__(self, folder: Path) -> None:
        self._sentinels = self.FIRST + 256
        self._special = {name: i for i, name in enumerate(self.CONTROL)}
        for i in range(num_sentinels(folder, 125)):
            self._special[f"<extra_id_{i}>"] = self._sentinels + i
        self._texts = {i: name for name, i in self._special.items() if i >= self._sentinels}
        split = read_settings(folder).get("split_special_tokens")
        self._pattern = any_of(() if split else self._special)

    @property
    def vocabulary(self) -> Vocabulary:
        pieces = {f"<0x{i:02X}>": self.FIRST + i for i in range(256)}
        return as_vocabulary(pieces | self._special, self._special.values())

    @property
    def eos_token_id(self) -> int:
        return self.EOS

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
