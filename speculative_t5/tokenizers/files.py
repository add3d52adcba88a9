"""The files of a tokenizer: which there are, and what the JSON ones say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import first_line, refuse_pointer

TOKENIZER_FILES = (
    "spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt",
)  # fmt: skip
GENERATION_CONFIG = "generation_config.json"
DOWNLOAD_AGAIN = "download or copy it again"  # ends the messages about damaged files
SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,4})>")
MAX_SENTINELS = 10_000  # more than any model has, and few enough to list


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; what is not in it may be in config.json, such as the class."""
    return _read_object(folder / "config.json") | _read_object(folder / "tokenizer_config.json")


def read_prefix(folder: Path) -> str:
    """Read `prefix`, the text to put before each prompt, from a model's config.json; "" if none."""
    path = folder / "config.json"
    prefix = _read_object(path).get("prefix")
    if prefix is not None and not isinstance(prefix, str):
        raise ValueError(f"prefix in {path} is {prefix!r}, expected a string")
    return prefix or ""


def read_added_tokens(folder: Path) -> tuple[dict[str, int], set[str]]:
    """Read the ids of tokens added to a tokenizer, from both files that list them.

    Returns:
        The ids by text, and the texts that are special: decoding leaves these out.
    """
    listed = _read_object(folder / "added_tokens.json")
    decoder = read_settings(folder).get("added_tokens_decoder")
    special = set()
    for token, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if (text := token_text(entry)) and re.fullmatch(r"[0-9]{1,9}", token):
            listed[text] = int(token)
            if isinstance(entry, dict) and entry.get("special"):
                special.add(text)
    added = {t: token for t, token in listed.items() if t and type(token) is int and token >= 0}
    return added, special


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that splits a text at these texts, and keeps them; the longest first."""
    names = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(names)})" if names else r"(?!)()")


def num_sentinels(folder: Path, default: int) -> int:
    """Read how many sentinels (<extra_id_0>, ...) a tokenizer has, `extra_ids` in its settings."""
    count = read_settings(folder).get("extra_ids")
    if count is None:
        return default
    if type(count) is not int or not 0 <= count <= MAX_SENTINELS:
        raise ValueError(
            f"extra_ids in {folder / 'tokenizer_config.json'} is {count!r}, "
            f"expected an integer from 0 to {MAX_SENTINELS}"
        )
    return count


def token_text(token: Any) -> str | None:
    """Return the text of an entry of tokenizer_config.json: a string, or an object with one."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def refuse_pointers(folder: Path) -> None:
    """Refuse a folder where Git LFS has not fetched a tokenizer's files."""
    for name in (*TOKENIZER_FILES, "tokenizer.model"):
        if (folder / name).is_file():
            refuse_pointer(folder / name)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; {DOWNLOAD_AGAIN}") from error
    return read if isinstance(read, dict) else {}
