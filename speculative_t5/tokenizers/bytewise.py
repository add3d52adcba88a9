"""ByT5's tokenizer (arXiv 2105.13626), which needs no file of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .base import as_vocabulary
from .cleaning import clean_up
from .settings import SENTINEL, AddedToken, TokenizerSettings, read_settings
from .splitting import SlowSplitter


class ByteTokenizer:
    """A byte is an id.

    UTF-8 bytes follow three control tokens, and then come sentinels, `extra_ids` of the folder, and
    the tokens that were added, which are found in a text before its bytes.
    """

    FIRST, SENTINELS = 3, 125  # the id of byte 0; the number of sentinels as published
    CONTROL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder)
        named = settings.named(self.CONTROL)
        self.cleans_up = bool(settings.config.get("clean_up_tokenization_spaces"))
        special = [token.text for token in (*named.values(), *self._extras(settings))]
        control = [named[role].text for role in self.CONTROL]
        self._ids, added = _numbered(settings, control, special)
        self.eos_token_id = self._ids[named["eos_token"].text]
        hidden = {text for text in special if not SENTINEL.fullmatch(text)}
        self._texts = {i: token.text for i, token in added.items() if token.text not in hidden}
        splits = settings.splits_special_tokens
        listed = {token.text: token for token in (*settings.listed.values(), *added.values())}
        self._splitter = SlowSplitter(() if splits else listed.values())
        # As in transformers, a token of one character stands for the byte of its number anywhere.
        self._of_byte = [self._ids.get(chr(i), self.FIRST + i) for i in range(256)]
        bytewise = {f"<0x{i:02X}>": self.FIRST + i for i in range(256)}
        ids = {self._ids[text] for text in special}
        self.vocabulary = as_vocabulary(bytewise | self._ids, ids)
        self._hidden = ids - self._texts.keys()

    def _extras(self, settings: TokenizerSettings) -> tuple[AddedToken, ...]:
        """Return the special tokens without a role: sentinels, unless others are listed."""
        listed = settings.old_extras if settings.extras is None else settings.extras
        if listed is not None:
            return listed
        count = settings.num_sentinels(self.SENTINELS)
        return tuple(AddedToken(f"<extra_id_{i}>", special=True) for i in range(count))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part, is_token in self._splitter.split(text):
            if is_token:
                ids.append(self._ids[part])
            else:
                ids += [self._of_byte[byte] for byte in part.encode()]
        return ids if ids[-1:] == [self.eos_token_id] else [*ids, self.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        text = self.decode_as_it_is(ids)
        return clean_up(text) if self.cleans_up else text

    def decode_as_it_is(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with the spaces that are cleaned up."""
        text = bytearray()
        for token in ids:
            if token in self._texts:
                text += self._texts[token].encode()
            elif self.FIRST <= token < self.FIRST + 256 and token not in self._hidden:
                text.append(token - self.FIRST)
        return text.decode(errors="replace")


def _numbered(
    settings: TokenizerSettings, control: Sequence[str], special: Sequence[str]
) -> tuple[dict[str, int], dict[int, AddedToken]]:
    """Return the ids of the tokens beside bytes, and the tokens by id.

    Those that are listed have the ids given there, sentinels follow the bytes in order, and other
    special ones get the next free ids. (transformers 5 puts sentinels that no file lists after the
    first of those that one does, where the model has other rows.)
    """
    added = {i: AddedToken(text, lstrip=True, rstrip=True) for i, text in enumerate(control)}
    added |= settings.listed
    ids = {token.text: i for i, token in added.items()}
    known = {chr(i): ByteTokenizer.FIRST + i for i in range(256)} | ids
    for text in special:
        if text not in ids:
            sentinel = SENTINEL.fullmatch(text)
            own = ByteTokenizer.FIRST + 256 + int(sentinel[1]) if sentinel else len(known)
            ids[text] = known.setdefault(text, len(known) if own in added else own)
            added[ids[text]] = AddedToken(text, special=True)
    return ids, added
