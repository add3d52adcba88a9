"""Markdown: what a reader of the page sees, and the same file with other words.

Which lines hold text is found by `splitting`, and what stands within them here: both read what
people write, which is not always CommonMark.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .formats import PlainFile, say_estimated, say_refused
from .marks import Character, MarkedLine, Part
from .splitting import paragraphs

_INLINE_MARK = re.compile(
    r"""
    (?P<escape> \\[!-/:-@\[-`{-~] )
    | (?P<code> (?<!`)(?P<ticks>`{1,20}+) (?:[^`]|(?!(?P=ticks)(?!`))`++){1,2000}? (?P=ticks)(?!`) )
    | (?P<address>
        https?://[^\s<>()"'`\[\]]++ | <[a-z][a-z+.-]{1,20}:[^\s<>]++> | <[^\s<>@]++@[^\s<>@]++>
      )
    | (?P<comment> <!-- )
    | (?P<opaque> <(?P<name>script|style|pre|textarea|svg|math|code|kbd|samp|var)(?=[\s/>]) )
    | (?P<tag>
        </?[a-zA-Z][\w-]*+(?:"[^"]*"|'[^']*'|[^<>"'])*+>
        | \{%[^\n]{0,1000}?%\} | \{\#[^\n]{0,1000}?\#\}
      )
    | (?P<filled>
        \{\{[^{}\n]{0,1000}\}\}
        | \$\$?(?=\S)[^$\n]{1,500}(?<=\S)\$\$?(?!\d)
        | &\#?\w{1,30};
      )
    | (?P<note> \[\^[^\]\s]++\] | \[![A-Z]++\] | (?<!\S)(?:!!!|\?\?\?\+?|:::+)[^\n]*+ )
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
_LINE_WITH_END = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")

MarkKind = Literal["hidden", "fixed", "escape"]
Mark = tuple[int, int, MarkKind]  # where it begins and ends in the file


@dataclass(frozen=True)
class _Stretch:
    """A part of a line: text, or what is not read."""

    raw: str
    depth: int = 0  # of the marks around it
    is_fixed: bool = False
    is_read: bool = True
    is_escape: bool = False  # a backslash and the sign that it stands before

    @property
    def text(self) -> str:
        return "" if not self.is_read else self.raw[1:] if self.is_escape else self.raw


class _MarkFinder:
    """Finds the marks of a text, in order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._labels = {" ".join(each.casefold().split()) for each in _DEFINED.findall(text)}
        self._found: list[Mark] = []
        self._open: list[tuple[int, int]] = []  # brackets: where each begins, and its mark
        self._without_end: dict[str, int] = {}  # of elements: from where on none ends

    def marks(self) -> list[Mark]:
        """Return all marks; none overlaps another."""
        at = 0
        for passage in paragraphs(self._text, labels=True):
            at, self._open = max(at, passage.start), []
            while at < passage.end and (found := _INLINE_MARK.search(self._text, at, passage.end)):
                at = self._take(found)
        return _apart(self._found)

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
            if _is_emphasis(self._text, start, end):
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
        is_label = " ".join(within.casefold().split()) in self._labels
        if self._text[first] == "!":
            del self._found[number:]
            self._add(first, end, "hidden")
        elif is_label and (found["closing"] or found[0] == "][]"):  # its words name its target
            del self._found[number:]
            self._add(first, end, "fixed")
        elif found["target"]:
            self._found.insert(number, (first, first + 1, "hidden"))
            self._add(start, end, "hidden")

    def _behind(self, found: re.Match[str]) -> int:
        """Return the place behind an element that is not read; of one without end, its tag's."""
        name = (found["name"] or "").casefold()
        closing = f"</{name}>" if name else "-->"
        start = found.end()
        if start < self._without_end.get(name, len(self._text)):
            at = self._text.find(closing, start)
            if at >= 0:
                return at + len(closing)
            self._without_end[name] = start
        tag_end = self._text.find(">", start, start + 1000)
        return max(start, tag_end + 1)

    def _add(self, start: int, end: int, kind: MarkKind) -> None:
        if start < end:
            self._found.append((start, end, kind))


def _apart(marks: list[Mark]) -> list[Mark]:
    """Return marks in order, without those within others."""
    found: list[Mark] = []
    for mark in sorted(marks):
        if not found or mark[0] >= found[-1][1]:
            found.append(mark)
    return found


def _is_emphasis(text: str, start: int, end: int) -> bool:
    """Whether asterisks and the like begin or end emphasis, by CommonMark's rules of flanks."""
    before, after = text[start - 1 : start] or " ", text[end : end + 1] or " "
    left = _flanks(after, before)
    right = _flanks(before, after)
    if text[start] == "_" and left and right:
        return _is_sign(before) or _is_sign(after)
    return left or right


def _flanks(inner: str, outer: str) -> bool:
    """Whether a run of signs stands at the words on its inner side."""
    if inner.isspace():
        return False
    return not _is_sign(inner) or outer.isspace() or _is_sign(outer)


def _is_sign(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS"


class MarkdownFile(PlainFile):
    """Markdown: all but words stays as it is, bytes of words that do not change included.

    Targets of links, pictures, marks of notes, tags and asterisks are not read and stay; code,
    addresses, formulas and what a template fills in are read, and stay.
    """

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data, name)
        source = self.text
        self._lines: list[tuple[list[_Stretch], str]] = []  # each, and how it ends
        self._estimated: list[int] = []
        self._refused: list[int] = []
        marks = _MarkFinder(source).marks()
        starts = [start for start, _, _ in marks]
        depth = 0
        for line in _LINE_WITH_END.finditer(source):
            words = line[0].rstrip("\r\n")
            start, end = line.start(), line.start() + len(words)
            first = max(0, bisect_left(starts, start) - 1)
            some = marks[first : bisect_left(starts, end)]
            stretches, depth = _stretches(source, start, end, some, depth if words.strip() else 0)
            self._lines.append((stretches, line[0][len(words) :]))
            if line.end() == len(source) and not (line[0] and line[0] != words):
                break
        self.unread = [
            sum(len(each.raw) - len(each.text) for each in some) for some, _ in self._lines
        ]
        self.text = "".join(
            "".join(each.text for each in some) + line_end for some, line_end in self._lines
        )

    def rewritten(self, text: str) -> bytes:
        made, lines = [], _LINE_WITH_END.findall(text)
        for number, ((stretches, line_end), new) in enumerate(
            zip(self._lines, lines, strict=False), 1
        ):
            words = new[: len(new) - len(line_end)] if line_end else new
            raw = "".join(each.raw for each in stretches)
            if words != "".join(each.text for each in stretches):
                raw = self._changed(number, stretches, words)
            made.append(raw + line_end)
        return "".join(made).encode()

    def _changed(self, number: int, stretches: list[_Stretch], words: str) -> str:
        """Return a line with other words."""
        read = [i for i, each in enumerate(stretches) if each.is_read]
        if not read:
            return "".join(each.raw for each in stretches)
        characters = [
            Character(text, part, raw)
            for part, i in enumerate(read)
            for raw, text in _characters_of(stretches[i])
        ]
        parts = [Part(stretches[i].depth, stretches[i].is_fixed) for i in read]
        changed = MarkedLine(characters, parts).changed(words)
        if changed.is_estimate:
            self._estimated.append(number)
        if changed.has_refused:
            self._refused.append(number)
        made = [each.raw for each in stretches]
        for i, part in zip(read, changed.parts, strict=True):
            made[i] = part
            if not part and _is_around(stretches, i):  # asterisks around nothing would be seen
                made[i - 1] = made[i + 1] = ""
        if strays := _strays(stretches, made):
            made = ["" if i in strays else each for i, each in enumerate(made)]
            self._estimated.append(number)
        return "".join(made)

    def not_kept(self) -> list[str]:
        return [
            *say_estimated("line", self._estimated, "links and emphasis"),
            *say_refused("line", self._refused, "code, or of an address"),
        ]


def _is_around(stretches: list[_Stretch], place: int) -> bool:
    """Whether a stretch of words is all that stands in some emphasis."""
    if not 0 < place < len(stretches) - 1 or not stretches[place].raw:
        return False
    before, after = stretches[place - 1], stretches[place + 1]
    return (
        not (before.is_read or after.is_read) and before.raw == after.raw and before.raw[0] in "*_~"
    )


def _strays(stretches: list[_Stretch], made: list[str]) -> set[int]:
    """Return the places of emphasis that would be seen as signs, with the like in the line."""
    line, at, seen = "".join(made), 0, set[str]()
    for stretch, raw in zip(stretches, made, strict=True):
        is_mark = not stretch.is_read and raw[:1] in ("*", "_", "~")
        if is_mark and not _is_emphasis(line, at, at + len(raw)):
            seen.add(raw)
        at += len(raw)
    return {i for i, each in enumerate(stretches) if not each.is_read and each.raw in seen}


def _characters_of(stretch: _Stretch) -> Iterator[tuple[str, str]]:
    """Yield how each character is written, and as what it is read."""
    if stretch.is_escape:
        yield stretch.raw, stretch.text
    else:
        yield from ((each, each) for each in stretch.raw)


def _stretches(
    source: str, start: int, end: int, marks: list[Mark], depth: int
) -> tuple[list[_Stretch], int]:
    """Return the stretches of a line, and how many marks are open behind it."""
    found, at, opened = [], start, depth
    for first, last, kind in marks:
        first, last = max(first, at), min(last, end)
        if first >= last:
            continue
        if at < first:
            found.append(_Stretch(source[at:first], opened))
        raw = source[first:last]
        if kind == "hidden":
            found.append(_Stretch(raw, is_read=False))
            opened = max(0, opened + _opens(source, first, last))
        else:
            found.append(
                _Stretch(raw, opened, is_fixed=kind == "fixed", is_escape=kind == "escape")
            )
        at = last
    if at < end:
        found.append(_Stretch(source[at:end], opened))
    return found, opened


def _opens(source: str, first: int, last: int) -> int:
    """Return 1 if words behind a mark have one more, -1 if one less, else 0."""
    mark = source[first:last]
    if mark == "[" or (mark[0] in "*_~`" and not source[last : last + 1].isspace()):
        before = source[first - 1 : first] if first else " "
        return 1 if mark == "[" or before.isspace() or _is_sign(before) else -1
    return -1 if mark[0] in "]*_~`" else 0
