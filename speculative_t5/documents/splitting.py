"""Splits a text into the sentences that a model may read, and leaves everything else out."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal

from .segments import segments

# Those that sentencex has rules for.
SENTENCE_LANGUAGES = (
    "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
).split()
WRAPPED_LENGTHS = range(40, 121)  # characters of a line that was broken because it was full
CODE_INDENT = 4  # columns before code
MIN_TILDES = 4  # that underline a heading, at least
LABEL_WORDS = 4  # words of a label, at most
CLAUSE_WORDS = 3  # words of a clause, at least
MARKS_BEFORE = 1000  # characters before a passage in which the marks of its line are looked for

_UNSPACED = re.compile(r"[^\s\0]+")  # NUL is a blank that no text needs
_LINE_TEXT = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
_QUOTE = re.compile(r"[ \t]{0,3}>(?:[ \t]?>)*[ \t]?")
_BULLET = r"[-*+•◦‣·–—]|\(?[A-Za-z]\)"
_BOX = r"\[[ xX]\]"
_LIST_MARKER = re.compile(rf"(?:{_BULLET}|\(?\d{{1,3}}[.)])[ \t]+(?:{_BOX}[ \t]+)?")
_FENCE = re.compile(r"`{3,}+(?=[^`]*$)|~{3,}")
_HEADING = re.compile(r"#{1,6}(?:[ \t]|$)")
_RULE = re.compile(r"([-*_])[ \t]*+(?:\1[ \t]*+){2,}$")
_UNDERLINE = re.compile(r"(=+|-{3,})[ \t]*$")
_ROW = re.compile(r"\||.*\|.*\||.*(?<=\S)(?:\t| {4})[ \t]*+\S")
# All marks that a line may begin with, and what makes its words something other than text. Here an
# item may have any number, also a year, and there may be marks within marks, HTML and link targets.
_KIND = re.compile(
    rf"(\ufeff?(?:{_QUOTE.pattern}|[ \t]*(?:{_BULLET}|{_BOX}|\(?\d+[.)])(?:[ \t]+|$))*+[ \t]*)"
    rf"({_FENCE.pattern}|{_HEADING.pattern}|</?[A-Za-z]|<[!?]|\[[^\]]*\]:)?"
)
_SENTENCE_END = re.compile(r"[.!?…。！？؟।։][\"'”’»)\]*_]*$")
_CELL = re.compile(r"[^\s|](?:[^|\t]*?[^\s|])?(?=\s*(?:\||\t| {4}|$))")
_LINK = re.compile(r"\[[^\]]+\]:[ \t]")  # where its target stands
_PAUSE = re.compile(r"[,;:—–]$|[，；：、]")
_BLANK = re.compile(r"[\s\0]*$")
_OPENING = "\"'“‘„‚«‹([*_¿¡"

Span = tuple[int, int]  # where a word begins and ends in the text
# Which line breaks may be within a sentence: see `paragraphs`; those between cues of subtitles that
# do not end as a sentence does; or none.
Breaks = Literal["wrapped", "cues", "none"]


@dataclass(frozen=True)
class Passage:
    """Words of a text that belong together: a paragraph, or some sentences of it."""

    spans: tuple[Span, ...]  # of the words; nothing stands between some of different sentences
    line: int  # number of the line where it begins, from 1

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    def flat(self, text: str) -> str:
        """Return the passage on one line, with single spaces."""
        return " ".join(self.words(text)[0])

    def words(self, text: str) -> tuple[list[str], list[str]]:
        """Return the words of `flat`, and what stands between them in the text."""
        borders = [
            (before, start)
            for (_, before), (start, _) in pairwise(self.spans)
            if before < start  # or a sentence follows without a space
        ]
        starts = [self.start, *(start for _, start in borders)]
        ends = [*(before for before, _ in borders), self.end]
        words = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        return words, [text[before:start] for before, start in borders]


def sentences(text: str, passage: Passage, language: str) -> list[Passage]:
    """Split a paragraph into sentences, by the rules of sentencex."""
    flat = passage.flat(text)
    borders = [0, *accumulate(map(len, segments(language, flat)))]
    places = []  # in the text, of each character of flat
    for start, end in passage.spans:
        places += [*range(start, end), end]  # with the space behind the word
    found, line, at = [], passage.line, passage.start
    for border in pairwise(borders):
        words = [word.span() for word in _UNSPACED.finditer(flat, *border)]
        if words:
            spans = tuple((places[start], places[end - 1] + 1) for start, end in words)
            line += len(re.findall(r"\r\n|\r|\n", text[at : spans[0][0]]))
            at = spans[0][0]
            found.append(Passage(spans, line))
    return found


def clauses(text: str, passage: Passage) -> list[Passage]:
    """Split a sentence at commas and the like."""
    parts: list[list[Span]] = [[]]
    for span in passage.spans:
        parts[-1].append(span)
        if len(parts[-1]) >= CLAUSE_WORDS and _PAUSE.search(text[slice(*span)]):
            parts.append([])
    if len(parts) > 1 and len(parts[-1]) < CLAUSE_WORDS:
        last = parts.pop()
        parts[-1] += last
    return [replace(passage, spans=tuple(part)) for part in parts]


@dataclass(frozen=True)
class _Line:
    """A line of a text, without its indentation and quotation marks."""

    number: int  # from 1
    start: int  # where its words begin in the text
    words: str
    depth: int  # of quotation marks
    indent: int  # in columns


def _lines(text: str) -> list[_Line]:
    lines = []
    for number, found in enumerate(_LINE_TEXT.finditer(text), 1):
        start, end = found.span(1)
        start += text.startswith("\ufeff") and start == 0
        quote = _QUOTE.match(text, start, end)
        depth = quote[0].count(">") if quote else 0
        start = quote.end() if quote else start
        words = text[start:end].lstrip(" \t")
        indent = len(text[start:end].expandtabs(CODE_INDENT)) - len(words.expandtabs(CODE_INDENT))
        lines.append(_Line(number, end - len(words), words, depth, indent))
    while lines and _BLANK.match(lines[-1].words):
        lines.pop()
    return lines


class _Fences:
    """Finds where the code ends that a fence opens, without looking at all lines for each."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self._lines = lines
        self._left: list[int | None] = [None] * len(lines)  # where a line's quotation has ended
        open_: list[int] = []
        # By depth and character, the places of lines that may close a fence, and their lengths.
        self._closing: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        for place, line in enumerate(lines):
            while open_ and lines[open_[-1]].depth > line.depth:
                self._left[open_.pop()] = place
            open_.append(place)
            closing = line.words.rstrip(" \t")
            if closing.startswith(("`", "~")) and not closing.strip(closing[0]):
                found = self._closing.setdefault((line.depth, closing[0]), ([], []))
                found[0].append(place)
                found[1].append(len(closing))
        # For each such line, the longest from there on.
        self._longest = {
            key: [*accumulate(reversed(sizes), max)][::-1]
            for key, (_, sizes) in self._closing.items()
        }

    def behind(self, first: int, fence: str) -> int | None:
        """Return the place behind the code that a fence opens, None if it is never closed."""
        key, left = (self._lines[first].depth, fence[0]), self._left[first]
        places, sizes = self._closing.get(key, ([], []))
        at = bisect_right(places, first)
        if at < len(places) and self._longest[key][at] >= len(fence):
            while sizes[at] < len(fence) and (left is None or places[at] < left):
                at += 1
            if left is None or places[at] < left:
                return places[at] + 1
        return left


