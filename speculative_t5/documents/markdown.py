"""Markdown: what a reader of the page sees, and the same file with other words.

Which lines hold text is found by `splitting`, and what stands within them here: both read what
people write, which is not always CommonMark.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from .formats import PlainFile, say_estimated, say_refused
from .marks import Changed, Part, is_other, line_of_parts
from .splitting import paragraphs

_INLINE_MARK = re.compile(
    r"""
    (?P<escape> \\[!-/:-@\[-`{-~] )
    | (?P<code> (?<!`)(?P<ticks>`{1,20}+) (?:[^`]|(?!(?P=ticks)(?!`))`++){1,2000}? (?P=ticks)(?!`) )
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
_END_OF_LINE = re.compile(r"(\r\n|\r|\n)")
MAX_LABEL = 500  # characters of what names the target of a link

# What is not read; what is read and stays; a backslash and the sign that it stands before.
MarkKind = Literal["hidden", "fixed", "escape"]
Mark = tuple[int, int, MarkKind]  # where it begins and ends in the file


@dataclass(frozen=True)
class _Stretch:
    """A part of a line: words, or a mark."""

    raw: str
    depth: int = 0  # of the marks around it
    mark: MarkKind | None = None

    @property
    def is_read(self) -> bool:
        return self.mark != "hidden"

    @property
    def is_emphasis(self) -> bool:
        return not self.is_read and self.raw[0] in "*_~"

    @property
    def text(self) -> str:
        """How it is read."""
        return "".join(text for _, text in self.characters)

    @property
    def characters(self) -> list[tuple[str, str]]:
        """How each character is written, and as what it is read."""
        if self.mark == "hidden":
            return []
        return [(self.raw, self.raw[1:])] if self.mark == "escape" else [(c, c) for c in self.raw]


@dataclass(frozen=True)
class _MarkedWords:
    """A line of a file, without its end."""

    stretches: list[_Stretch]

    @property
    def raw(self) -> str:
        return "".join(each.raw for each in self.stretches)

    @property
    def text(self) -> str:
        """How it is read, with the blanks on both sides of a picture as one."""
        found, last = list[str](), ""
        for each in self.stretches:
            text = "" if each.mark == "fixed" else each.text
            text = text.lstrip(" ") if last.endswith(" ") else text
            found.append(each.text if each.mark == "fixed" else text)
            last = "" if each.mark == "fixed" else text or last
        return "".join(found)


class _MarkFinder:
    """Finds the marks of a text, in order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._labels = {*map(_label, _DEFINED.findall(text))}
        self._found: list[Mark] = []
        self._open: list[tuple[int, int]] = []  # brackets: where each begins, and its mark
        self._without_end: dict[str, int] = {}  # of elements: from where on none ends

    def marks(self) -> list[Mark]:
        """Return all marks; none overlaps another."""
        at = 0
        for start, end in self.blocks():
            at, self._open = max(at, start), []
            while at < end and (found := _INLINE_MARK.search(self._text, at, end)):
                at = self._take(found)
        return _apart(self._found)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield where texts begin and end whose marks may go on over the ends of lines."""
        begun: tuple[int, int] | None = None
        for passage in paragraphs(self._text, labels=True):
            if begun and _LINE_END_WITHIN.fullmatch(self._text, begun[1], passage.start):
                begun = begun[0], passage.end
                continue
            yield from [begun] if begun else []
            begun = passage.start, passage.end
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
        finder = _MarkFinder(self.text)
        self._lines, self._ends = _read_lines(self.text, finder.marks())
        starts = [0, *(end.end() for end in _END_OF_LINE.finditer(self.text))]
        # Of texts of several lines, the first line and the one behind them.
        spans = ((bisect_right(starts, i) - 1, bisect_left(starts, j)) for i, j in finder.blocks())
        self._blocks = [span for span in spans if span[1] - span[0] > 1]
        self._estimated: list[int] = []
        self._refused: list[int] = []
        texts = [line.text for line in self._lines]
        self.unread = [
            len(line.raw) - len(text) for line, text in zip(self._lines, texts, strict=True)
        ]
        self.text = _with_ends(texts, self._ends)

    def rewritten(self, text: str) -> bytes:
        new = _END_OF_LINE.split(text)[::2]
        changed = {
            i: _with_words(line, words)
            for i, (line, words) in enumerate(zip(self._lines, new, strict=True))
            if words != line.text
        }
        for span in self._blocks:
            lines = [i for i in range(*span) if i in changed]
            if any(changed[i].has_refused for i in lines):
                old = " ".join(self._lines[i].text for i in lines)
                if is_other(old, " ".join(new[i] for i in lines)):
                    # A translation may have its words in other lines than the source.
                    changed |= {i: Changed([self._lines[i].raw], has_refused=True) for i in lines}
        self._estimated += [i + 1 for i, line in changed.items() if line.is_estimate]
        self._refused += [i + 1 for i, line in changed.items() if line.has_refused]
        made = [
            "".join(changed[i].parts) if i in changed else line.raw
            for i, line in enumerate(self._lines)
        ]
        return _with_ends(made, self._ends).encode()

    def not_kept(self) -> list[str]:
        return [
            *say_estimated("line", self._estimated, "links and emphasis"),
            *say_refused("line", self._refused, "code, or of an address"),
        ]


def _with_words(line: _MarkedWords, words: str) -> Changed:
    """Return the stretches of a line with other words."""
    stretches = line.stretches
    read = [i for i, each in enumerate(stretches) if each.is_read]
    parts = [Part(stretches[i].depth, stretches[i].mark == "fixed") for i in read]
    escaped = {each.raw[1] for each in stretches if each.mark == "escape"}
    marked = line_of_parts([stretches[i].characters for i in read], parts)
    changed = marked.changed(words, partial(_escaped, signs=escaped))
    made = [each.raw for each in stretches]
    for i, part in zip(read, changed.parts, strict=True):
        made[i] = part
        if not part and _is_emphasized(stretches, i):  # asterisks around nothing would be seen
            made[i - 1] = made[i + 1] = ""
    _move_spaces(stretches, made)
    strays = _strays(stretches, made)
    made = ["" if i in strays else each for i, each in enumerate(made)]
    return Changed(made, changed.is_estimate or bool(strays), changed.has_refused)


def _escaped(text: str, *, signs: Set[str]) -> str:
    """Write a text with a backslash before signs that would be marks without one."""
    return "".join(f"\\{each}" if each in signs else each for each in text)


def _is_emphasized(stretches: list[_Stretch], place: int) -> bool:
    """Whether a stretch of words is all that stands between two marks of emphasis."""
    if not (0 < place < len(stretches) - 1 and stretches[place].raw):
        return False
    before, after = stretches[place - 1], stretches[place + 1]
    return before.is_emphasis and after.is_emphasis and before.raw == after.raw


def _move_spaces(stretches: list[_Stretch], made: list[str]) -> None:
    """Move spaces within emphasis to its outside, as it would neither begin nor end there."""
    for i, (each, behind) in enumerate(pairwise(stretches)):
        if not (i and made[i] and each.is_emphasis):
            continue
        if behind.depth > each.depth:
            words = made[i + 1].lstrip()
            made[i - 1] += made[i + 1][: len(made[i + 1]) - len(words)]
            made[i + 1] = words
        else:
            words = made[i - 1].rstrip()
            made[i + 1] = made[i - 1][len(words) :] + made[i + 1]
            made[i - 1] = words


def _strays(stretches: list[_Stretch], made: list[str]) -> set[int]:
    """Return the places of emphasis that would be seen as signs, with the like in the line."""
    line, at, seen = "".join(made), 0, set[str]()
    for stretch, raw in zip(stretches, made, strict=True):
        if raw and stretch.is_emphasis and not _is_emphasis(line, at, at + len(raw)):
            seen.add(raw)
        at += len(raw)
    return {i for i, each in enumerate(stretches) if each.is_emphasis and each.raw in seen}


def _read_lines(source: str, marks: Sequence[Mark]) -> tuple[list[_MarkedWords], list[str]]:
    """Return the lines of a file, and how each but the last ends."""
    pieces = _END_OF_LINE.split(source)
    words, ends = pieces[::2], pieces[1::2]
    starts = [start for start, _, _ in marks]
    lines, at, depth = [], 0, 0
    for line, line_end in zip(words, [*ends, ""], strict=True):
        end = at + len(line)
        # The mark before the first one of the line may go on in it.
        first = max(0, bisect_left(starts, at) - 1)
        some = marks[first : bisect_left(starts, end)]
        stretches, depth = _stretches(source, at, end, some, depth if line.strip() else 0)
        lines.append(_MarkedWords(stretches))
        at = end + len(line_end)
    return lines, ends


def _with_ends(lines: Sequence[str], ends: Sequence[str]) -> str:
    return "".join(line + end for line, end in zip(lines, [*ends, ""], strict=True))


def _stretches(
    source: str, start: int, end: int, marks: Sequence[Mark], depth: int
) -> tuple[list[_Stretch], int]:
    """Return the stretches of a line, and how many marks are open behind it."""
    found, at = list[_Stretch](), start
    for mark_start, mark_end, kind in marks:
        first, last = max(mark_start, at), min(mark_end, end)
        if first >= last:
            continue
        if at < first:
            found.append(_Stretch(source[at:first], depth))
        found.append(_Stretch(source[first:last], depth, kind))
        if kind == "hidden":
            depth = max(0, depth + _opens(source, first, last))
        at = last
    if at < end:
        found.append(_Stretch(source[at:end], depth))
    return found, depth


def _opens(source: str, first: int, last: int) -> int:
    """Return 1 if words behind a mark have one more, -1 if one less, else 0."""
    kind = source[first]
    if kind == "[":
        return int(last - first == 1)  # of a link, and not the mark of a note
    if kind == "]":
        return -1
    if kind not in "*_~`":
        return 0
    before, after = source[first - 1 : first] or " ", source[last : last + 1] or " "
    return 1 if not after.isspace() and (before.isspace() or _is_sign(before)) else -1
