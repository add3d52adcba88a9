"""Tokenizers in a spiece.model, as most of the T5 family have; read by sentencepiece."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..decoding import Vocabulary
from ..errors import first_line
from .base import as_vocabulary
from .files import DOWNLOAD_AGAIN, SENTINEL, num_sentinels, read_added_tokens


class SentencePieceTokenizer:
    """A folder's spiece.model and the tokens added to it, such as T5's <extra_id_0>, ..."""

    def __init__(self, folder: Path) -> None:
        import sentencepiece

        path = folder / "spiece.model"
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
            self._num_pieces: int = self._pieces.get_piece_size()
            self._ids = {self._pieces.id_to_piece(i): i for i in range(self._num_pieces)}
        # It raises TypeError for a path that is not UTF-8, ValueError for such a piece.
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model: {first_line(error)}; {DOWNLOAD_AGAIN}"
            ) from error
        self._added = self._find_added(folder)
        self._texts = {token: text for text, token in self._added.items()}
        names = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(names)})" if names else r"(?!)()")

    def _find_added(self, folder: Path) -> dict[str, int]:
        """Find the tokens beside the pieces; T5's sentinels follow these in reverse order."""
        listed = read_added_tokens(folder)
        added = {
            text: token
            for text, token in listed.items()
            if token >= self._num_pieces or SENTINEL.fullmatch(text)
        }
        count = num_sentinels(folder, 0 if any(map(SENTINEL.fullmatch, listed)) else 100)
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
        """The id of text that has no piece."""
        return int(self._pieces.unk_id())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        parts = self._pattern.split(text)
        for i, part in enumerate(parts):
            if i % 2:  # an added token, between two stretches of text
                ids.append(self._added[part])
            else:
                # An added token swallows the spaces before it.
                ids += self._pieces.encode(part.rstrip() if i + 1 < len(parts) else part)
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