@dataclass
class _Paragraph:
    """A paragraph whose lines are still being read."""

    line: int
    depth: int  # of quotation marks
    code: bool  # indented as code is
    spans: list[Span] = field(default_factory=list)
    last: str = ""  # its last line


def paragraphs(text: str, *, labels: bool = False, breaks: Breaks = "wrapped") -> Iterator[Passage]:
    """Yield the paragraphs of plain or Markdown text that hold sentences.

    With `labels`, headings, the cells of tables and labels are paragraphs as well.

    Blank lines, indentation, quotation marks (>), list markers and line ends are never part of
    one. These are left out as a whole: headings (#, or underlined), rules (---), rows of tables
    (with bars, tabs or wide gaps), fenced code, code indented by four columns (except a paragraph
    that begins with a capital and ends as a sentence does), labels, see `is_label`, targets of
    links, and what stands between --- and --- at the beginning (front matter).

    Fences are those of CommonMark: a quotation closes those within. But of a fence that is never
    closed only its own line is left out. And tildes below a line that does not end as a sentence
    underline a heading, as in reStructuredText: at least four, or as many as its characters.

    A line break is within a paragraph if the next line begins with a small letter, or if its line
    is full: 40 to 120 characters long. Any other line break ends the paragraph.
    """
    finished = partial(_finished, text, labels=labels)
    open_: _Paragraph | None = None
    in_list = False
    lines, marked = _lines(text), breaks == "wrapped"  # whether as Markdown
    # The place behind the last code, or behind the front matter.
    code = 0
    if lines and marked and lines[0].words.rstrip() == "---":
        code = next((i for i, line in enumerate(lines) if i and line.words.rstrip() == "---"), 0)
    fences = _Fences(lines)
    for place, each in enumerate(lines):
        if place < code:
            continue
        start, line, depth, indent = each.start, each.words, each.depth, each.indent
        if marked and open_ and depth == open_.depth and _is_underline(line, open_.last.rstrip()):
            yield from finished(open_ if labels else None)
            open_ = None
            continue
        marker = _LIST_MARKER.match(line)
        fence = _FENCE.match(line, marker.end() if marker else 0) if marked else None
        if fence:
            code = fences.behind(place, fence[0]) or code
        parting = marked and (_HEADING.match(line) or _RULE.match(line) or _LINK.match(line))
        is_row = marked and _ROW.match(line)
        if fence or parting or is_row or _BLANK.match(line):
            yield from finished(open_)
            open_ = None
            if labels and (is_row or _HEADING.match(line)):
                start += len(line) - len(line.lstrip("# \t"))
                for cell in _CELL.finditer(text, start, each.start + len(line.rstrip("# \t"))):
                    spans = _word_spans(text, *cell.span())
                    yield from finished(_Paragraph(each.number, depth, code=False, spans=spans))
            in_list = in_list and not (parting and indent == 0)
            continue
        if marker:
            in_list, start, line = True, start + marker.end(), line[marker.end() :]
        elif indent == 0 and open_ is None:
            in_list = False
        new = marker or open_ is None or depth != open_.depth
        if new or open_ is None or not _continues(open_.last, line, breaks):
            yield from finished(open_)
            open_ = _Paragraph(each.number, depth, marked and indent >= CODE_INDENT and not in_list)
        open_.spans += _word_spans(text, start, start + len(line))
        open_.last = line
    yield from finished(open_)


