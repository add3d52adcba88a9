"""Splits a text into the sentences that a model may read, and leaves everything else out."""

import re
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from tempfile import gettempdir
from typing import Any, Literal

# Those that sentencex has rules for.
SENTENCE_LANGUAGES = (
    "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
).split()
# Characters that sentencex, whose steps grow with their square, sees at a time. Paragraphs that are
# no longer are split as a whole; in longer ones what follows the last end is seen once more.
SEEN_AT_ONCE = 8192
WRAPPED_LENGTHS = range(40, 121)  # characters of a line that was broken because it was full
CODE_INDENT = 4  # columns before code
MIN_TILDES = 4  # that underline a heading, at least
LABEL_WORDS = 4  # words of a label, at most
LABEL_WORDS_IN_CUES = 2  # where people speak, and full stops may be missing
BLANKS_AROUND = 100  # characters in which the end of a line is looked for beside a passage
CLAUSE_WORDS = 3  # words of a clause, at least
MARKS_BEFORE = 1000  # characters before a passage in which the marks of its line are looked for

_READING = threading.Lock()
_UNSPACED = re.compile(r"[^\s\0]+")  # NUL is a blank that no text needs
_LINE_TEXT = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|\Z)")
_QUOTE = re.compile(r"[ \t]{0,3}>(?:[ \t]?>)*[ \t]?")
_BULLET = r"[-*+•◦‣·–—]|\(?[A-Za-z]\)"
_BOX = r"\[[ xX]\]"
_NOTE = r"\[\^[^\]\s]{1,100}\]:"  # that begins the text of a footnote
_LIST_MARKER = re.compile(rf"(?:{_BULLET}|\(?\d{{1,3}}[.)]|{_NOTE})[ \t]+(?:{_BOX}[ \t]+)?")
_FENCE = re.compile(r"`{3,}+(?=[^`]*$)|~{3,}")
_HEADING = re.compile(r"\#{1,6}(?:[ \t]|$)")
_RULE = re.compile(r"([-*_])[ \t]*+(?:\1[ \t]*+){2,}$")
_UNDERLINE = re.compile(r"(=+|-{3,})[ \t]*$")
_GAP = r"(?<=\S)(?:\t| {4})[ \t]*+\S"  # between the cells of a row
_WIDE_GAP = re.compile(_GAP)
_ROW = re.compile(rf"\||.*\|.*\||.*{_GAP}")
# All marks that a line may begin with, and what makes its words something other than text. Here an
# item may have any number, also a year, and there may be marks within marks, HTML and link targets.
_KIND = re.compile(
    rf"""
    (\ufeff?
        (?:
            {_QUOTE.pattern}
            | [ \t]* (?:{_BULLET} | {_BOX} | \(?\d+[.)]) (?:[ \t]+|$)
        )*+
        [ \t]*
    )
    (
        {_FENCE.pattern}
        | {_HEADING.pattern}
        | </?[A-Za-z] | <[!?]
        | \[[^\]]*\]:
    )?
    """,
    re.VERBOSE,
)
_FORMULA = re.compile(r"\$\$|\\\[|\\begin\{(?P<name>[a-zA-Z]{1,40}\*?)\}")
FRONT_MATTER_RULES = ("---", "+++")  # that it stands between
_SENTENCE_END = re.compile(r"[.!?…。！？؟।։][\"'”’»)\]*_]*$")
_CELL = re.compile(r"[^\s|](?:[^|\t]*?[^\s|])?(?=\s*(?:\||\t| {4}|$))")
_LINK = re.compile(r"\[(?!\^)[^\]]+\]:[ \t]")  # where its target stands
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


@dataclass(frozen=True)
class FileLines:
    """What a file says of the lines of its text."""

    breaks: Breaks = "wrapped"  # which line breaks may be within a sentence
    unread: Sequence[int] = ()  # how many characters of each line of the file are not in the text
    # Numbers of lines that go on in the same paragraph on the next one, behind a break or a tab.
    inner_breaks: Collection[int] = frozenset()
    items: Collection[int] = frozenset()  # numbers of lines that begin an item without its marker

    def begins_item(self, text: str, passage: Passage) -> bool:
        """Whether a passage is the first of an item of a list."""
        first = passage.start == 0 or text[passage.start - 1] == "\n"
        before = _marks_before(text, passage) or ""
        return (first and passage.line in self.items) or bool(_LIST_MARKER.search(before))

    def within(self, text: str, passage: Passage) -> tuple[bool, bool]:
        """Return whether a passage goes on from the line above, and on the line below."""
        before = text[max(0, passage.start - BLANKS_AROUND) : passage.start].rstrip(" \t")
        behind = text[passage.end : passage.end + BLANKS_AROUND].lstrip(" \t")
        return (
            passage.line - 1 in self.inner_breaks and before.endswith("\n"),
            passage.line in self.inner_breaks and behind.startswith("\n"),
        )


