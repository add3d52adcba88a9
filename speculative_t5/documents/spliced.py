r"""Files with texts of programs: strings in them are replaced, and all else keeps its bytes.

A string is read as lines, as it is shown: `\n` in it ends one. What a program puts values in place
of stays as it is.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

from .formats import PlainFile, say_refused
from .marks import MarkedLine, Part, read_line
from .placeholders import CHOICES_PATTERN
from .splitting import Breaks

LONGEST_WHOLE = 60  # characters of what is read as a whole
WRAPPED_FROM = 6  # words of a line that was broken because it was full, at least
MOST_NAMED = 3  # numbers of lines that one note names

# A "wrap" is a line break within a sentence, which is read as a blank. A "join" is between two
# literals that make one string, and a "mark" is within a sentence and no part of it.
TokenKind = Literal["text", "fixed", "mark", "break", "wrap", "join"]
Splice = tuple[int, int, str]  # where a stretch of a file begins and ends, and what replaces it
_READ_KINDS = ("text", "fixed", "wrap")
_STAND_IN = re.compile("\ud800([0-9]{1,9})\ud801")
_UNBROKEN = re.compile(  # a word, with tags and placeholders in it, and the blanks before it
    r"\s*+(?:<[^<>]*>|\{[^{}]*\}|&lt;[^<>&]{0,300}&gt;|\S)++|\s++\Z"
)
_CHOICES = re.compile(CHOICES_PATTERN)


@dataclass(frozen=True)
class StringToken:
    """A piece of a string, as the file has it."""

    raw: str
    kind: TokenKind = "text"
    read: str | None = None  # what the whole of it is read as, if not its characters
    opens: int = 0  # how many marks begin with it; -1 if one ends


@dataclass(frozen=True)
class Spelling:
    """How a format writes characters in strings."""

    read: Callable[[str], Iterator[tuple[str, str]]]  # yields how each is written, and is read
    write: Callable[[str], str]
    line_break: str = "\\n"


@dataclass(frozen=True)
class ChangedString:
    """A string with other words."""

    raw: str
    is_estimate: bool = False
    has_refused: bool = False


class _StringLine:
    """A line of a string."""

    def __init__(self, tokens: Sequence[StringToken], spelling: Spelling) -> None:
        self.tokens, self._spelling = tokens, spelling
        shown = (token for token in tokens if token.kind in _READ_KINDS)
        read = "".join(each for token in shown for _, each in self._pairs(token))
        self.text = " ".join(read.split())

    @property
    def is_read(self) -> bool:
        """Whether there are words in it that may change."""
        words = (token.raw for token in self.tokens if token.kind == "text")
        return bool(self.text) and any(not raw.isspace() for raw in words)

    def _pairs(self, token: StringToken) -> Iterator[tuple[str, str]]:
        if token.read is None:
            yield from self._spelling.read(token.raw)
        else:
            yield token.raw, token.read

    def changed(self, text: str, *, translates: bool) -> ChangedString:
        """Return the line with another text.

        In a correction what is fixed stays where it is. In a translation its order may change, and
        the literals of the string are one.
        """
        tokens = [token for token in self.tokens if not (translates and token.kind == "join")]
        groups: list[list[StringToken]] = []  # what is read as a part, or is a mark
        parts: dict[int, Part] = {}  # by group
        depth = 0
        for token in tokens:
            depth = max(0, depth + token.opens)
            is_part = token.kind in _READ_KINDS
            goes_on = is_part and len(groups) - 1 in parts
            if goes_on and translates:
                groups[-1].append(token)
                continue
            groups.append([token])
            if is_part:
                fixed = token.kind == "fixed" and not translates
                parts[len(groups) - 1] = Part(depth, fixed)
        some = [token for token in tokens if _is_whole(token)]
        wholes = _Wholes(some, self._spelling.write)
        read_all = partial(self._read_wholes, wholes) if translates else self._read_each
        read = [*read_line([groups[i] for i in parts], read_all)]
        write = wholes.write if translates else self._spelling.write
        changed = MarkedLine(read, [*parts.values()]).changed(text, write)
        pieces = ["".join(token.raw for token in group) for group in groups]
        before = "".join(pieces)
        for i, part in zip(parts, changed.parts, strict=True):
            pieces[i] = part
        made = "".join(pieces)
        if translates:
            put = wholes.put_in(made)
            if put is None:
                return ChangedString(before, has_refused=True)
            made = self._wrapped(put, before)
        return ChangedString(made, changed.is_estimate, changed.has_refused)

    def _read_each(self, tokens: Sequence[StringToken]) -> Iterator[tuple[str, str]]:
        return chain.from_iterable(map(self._pairs, tokens))

    def _read_wholes(
        self, wholes: _Wholes, tokens: Sequence[StringToken]
    ) -> Iterator[tuple[str, str]]:
        """Yield what is fixed as one, so that no half of it is kept where its order changes."""
        for token in tokens:
            pairs = self._pairs(token)
            if token.read is not None and _is_whole(token):
                yield wholes.next_stand_in(), token.read
            elif token.kind == "fixed":
                yield token.raw, "".join(read for _, read in pairs)
            else:
                yield from pairs

    def _wrapped(self, made: str, before: str) -> str:
        """Break a line at blanks where it is longer than those were that its string had."""
        line_break = self._spelling.line_break
        if line_break not in before or line_break in made:
            return made
        most, room = max(map(len, before.split(line_break))), 0
        words: list[str] = []
        for word in _UNBROKEN.findall(made):
            room -= len(word)
            if words and room < 0 and word[0].isspace() and word.strip():
                words.append(line_break)
                word = word.lstrip()
                room = most - len(word)
            elif not words:
                room = most - len(word)
            words.append(word)
        return "".join(words)


class _Wholes:
    """What stays as a whole in a line of a translation, wherever its words come to stand.

    Until the line is made, a number between halves of surrogates, which no text has, stands in.
    """

    def __init__(self, tokens: Sequence[StringToken], write: Callable[[str], str]) -> None:
        self._tokens, self._write = tokens, write
        self._numbers = iter(range(len(tokens)))
        self._left: dict[str, deque[int]] = {}  # by what they are read as
        for number, token in enumerate(tokens):
            self._left.setdefault(token.read or "", deque()).append(number)
        self._firsts = {name[0] for name in self._left}
        self._lengths = sorted({*map(len, self._left)}, reverse=True)

    def next_stand_in(self) -> str:
        """Return what stands in for the next one of the line as it was."""
        return _stand_in(next(self._numbers))

    def write(self, text: str) -> str:
        """Write words as the format does, and stand-ins where the names of some are."""
        made, at, begun = [], 0, 0
        while at < len(text):
            name = self._name_at(text, at) if text[at] in self._firsts else None
            if name is None:
                at += 1
                continue
            made += [self._write(text[begun:at]), _stand_in(self._left[name].popleft())]
            at = begun = at + len(name)
        return "".join([*made, self._write(text[begun:])])

    def _name_at(self, text: str, at: int) -> str | None:
        if at and (text[at - 1].isalnum() or text[at - 1] == "_"):
            return None
        for length in self._lengths:
            name, behind = text[at : at + length], text[at + length : at + length + 1]
            if self._left.get(name) and not (behind.isalnum() or behind == "_"):
                return name
        return None

    def put_in(self, made: str) -> str | None:
        """Return a line with all of them; None if one is missing, or comes twice."""
        if sorted(map(int, _STAND_IN.findall(made))) != [*range(len(self._tokens))]:
            return None
        return _STAND_IN.sub(lambda found: self._tokens[int(found[1])].raw, made)


def _stand_in(number: int) -> str:
    return f"\ud800{number}\ud801"


class FileString:
    """A string of a file: lines that are read, and what is between them."""

    def __init__(self, tokens: Sequence[StringToken], start: int, spelling: Spelling) -> None:
        self.start, self.end = start, start + sum(len(token.raw) for token in tokens)
        self._pieces: list[_StringLine | StringToken] = []
        self.lines: list[_StringLine] = []  # that are read
        self.places: list[int] = []  # where each of those begins in the file
        line: list[StringToken] = []
        at = start
        for token in [*_with_wraps(tokens), StringToken("", "break")]:
            if token.kind != "break":
                line.append(token)
                continue
            made = _StringLine(line, spelling)
            if made.is_read:
                self.lines.append(made)
                self.places.append(at)
            self._pieces += [made, token]
            at += sum(len(each.raw) for each in [*line, token])
            line = []

    def changed(self, texts: Sequence[str], *, translates: bool) -> ChangedString:
        """Return the string with other texts of its lines; of a translation, as one literal."""
        new = iter(texts)
        made = []
        for piece in self._pieces:
            if isinstance(piece, StringToken):
                made.append(ChangedString(piece.raw))
            elif not piece.is_read:
                kept = (each.raw for each in piece.tokens if not _is_join(each, translates))
                made.append(ChangedString("".join(kept)))
            else:
                made.append(piece.changed(next(new), translates=translates))
        raw = "".join(each.raw for each in made)
        is_estimate = any(each.is_estimate for each in made)
        return ChangedString(raw, is_estimate, any(each.has_refused for each in made))


def _is_whole(token: StringToken) -> bool:
    return token.kind == "fixed" and token.read is not None


def _is_join(token: StringToken, translates: bool) -> bool:
    return translates and token.kind == "join"


def _with_wraps(tokens: Sequence[StringToken]) -> Iterator[StringToken]:
    """Yield tokens, line breaks that are within a sentence as texts.

    Those are behind some words that no sentence ends with, and a small letter follows.
    """
    texts = [*tokens]
    following = ""  # what is behind each token, from the last one on
    after: list[str] = []
    for token in reversed(texts):
        after.append(following)
        following = following if token.kind == "join" else token.raw
    line = ""
    for token, behind in zip(texts, reversed(after), strict=True):
        if token.kind != "break":
            line += token.raw if token.kind != "join" else ""
            yield token
            continue
        is_open = len(line.split()) >= WRAPPED_FROM and line.rstrip()[-1:] not in tuple(".!?:;…")
        yield StringToken(token.raw, "wrap", " ") if is_open and behind[:1].islower() else token
        line = ""


class SplicedFile(PlainFile):
    """A file of which strings are read, and replaced where they stand."""

    breaks: Breaks = "none"
    spelling: Spelling

    def _begin(self, source: str, encoding: str = "utf-8") -> None:
        """Take the text of a file, and find its strings."""
        self._source, self._encoding = source, encoding
        self.language: str | None = None  # that it is translated into
        ends = re.finditer(r"\r\n|\r|\n", source)
        self._line_starts = [0, *(end.end() for end in ends)]
        self._estimated: list[int] = []
        self._refused: list[int] = []
        self._unwritten: list[int] = []
        self._find()

    def _find(self) -> None:
        self._with_choices: list[int] = []
        self._strings = [*self._found()]
        self.text = "\n".join(line.text for each in self._strings for line in each.lines)
        self._places = [place for each in self._strings for place in each.places]

    def translate_into(self, language: str) -> None:
        self.language = language
        self._find()

    @abstractmethod
    def _found(self) -> Iterator[FileString]:
        """Yield the strings that are read."""

    def _edits(self, made: Mapping[int, str]) -> Iterator[Splice]:
        """Yield the edits for strings, by their numbers, that have other words."""
        for number, raw in made.items():
            string = self._strings[number]
            yield string.start, string.end, raw

    def _has_choices(self, raw: str, place: int) -> bool:
        """Whether a string has words between signs of its own; note that it has."""
        if "{" in raw and _CHOICES.search(raw):
            self._with_choices.append(self._line_of(place))
            return True
        return False

    def _line_of(self, place: int) -> int:
        return bisect_right(self._line_starts, place)

    def number(self, line: int) -> int:
        return self._line_of(self._places[line - 1])

    def rewritten(self, text: str) -> bytes:
        self._estimated, self._refused, self._unwritten = [], [], []
        made, lines = dict[int, str](), iter(text.split("\n"))
        for number, string in enumerate(self._strings):
            old = [line.text for line in string.lines]
            new = [next(lines, line) for line in old]
            if new == old:
                continue
            changed = string.changed(new, translates=self.language is not None)
            line = self._line_of(string.start)
            if not _can_write(changed.raw, self._encoding):
                self._unwritten.append(line)
                continue
            self._estimated += [line] * changed.is_estimate
            self._refused += [line] * changed.has_refused
            if not (changed.has_refused and self.language is not None):
                made[number] = changed.raw
        return spliced(self._source, self._edits(made)).encode(self._encoding)

    def not_kept(self) -> list[str]:
        estimated = [
            f"line {number}: the places of tags within it are estimates"
            for number in dict.fromkeys(self._estimated)
        ]
        return [
            *estimated,
            *say_refused("line", self._refused, "a placeholder or a name"),
            *say_left(
                self._unwritten,
                f"its new words have characters that {self._encoding} lacks; save the file in "
                "UTF-8 to have them",
            ),
            *say_left(self._with_choices, "it says another thing for each number or kind"),
        ]


def say_left(numbers: Sequence[int], why: str) -> list[str]:
    """Say once which lines have strings that stay as they are, and why."""
    if not numbers:
        return []
    found = [*dict.fromkeys(numbers)]
    named = ", ".join(map(str, found[:MOST_NAMED]))
    more = f" and {len(found) - MOST_NAMED:,} more" if len(found) > MOST_NAMED else ""
    word = "line" if len(found) == 1 else "lines"
    return [f"{word} {named}{more} left as is: {why}"]


def spliced(source: str, edits: Iterator[Splice]) -> str:
    """Return a text with edits, none of which overlaps another."""
    made, at = [], 0
    for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
        made += [source[at:start], new]
        at = end
    return "".join([*made, source[at:]])


def _can_write(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def read_tokens(raw: str, pattern: re.Pattern[str]) -> Iterator[StringToken]:
    """Yield the tokens of a string.

    The pattern's groups say what is found: "fixed", "tag", "break", or "mark" for what is not read;
    in whatever else it finds, such as an escape, nothing begins.
    """
    at = 0
    for found in pattern.finditer(raw):
        name = found.lastgroup
        if name not in ("fixed", "tag", "break", "mark"):
            continue
        if at < found.start():
            yield StringToken(raw[at : found.start()])
        at = found.end()
        if name == "fixed":
            yield StringToken(found[0], "fixed")
        elif name == "break":
            yield StringToken(found[0], "break")
        else:
            yield StringToken(found[0], "mark", opens=opens(found[0]) if name == "tag" else 0)
    if at < len(raw):
        yield StringToken(raw[at:])


def opens(tag: str) -> int:
    """Return 1 for a tag that begins a mark, -1 for one that ends one, else 0."""
    if tag.startswith(("</", "&lt;/")):
        return -1
    is_alone = tag.endswith(("/>", "/&gt;")) or re.match(r"(?:<|&lt;)(?:br|hr|img)\b", tag)
    return 0 if is_alone else 1


def placed_lines(source: str, place: int) -> tuple[int, int]:
    """Return the numbers, from 1, of the line and the column of a place in a text."""
    before = source[:place]
    line = len(re.findall(r"\r\n|\r|\n", before)) + 1
    column = place - max(before.rfind("\n"), before.rfind("\r"))
    return line, column