def _word_spans(text: str, start: int, end: int) -> list[Span]:
    return [word.span() for word in _UNSPACED.finditer(text, start, end)]


def _is_underline(line: str, above: str) -> bool:
    """Whether a line makes the one above a heading."""
    if _SENTENCE_END.search(above):
        return False
    if line.startswith("~~~") and not line.strip("~ \t"):
        full = len(line.rstrip()) >= len(above)
        return full or (len(line.rstrip()) >= MIN_TILDES and not above.endswith(":"))
    return _UNDERLINE.match(line) is not None


def _continues(line: str, following: str, breaks: Breaks) -> bool:
    """Whether the following line continues the sentence of this one."""
    if breaks == "wrapped":
        return following[:1].islower() or len(line.rstrip()) in WRAPPED_LENGTHS
    return breaks == "cues" and not _SENTENCE_END.search(line.rstrip())


def _finished(text: str, paragraph: _Paragraph | None, *, labels: bool) -> Iterator[Passage]:
    """Yield a paragraph if it holds sentences, or with `labels`, any words."""
    if paragraph is None or not paragraph.spans:
        return
    passage = Passage(tuple(paragraph.spans), paragraph.line)
    flat = passage.flat(text)
    prose = _SENTENCE_END.search(flat) and flat.lstrip(_OPENING)[:1].isupper()
    if (labels or not is_label(flat)) and (prose or not paragraph.code):
        yield passage


def is_label(flat: str) -> bool:
    """Whether a text is no sentence.

    That is one without letters; and one without a full stop or the like at its end if it has at
    most four words, if most of its words have capitals, or if it ends in a comma, a semicolon or a
    colon.
    """
    words = [word for word in flat.split() if any(map(str.isalpha, word))]
    capitals = sum(word.lstrip(_OPENING)[:1].isupper() for word in words)
    short = len(words) <= LABEL_WORDS or 2 * capitals > len(words)
    return not words or (
        not _SENTENCE_END.search(flat) and (short or flat.endswith((",", ";", ":")))
    )


def keeps_lines(text: str, passage: Passage, output: str) -> bool:
    """Whether each line of a passage stays what it is with an output in the passage's place.

    A line is text, an item of a list, a quotation, a heading, code, HTML, a row of a table or a
    rule, see `_KIND`.
    """
    first = max(0, passage.start - MARKS_BEFORE)
    start = max(first, *(text.rfind(end, first, passage.start) + 1 for end in "\r\n"))
    before = _KIND.match(text, start, passage.start)
    begins = before is not None and before.end(1) == passage.start
    head = "" if begins else "x "  # where other words come first, only the further lines count
    return _kinds(head + text[passage.start : passage.end]) == _kinds(head + output)


def _kinds(text: str) -> list[tuple[object, ...]]:
    """Return for each line its marks, its kind, whether it has words, and its number of bars."""
    lines = re.split(r"[\r\n]+", text)
    kinds = [found.groups() if (found := _KIND.match(line)) else () for line in lines]
    return [
        (*kind, any(map(str.isalnum, line)), line.count("|"))
        for kind, line in zip(kinds, lines, strict=True)
    ]
