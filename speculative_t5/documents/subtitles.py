"""What is shown in a cue of subtitles: what is spoken in it, and what stays around the words.

A cue has one speech or several. A speech begins with the cue, and further ones begin

- at a line that begins with a dash, unless that line goes on with a small letter where the line
  above has no end of a sentence and the cue does not begin with a dash;
- at `>>`, at the beginning of a line or between blanks, and at a voice such as `<v Anna>`;
- at a line that begins with a name, or with a description behind the end of a sentence.

A name is one to three words in capital letters before a colon, with two letters or more, and a
blank or the end of the line behind the colon: `MAN:`, `DR. SMITH:`, `OFFICER #2:`. `Note: this`,
`Q: why` and `AT 10:30` are none. Where all words that follow on the line are in capitals as well,
only one word is a name: `MAN: STOP IT`, but not `HE SAID: STOP IT`. What is heard is not counted:
`DR. SMITH: [MUSIC PLAYING]` has a name.

A description says what is heard: words in brackets, and in round ones at the beginning of a
speech, behind the end of a sentence, or alone. It is read by itself, so that it is translated, and
no part of the sentence beside it. Within a sentence one in brackets stays as it is, and so do one
small word or capitals in round brackets: `I (coughs) know`; other words in those are read with the
sentence: `He (the man) left`. Notes of music stay everywhere.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import unescape
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from .layout import arranged
from .marks import Character, MarkedLine, Part, is_other, read_line

SUBTITLE_WIDTH = 42  # characters of a line, by broadcasters' rules; half without spaces
NAME_WORDS = 3  # of a speaker, at most
LOOKED_BACK = 60  # characters in which the end of a sentence is looked for

# A mask is a text of the same length, in which characters stand for what is not read as it is.
TAG = "\0"  # a tag, or something else that is no text
REST = "\1"  # further characters of a break or of the name of a character
JOINT = "\2"  # a break within words that no blanks part

_LETTERS_APART = "\u2e80-\u2fff\u3001-\u30ff\u31f0-\u9fff\uf900-\ufaff\uff01-\uffef"  # letters
_BREAK_WITHIN = re.compile(rf"([{_LETTERS_APART}][\0\x01]*+)\n(?=[\0\x01]*+[{_LETTERS_APART}])")
_NOT_READ = re.compile(r"[\0-\x02]+")
_CHARACTER = re.compile(r"[^\0]\x01*+", re.DOTALL)
_NOT_LAST, _NOT_FIRST = "（「『【《〈", "）」』】》〉、。，．！？…ー"  # signs of a line
_NO_TEXT = {ord(REST): TAG, ord(JOINT): TAG}  # where a text has them itself
_TAGS = re.compile(r"\0+")
_NOTES = "♪♫♬♩"
# What stands around words: blanks, tags, and notes of music, for which # was used once. What is
# behind them is read backwards: forwards each blank might be the first of those at the end.
_AROUND = re.compile(rf"(?:[\s\0-\x02{_NOTES}]|\#(?!\w))*+")
_AROUND_ON_LINE = re.compile(rf"(?:[^\S\n]|[\0-\x02{_NOTES}])*+")
_DASH = re.compile(r"[-–—](?![-–—\d>])[\s\0-\x02]*+(?=[^\s\0-\x02])")  # -5 and -- are none
_ARROWS = re.compile(r"(?:>\x01*+){2,3}(?!>)")
_ARROWS_WITHIN = re.compile(r"(?<=\s)(?:>\x01*+){2,3}(?=\s)")
_NAME = re.compile(r"([^\n:：]{1,40}+)[:：](?=[\s\0-\x02]|$)")
_NAME_SIGNS = re.compile(r"[\w .'’#&/()\0-\x02-]++")
_LINE_REST = re.compile(r"[^\n]{0,200}")
_DESCRIPTION = re.compile(
    r"[\[［【]([^\[\]［］【】]{1,200}+)[\]］】][:：]?(?![a-z])"
    r"|\(([^()]{1,200}+)\):?(?!\w)"
    r"|（([^（）]{1,200}+)）[:：]?"
)
_OPENED_BY = {"]": "[", "］": "［", "】": "【", ")": "(", "）": "（"}
_ANCHOR = re.compile(
    rf"(?<!\w)\[[^\[\]]{{1,200}}+\](?![a-z])|[［【][^［］【】]{{1,200}}+[］】]"
    rf"|(?<!\w)\([^()]{{1,200}}+\)(?!\w)|[{_NOTES}]++"
)
_RUBY = re.compile(r"<rt>([^<]{1,200}+)</rt>")  # how characters are read, above them
_BLANKS = f" \t\n\r\f\v{REST}"
_VOICE = re.compile(r"<v(?:\.[^\s<>]*+)?[ \t]([^<>]*+)>", re.IGNORECASE)


class Markup(Protocol):
    """What a format has in its cues beside words."""

    def mask(self, text: str) -> str:
        """Return a text of the same length with what is read; see `TAG`, `REST`."""

    def depths(self, text: str) -> list[tuple[int, int]]:
        """Return where tags are in a text, and how many marks are on what follows each."""

    def spelled(self, text: str) -> str:
        """Return words as a cue has them."""


class Tags:
    """Marks of SubRip and WebVTT: tags, positions, and names of characters."""

    _token = re.compile(
        r"""
        (?P<line> <br\s*+/?> | \r\n | \r | \n | (?-i:\\N))
        | (?P<character> &(?:amp|lt|gt|nbsp|lrm|rlm|\#\d{1,7}|\#x[0-9a-f]{1,6}); )
        | <rt> [^<]{0,200} </rt>
        | < (?: [ ]{0,9} / [^>]{0,200} | [a-z][^<>]*+ | [ ]{1,9}[bius][ ]{0,9} | \d+:[\d:.,]*+ ) >
        | \{ (?:\\|[a-z]:) [^{}]*+ \}
        """,
        re.VERBOSE | re.IGNORECASE,
    )
    _paired = re.compile(
        r"<[ ]{0,9}(/?)[ ]{0,9}(?:[biusc]|v|font|lang|ruby)\b[^<>]*+>", re.IGNORECASE
    )

    def __init__(self, *, has_names: bool) -> None:
        self._has_names = has_names  # whether `&` and `<` are written as names

    def mask(self, text: str) -> str:
        return self._token.sub(_masked, text)

    def depths(self, text: str) -> list[tuple[int, int]]:
        found, depth = [], 0
        for tag in self._paired.finditer(text):
            depth = max(0, depth - 1) if tag[1] else depth + 1
            found.append((tag.start(), depth))
        return found

    def spelled(self, text: str) -> str:
        if not self._has_names:
            return text
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _masked(found: re.Match[str]) -> str:
    size = len(found[0])
    if found["line"]:
        return "\n" + REST * (size - 1)
    char = unescape(found[0]) if found["character"] else ""
    if len(char) != 1 or char in "\0\1\2":
        return TAG * size
    return (" " if char in "\r\n" else char) + REST * (size - 1)


class Speech:
    """Words of one speaker, or of a description, between what stays."""

    def __init__(self, cue: Cue, start: int, end: int, *, kind: str = "", voice: str = "") -> None:
        self.cue, self._start, self._end = cue, start, end
        self.is_description = kind == "description"
        self.begins = kind == "begins"  # another speaker than the one before, or nobody
        self.voice = voice
        self.repeated: Speech | None = None  # what it says again, in captions that roll up
        self.kept: list[str] = []  # descriptions within it
        mask = cue.mask[start:end]
        self.kept += _RUBY.findall(self.raw)
        self._mask = mask if self.is_description else _ANCHOR.sub(self._hidden, mask)
        self.text = _flat(self._mask)

    def _hidden(self, found: re.Match[str]) -> str:
        """Return the mask of what is in brackets within it."""
        if not _stays_within(found[0]):
            return found[0]
        if any(map(str.isalpha, found[0])):
            self.kept.append(_flat(found[0]))
        return TAG * len(found[0])

    @property
    def raw(self) -> str:
        """Its text in the file."""
        return self.cue.text[self._start : self._end]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Where texts are between tags."""
        tags = [found.span() for found in _TAGS.finditer(self._mask)]
        starts = [0, *(end for _, end in tags)]
        ends = [*(start for start, _ in tags), len(self._mask)]
        return [*zip(starts, ends, strict=True)]

    def _pairs(self, span: tuple[int, int]) -> Iterator[tuple[str, str]]:
        """Yield how each character is written, and as what it is read."""
        raw = self.raw
        for found in _CHARACTER.finditer(self._mask, *span):
            yield raw[slice(*found.span())], "" if found[0][0] == JOINT else found[0][0]

    def _line(self, *, has_breaks: bool) -> MarkedLine:
        """Return the line with a line end for each blank with a break, or without breaks."""
        parts = [Part(self.cue.depth(self._start + start)) for start, _ in self._spans]
        characters: list[Character] = []
        for each in read_line(self._spans, self._pairs):
            raws = each.raw, *(raw for _, raw in each.others)
            has_break = not each.text.strip() and any(map(self.cue.has_break, raws))
            if has_break and each.text:
                is_apart = has_breaks and each.text == " "
                each = replace(each, text="\n") if is_apart else Character(" ", each.part, " ")
            elif has_break and not has_breaks:
                each = replace(each, raw="", others=())
            characters.append(each)
        return MarkedLine(characters, parts)

    def shown(self, words: str, *, wraps: bool) -> tuple[str, bool]:
        """Return the text of the file with other words, and whether places of tags are estimates.

        Breaks stay before their words. If most words change, they are on one line, or on two if
        that is long and `wraps`.
        """
        cue, raw = self.cue, self.raw
        if words == self.text:
            return raw, False
        is_whole = is_retold(self.text, words)
        line = self._line(has_breaks=not is_whole)
        if "\n" in line.text:
            old = re.findall(r"[^ \n]+", line.text)
            words = arranged(old, re.findall(r"[ \n]", line.text), words.split()) or words
        changed = line.changed(words, cue.spelled)
        pieces, last = list[str](), (0, 0)
        for (start, end), part in zip(self._spans, changed.parts, strict=True):
            pieces += [self._apart(last, start, pieces[-1:], part), part]
            last = start, end
        made = "".join(pieces)
        if is_whole and wraps and _is_wide(words):
            made = _wrapped(made, cue.masked(made), cue.line_end)
        return made, changed.is_estimate

    def _apart(self, last: tuple[int, int], end: int, before: Sequence[str], behind: str) -> str:
        """Return what is between the last part and one; brackets keep blanks on their sides."""
        (above, start), mask = last, self._mask
        between = self.raw[start:end]
        if _ANCHOR.search(between):
            place = above + len(mask[above:start].rstrip(_BLANKS))
            blank = self.raw[_behind_character(mask, place, start) : start]
            is_lost = blank and before and not before[0].endswith(blank)
            if is_lost and before[0] and not before[0][-1].isspace():
                between = f" {between}"
            if mask[end : end + 1].isspace() and behind[:1].isalnum():
                between += " "
        return between


class _Mark(NamedTuple):
    """Where a description begins and ends, and its words within."""

    start: int
    end: int
    inner: tuple[int, int]


@dataclass(frozen=True)
class Times:
    """When a cue is shown, in seconds."""

    start: float
    end: float

    def rate(self, characters: int) -> float:
        """Return how many characters a second are shown; 0 if no time is between the two."""
        seconds = self.end - self.start
        return characters / seconds if seconds > 0 else 0.0


class Cue:
    """What is shown at one time, or what follows it behind a blank line."""

    def __init__(
        self,
        number: int,
        text: str,
        markup: Markup,
        times: Times | None = None,
        *,
        voice: str = "",
        line_end: str = "",
        adds_breaks: bool = True,
    ) -> None:
        self.number, self.text, self.times, self.voice = number, text, times, voice
        self._markup, self._adds_breaks = markup, adds_breaks
        self.mask = self.masked(text)
        first = re.search(r"\n\x01*", self.mask.rstrip("\0\1 \t\n"))
        self.line_end = text[slice(*first.span())] if first else line_end
        self._has_line_end = first is not None
        self._borders: set[int] = set()  # where speeches have to begin
        self._find_speeches()

    def _find_speeches(self) -> None:
        self.names: list[str] = []  # of speakers
        self.parts = [part for part in self._parts() if part]
        self.speeches = [part for part in self.parts if isinstance(part, Speech)]

    def line(self, *, last: bool) -> tuple[str, int]:
        """Return the words of its first line, or its last, and the border on the other side."""
        mask = self.mask.strip("\0\1 \t\n")
        words, _, others = mask.rpartition("\n")[::-1] if last else mask.partition("\n")
        border = self.mask.find(mask) + (len(others) if last else len(words)) + 1
        return _flat(words), border if others else 0

    def begin_at(self, border: int) -> None:
        """Let a speech begin at a place, where a line does."""
        if border and border not in self._borders:
            self._borders.add(border)
            self._find_speeches()

    def masked(self, text: str) -> str:
        mask = self._markup.mask(text.translate(_NO_TEXT))
        return _BREAK_WITHIN.sub(rf"\1{JOINT}", mask) if "\n" in mask else mask

    def has_break(self, raw: str) -> bool:
        return "\n" in self._markup.mask(raw)

    def spelled(self, text: str) -> str:
        return self._markup.spelled(text).replace("\n", self.line_end)

    @cached_property
    def _depths(self) -> tuple[list[int], list[int]]:
        found = self._markup.depths(self.text)
        return [place for place, _ in found], [depth for _, depth in found]

    def depth(self, place: int) -> int:
        """Return how many marks are on the text at a place."""
        places, depths = self._depths
        at = bisect_right(places, place - 1)
        return depths[at - 1] if at else 0

    def _parts(self) -> Iterator[str | Speech]:
        """Yield what is spoken, and what stays before, between and behind it."""
        voice = self.voice
        has_voices = _VOICE.search(self.text) is not None
        for start, end in pairwise([*self._starts(), len(self.text)]):
            voices = _VOICE.findall(self.text, start, end) if has_voices else []
            voice = voices[-1].strip() if voices else voice
            for part in self._parts_of(start, end, voice):
                if not isinstance(part, Speech) or part.text:
                    yield part
                else:
                    yield part.raw

    def _starts(self) -> Iterator[int]:
        """Yield where what one speaker says begins, in order; the first is 0."""
        mask, found = self.mask, {0, *self._borders}
        has_dash = bool(_DASH.match(mask, _end_of(_AROUND_ON_LINE, mask, 0)))
        for line in re.finditer(r"[\n\x02]", mask):
            at = _end_of(_AROUND_ON_LINE, mask, line.end())
            is_new = _is_behind_end(mask, line.start())
            dash = _DASH.match(mask, at)
            if dash:
                is_start = is_new or has_dash or not mask[dash.end()].islower()
            else:
                is_start = _name_end(mask, at) > at or bool(_ARROWS.match(mask, at))
                is_start = is_start or (is_new and bool(_description(mask, at, len(mask))))
            if is_start:
                found.add(line.end())
        found |= {each.start() for each in _ARROWS_WITHIN.finditer(mask)}
        found |= {each.start() for each in _VOICE.finditer(self.text)}
        yield from sorted(found)

    def _parts_of(self, start: int, end: int, voice: str) -> Iterator[str | Speech]:
        """Yield the parts of what one speaker says."""
        text, mask = self.text, self.mask
        done, at, begins = start, start, False
        while True:
            at = min(_end_of(_AROUND, mask, at), end)
            mark = _mark_end(mask, at)
            if at < mark <= end:
                name = _flat(mask[at:mark])
                self.names += [name] * any(map(str.isalpha, name))
                at, begins = mark, True
            elif found := _description(mask, at, end):
                yield text[done : found.inner[0]]
                yield Speech(self, *found.inner, kind="description")
                done, at = found.inner[1], found.end
            else:
                break
        stop, behind = _behind(mask, at, end)
        yield text[done:at]
        yield Speech(self, at, stop, kind="begins" if begins else "", voice=voice)
        done = stop
        for found in behind:
            yield text[done : found.inner[0]]
            yield Speech(self, *found.inner, kind="description")
            done = found.inner[1]
        yield text[done:end]

    def shown(self, words: Sequence[str]) -> tuple[str, bool]:
        """Return its text with other words for each speech, and whether tags may be misplaced."""
        left = iter(words)
        spoken = sum(not speech.is_description for speech in self.speeches)
        wraps = spoken < 2 and (self._adds_breaks or self._has_line_end)
        made, is_estimate = [], False
        for part in self.parts:
            if isinstance(part, str):
                made.append(part)
            else:
                found, has_moved = part.shown(next(left), wraps=wraps)
                made.append(found)
                is_estimate |= has_moved
        return "".join(made), is_estimate

    def size(self, text: str) -> int:
        """Return how many characters are shown of a text that it could have."""
        return len(_flat(self.masked(text)))


def is_retold(before: str, after: str) -> bool:
    """Whether most words of a text are not those of another; most letters where no blanks are."""
    if _is_unspaced(before) and _is_unspaced(after):
        return is_other(" ".join(before), " ".join(after))
    return is_other(before, after)


def _is_unspaced(text: str) -> bool:
    return 2 * len(re.findall(f"[{_LETTERS_APART}]", text)) > len(text)


def _flat(mask: str) -> str:
    return " ".join(_NOT_READ.sub("", mask).split())


def _end_of(pattern: re.Pattern[str], mask: str, at: int) -> int:
    found = pattern.match(mask, at)
    return found.end() if found else at


def _is_behind_end(mask: str, at: int) -> bool:
    """Whether nothing stands before a place, or the end of a sentence."""
    return ends_sentence(_NOT_READ.sub("", mask[max(0, at - LOOKED_BACK) : at]))


def ends_sentence(text: str) -> bool:
    """Whether a text is none, or ends as a sentence does."""
    return text.rstrip(" \n\t\"'”’»)]*_" + _NOTES)[-1:] in ".!?…。！？؟।։"


def _mark_end(mask: str, at: int) -> int:
    """Return where the mark of a speaker ends that begins at a place; the place if none does."""
    found = _DASH.match(mask, at) or _ARROWS.match(mask, at)
    return found.end() if found else _name_end(mask, at)


def _name_end(mask: str, at: int) -> int:
    """Return where the name of a speaker and its colon end, the place if none is there."""
    found = _NAME.match(mask, at)
    if not found or not _NAME_SIGNS.fullmatch(found[1]):
        return at
    words = _flat(found[1]).split()
    letters = sum(map(str.isalpha, found[1]))
    if not (0 < len(words) <= NAME_WORDS and found[1].isupper() and letters > 1):
        return at
    line = _LINE_REST.match(mask, found.end())[0]  # type: ignore[index]
    rest = _flat(_DESCRIPTION.sub("", line))
    is_loud = rest.isupper() and len(rest.split()) > 1
    named = [word for word in words if any(map(str.isalpha, word))]
    return at if is_loud and len(named) > 1 else found.end()


def _description(mask: str, at: int, end: int) -> _Mark | None:
    """Return the description that begins at a place, if one does."""
    found = _DESCRIPTION.match(mask, at, end)
    if not found:
        return None
    inner = found.span(found.lastindex or 0)
    return _Mark(*found.span(), inner) if any(map(str.isalpha, mask[slice(*inner)])) else None


def _behind(mask: str, start: int, end: int) -> tuple[int, list[_Mark]]:
    """Return where words end, and the descriptions behind them, in order."""
    backwards, stop, found = mask[start:end][::-1], end, list[_Mark]()
    while True:
        stop = _behind_character(mask, end - _end_of(_AROUND, backwards, end - stop), end)
        opening = _OPENED_BY.get(mask[stop - 1 : stop])
        at = mask.rfind(opening, max(start, stop - 202), stop) if opening else -1
        mark = _description(mask, at, stop) if at >= start else None
        if mark is None or mark.end != stop or not _stands_apart(mask, start, mark):
            return stop, found[::-1]
        found.append(mark)
        stop = at


def _behind_character(mask: str, place: int, end: int) -> int:
    """Return the place behind a character that has its name in the file."""
    while place < end and mask[place] == REST:
        place += 1
    return place


def _stands_apart(mask: str, start: int, mark: _Mark) -> bool:
    """Whether what is in brackets at an end is no part of the sentence before it."""
    if mask[mark.start - 1 : mark.start].isalnum() and mask[mark.start] == "(":
        return False
    before = mask[max(start, mark.start - LOOKED_BACK) : mark.start]
    return _stays_within(mask[mark.start : mark.end]) or _is_behind_end(before, len(before))


def _stays_within(words: str) -> bool:
    """Whether what is in brackets, or notes, within a sentence is no part of it."""
    inner = _flat(words[1:-1])
    if words[0] not in "(（" or not inner.strip(f"{_NOTES} "):
        return True
    return inner.isupper() or (inner.isalpha() and inner.islower())


def _is_wide(words: str) -> bool:
    return len(words) > (SUBTITLE_WIDTH // 2 if _is_unspaced(words) else SUBTITLE_WIDTH)


def _wrapped(text: str, mask: str, line_end: str) -> str:
    """Return a text on two lines: parted at the blank outside of tags that is nearest its middle.

    Letters that no blanks part are parted near their middle, if no tags are among them.
    """
    sizes = [*accumulate((char > JOINT for char in mask), initial=0)]  # before each place
    middle = sizes[-1] / 2
    gaps = [found.start() for found in re.finditer(" ", mask)]
    if not gaps and _is_unspaced(text) and not _NOT_READ.search(mask):
        pairs = enumerate(pairwise(text), 1)
        gaps = [i for i, (a, b) in pairs if a not in _NOT_LAST and b not in _NOT_FIRST]
    if not gaps:
        return text
    at = min(gaps, key=lambda gap: abs(sizes[gap] - middle))
    return text[:at] + line_end + text[at:].lstrip(" ")