PLAIN_LINES = FileLines()


def passage_lines(text: str, passage: Passage) -> list[Passage]:
    """Split a passage where its lines end."""
    lines = [[passage.spans[0]]]
    for (_, end), span in pairwise(passage.spans):
        if "\n" in text[end : span[0]]:
            lines.append([])
        lines[-1].append(span)
    return [Passage(tuple(spans), number) for number, spans in enumerate(lines, passage.line)]


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


def segments(language: str, text: str) -> list[str]:
    """Split a text into sentences, with the blanks behind each; joined they are the text."""
    from sentencex import segment  # only where text is split

    if len(text) <= SEEN_AT_ONCE:
        found = segment(language, text)
        return found if sum(map(len, found)) == len(text) else [text]
    ends, start = [0], 0
    while start < len(text):
        stop = _blank_before(text, start + SEEN_AT_ONCE, start + SEEN_AT_ONCE // 2)
        sizes = [*map(len, segment(language, text[start:stop]))]
        some = [start + size for size in accumulate(sizes)]
        if not some or some[-1] != stop:  # it has lost something
            some = [stop]
        if stop < len(text):
            some.pop()  # the end of what was seen
        ends += some
        middle = start + SEEN_AT_ONCE // 2
        if stop == len(text) or ends[-1] > middle:
            start = ends[-1]
        else:  # a sentence longer than what was seen
            start = max(ends[-1], _blank_before(text, middle, start + SEEN_AT_ONCE // 4))
    return [text[i:j] for i, j in zip(ends, ends[1:], strict=False)]


def _blank_before(text: str, most: int, least: int) -> int:
    """Return a place behind a blank, the last up to `most`; there if none is after `least`."""
    if most >= len(text):
        return len(text)
    found = text.rfind(" ", least, most)
    return found + 1 if found >= 0 else most


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
    unread: int = 0  # characters that the file has in it besides


def _lines(text: str, unread: Sequence[int]) -> list[_Line]:
    lines = []
    for number, found in enumerate(_LINE_TEXT.finditer(text), 1):
        start, end = found.span(1)
        start += text.startswith("\ufeff") and start == 0
        quote = _QUOTE.match(text, start, end)
        depth = quote[0].count(">") if quote else 0
        start = quote.end() if quote else start
        words = text[start:end].lstrip(" \t")
        indent = len(text[start:end].expandtabs(CODE_INDENT)) - len(words.expandtabs(CODE_INDENT))
        more = unread[number - 1] if number <= len(unread) else 0
        lines.append(_Line(number, end - len(words), words, depth, indent, more))
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


def _formulas(lines: Sequence[_Line]) -> dict[int, int]:
    """Return where formulas of several lines begin, and the place behind each."""
    found: dict[int, int] = {}
    begun, closing = 0, ""
    for place, line in enumerate(lines):
        if closing and closing in line.words:
            found[begun], closing = place + 1, ""
        elif _BLANK.match(line.words):
            closing = ""
        elif not closing and (opening := _FORMULA.match(line.words)):
            name = opening["name"]
            end = rf"\end{{{name}}}" if name else opening[0].replace("[", "]")
            begun, closing = place, "" if end in line.words[opening.end() :] else end
    return found


@dataclass
class _Paragraph:
    """A paragraph whose lines are still being read."""

    line: int
    depth: int  # of quotation marks
    code: bool  # indented as code is
    spans: list[Span] = field(default_factory=list)
    last: str = ""  # its last line
    unread: int = 0  # characters that the file has in that besides


def paragraphs(
    text: str, *, labels: bool = False, breaks: Breaks = "wrapped", unread: Sequence[int] = ()
) -> Iterator[Passage]:
    r"""Yield the paragraphs of plain or Markdown text that hold sentences.

    With `labels`, headings, the cells of tables and labels are paragraphs as well.

    Blank lines, indentation, quotation marks (>), list markers and line ends are never part of
    one. These are left out as a whole: headings (#, or underlined), rules (---), rows of tables
    (with bars, tabs or wide gaps), fenced code, code indented by four columns (except a paragraph
    that begins with a capital and ends as a sentence does), labels, see `is_label`, targets of
    links, formulas of several lines ($$, \[ or \begin to their ends, without a blank line), and
    what stands between --- and --- or +++ and +++ at the beginning (front matter).

    Fences are those of CommonMark: a quotation closes those within. But of a fence that is never
    closed only its own line is left out. And tildes below a line that does not end as a sentence
    underline a heading, as in reStructuredText: at least four, or as many as its characters.

    A line break is within a paragraph if the next line begins with a small letter, or if its line
    is full: 40 to 120 characters long, with as many as are `unread` in it. Any other line break
    ends the paragraph.
    """
    return _ParagraphReader(text, labels=labels, breaks=breaks, unread=unread).passages()


class _ParagraphReader:
    """Makes paragraphs of the lines of a text, see `paragraphs`."""

    def __init__(self, text: str, *, labels: bool, breaks: Breaks, unread: Sequence[int]) -> None:
        self._text, self._labels, self._breaks = text, labels, breaks
        self._is_markdown = breaks == "wrapped"
        self._lines = _lines(text, unread)
        self._fences = _Fences(self._lines)
        self._formulas = _formulas(self._lines) if self._is_markdown else {}
        self._open: _Paragraph | None = None  # its last line has been read last
        self._in_list = False

    def passages(self) -> Iterator[Passage]:
        """Yield the paragraphs."""
        behind = self._behind_front_matter()  # the place behind what is not read
        for place, line in enumerate(self._lines):
            if place < behind:
                continue
            if self._makes_heading(line):
                yield from self._closed(wanted=self._labels)
                continue
            marker = _LIST_MARKER.match(line.words)
            fence = self._fence(line, marker)
            if fence:
                behind = self._fences.behind(place, fence) or behind
            elif place in self._formulas:
                behind = self._formulas[place]
                yield from self._closed()
                continue
            if fence or self._is_no_text(line):
                yield from self._closed()
                yield from self._cells(line)
                self._in_list = self._in_list and not (line.indent == 0 and self._parts(line))
            else:
                yield from self._taken(line, marker)
        yield from self._closed()

    def _behind_front_matter(self) -> int:
        """Return the place behind what stands between two --- or +++ at the beginning, else 0."""
        lines = self._lines
        rule = lines[0].words.rstrip() if lines and self._is_markdown else ""
        if rule not in FRONT_MATTER_RULES:
            return 0
        closing = (place for place, line in enumerate(lines) if line.words.rstrip() == rule)
        next(closing)  # which opens it
        return next(closing, 0)

    def _makes_heading(self, line: _Line) -> bool:
        """Whether a line underlines the one above."""
        above = self._open
        if not (self._is_markdown and above and line.depth == above.depth):
            return False
        return _is_underline(line.words, above.last.rstrip())

    def _fence(self, line: _Line, marker: re.Match[str] | None) -> str | None:
        """Return the fence that a line begins with, perhaps behind the marker of an item."""
        found = _FENCE.match(line.words, marker.end() if marker else 0)
        return found[0] if found and self._is_markdown else None

    def _is_no_text(self, line: _Line) -> bool:
        """Whether a line has none, or only some that stands by itself."""
        return bool(_BLANK.match(line.words)) or self._parts(line) or self._is_row(line)

    def _parts(self, line: _Line) -> bool:
        """Whether a line is a heading, a rule or the target of a link."""
        if not self._is_markdown:
            return False
        words = line.words
        return bool(_HEADING.match(words) or _RULE.match(words) or _LINK.match(words))

    def _is_row(self, line: _Line) -> bool:
        return self._is_markdown and _ROW.match(line.words) is not None

    def _cells(self, line: _Line) -> Iterator[Passage]:
        """With labels, yield the words of a heading, or of each cell of a row."""
        words = line.words
        if not (self._labels and (self._is_row(line) or _HEADING.match(words))):
            return
        start = line.start + len(words) - len(words.lstrip("# \t"))
        for cell in _CELL.finditer(self._text, start, line.start + len(words.rstrip("# \t"))):
            spans = _word_spans(self._text, *cell.span())
            yield from self._finished(_Paragraph(line.number, line.depth, code=False, spans=spans))

    def _taken(self, line: _Line, marker: re.Match[str] | None) -> Iterator[Passage]:
        """Add a line of text to the open paragraph, or yield that and open another one."""
        start, words, paragraph = line.start, line.words, self._open
        if marker:
            self._in_list, start, words = True, start + marker.end(), words[marker.end() :]
        elif line.indent == 0 and paragraph is None:
            self._in_list = False
        is_new = marker or paragraph is None or line.depth != paragraph.depth
        if is_new or paragraph is None or not self._continues(paragraph, words):
            yield from self._closed()
            code = self._is_markdown and line.indent >= CODE_INDENT and not self._in_list
            paragraph = self._open = _Paragraph(line.number, line.depth, code)
        paragraph.spans += _word_spans(self._text, start, start + len(words))
        paragraph.last, paragraph.unread = words, line.unread

    def _continues(self, paragraph: _Paragraph, following: str) -> bool:
        """Whether the following line continues the sentence of a paragraph's last one."""
        last = paragraph.last.rstrip()
        if self._breaks == "wrapped":
            return following[:1].islower() or len(last) + paragraph.unread in WRAPPED_LENGTHS
        return self._breaks == "cues" and not _SENTENCE_END.search(last)

    def _closed(self, *, wanted: bool = True) -> Iterator[Passage]:
        """Close the open paragraph, and yield it if it is wanted and holds sentences."""
        closed, self._open = self._open, None
        if wanted and closed is not None:
            yield from self._finished(closed)

    def _finished(self, paragraph: _Paragraph) -> Iterator[Passage]:
        """Yield a paragraph if it holds sentences, or with labels, any words."""
        if not paragraph.spans:
            return
        passage = Passage(tuple(paragraph.spans), paragraph.line)
        flat = passage.flat(self._text)
        prose = _SENTENCE_END.search(flat) and flat.lstrip(_OPENING)[:1].isupper()
        if (self._labels or not is_label(flat, self._breaks)) and (prose or not paragraph.code):
            yield passage


def has_wide_gap(line: str) -> bool:
    """Whether a line has a gap as between the cells of a row."""
    return _WIDE_GAP.search(line) is not None


def _word_spans(text: str, start: int, end: int) -> list[Span]:
    return [word.span() for word in _UNSPACED.finditer(text, start, end)]


def ends_as_sentence(text: str) -> bool:
    """Whether a text ends with a full stop or the like."""
    return _SENTENCE_END.search(text) is not None


def _is_underline(line: str, above: str) -> bool:
    """Whether a line makes the one above a heading."""
    if _SENTENCE_END.search(above):
        return False
    if line.startswith("~~~") and not line.strip("~ \t"):
        full = len(line.rstrip()) >= len(above)
        return full or (len(line.rstrip()) >= MIN_TILDES and not above.endswith(":"))
    return _UNDERLINE.match(line) is not None


def is_label(flat: str, breaks: Breaks = "wrapped") -> bool:
    """Whether a text is no sentence.

    That is one without letters; and one without a full stop or the like at its end if it has at
    most four words, two in cues of subtitles, if most of its words have capitals, or if it ends in
    a comma, a semicolon or a colon. In cues it may end so where somebody is interrupted.
    """
    is_cue = breaks == "cues"
    most = LABEL_WORDS_IN_CUES if is_cue else LABEL_WORDS
    words = [word for word in flat.split() if any(map(str.isalpha, word))]
    capitals = sum(word.lstrip(_OPENING)[:1].isupper() for word in words)
    short = len(words) <= most or 2 * capitals > len(words)
    goes_on = not is_cue and flat.endswith((",", ";", ":"))
    is_open = not _SENTENCE_END.search(flat)
    return not words or (is_open and (short or goes_on))


def _marks_before(text: str, passage: Passage) -> str | None:
    """Return what is before a passage on its line, if these are marks and no words."""
    first = max(0, passage.start - MARKS_BEFORE)
    start = max(first, *(text.rfind(end, first, passage.start) + 1 for end in "\r\n"))
    found = _KIND.match(text, start, passage.start)
    return found[1] if found and found.end(1) == passage.start else None


def keeps_lines(text: str, passage: Passage, output: str) -> bool:
    """Whether each line of a passage stays what it is with an output in the passage's place.

    A line is text, an item of a list, a quotation, a heading, code, HTML, a row of a table or a
    rule, see `_KIND`.
    """
    begins = _marks_before(text, passage) is not None
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


def identifier(*codes: str) -> Any:
    """Return what tells languages apart, by default all that it knows.

    The first call reads its file, which takes half a second: see `read_identifier_ahead`.
    """
    with _READING:
        return _read_identifier(*codes)


@cache
def read_identifier_ahead() -> None:
    """Begin to read what `identifier` returns, on a thread of its own; later calls do nothing."""
    threading.Thread(target=_try_to_read, name="identifier", daemon=True).start()


def _try_to_read() -> None:
    # The next call of `identifier` tries again, and says why that fails.
    with suppress(OSError):
        identifier()


@cache
def _read_identifier(*codes: str) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    try:
        made = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    except OSError as error:
        why = f"{error.strerror}, and what tells languages apart needs a temporary file there"
        raise OSError(error.errno, why, gettempdir()) from error
    if codes:
        made.set_languages([*codes])
    return made
