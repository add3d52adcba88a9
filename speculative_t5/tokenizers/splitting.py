"""Finds added tokens in a text, for the tokenizers that are not made of the library's own parts."""

import re
from collections.abc import Iterable

from .settings import AddedToken


class Splitter:
    """Cuts a text at added tokens; of those that begin at one place the longest counts."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        names = sorted(map(re.escape, self._tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(names) or r"(?!)")

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the parts of a text in order, and whether each is a token; none is empty.

        It goes by the rules of the library `tokenizers`: a `single_word` may stand beside any
        character that belongs to no word.
        """
        parts, start = [], 0
        for found in self._pattern.finditer(text):
            token = self._tokens[found[0]]
            before = text[max(0, found.start() - 1) : found.start()]
            after = text[found.end() : found.end() + 1]
            in_word = token.single_word and (_is_of_word(before) or _is_of_word(after))
            if in_word or found.start() < start:
                continue
            part = text[start : found.start()]
            parts += [(part.rstrip() if token.lstrip else part, False), (found[0], True)]
            start = found.end()
            while token.rstrip and text[start : start + 1].isspace():
                start += 1
        parts.append((text[start:], False))
        return [part for part in parts if part[0]]


class SlowSplitter(Splitter):
    """The same by the rules of transformers' slow tokenizers, of which byt5's is one."""

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the parts; a `single_word` stands between spaces, and joins one neighbour."""
        parts = self._cut(text)
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
        return [(part, part in self._tokens) for part in parts if part]

    def _cut(self, text: str) -> list[str]:
        parts, start = [], 0
        for found in self._pattern.finditer(text):
            parts += [text[start : found.start()], found[0]]
            start = found.end()
        return [part for part in (*parts, text[start:]) if part]


def _is_of_word(character: str) -> bool:
    return character == "_" or character.isalnum()
