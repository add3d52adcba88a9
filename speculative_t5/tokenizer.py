"""Text -> ids, and ids -> text, all at once or as they come."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece as spm

from .session import Vocabulary

TOKENIZER_FILES = (
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_EXTRA_ID = re.compile(r"\s*<extra_id_(\d+)>")


class Tokenizer(Protocol):
    """Text at the two ends of the engine."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What tells this tokenizer from another."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, EOS at the end."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; control tokens and vocabulary padding have none."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder: spiece.model, or tokenizer.json where there is none.

    Raises:
        ValueError: If the folder has neither, or the file cannot be read.
    """
    if (folder / "spiece.model").exists():
        return SentencePieceTokenizer(folder)
    if (folder / "tokenizer.json").exists():
        return JSONTokenizer(folder)
    raise ValueError(f"no tokenizer in {folder}: expected spiece.model or tokenizer.json")


class SentencePieceTokenizer:
    """A spiece.model and T5's sentinels <extra_id_0>, <extra_id_1>, ... in the ids after it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "spiece.model"
        try:
            self._pieces = spm.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        extra = _settings(folder).get("extra_ids")
        self._num_extra = extra if isinstance(extra, int) else 100
        self._num_pieces = self._pieces.get_piece_size()

    @property
    def vocabulary(self) -> Vocabulary:
        pieces = [self._pieces.id_to_piece(i) for i in range(self._num_pieces)]
        pieces += [f"<extra_id_{i}>" for i in reversed(range(self._num_extra))]
        special = [
            i
            for i in range(len(pieces))
            if i >= self._num_pieces or self._pieces.is_control(i) or self._pieces.is_unknown(i)
        ]
        return _vocabulary({piece: i for i, piece in enumerate(pieces)}, special)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        # Odd places of the split hold the sentinels' numbers.
        for place, part in enumerate(_EXTRA_ID.split(text)):
            if place % 2 == 0:
                ids += self._pieces.encode(part)
            elif int(part) < self._num_extra:
                ids.append(self._num_pieces + self._num_extra - 1 - int(part))
            else:
                ids += self._pieces.encode(f"<extra_id_{part}>")
        return [*ids, self._pieces.eos_id()]

    def decode(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token < self._num_pieces:
                run.append(token)
                continue
            texts += [self._pieces.decode(run)] if run else []
            run = []
            if (number := self._num_pieces + self._num_extra - 1 - token) >= 0:
                texts.append(f"<extra_id_{number}>")
        texts += [self._pieces.decode(run)] if run else []
        return " ".join(texts)


class JSONTokenizer:
    """A tokenizer.json, read by the `tokenizers` library."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        settings = _settings(folder)
        eos, pad = (
            self._backend.token_to_id(_content(settings.get(name)) or default)
            for name, default in (("eos_token", "</s>"), ("pad_token", "<pad>"))
        )
        if eos is None:
            raise ValueError(f"{path} has no piece for the end of a text, such as </s>")
        self._eos = eos
        self._control = {eos} if pad is None else {eos, pad}

    @property
    def vocabulary(self) -> Vocabulary:
        added = self._backend.get_added_tokens_decoder()
        special = [i for i, token in added.items() if token.special]
        return _vocabulary(self._backend.get_vocab(), [*self._control, *special])

    def encode(self, text: str) -> list[int]:
        ids = list(self._backend.encode(text).ids)
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos]

    def decode(self, ids: Sequence[int]) -> str:
        shown = [i for i in ids if i not in self._control]
        return str(self._backend.decode(shown, skip_special_tokens=False))


class Detokenizer:
    """Ids -> text, piece by piece: the parts joined are the text of all ids.

    Only the last few ids are decoded again at each call. Text that ends within a character (a
    byte-level piece) is held back until the rest of it has come, or `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # the ids decoded again begin here,
        self._shown = 0  # and their text up to here is out already

    def add(self, ids: Sequence[int]) -> str:
        """Text that these ids add."""
        self._ids += ids
        before, text = self._texts()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        # Decoding strips leading spaces, so the window must begin with something to see.
        if self._tokenizer.decode(self._ids[self._shown :]).strip():
            self._window = self._shown
        self._shown = len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """Text still held back."""
        before, text = self._texts()
        self._shown = len(self._ids)
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._ids[self._window : self._shown])
        return before, self._tokenizer.decode(self._ids[self._window :])


def _content(token: Any) -> str | None:
    """A token in tokenizer_config.json: a string, or an object that has one."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _vocabulary(ids: dict[str, int], special: Sequence[int]) -> Vocabulary:
    lines = sorted(f"{i} {piece}" for piece, i in ids.items())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Vocabulary(len(ids), digest, frozenset(special))
