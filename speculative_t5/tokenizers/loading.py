"""Which tokenizer a T5's folder holds, and whether it fits the model."""

from __future__ import annotations

from pathlib import Path

from ..models import T5Config
from .base import T5Tokenizer
from .byt5 import ByteTokenizer
from .files import read_settings, refuse_pointers
from .spiece import SentencePieceTokenizer
from .tokenizer_json import JSONTokenizer

REPLACE = "copy the tokenizer that belongs to the model there"


def load_tokenizer(folder: Path, config: T5Config | None = None) -> T5Tokenizer:
    """Load the tokenizer of a model folder, and check that it fits the model's config if given.

    Reads tokenizer.json, or else spiece.model, or else vocab.json and merges.txt (codet5). ByT5
    needs none of them: tokenizer_config.json or config.json names ByT5Tokenizer.

    Raises:
        ValueError: If the folder has none of them, the file cannot be read, or it does not fit.
    """
    tokenizer = _find_tokenizer(folder)
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
    """Whether a folder seems to hold a T5's tokenizer; its files are not opened."""
    files = ("spiece.model", "tokenizer.json", "vocab.json")
    return any((folder / name).is_file() for name in files) or _is_byt5(folder)


def _find_tokenizer(folder: Path) -> T5Tokenizer:
    refuse_pointers(folder)
    if (folder / "spiece.model").is_file() and not (folder / "tokenizer.json").is_file():
        return SentencePieceTokenizer(folder)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return JSONTokenizer(folder)
    if _is_byt5(folder):
        return ByteTokenizer(folder)
    raise ValueError(
        f"no tokenizer in {folder}: expected spiece.model or tokenizer.json; "
        "copy it there from the model that this one was tuned from"
    )


def _is_byt5(folder: Path) -> bool:
    return read_settings(folder).get("tokenizer_class") == "ByT5Tokenizer"
