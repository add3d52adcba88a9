"""Ids to text, piece by piece, as rounds emit them."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Tokenizer


class Detokenizer:
    """Decodes ids one at a time: the parts joined are the text of all ids.

    Each call decodes only the last few ids again. Text that ends within a character (a byte-level
    piece) is held back until the rest of it has arrived, or until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the ids that the next call decodes again
        self._shown = 0  # how many of them, from the first, have been returned
        self._before = ""  # the text returned for those

    def add(self, token: int) -> str:
        """Return the text that this id adds."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        added = text[len(self._before) :]
        new = self._ids[self._shown :]
        last = self._tokenizer.decode(new)
        # Decoding strips leading spaces, so the ids decoded again must begin with visible text.
        if last.strip():
            self._ids, text = new, last
        elif new == [token] and self._ids[-3:] == [token] * 3:
            # An output may end in thousands of line breaks: two of them stand for more.
            del self._ids[-1]
            text = self._tokenizer.decode(self._ids)
        self._shown, self._before = len(self._ids), text
        return added

    def finish(self) -> str:
        """Return the text still held back."""
        text = self._tokenizer.decode(self._ids)
        added = text[len(self._before) :]
        self._shown, self._before = len(self._ids), text
        return added


def pieces(tokens: Sequence[int], detokenizer: Detokenizer, *, end: bool) -> tuple[str, ...]:
    """Return the text that each id adds; at the `end` the last one includes what was held back."""
    texts = [detokenizer.add(token) for token in tokens]
    if end and (rest := detokenizer.finish()):
        texts = [*texts[:-1], "".join(texts[-1:]) + rest]
    return tuple(texts)
