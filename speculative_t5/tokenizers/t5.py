"""The tokenizers of T5s, chosen by a folder's files: ids and texts are those of transformers.

transformers is not imported: the library `tokenizers` decides, with the rules of `backends`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..decoding import Vocabulary
from ..models import T5Config
from . import backends
from .backends import Made
from .base import VOCABULARY_FILES, as_vocabulary
from .bytewise import ByteTokenizer
from .cleaning import clean_up
from .sentencepiece_files import read_sentencepiece
from .sentencepiece_tokenizer import SentencePieceTokenizer
from .settings import GET_FILE_AGAIN, SENTINEL, TokenizerSettings, read_settings
from .steps import check_steps, in_one_line

COPY_ITS_TOKENIZER = "copy the tokenizer that belongs to the model there"
LONG_TEXT = 10_000  # characters of a text that takes long
# The first of them counts.
PIECE_FILES = ("tokenizer.json", "spiece.model", "vocab.json", "vocab.txt")
# The files that the pieces of a class are in.
OWN_PIECES: Mapping[str, tuple[str, ...]] = {
    backends.T5_CLASS: ("spiece.model",),
    backends.ANY_CLASS: ("spiece.model",),
    backends.ROBERTA_CLASS: ("vocab.json",),
    backends.GPT2_CLASS: ("vocab.json",),
    backends.BERT_CLASS: ("vocab.txt",),
}


def load_tokenizer(folder: Path, config: T5Config | None = None) -> T5Tokenizer:
    """Load the tokenizer of a model folder; refuse one that does not fit the config, if given.

    Reads tokenizer.json, or else spiece.model, or else vocab.json and merges.txt (codet5, FRED-T5),
    or else vocab.txt (T5s for Chinese). ByT5 needs none of them: tokenizer_config.json or
    config.json names ByT5Tokenizer.
    """
    tokenizer = _load_unchecked(folder)
    if config is None:
        return tokenizer
    vocabulary, end = tokenizer.vocabulary, tokenizer.eos_token_id
    if end not in (None, config.eos_token_id, *config.end_ids):
        raise ValueError(
            f"the tokenizer in {folder} has the EOS id {end}, the model {config.eos_token_id} "
            f"(eos_token_id in config.json): {COPY_ITS_TOKENIZER}"
        )
    # Sentinels may lie beyond the embedding, and then cannot be used.
    beyond = sum(token >= config.vocab_size for token in vocabulary.special)
    if vocabulary.size - beyond > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {vocabulary.size} pieces, "
            f"the model {config.vocab_size} rows for them (vocab_size in config.json): "
            f"{COPY_ITS_TOKENIZER}"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder seems to hold a tokenizer; the files of pieces are not opened."""
    return any((folder / name).is_file() for name in VOCABULARY_FILES) or _is_bytewise(folder)


def _is_bytewise(folder: Path) -> bool:
    return read_settings(folder).kind == "ByT5Tokenizer"


def _load_unchecked(folder: Path) -> T5Tokenizer:
    settings = read_settings(folder)
    if settings.kind == "ByT5Tokenizer":
        return ByteTokenizer(folder)
    path = _path_of_pieces(folder, settings)
    _check_class(path, settings)
    if path.name == "spiece.model":
        return _from_sentencepiece(path, settings)
    return BackendTokenizer(_make(path, settings), settings, path)


def _path_of_pieces(folder: Path, settings: TokenizerSettings) -> Path:
    """Return the file that a folder's pieces are read from; refuse a folder without any."""
    own = OWN_PIECES.get(backends.class_of(settings), ())
    for name in (PIECE_FILES[0], *own, *PIECE_FILES[1:]):
        if (folder / name).is_file():
            return folder / name
    found = [name for name in VOCABULARY_FILES if (folder / name).is_file()]
    raise ValueError(
        f"no tokenizer in {folder}: expected {', '.join(PIECE_FILES[:-1])} or {PIECE_FILES[-1]}, "
        f"found {found[0] if found else 'none of them'}; copy it there from the model that this "
        "one was tuned from"
    )


def _check_class(path: Path, settings: TokenizerSettings) -> None:
    """Refuse a class that would make other ids of the file than are made here."""
    kind = backends.class_of(settings)
    known = sorted(each for each, files in OWN_PIECES.items() if path.name in files)
    # T5Tokenizer is also what a folder has that names none.
    if path.name != "tokenizer.json" and kind not in (backends.T5_CLASS, *known):
        raise ValueError(
            f"{path} is for the class {kind} (tokenizer_class in tokenizer_config.json), expected "
            f"{' or '.join(known)}: save a tokenizer.json there, by AutoTokenizer's "
            "save_pretrained in transformers"
        )
    if path.name == "vocab.json" and not (path.parent / "merges.txt").is_file():
        raise ValueError(
            f"{path.parent} has a vocab.json, and no merges.txt beside it: copy it there from the "
            "model that this one was tuned from"
        )


