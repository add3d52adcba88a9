"""Finds added tokens in a text, for the tokenizers that are not made of the library's own parts."""

import re
from collections.abc import Collection, Iterable, Mapping

from .settings import AddedToken


class Splitter:
    """Cuts a text at added tokens as transformers' slow tokenizers do; the longest come first."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens: Mapping[str, AddedToken] = {token.text: token for token in tokens}
        self._pattern = _any_of(self._tokens)

    def split(self, text: str) -> list[str]:
        """Return the parts of a text in order, added tokens among them; none is empty."""
        parts = [part for part in self._pattern.split(text) if part]
        for i, part in enumerate(parts):
            token = self._tokens.get(part)
            if token is None:
                continue
            left, right = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
            if token.rstrip and right:
                parts[i + 1] = right.lstrip()
            if token.lstrip and left:
                parts[i - 1] = left.rstrip()
            if token.single_word and left and left[-1] != " ":
                parts[i - 1], parts[i] = parts[i - 1] + part, ""
            elif token.single_word and right and right[0] != " ":
                parts[i], parts[i + 1] = "", part + parts[i + 1]
        return [part for part in parts if part]

    def __contains__(self, part: str) -> bool:
        return part in self._tokens


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that splits a text at these texts, and keeps them; the longest first."""
    names = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(names)})" if names else r"(?!)()")
