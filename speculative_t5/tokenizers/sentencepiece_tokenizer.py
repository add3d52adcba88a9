"""A spiece.model that the library `tokenizers` would read in another way than it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..decoding import Vocabulary
from .base import as_vocabulary
from .cleaning import clean_up
from .sentencepiece_files import SentencePieceFile
from .settings import SENTINEL, AddedToken, TokenizerSettings
from .splitting import Splitter


class SentencePieceTokenizer:
    """A spiece.model and the tokens added to it, read and written by sentencepiece itself.

    It is for pieces of bytes, which transformers does not know, for BPE, and for texts that must
    not spell special tokens. Without pieces of bytes it normalizes as transformers does, in another
    way than sentencepiece (combining marks, U+0085).
    """

    def __init__(self, file: SentencePieceFile, settings: TokenizerSettings) -> None:
        self._pieces, self._names = file.processor, file.names
        self._normalizer: Any = None
        if file.charsmap and not file.has_bytes:
            from tokenizers import normalizers

            # A sequence can be pickled; what is in it cannot.
            self._normalizer = normalizers.Sequence([normalizers.Precompiled(file.charsmap)])
            self._pieces = file.without_normalizer
        self.eos_token_id = int(self._pieces.eos_id())
        self.unknown_id = int(self._pieces.unk_id())
        self.cleans_up = bool(settings.config.get("clean_up_tokenization_spaces"))
        control = self._control = file.control
        added = self._find_added(settings)
        ids = {text: i for text, (i, _) in added.items()}
        special = {text for text, (_, token) in added.items() if token.special}
        self._special = {*control.values(), *(ids[text] for text in special)}
        tokens = [token for _, token in added.values()]
        if settings.splits_special_tokens:
            tokens = [token for token in tokens if not token.special]
        else:
            tokens += [AddedToken(name, special=True) for name in control if name not in ids]
        self._ids = control | ids
        self._splitter = Splitter(tokens)
        self._texts = {
            i: text
            for text, i in ids.items()
            if text not in special or _is_sentinel(added[text][1])
        }
        names = {name: i for i, name in enumerate(self._names)}
        self.vocabulary: Vocabulary = as_vocabulary(names | ids, self._special)

    def _find_added(self, settings: TokenizerSettings) -> dict[str, tuple[int, AddedToken]]:
        """Find the tokens beside the pieces, with their ids, as the library `tokenizers` does.

        Sentinels follow the pieces, the last one first; others have the id of their piece, or else
        the next free one.
        """
        count, ids = settings.num_sentinels(100), {name: i for i, name in enumerate(self._names)}
        sentinels = [AddedToken(f"<extra_id_{i}>", special=True) for i in range(count)]
        ids |= {token.text: i for i, token in enumerate(reversed(sentinels), len(ids))}
        extras = (*(settings.extras or ()), *(settings.old_extras or ()))
        special = {token.text for token in extras}
        tokens = {token.text: token for token in (*extras, *sentinels)}
        for i in sorted(settings.listed):
            token = settings.listed[i]
            is_special = token.special or token.text in special or _is_sentinel(token)
            tokens[token.text] = replace(token, special=is_special)
        listed = [token.text for _, token in sorted(settings.listed.items())]
        for text in dict.fromkeys([*listed, *tokens]):
            ids.setdefault(text, len(ids))
        control = {*self._control.values()}
        return {
            text: (ids[text], token) for text, token in tokens.items() if ids[text] not in control
        }

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part, is_token in self._splitter.split(text):
            if is_token:
                ids.append(self._ids[part])
            else:
                if self._normalizer is not None:
                    part = " ".join(self._normalizer.normalize_str(part).split())
                ids += self._pieces.encode(part)
        return [*ids, self.eos_token_id]

    def decode(self, ids: Sequence[int]) -> str:
        text = self.decode_as_it_is(ids)
        return clean_up(text) if self.cleans_up else text

    def decode_as_it_is(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with the spaces that cleaning up would leave out."""
        shown = ["x"]  # else sentencepiece strips all spaces from the beginning, and not just one
        for token in ids:
            if token in self._texts:
                space = " " if token in self._special and len(shown) > 1 else ""
                shown.append(f"{space}{self._texts[token]}")
            elif token < len(self._names) and token not in self._special:
                shown.append(self._names[token])
        return str(self._pieces.decode(shown))[1:].removeprefix(" ")


def _is_sentinel(token: AddedToken) -> bool:
    return SENTINEL.fullmatch(token.text) is not None
