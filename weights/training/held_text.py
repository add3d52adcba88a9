"""Parts of a text that no damage may touch: code, addresses, markup, numbers and names.

Each is held by one character that no rule knows, and filled in again afterwards.
"""

import html
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from learner_errors.spelling import TITLES

_FIRST, _LAST = 0xE000, 0xF8FF  # the characters for private use
_NAMES = frozenset([*map(str.capitalize, TITLES), "I"])
# How a sentence's first word can be told: nothing or an end before it, then quotes and the like.
_BEGIN = re.compile(r"(?:^|[.!?:][\"”’)]*\s)[\"“‘'(\[\s*•+\-\d.)\ue000-\uf8ff]*$")
# Pattern, and what remains of it in a text without marks.
_MARKUP: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"!?\[(?=[^\[\]]{0,200}\]\([^()\s]{0,300}[^()]{0,80}\))", lambda found: ""),
    (r"\]\([^()\s]{0,300}[^()]{0,80}\)", lambda found: ""),
    (r"`([^`<]{1,120}?) <[^`]{1,300}>`__?", lambda found: found[1]),
    (r"<(https?://[^<>\s]{1,300})>", lambda found: found[1]),
    (r"</?[a-zA-Z][^<>]{0,300}>", lambda found: ""),
    (r"&#?\w{1,8};", lambda found: html.unescape(found[0])),
    (r":pep:`(\d+)`", lambda found: f"PEP {found[1]}"),
    (r":[a-z:]{1,12}:`~?([^`<]{1,80}?)(?: ?<[^`]{1,200}>)?`", lambda found: found[1]),
    (
        r"[^\s`]{0,40}(?:``[^`]{1,200}``|`[^`]{1,200}`_?)[^\s`]{0,40}",
        lambda found: found[0].replace("`", ""),
    ),
    (r"\*{1,3}(?=[\w\ue000-\uf8ff])|(?<=[\w.,:!?\ue000-\uf8ff])\*{1,3}", lambda found: ""),
    (r"(?<![\w/])_{1,2}(?=[A-Za-z])|(?<=[A-Za-z.,:!?])_{1,2}(?!\w)", lambda found: ""),
)
_AS_IT_IS = (
    r"\S*(?:://|www\.)\S*",
    r"\S*[\d/\\@#=_{}|~^$%<>&]\S*",
    r"\S*\w\.\w\S*",
    r"\S*[^\W_][A-Z]\S*",
    r"\S*[\ue000-\uf8ff]\w\S*|\S*\w[\ue000-\uf8ff]\S*",
)


@dataclass(frozen=True)
class Held:
    """A text, in which a character stands for each part, and the parts with and without marks."""

    text: str
    parts: Sequence[tuple[str, str]]

    @staticmethod
    def reserved(text: str) -> bool:
        """Whether a text has characters for private use itself."""
        return any(_FIRST <= ord(c) <= _LAST for c in text)

    def keeps(self, text: str) -> bool:
        """Whether another text has the same held parts in the same order."""
        return _holders(text) == _holders(self.text)

    def filled(self, text: str, *, plain: bool) -> str:
        """Put the held parts into a text again, with `plain` without marks."""
        for i, part in reversed([*enumerate(self.parts)]):
            text = text.replace(chr(_FIRST + i), part[plain])
        return " ".join(text.split())


def held(text: str, words: Collection[str]) -> Held:
    """Hold all parts of a text that must stay; a word that is not among `words` is a name."""
    parts: list[tuple[str, str]] = []

    def hold(found: re.Match[str], plain: str) -> str:
        parts.append((found[0], plain))
        return chr(_FIRST + len(parts) - 1)

    for pattern, without in _MARKUP:
        text = re.sub(pattern, lambda found, without=without: hold(found, without(found)), text)
    for pattern in _AS_IT_IS:
        text = re.sub(pattern, lambda found: hold(found, found[0]), text)

    def hold_name(found: re.Match[str]) -> str:
        begins = _BEGIN.search(text, 0, found.start())
        known = found[0].lower() in words
        return found[0] if found[0] in _NAMES or (begins and known) else hold(found, found[0])

    return Held(re.sub(r"\b[A-Z]\w*(?:-\w+)*", hold_name, text), parts)


def _holders(text: str) -> list[str]:
    return [c for c in text if _FIRST <= ord(c) <= _LAST]