def _make(path: Path, settings: TokenizerSettings) -> Made:
    if path.name == "tokenizer.json":
        check_steps(path)
    with in_one_line(f"{path} is not a tokenizer", GET_FILE_AGAIN):
        if path.name == "tokenizer.json":
            made = backends.from_json(path.read_text(encoding="utf-8"), settings)
        elif path.name == "vocab.json":
            made = backends.from_bpe(path.parent, settings)
        else:
            made = backends.from_wordpiece(path.parent, settings)
        made.backend.encode("e\u0301 \ufb01\u2460")  # a damaged normalizer fails here
    return made


def _from_sentencepiece(path: Path, settings: TokenizerSettings) -> T5Tokenizer:
    with in_one_line(f"{path} is not a SentencePiece model", GET_FILE_AGAIN):
        file = read_sentencepiece(path.read_bytes())
        # To the library any piece can be spelled, control tokens and sentinels among them.
        if file.has_bytes or not file.is_unigram or settings.splits_special_tokens:
            return SentencePieceTokenizer(file, settings)
        made = backends.from_sentencepiece(file, settings)
    return BackendTokenizer(made, settings, path)


class BackendTokenizer:
    """A tokenizer of the library `tokenizers`, made of a folder's files."""

    def __init__(self, made: Made, settings: TokenizerSettings, path: Path) -> None:
        if made.missing:
            role = made.missing[0]
            raise ValueError(
                f"{path} has no piece {made.named[role].text}, which {settings.kind} needs: "
                f"name the one it has as {role} in tokenizer_config.json"
            )
        self.kind = backends.class_of(settings)  # such as GPT2Tokenizer
        self._backend, self._path = made.backend, path
        self._splits = settings.splits_special_tokens
        self._backend.encode_special_tokens = self._splits
        self.cleans_up = _cleans_up(made, settings)
        self.eos_token_id = made.id_of("eos_token")
        unknown = made.id_of("unk_token")
        # GPT-2's stands for the end of a text, too, and its bytes lack nothing.
        self.unknown_id = None if unknown == self.eos_token_id else unknown
        added = self._backend.get_added_tokens_decoder()
        # The library leaves out a token that has been special once, whatever was said of it later.
        special = {i for i in added if not self._backend.decode([i], skip_special_tokens=True)}
        special |= {i for role in made.named if (i := made.id_of(role)) is not None}
        self._sentinels = {i for i in special & added.keys() if _spells_sentinel(added[i].content)}
        self._hidden = special - self._sentinels
        self._space: int | None = self._backend.token_to_id("\u2581")
        self.vocabulary: Vocabulary = as_vocabulary(self._backend.get_vocab(), special)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend.encode_special_tokens = self._splits  # it is not pickled

    def encode(self, text: str) -> list[int]:
        with self._using():
            if len(text) < LONG_TEXT:
                found = self._backend.encode(text)
            else:  # without the interpreter's lock, for which other threads wait
                (found,) = self._backend.encode_batch([text])
            return list(found.ids)

    def decode(self, ids: Sequence[int]) -> str:
        text = self.decode_as_it_is(ids)
        return clean_up(text) if self.cleans_up else text

    def decode_as_it_is(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with the spaces that are cleaned up."""
        shown: list[int] = []
        for token in ids:
            if token in self._sentinels and shown and self._space is not None:
                shown.append(self._space)  # a sentinel swallows the spaces before it
            if token not in self._hidden:
                shown.append(token)
        with self._using():
            return str(self._backend.decode(shown, skip_special_tokens=False))

    def _using(self) -> AbstractContextManager[None]:
        """Say in one line that a file is damaged where a text brings that to light."""
        advice = "give another one, or download or copy the file again"
        return in_one_line(f"{self._path} fails on this text", advice)


T5Tokenizer = ByteTokenizer | SentencePieceTokenizer | BackendTokenizer


def _spells_sentinel(text: str) -> bool:
    return SENTINEL.fullmatch(text) is not None


def _cleans_up(made: Made, settings: TokenizerSettings) -> bool:
    """Whether spaces are left out as `clean_up` does: from BPE's texts only if forced."""
    from tokenizers import models

    name = "clean_up_tokenization_spaces"
    forced = f"{name}_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = isinstance(made.backend.model, models.BPE)
    return bool(settings.config.get(name) and (not is_bpe or settings.config.get(forced)))
