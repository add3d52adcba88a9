"""Marks of Markdown: which signs of a text are no words, and which words have to stay."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

from .splitting import paragraphs

_INLINE_MARK = re.compile(
    r"""
    (?P<escape> \\[!-/:-@\[-`{-~] )
    | (?P<code>
        (?:(?<!`)|(?<=\\`)) (?P<ticks>`{1,20}+)
        (?:[^`]|(?!(?P=ticks)(?!`))`++){1,2000}? (?P=ticks)(?!`)
      )
    | (?P<address>
        https?://[^\s<>()"'`\[\]]++ | <[a-z][a-z+.-]{1,20}:[^\s<>]++> | <[^\s<>@]++@[^\s<>@]++>
      )
    | (?P<comment> <!-- )
    | (?P<opaque>
        <(?P<name>(?i:script|style|pre|textarea|svg|math|code|kbd|samp|var))(?=[\s/>])
      )
    | (?P<tag>
        </?[a-zA-Z][\w-]*+(?:"[^"]*"|'[^']*'|[^<>"'])*+>
        | \{%[^\n]{0,1000}?%\} | \{\#[^\n]{0,1000}?\#\}
        | <![A-Za-z\[][^<>\n]{0,1000}> | <\?[^\n]{0,1000}?\?>
      )
    | (?P<filled>
        \{\{[^{}\n]{0,1000}\}\}
        | \$\$?(?=\S)[^$\n]{1,500}(?<=\S)\$\$?(?!\d)
        | &\#?\w{1,30};
      )
    | (?P<note> \[\^[^\[\]\s]{1,100}\] | \[![A-Z]++\] | (?<!\S)(?:!!!|\?\?\?\+?|:::+)[^\n]*+ )
    | (?P<target>
        \](?: \([^()\n]{0,2000}(?:\([^()\n]{0,500}\)[^()\n]{0,500}){0,3}\) | \[[^\[\]\n]{0,500}\] )
      )
    | (?P<opening> !?\[ )
    | (?P<closing> \] )
    | (?P<emphasis> \*++ | _++ | ~~++ )
    """,
    re.VERBOSE,
)
_DEFINED = re.compile(r"^ {0,3}\[([^\]\n]{1,500})\]:", re.MULTILINE)  # the target of a reference
# Between two lines of a text; another sentence may begin there, but no item and no heading.
_LINE_END_WITHIN = re.compile(r"[ \t]*+(?:\r\n|\r|\n)[ \t>]*+")
MAX_LABEL = 500  # characters of what names the target of a link

# What is not read; what is read and stays; a backslash and the sign that it stands before.
MarkKind = Literal["hidden", "fixed", "escape"]
Mark = tuple[int, int, MarkKind]  # where it begins and ends in the file


class MarkFinder:
    """Finds the marks of a text, in order."""

    def __init__(self, text: str, *, has_front_matter: bool) -> None:
        self._text = text
        # Below another line, nothing is.
        self._above = "" if has_front_matter else "\n"
        self._labels = {*map(_label, _DEFINED.findall(text))}
        self._found: list[Mark] = []
        self.blocks = [*self._read_blocks()]
        self._open: list[tuple[int, int]] = []  # brackets: where each begins, and its mark
        self._without_end: dict[str, int] = {}  # of elements: from where on none ends

    def marks(self) -> list[Mark]:
        """Return all marks; none overlaps another."""
        at = 0
        for start, end in self.blocks:
            at, self._open = max(at, start), []
            while at < end and (found := _INLINE_MARK.search(self._text, at, end)):
                at = self._take(found)
        return _apart(self._found)

    def _read_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield where texts begin and end whose marks may go on over the ends of lines."""
        begun: tuple[int, int] | None = None
        for passage in paragraphs(self._above + self._text, labels=True):
            start, end = (place - len(self._above) for place in (passage.start, passage.end))
            if begun and _LINE_END_WITHIN.fullmatch(self._text, begun[1], start):
                begun = begun[0], end
                continue
            yield from [begun] if begun else []
            begun = start, end
        yield from [begun] if begun else []

    def _take(self, found: re.Match[str]) -> int:
        """Take a mark, and return the place behind it."""
        start, end = found.span()
        kind = found.lastgroup
        if found["code"]:
            ticks = len(found["ticks"])
            self._add(start, start + ticks, "hidden")
            self._add(start + ticks, end - ticks, "fixed")
            self._add(end - ticks, end, "hidden")
        elif kind == "escape":
            self._add(start, end, "escape")
        elif kind in ("address", "filled"):
            self._add(start, end, "fixed")
        elif kind in ("tag", "note"):
            self._add(start, end, "hidden")
        elif found["opaque"] or kind == "comment":
            end = self._behind(found)
            self._add(start, end, "hidden")
        elif kind == "emphasis":
            if is_emphasis(self._text, start, end):
                self._add(start, end, "hidden")
        else:
            self._take_bracket(found)
        return end

    def _take_bracket(self, found: re.Match[str]) -> None:
        start, end = found.span()
        if found["opening"]:
            self._open.append((start, len(self._found)))
            return
        if not self._open:
            return
        first, number = self._open.pop()
        within = self._text[first + 1 : start]
        is_label = len(within) <= MAX_LABEL and _label(within) in self._labels
        if self._text[first] == "!":
            del self._found[number:]
            self._add(first, end, "hidden")
        elif is_label and (found["closing"] or found[0] == "][]"):  # its words name its target
            del self._found[number:]
            self._add(first, end, "fixed")
        elif found["target"]:
            self._add(first, first + 1, "hidden")
            self._add(start, end, "hidden")

    def _behind(self, found: re.Match[str]) -> int:
        """Return the place behind an element that is not read; of one without end, its tag's."""
        name = (found["name"] or "").casefold()
        start = found.end()
        if start < self._without_end.get(name, len(self._text)):
            closing = re.compile(rf"</{name}\s*>" if name else "-->", re.IGNORECASE)
            if last := closing.search(self._text, start):
                return last.end()
            self._without_end[name] = start
        tag_end = self._text.find(">", start, start + 1000)
        return max(start, tag_end + 1)

    def _add(self, start: int, end: int, kind: MarkKind) -> None:
        if start < end:
            self._found.append((start, end, kind))


def _label(text: str) -> str:
    """Return what names the target of a link as it is compared: without case and wide spaces."""
    return " ".join(text.casefold().split())


def _apart(marks: list[Mark]) -> list[Mark]:
    """Return marks in order, without those within others."""
    found: list[Mark] = []
    for mark in sorted(marks):
        if not found or mark[0] >= found[-1][1]:
            found.append(mark)
    return found


def is_emphasis(text: str, start: int, end: int) -> bool:
    """Whether asterisks and the like begin or end emphasis, by CommonMark's rules of flanks."""
    before, after = text[start - 1 : start] or " ", text[end : end + 1] or " "
    left = _flanks(after, before)
    right = _flanks(before, after)
    if text[start] == "_" and left and right:
        return is_sign(before) or is_sign(after)
    return left or right


def _flanks(inner: str, outer: str) -> bool:
    """Whether a run of signs stands at the words on its inner side."""
    if inner.isspace():
        return False
    return not is_sign(inner) or outer.isspace() or is_sign(outer)


def is_sign(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS"
