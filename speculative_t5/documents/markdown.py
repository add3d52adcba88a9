"""Markdown: what a reader of the page sees, and the same file with other words.

Which lines hold text is found by `splitting`, and what stands within them here: both read what
people write, which is not always CommonMark.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from .formats import PlainFile, say_estimated, say_refused
from .marks import Character, MarkedLine, Part
from .spliced import say_left
from .splitting import CODE_INDENT, has_wide_gap, paragraphs

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
_END_OF_LINE = re.compile(r"(\r\n|\r|\n)")
# A sign that makes a line an item, a quotation, a heading, code, a row of a table or a rule.
_BLOCK_SIGN = re.compile(
    r"""
    [ \t]*+
    (?:
        ([-*+])(?=[ \t]|$) | (\#)\#{0,5}(?=[ \t]|$) | ([>|]) | (`)`` | (~)~~ | ([-=])\6*+[ \t]*+$
        | \d{1,9}([.)])(?=[ \t]|$)
    )
    """,
    re.VERBOSE,
)
_BLANKS_WITHIN = re.compile(r"[ \t]{2,}+")
_ESCAPABLE = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
MAX_LABEL = 500  # characters of what names the target of a link
ESCAPING_ROUNDS = 3  # a sign that is escaped may show another one behind it

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
    def is_run(self) -> bool:
        """Whether it is a mark that more of its sign would lengthen."""
        return not self.is_read and self.raw[0] in "*_~`"

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
    has_marks: bool = True  # whether it may have some, as front matter and code have not

    def placed(self, start: int = 0) -> Iterator[tuple[int, _Stretch]]:
        """Yield its stretches, each with the place where it begins if the line does at one."""
        for stretch in self.stretches:
            yield start, stretch
            start += len(stretch.raw)

    def brackets(self) -> list[int]:
        """Return where its words have some."""
        words = [(at, stretch.raw) for at, stretch in self.placed() if stretch.mark is None]
        return [at + i for at, raw in words for i, char in enumerate(raw) if char in "[]"]

    def touching(self) -> Iterator[int]:
        """Yield where its words have a sign that would lengthen the mark beside it."""
        for (_, first), (middle, second) in pairwise(self.placed()):
            if first.mark is None and second.is_run and first.raw.endswith(second.raw[0]):
                yield middle - 1
            if second.mark is None and first.is_run and second.raw.startswith(first.raw[0]):
                yield middle

    def escaped(self, places: Sequence[int]) -> _MarkedWords:
        """Return the line with a backslash before some signs of its words, by their places."""
        made = list[_Stretch]()
        for at, stretch in self.placed():
            if stretch.mark is not None:
                made.append(stretch)
                continue
            first = 0
            for place in places[bisect_left(places, at) :]:
                if place >= at + len(stretch.raw):
                    break
                sign = stretch.raw[place - at]
                made.append(_Stretch(stretch.raw[first : place - at]))
                made.append(_Stretch(f"\\{sign}", mark="escape"))
                first = place - at + 1
            made.append(_Stretch(stretch.raw[first:]))
        return _MarkedWords(made)

    def begun_as(self, line: _MarkedWords) -> _MarkedWords:
        """Return the line as one of the same kind: text, an item, a row and the like.

        A sign that has come to its beginning is escaped, and where gaps between its words would
        make it a row of a table, they are narrowed.
        """
        made = self
        if not line.has_marks:
            return made
        if has_wide_gap(self.raw) and not has_wide_gap(line.raw):
            last = len(self.stretches) - 1
            made = _MarkedWords(
                [
                    _narrowed(each, at_start=not i, at_end=i == last)
                    for i, each in enumerate(self.stretches)
                ]
            )
        had, signs = _block_signs(line.raw), _block_signs(made.raw)
        return made.escaped(signs[len(had) : len(had) + 1])

    @property
    def raw(self) -> str:
        return "".join(each.raw for each in self.stretches)

    @property
    def text(self) -> str:
        """How it is read."""
        return "".join(each.text for each in self.stretches)


class _MarkFinder:
    """Finds the marks of a text, in order."""

    def __init__(self, text: str, *, has_front_matter: bool) -> None:
        self._text = text
        # Below another line, nothing is.
        self._above = "" if has_front_matter else "\n"
        self._labels = {*map(_label, _DEFINED.findall(text))}
        self._found: list[Mark] = []
        self.read: list[tuple[int, int]] = []  # where what may have marks begins and ends
        self._open: list[tuple[int, int]] = []  # brackets: where each begins, and its mark
        self._without_end: dict[str, int] = {}  # of elements: from where on none ends

    def marks(self) -> list[Mark]:
        """Return all marks; none overlaps another."""
        at = 0
        for passage in paragraphs(self._above + self._text, labels=True):
            start, end = (place - len(self._above) for place in (passage.start, passage.end))
            self.read.append((start, end))
            at, self._open = max(at, start), []
            while at < end and (found := _INLINE_MARK.search(self._text, at, end)):
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

    def __init__(self, data: bytes, name: str, *, has_front_matter: bool = True) -> None:
        super().__init__(data, name)
        self._has_front_matter = has_front_matter  # whether --- at its beginning may begin some
        self._lines, self._ends = _read_lines(self.text, has_front_matter=has_front_matter)
        self._estimated: list[int] = []
        self._refused: list[int] = []
        self._left: list[int] = []
        texts = [line.text for line in self._lines]
        self.unread = [
            len(line.raw) - len(text) for line, text in zip(self._lines, texts, strict=True)
        ]
        self.text = _with_ends(texts, self._ends)

    def rewritten(self, text: str) -> bytes:
        lines, changed = [*self._lines], list[int]()
        for i, new in enumerate(_END_OF_LINE.split(text)[::2]):
            if new != lines[i].text:
                lines[i] = self._changed(i + 1, lines[i], new)
                changed.append(i)
        for _ in range(ESCAPING_ROUNDS):
            misread = self._misread(lines, changed)
            if not misread:
                break
            for i, places in misread.items():
                lines[i] = lines[i].escaped(places)
        else:
            for i in self._misread(lines, changed):
                lines[i] = self._lines[i]
                self._left.append(i + 1)
        return _with_ends([line.raw for line in lines], self._ends).encode()

    def _misread(
        self, lines: Sequence[_MarkedWords], changed: Sequence[int]
    ) -> dict[int, list[int]]:
        """Return which of the changed lines have signs that would be read as marks, and where.

        There are no places where a mark begins that cannot be escaped.
        """
        source = _with_ends([line.raw for line in lines], self._ends)
        marks = _MarkFinder(source, has_front_matter=self._has_front_matter).marks()
        starts = [start for start, _, _ in marks]
        ends = [*self._ends, ""]
        sizes = (len(line.raw) + len(end) for line, end in zip(lines, ends, strict=True))
        begins = [*accumulate(sizes, initial=0)]
        found: dict[int, list[int]] = {}
        for i in changed:
            start, places, is_misread = begins[i], list[int](), False
            for at, stretch in lines[i].placed(start):
                # The mark before the first one of the stretch may go on in it.
                first = max(0, bisect_left(starts, at) - 1)
                some = marks[first : bisect_left(starts, at + len(stretch.raw))]
                if stretch.mark is None:
                    covered = [*_covered(source, some, at, at + len(stretch.raw))]
                    is_misread |= bool(covered)
                    places += [place - start for place in covered if place >= at]
                elif stretch.mark == "hidden" and not any(mark[0] == at for mark in some):
                    is_misread |= stretch.raw[0] == "`"
                    if stretch.raw[0] in "[]":  # one of the words is taken for its other end
                        places += lines[i].brackets()
            if is_misread or places:
                found[i] = sorted({*places})
        return found

    def _changed(self, number: int, line: _MarkedWords, words: str) -> _MarkedWords:
        """Return a line with other words."""
        stretches = line.stretches
        read = [i for i, each in enumerate(stretches) if each.is_read]
        characters = [
            Character(text, part, raw)
            for part, i in enumerate(read)
            for raw, text in stretches[i].characters
        ]
        parts = [Part(stretches[i].depth, stretches[i].mark == "fixed") for i in read]
        changed = MarkedLine(characters, parts).changed(words)
        if changed.is_estimate:
            self._estimated.append(number)
        if changed.has_refused:
            self._refused.append(number)
        made = [each.raw for each in stretches]
        for i, part in zip(read, changed.parts, strict=True):
            made[i] = part
            if _is_emphasized(stretches, i):
                mark = stretches[i - 1].raw
                made[i - 1], made[i], made[i + 1] = _emphasized(mark, part)
        if strays := _strays(stretches, made):
            made = ["" if i in strays else each for i, each in enumerate(made)]
            self._estimated.append(number)
        new = _MarkedWords([*_parted(stretches, made)])
        return new.escaped(sorted({*new.touching()})).begun_as(line)

    def not_kept(self) -> list[str]:
        return [
            *say_estimated("line", self._estimated, "links and emphasis"),
            *say_refused("line", self._refused, "code, or of an address"),
            *say_left(self._left, "new words there would be read as marks of Markdown"),
        ]


def _parted(stretches: Sequence[_Stretch], made: Sequence[str]) -> Iterator[_Stretch]:
    """Yield the stretches of a line as they were made, words beside words as one."""
    words = ""
    for stretch, raw in zip(stretches, made, strict=True):
        if stretch.mark is None:
            words += raw
            continue
        before, mark, behind = raw.partition(stretch.raw)  # words may have replaced an escape
        words += before
        if mark:
            yield _Stretch(words)
            yield stretch
            words = behind
    yield _Stretch(words)


def _covered(source: str, marks: Sequence[Mark], start: int, end: int) -> Iterator[int]:
    """Yield the places of signs that are read as marks, of words between two places.

    A place before the words stands for a mark that begins there and covers some of them.
    """
    for first, last, kind in marks:
        if kind == "fixed" or last <= start:
            continue
        is_run = source[first] in "*_~`"
        places = range(max(first, start), min(last, end)) if is_run else [first]
        yield from (place for place in places if source[place] in _ESCAPABLE)


def _block_signs(raw: str) -> list[int]:
    """Return the places of the signs that a line begins with which say what it is."""
    places, at = list[int](), 0
    while found := _BLOCK_SIGN.match(raw, at):
        places.append(found.start(found.lastindex or 0))
        at = found.end()
    return places


def _is_emphasized(stretches: list[_Stretch], place: int) -> bool:
    """Whether a stretch of words, without blanks around, is all that stands between two marks."""
    if not 0 < place < len(stretches) - 1:
        return False
    before, words, after = stretches[place - 1 : place + 2]
    is_within = bool(words.raw) and words.raw == words.raw.strip() and words.depth > before.depth
    return is_within and before.is_emphasis and after.is_emphasis and before.raw == after.raw


def _emphasized(mark: str, words: str) -> tuple[str, str, str]:
    """Return a mark of emphasis, words behind it, and the mark again.

    There are no marks around nothing, as they would be seen, and no blanks come to stand within.
    """
    inner = words.strip(" \t")
    if not inner:
        return "", words, ""
    start = words.index(inner)
    return words[:start] + mark, inner, mark + words[start + len(inner) :]


def _strays(stretches: list[_Stretch], made: list[str]) -> set[int]:
    """Return the places of emphasis that would be seen as signs, with the like in the line."""
    line, at, seen = "".join(made), 0, set[str]()
    for stretch, raw in zip(stretches, made, strict=True):
        if raw and stretch.is_emphasis and not _is_emphasis(line, at, at + len(raw)):
            seen.add(raw)
        at += len(raw)
    return {i for i, each in enumerate(stretches) if each.is_emphasis and each.raw in seen}


def _read_lines(source: str, *, has_front_matter: bool) -> tuple[list[_MarkedWords], list[str]]:
    """Return the lines of a file, and how each but the last ends."""
    pieces = _END_OF_LINE.split(source)
    words, ends = pieces[::2], pieces[1::2]
    finder = _MarkFinder(source, has_front_matter=has_front_matter)
    marks = finder.marks()
    starts = [start for start, _, _ in marks]
    read_starts = [start for start, _ in finder.read]
    lines, at, depth = [], 0, 0
    for line, line_end in zip(words, [*ends, ""], strict=True):
        end = at + len(line)
        # The mark before the first one of the line may go on in it.
        first = max(0, bisect_left(starts, at) - 1)
        some = marks[first : bisect_left(starts, end)]
        stretches, depth = _stretches(source, at, end, some, depth if line.strip() else 0)
        last = bisect_left(read_starts, end) - 1  # of what is read, and begins before its end
        lines.append(_MarkedWords(stretches, has_marks=last >= 0 and finder.read[last][1] > at))
        at = end + len(line_end)
    return lines, ends


def _narrowed(stretch: _Stretch, *, at_start: bool, at_end: bool) -> _Stretch:
    """Return words with single blanks for wide gaps, except where the line begins and ends."""
    if stretch.mark is not None:
        return stretch
    size = len(stretch.raw)

    def narrow(found: re.Match[str]) -> str:
        is_outer = (at_start and found.start() == 0) or (at_end and found.end() == size)
        is_wide = len(found[0]) >= CODE_INDENT or "\t" in found[0]
        return " " if is_wide and not is_outer else found[0]

    return replace(stretch, raw=_BLANKS_WITHIN.sub(narrow, stretch.raw))


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
        return 1
    if kind == "]":
        return -1
    if kind not in "*_~`":
        return 0
    before, after = source[first - 1 : first] or " ", source[last : last + 1] or " "
    return 1 if not after.isspace() and (before.isspace() or _is_sign(before)) else -1
