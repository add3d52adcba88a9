"""What the JSON files beside a tokenizer's pieces say: its class, its tokens by role, those added.

The rules are those of transformers 5, which is not imported: where two files disagree, the one that
transformers believes counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import read_json

GET_FILE_AGAIN = "download or copy it again"  # ends the messages about damaged files
TOKENIZER_CONFIG, MODEL_CONFIG = "tokenizer_config.json", "config.json"
SENTINEL = re.compile(r"<extra_id_(0|[1-9][0-9]{0,4})>")
MAX_SENTINELS = 10_000  # more than any model has, and few enough to list
TOKEN_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The class of a folder that names none, by its model_type. umt5's has its pieces in tokenizer.json.
CLASS_OF_MODEL = {"byt5": "ByT5Tokenizer", "umt5": "TokenizersBackend"}
CLASS_ALIASES = {"MT5Tokenizer": "T5Tokenizer", "PreTrainedTokenizer": "TokenizersBackend"}
_EXTRAS, _OLD_EXTRAS = "extra_special_tokens", "additional_special_tokens"


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the text is cut into pieces."""

    text: str
    special: bool = False  # whether it is control, and no part of the text
    lstrip: bool = False  # whether it takes in the blanks before it
    rstrip: bool = False  # and those after it
    single_word: bool = False  # whether it is found only between ends of words
    normalized: bool = False  # whether it is looked for in the normalized text

    @classmethod
    def of(cls, entry: Any, *, special: bool | None = None) -> AddedToken | None:
        """Read an entry: a text, or an object with its content and flags; None if it is neither."""
        if isinstance(entry, str):
            entry = {"content": entry}
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            return None
        if not entry["content"]:
            return None
        is_special = bool(entry.get("special")) if special is None else special
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word")}
        normalized = bool(entry.get("normalized", not is_special))
        return cls(entry["content"], is_special, normalized=normalized, **flags)


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a folder's tokenizer; files that are not there say nothing."""

    folder: Path
    config: Mapping[str, Any]  # tokenizer_config.json
    model: Mapping[str, Any]  # config.json
    special_map: Mapping[str, Any]  # special_tokens_map.json, where it counts
    listed: Mapping[int, AddedToken]  # tokens beside the pieces, by the id they are given there

    @property
    def kind(self) -> str:
        """The name of the tokenizer's class; T5Tokenizer if no file says another."""
        for found in (self.config.get("tokenizer_class"), self.model.get("tokenizer_class")):
            if isinstance(found, str) and found:
                name = found.removesuffix("Fast")
                return CLASS_ALIASES.get(name, name)
        return CLASS_OF_MODEL.get(str(self.model.get("model_type")), "T5Tokenizer")

    @property
    def splits_special_tokens(self) -> bool:
        """Whether a text cannot spell special tokens."""
        name = "split_special_tokens"
        return bool(self.config.get(name, self.model.get(name)))

    @property
    def extras(self) -> tuple[AddedToken, ...] | None:
        """Special tokens without a role; None if nothing is said of them."""
        names = (_EXTRAS, _OLD_EXTRAS)
        if not any(name in self.config for name in names) and _EXTRAS not in self.special_map:
            return None
        tokens = _as_tokens(self.config.get(_EXTRAS) or self.config.get(_OLD_EXTRAS))
        known = {token.text for token in tokens}
        more = _as_tokens(self.special_map.get(_EXTRAS))
        return tuple(tokens + [token for token in more if token.text not in known])

    @property
    def old_extras(self) -> tuple[AddedToken, ...] | None:
        """Those of special_tokens_map.json, by the name that they had before transformers 5."""
        found = self.special_map.get(_OLD_EXTRAS)
        return None if found is None else tuple(_as_tokens(found))

    def named(self, defaults: Mapping[str, str]) -> dict[str, AddedToken]:
        """Return the tokens that have a role, such as eos_token; `defaults` are the class's."""
        entries = dict(defaults) | self._roles
        found = {
            role: AddedToken.of(entry, special=True)
            for role, entry in entries.items()
            if role in TOKEN_ROLES
        }
        for role, entry in entries.items():  # a model's own roles come last
            found.setdefault(role, AddedToken.of(entry, special=True))
        order = {role: i for i, role in enumerate(TOKEN_ROLES)}
        ordered = sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
        return {role: token for role, token in ordered if token is not None}

    @property
    def _roles(self) -> dict[str, Any]:
        roles: dict[str, Any] = {}
        for file in (self.config, self.special_map):
            for name, entry in file.items():
                own = name.endswith("_token") and isinstance(entry, str)
                if own or name in TOKEN_ROLES:
                    roles[name] = entry
            extras = file.get(_EXTRAS)
            roles |= extras if isinstance(extras, dict) else {}
        return roles

    def num_sentinels(self, default: int) -> int:
        """Return how many sentinels (<extra_id_0>, ...) there are: `extra_ids` of the files."""
        count = self.config.get("extra_ids", self.model.get("extra_ids"))
        if count is None:
            return default
        if type(count) is not int or not 0 <= count <= MAX_SENTINELS:
            raise ValueError(
                f"extra_ids in {self.folder / TOKENIZER_CONFIG} is {count!r}, "
                f"expected an integer from 0 to {MAX_SENTINELS}"
            )
        return count


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a folder's tokenizer; entries of the wrong type are left out."""
    config = _read_object(folder / TOKENIZER_CONFIG)
    listed: dict[int, AddedToken] = {}
    special_map: Mapping[str, Any] = {}
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        for token, entry in (decoder if isinstance(decoder, dict) else {}).items():
            made = AddedToken.of(entry)
            if made is not None and re.fullmatch(r"[0-9]{1,9}", token):
                listed[int(token)] = made
    else:
        special_map = _read_object(folder / "special_tokens_map.json")
    settings = TokenizerSettings(
        folder, config, _read_object(folder / MODEL_CONFIG), special_map, listed
    )
    if "added_tokens_decoder" not in config:
        # This old file has no flags: what is listed as special elsewhere is.
        special = {token.text for token in settings.named({}).values()}
        special |= {token.text for token in settings.extras or ()}
        for text, token in _read_object(folder / "added_tokens.json").items():
            made = AddedToken.of(text, special=text in special)
            if made is not None and type(token) is int and token >= 0:
                listed[token] = made
    return settings


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path, GET_FILE_AGAIN) if path.is_file() else {}


def _as_tokens(entries: Any) -> list[AddedToken]:
    """Return the special tokens in a list; an object has tokens with roles, see `named`."""
    found = entries if isinstance(entries, list) else []
    made = (AddedToken.of(entry, special=True) for entry in found)
    return [token for token in made if token is not None]
