"""Markdown: what a reader of the page sees, and the same file with other words.

Which lines hold text is found by `splitting`, and what stands within them here: both read what
people write, which is not always CommonMark.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .formats import PlainFile, say_estimated, say_refused
from .markdown_marks import Mark, MarkFinder, MarkKind, is_emphasis, is_sign
from .marks import Part, is_other, line_of_parts
from .spliced import say_left
from .splitting import CODE_INDENT, has_wide_gap

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
ESCAPING_ROUNDS = 3  # a sign that is escaped may show another one behind it


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
            end = at + len(stretch.raw)
            for place in places[bisect_left(places, at) : bisect_left(places, end)]:
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
        """How it is read, with the blanks on both sides of a picture as one."""
        found, last = list[str](), ""
        for each in self.stretches:
            text = "" if each.mark == "fixed" else each.text
            text = text.lstrip(" ") if last.endswith(" ") else text
            found.append(each.text if each.mark == "fixed" else text)
            last = "" if each.mark == "fixed" else text or last
        return "".join(found)


@dataclass(frozen=True)
class _ChangedLine:
    """A line with other words."""

    line: _MarkedWords
    is_estimate: bool  # whether which words are in which mark is one
    has_refused: bool  # whether something stayed because it has to


class MarkdownFile(PlainFile):
    """Markdown: all but words stays as it is, bytes of words that do not change included.

    Targets of links, pictures, marks of notes, tags and asterisks are not read and stay; code,
    addresses, formulas and what a template fills in are read, and stay.
    """

    def __init__(self, data: bytes, name: str, *, has_front_matter: bool = True) -> None:
        super().__init__(data, name)
        self._has_front_matter = has_front_matter  # whether --- at its beginning may begin some
        finder = MarkFinder(self.text, has_front_matter=has_front_matter)
        self._lines, self._ends = _read_lines(self.text, finder)
        starts = [0, *(end.end() for end in _END_OF_LINE.finditer(self.text))]
        # Of texts of several lines, the first line and the one behind them.
        spans = ((bisect_right(starts, i) - 1, bisect_left(starts, j)) for i, j in finder.blocks)
        self._blocks = [span for span in spans if span[1] - span[0] > 1]
        self._estimated: list[int] = []
        self._refused: list[int] = []
        self._left: list[int] = []
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
        refused = {i for i, each in changed.items() if each.has_refused}
        stay = self._translated_with(refused, [*changed], new)
        written = sorted(changed.keys() - stay)
        lines = [*self._lines]
        for i in written:
            lines[i] = changed[i].line
        left = self._escape(lines, written)
        left |= self._translated_with(left, written, new)
        for i in left:
            lines[i] = self._lines[i]
        self._refused += [i + 1 for i in sorted(refused | stay)]
        self._left += [i + 1 for i in sorted(left)]
        self._estimated += [i + 1 for i in written if i not in left and changed[i].is_estimate]
        return _with_ends([line.raw for line in lines], self._ends).encode()

    def _translated_with(
        self, some: Set[int], changed: Sequence[int], new: Sequence[str]
    ) -> set[int]:
        """Return all changed lines of the translated texts that have one of some lines.

        A translation may have its words in other lines than the source, so that all of them stay
        if one does.
        """
        found: set[int] = set()
        for start, end in self._blocks:
            lines = changed[bisect_left(changed, start) : bisect_left(changed, end)]
            if some.isdisjoint(lines):
                continue
            old = " ".join(self._lines[i].text for i in lines)
            if is_other(old, " ".join(new[i] for i in lines)):
                found |= {*lines}
        return found

    def _escape(self, lines: list[_MarkedWords], changed: Sequence[int]) -> set[int]:
        """Escape signs of changed lines that would be read as marks.

        The result is the lines of which some still would be.
        """
        for _ in range(ESCAPING_ROUNDS):
            misread = self._misread(lines, changed)
            if not misread:
                return set()
            for i, places in misread.items():
                lines[i] = lines[i].escaped(places)
        return {*self._misread(lines, changed)}

    def _misread(
        self, lines: Sequence[_MarkedWords], changed: Sequence[int]
    ) -> dict[int, list[int]]:
        """Return which of the changed lines have signs that would be read as marks, and where.

        There are no places where a mark begins that cannot be escaped.
        """
        source = _with_ends([line.raw for line in lines], self._ends)
        marks = MarkFinder(source, has_front_matter=self._has_front_matter).marks()
        starts = [start for start, _, _ in marks]
        ends = [*self._ends, ""]
        sizes = (len(line.raw) + len(end) for line, end in zip(lines, ends, strict=True))
        begins = [*accumulate(sizes, initial=0)]
        found: dict[int, list[int]] = {}
        for i in changed:
            start, places, is_misread, lost_bracket = begins[i], list[int](), False, False
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
                    lost_bracket |= stretch.raw[0] in "[]"
            if lost_bracket:  # one of the words is taken for its other end
                places += lines[i].brackets()
            if is_misread or places:
                found[i] = sorted({*places})
        return found

    def not_kept(self) -> list[str]:
        return [
            *say_estimated("line", self._estimated, "links and emphasis"),
            *say_refused("line", self._refused, "code, or of an address"),
            *say_left(self._left, "new words there would be read as marks of Markdown"),
        ]


def _with_words(line: _MarkedWords, words: str) -> _ChangedLine:
    """Return a line with other words."""
    stretches = line.stretches
    read = [i for i, each in enumerate(stretches) if each.is_read]
    parts = [Part(stretches[i].depth, stretches[i].mark == "fixed") for i in read]
    changed = line_of_parts([stretches[i].characters for i in read], parts).changed(words)
    made = [each.raw for each in stretches]
    for i, part in zip(read, changed.parts, strict=True):
        made[i] = part
    _drop_emphasis_of_nothing(stretches, made)
    _move_blanks(stretches, made)
    strays = _strays(stretches, made)
    for i in strays:
        made[i] = made[i].replace(stretches[i].raw, "")
    new = _MarkedWords([*_parted(stretches, made)])
    new = new.escaped(sorted({*new.touching()})).begun_as(line)
    return _ChangedLine(new, changed.is_estimate or bool(strays), changed.has_refused)


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
        if kind == "fixed" or max(first, start) >= min(last, end):
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


def _drop_emphasis_of_nothing(stretches: Sequence[_Stretch], made: list[str]) -> None:
    """Drop marks of emphasis that stand around nothing, as they would be seen."""
    begun: list[int] = []  # marks behind which nothing has come
    for i, each in enumerate(stretches):
        if each.is_emphasis:
            if begun and stretches[begun[-1]].raw == each.raw:
                made[begun.pop()] = made[i] = ""
            else:
                begun.append(i)
        elif made[i].strip() or (made[i] and begun and each.depth <= stretches[begun[-1]].depth):
            begun.clear()


def _move_blanks(stretches: Sequence[_Stretch], made: list[str]) -> None:
    """Move blanks within emphasis to its outside, as it would neither begin nor end there."""
    depths = [*(each.depth for each in stretches), 0]
    changes = [behind - depth for depth, behind in pairwise(depths)]
    marks = [i for i, each in enumerate(stretches) if made[i] and each.is_emphasis]
    for i in reversed(marks):  # from the inner ones to those around them
        if changes[i] > 0:
            words = made[i + 1].lstrip()
            made[i] = made[i + 1][: len(made[i + 1]) - len(words)] + made[i]
            made[i + 1] = words
    for i in marks:
        if i and changes[i] < 0:
            words = made[i - 1].rstrip()
            made[i] += made[i - 1][len(words) :]
            made[i - 1] = words


def _strays(stretches: Sequence[_Stretch], made: Sequence[str]) -> set[int]:
    """Return the places of emphasis that would be seen as signs, with the like in the line."""
    line, at, seen = "".join(made), 0, set[str]()
    for stretch, raw in zip(stretches, made, strict=True):
        if raw and stretch.is_emphasis:
            first = at + raw.index(stretch.raw)  # behind blanks that have been moved
            if not is_emphasis(line, first, first + len(stretch.raw)):
                seen.add(stretch.raw)
        at += len(raw)
    return {i for i, each in enumerate(stretches) if each.is_emphasis and each.raw in seen}


def _read_lines(source: str, finder: MarkFinder) -> tuple[list[_MarkedWords], list[str]]:
    """Return the lines of a file, and how each but the last ends."""
    pieces = _END_OF_LINE.split(source)
    words, ends = pieces[::2], pieces[1::2]
    marks = finder.marks()
    starts = [start for start, _, _ in marks]
    read_starts = [start for start, _ in finder.blocks]
    lines, at, depth = [], 0, 0
    for line, line_end in zip(words, [*ends, ""], strict=True):
        end = at + len(line)
        # The mark before the first one of the line may go on in it.
        first = max(0, bisect_left(starts, at) - 1)
        some = marks[first : bisect_left(starts, end)]
        stretches, depth = _stretches(source, at, end, some, depth if line.strip() else 0)
        last = bisect_left(read_starts, end) - 1  # of what is read, and begins before its end
        lines.append(_MarkedWords(stretches, has_marks=last >= 0 and finder.blocks[last][1] > at))
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
        return int(last - first == 1)  # of a link, and not the mark of a note
    if kind == "]":
        return -1
    if kind not in "*_~`":
        return 0
    before, after = source[first - 1 : first] or " ", source[last : last + 1] or " "
    return 1 if not after.isspace() and (before.isspace() or is_sign(before)) else -1
