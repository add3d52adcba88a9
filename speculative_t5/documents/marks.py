"""Lines whose characters stand in parts of a file, and changes that leave all others there.

A part is a text between two tags, or in a run of Word. What did not change keeps its part and its
spelling: marks (bold words, links) stay on their characters, and what is no text (pictures, marks
of notes) stays between its neighbours.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TypeVar

from .alignment import opcodes
from .comparison import EMOJI_JOINER, words_and_signs
from .dividing import TextPart, divided_by_words
from .layout import bare, places, similarity

TAKEN_ENDS = 5  # letters, at least, that a part of another word ends or begins with
LIKE_START = 3  # letters that two forms of a word begin with
LIKE_BEFORE = 0.75  # the least similarity of a text that is corrected, and not translated
LIKE_LENGTH = 200  # characters of such texts at most
LIKE_PAIRS = 0.5  # the least share of pairs of letters that such texts have in common
TextEdit = tuple[int, int, str]  # where a stretch begins and ends, and what replaces it
Text = TypeVar("Text")  # a part as a reader of a format has it
_LETTERS = re.compile(r"\w+")


@dataclass(frozen=True)
class Character:
    """A character of a line as it is read, and how the file has it."""

    text: str  # one, or "" for what is not read, such as spaces at an end
    part: int  # that it is in
    raw: str  # how it is written there; "" behind the first of several that are one there
    others: tuple[tuple[int, str], ...] = ()  # further parts of the spaces that are read as it


@dataclass(frozen=True)
class Part:
    """What there is to know of a part."""

    depth: int = 0  # marks that are on it
    is_fixed: bool = False  # whether its characters have to stay


@dataclass(frozen=True)
class Changed:
    """The parts of a line with another text."""

    parts: list[str]
    is_estimate: bool = False  # whether which words are in which part is one
    has_refused: bool = False  # whether something stayed because it has to


class MarkedLine:
    """A line in parts."""

    def __init__(self, characters: Sequence[Character], parts: Sequence[Part]) -> None:
        self._all, self._parts = characters, parts
        self._read = [i for i, each in enumerate(characters) if each.text]  # places of those
        self.text = "".join(each.text for each in characters)

    def changed(self, text: str, spell: Callable[[str], str] = str) -> Changed:
        """Return the parts for another text; `spell` writes what is new as the file would."""
        is_whole = is_other(self.text, text)  # as a translation is
        edits = [*self._edits(text, is_whole=is_whole)]
        made = self._edited(edits, spell, is_whole=is_whole)
        if not made.has_refused or is_whole:
            return made
        # Words that are put in may stand for some that have to stay, and would come twice.
        even = [*self._even(edits)]
        return replace(self._edited(even, spell, is_whole=is_whole), has_refused=True)

    def _even(self, edits: Iterable[TextEdit]) -> Iterator[TextEdit]:
        """Yield edits with as many words as before, none of which is one that has to stay."""
        texts = groupby(self._all, key=lambda each: each.part)
        staying = [
            "".join(each.text for each in some)
            for part, some in texts
            if self._parts[part].is_fixed
        ]
        fixed = _ends_of(word for text in staying for word in _LETTERS.findall(text))
        for edit in edits:
            old, new = _whole_words(self.text, edit)
            if len(old) == len(new) and fixed.isdisjoint(_ends_of(new)):
                yield edit

    def _edited(
        self, edits: Iterable[TextEdit], spell: Callable[[str], str], *, is_whole: bool
    ) -> Changed:
        made = _Writer(self._all, self._parts, self._read, spell, is_whole=is_whole)
        for start, end, new in edits:
            made.keep_until(start)
            made.replace(start, end, new)
        return made.done()

    def _edits(self, text: str, *, is_whole: bool) -> Iterator[TextEdit]:
        """Yield the edits that make another text.

        Where one would change some of several characters that are one in the file, it goes with
        all of those, and with the edits that change others of them.
        """
        found = [*map(self._within_a_part, least_edits(self.text, text))]
        if is_whole:
            found = [(_trimmed_words if len(self._parts) > 1 else trimmed)(self.text, text)]
        begun: TextEdit | None = None
        for start, end, new in found:
            first, last = start, end
            while self._is_within(first):
                first -= 1
            while self._is_within(last):
                last += 1
            if begun and first < begun[1]:  # both change what is one
                first, before = begun[0], begun[2][: len(begun[2]) - (begun[1] - start)]
            else:
                before = self.text[first:start]
                yield from [begun] if begun else []
            begun = first, last, before + new + self.text[end:last]
        yield from [begun] if begun else []

    def _within_a_part(self, edit: tuple[int, int, str]) -> tuple[int, int, str]:
        """Return an edit that leaves out a word and the blank on the side where its own part is."""
        start, end, new = edit
        if new or end == len(self._read):
            return edit
        blanks = [self._all[self._read[at]] for at in (start, end)]
        if any(each.raw != " " or each.others for each in blanks):  # no break goes with it
            return edit
        parts = [self._all[i].part for i in self._read[start : end + 1]]
        is_better = len({*parts[1:]}) == 1 < len({*parts[:-1]})
        return (start + 1, end + 1, new) if is_better else edit

    def _is_within(self, place: int) -> bool:
        """Whether a place is between characters that are one in the file."""
        return place < len(self._read) and not self._all[self._read[place]].raw


class _Writer:
    """Writes the parts of a line, from its first character to its last."""

    def __init__(
        self,
        characters: Sequence[Character],
        parts: Sequence[Part],
        read: Sequence[int],
        spell: Callable[[str], str],
        *,
        is_whole: bool,
    ) -> None:
        self._all, self._parts, self._read, self._spell = characters, parts, read, spell
        self._made: list[list[str]] = [[] for _ in parts]
        self._is_whole = is_whole  # whether the words are those of another language
        self._at = 0  # the next character of all
        self._is_estimate = self._has_divided = self._has_refused = False

    def done(self) -> Changed:
        """Write what is left, and return the parts."""
        for each in self._all[self._at :]:
            self._write(each)
        parts = ["".join(each) for each in self._made]
        had = {each.part for each in self._all if each.text and not each.text.isspace()}
        has_emptied = any(self._parts[part].depth and not parts[part].strip() for part in had)
        is_estimate = self._is_estimate or has_emptied or (self._is_whole and self._has_divided)
        return Changed(parts, is_estimate, self._has_refused)

    def keep_until(self, place: int) -> None:
        """Write characters as they are, as many as are read before a place; spaces before all."""
        end = self._read[place - 1] + 1 if place else self._read[0] if self._read else 0
        for each in self._all[self._at : end]:
            self._write(each)
        self._at = max(self._at, end)

    def replace(self, start: int, end: int, new: str) -> None:
        """Write a text in the place of the characters from one place to another."""
        if start == end:
            self._insert(start, new)
            return
        first, last = self._read[start], self._read[end - 1] + 1
        for each in self._all[self._at : first]:
            self._write(each)
        replaced = self._all[first:last]
        self._at = last
        read: dict[int, list[str]] = {}  # by part
        for each in replaced:
            if each.text:
                read.setdefault(each.part, []).append(each.text)
        texts = {part: "".join(each) for part, each in read.items()}
        if self._is_whole:
            texts = self._with_outer(texts, start, end)
        found, is_estimate = self._divided(texts, new)
        pieces = dict(zip(texts, found, strict=True))
        fixed = {part for part in texts if self._parts[part].is_fixed}
        if any(pieces[part] != texts[part] for part in fixed):
            self._has_refused = True
            pieces, is_estimate = {}, False  # all of it stays
        for each in replaced:
            if not (each.text and each.part in pieces) or each.part in fixed:
                self._write(each)
        self._write_pieces(pieces, replaced)
        self._is_estimate |= is_estimate
        self._has_divided |= len(texts) > 1

    def _with_outer(self, texts: dict[int, str], start: int, end: int) -> dict[int, str]:
        """Add the empty parts outside of marks to those of a text that is replaced."""
        left = self._all[self._read[start - 1]].part if start else 0
        right = self._all[self._read[end]].part if end < len(self._read) else len(self._parts) - 1
        least = min(self._parts[part].depth for part in range(left, right + 1))
        worded = {each.part for each in self._all if each.text.isalnum()}
        if len(texts) == 1 and worded <= texts.keys():
            return texts  # all words are in one mark
        if len(texts) == 1 and self._parts[next(iter(texts))].depth == least:
            return texts  # there are no more marks on it than on its neighbours
        around = [
            part
            for part in range(left, right + 1)
            if part in texts
            or (self._parts[part].depth == least and not self._parts[part].is_fixed)
        ]
        return {part: texts.get(part, "") for part in around}

    def _divided(self, texts: dict[int, str], new: str) -> tuple[list[str], bool]:
        """Divide a new text among parts; return whether that is an estimate."""
        least = min(self._parts[part].depth for part in texts)
        known = [
            TextPart(
                text, bool(text) and self._parts[part].depth > least, self._parts[part].is_fixed
            )
            for part, text in texts.items()
        ]
        if self._is_whole and len(texts) > 1 and (found := divided_by_words(known, new)):
            return _with_spaces([*texts.values()], found, [each.is_marked for each in known]), True
        return divided([*texts.values()], new)

    def _write_pieces(self, pieces: dict[int, str], replaced: Sequence[Character]) -> None:
        """Write what parts have in the place of some characters."""
        # That the words of further parts began with, unless a word goes on there now.
        is_apart = False
        spaces = {part: raw for each in replaced for part, raw in each.others}
        read = [each for each in replaced if each.text]
        last = {each.part: each for each, behind in pairwise(read) if each.part != behind.part}
        for part, piece in pieces.items():
            if not self._parts[part].is_fixed:  # else it has been written
                if piece and is_apart and not piece[0].isspace():
                    self._made[part].append(spaces.pop(part, ""))
                blank = last.get(part)
                if blank and blank.text == " " and piece.endswith(" "):  # as the file has it
                    self._made[part].append(self._spell(piece[:-1]))
                    self._write(blank)
                    for other, _ in blank.others:
                        spaces.pop(other, None)
                else:
                    self._made[part].append(self._spell(piece))
            is_apart = piece[-1:].isspace() if piece else is_apart

    def _insert(self, place: int, new: str) -> None:
        """Write a text before a character, which has no part of its own yet."""
        left = self._all[self._read[place - 1]] if place else None
        right = self._all[self._read[place]] if place < len(self._read) else None
        continues = left is not None and left.text.isalnum() and new[0].isalnum()
        begins = right is not None and right.text.isalnum() and new[-1].isalnum()
        first = left.part if left else 0
        last = right.part if right else len(self._parts) - 1
        around = [left.part] if continues and left else [right.part] if begins and right else []
        around = around or [*range(first, last + 1)]
        free = [part for part in around if not self._parts[part].is_fixed]
        if not free:
            self._has_refused = True
            return
        chosen = min(free, key=lambda part: self._parts[part].depth)
        self._made[chosen].append(self._spell(new))

    def _write(self, each: Character) -> None:
        self._made[each.part].append(each.raw)
        for part, raw in each.others:
            self._made[part].append(raw)


def line_of_parts(texts: Sequence[Iterable[tuple[str, str]]], parts: Sequence[Part]) -> MarkedLine:
    """Return the line of some texts, of which each has how a character is written, and is read.

    Blanks before a picture or the like, and again behind it, are read as those before it, unless
    they have to stay.
    """
    characters: list[Character] = []
    for part, text in enumerate(texts):
        pairs, count = [*text], 0
        last = characters[-1] if characters else None
        if last and last.text == " " and not (parts[part].is_fixed or parts[last.part].is_fixed):
            count = next((i for i, (_, read) in enumerate(pairs) if read != " "), len(pairs))
            spaces = "".join(raw for raw, _ in pairs[:count])
            others = (*last.others, (part, spaces)) if spaces else last.others
            characters[-1] = replace(last, others=others)
        characters += [Character(read, part, raw) for raw, read in pairs[count:]]
    return MarkedLine(characters, parts)


def read_line(
    texts: Sequence[Text], read: Callable[[Text], Iterable[tuple[str, str]]]
) -> Iterator[Character]:
    """Yield the characters of texts, each a part, that are read as one line with single blanks.

    A text may be a place of one. `read` yields how each character of a text is written, and as what
    it is read; some stand for two, or for none.
    """
    blank: list[tuple[int, str]] = []  # white space, by parts
    has_begun = False
    for part, text in enumerate(texts):
        for raw, found in read(text):
            if not found and not blank:
                yield Character("", part, raw)
            elif not found or found.isspace():
                if blank and blank[-1][0] == part:
                    blank[-1] = part, blank[-1][1] + raw
                else:
                    blank.append((part, raw))
            else:
                if blank and has_begun:
                    (first, spaces), *others = blank
                    yield Character(" ", first, spaces, tuple(others))
                else:
                    yield from (Character("", *each) for each in blank)
                blank, has_begun = [], True
                yield Character(found[0], part, raw)
                yield from (Character(each, part, "") for each in found[1:])
    yield from (Character("", *each) for each in blank)


def least_edits(before: str, after: str) -> Iterator[TextEdit]:
    """Yield the changes that make one text of another, in order, each as short as may be.

    Each is where a stretch of the text before begins and ends, and what replaces it. Words are
    aligned, and what is between them follows; as many changed words as were there go one by one.
    """
    if before == after:
        return
    old, new = _placed_words(before), _placed_words(after)
    at = new_at = 0  # behind the last word of both
    texts = [before[i:j] for i, j in old], [after[i:j] for i, j in new]
    for kind, i1, i2, j1, j2 in opcodes(*texts):
        if kind == "equal" or i2 - i1 == j2 - j1:
            for (start, end), (new_start, new_end) in zip(old[i1:i2], new[j1:j2], strict=True):
                yield from _edit(at, before[at:start], after[new_at:new_start])
                yield from _edit(start, before[start:end], after[new_start:new_end])
                at, new_at = end, new_end
            continue
        if j1 == j2 and i2 < len(old) and j2 < len(new):
            gaps = before[old[i2 - 1][1] : old[i2][0]], after[new_at : new[j2][0]]
            if gaps[0] != gaps[1]:
                continue  # the space before it is the one that stays
        end = old[i2 - 1][1] if i1 < i2 else at
        new_end = new[j2 - 1][1] if j1 < j2 else new_at
        if i1 < i2 and j1 < j2:
            start, new_start = old[i1][0], new[j1][0]
            yield from _edit(at, before[at:start], after[new_at:new_start])
            words = before[start:end], after[new_start:new_end]
            yield from _replaced(start, *words, texts[1][j1], has_several=i2 - i1 > 1)
            at, new_at = end, new_end
            continue
        if i1 == i2 and new[j1][0] == new_at and j2 < len(new):
            new_end = new[j2][0]  # a word before all others has its space behind it
        yield from _edit(at, before[at:end], after[new_at:new_end])
        at, new_at = end, new_end
    yield from _edit(at, before[at:], after[new_at:])


def _replaced(
    at: int, before: str, after: str, first: str, *, has_several: bool
) -> Iterator[tuple[int, int, str]]:
    """Yield the changes of a word to several, or of several to others; `first` begins those."""
    start, end, _ = trimmed(before, after)
    if has_several:  # no letter of a word of several stays for one of another
        yield at, at + len(before), after
    elif start == end < len(before):  # all of its letters stay, as in "cannot" and "can not"
        yield from _edit(at, before, after)
    elif first[:LIKE_START] == before[:LIKE_START]:  # the others are put in behind it
        yield from _edit(at, before, first)
        yield at + len(before), at + len(before), after[len(first) :]
    else:
        yield from _edit(at, before, after)


def _placed_words(text: str) -> list[tuple[int, int]]:
    """Return where words and signs begin and end in a text, spaces left out."""
    words = words_and_signs(text)
    ends = accumulate(map(len, words))
    return [
        (end - len(word), end) for word, end in zip(words, ends, strict=True) if not word.isspace()
    ]


def _edit(at: int, before: str, after: str) -> Iterator[TextEdit]:
    """Yield the change of one text to another, which begins at a place, if there is any."""
    if before != after:
        start, end, new = trimmed(before, after)
        yield at + start, at + end, new


def trimmed(before: str, after: str) -> TextEdit:
    """Return the change of one text to another without what both begin and end with."""
    start, most = 0, min(len(before), len(after))
    while start < most and before[start] == after[start]:
        start += 1
    while start and _joins(before[start:], after[start:]):
        start -= 1
    same, most = 0, most - start
    while same < most and before[-1 - same] == after[-1 - same]:
        same += 1
    while same and _joins(before[len(before) - same :]):
        same -= 1
    return start, len(before) - same, after[start : len(after) - same]


def _trimmed_words(before: str, after: str) -> TextEdit:
    """Return the change of one text to another, without cutting words that only begin alike."""
    start, end, _ = trimmed(before, after)
    behind = len(after) - (len(before) - end)
    while start and before[start - 1].isalnum() and _has_letter(start, before, after):
        start -= 1
    while (
        end < len(before)
        and before[end].isalnum()
        and (_has_letter(end - 1, before) or _has_letter(behind - 1, after))
    ):
        end, behind = end + 1, behind + 1
    return start, end, after[start:behind]


def _has_letter(at: int, *texts: str) -> bool:
    """Whether a text has a letter or digit at a place."""
    return at >= 0 and any(text[at : at + 1].isalnum() for text in texts)


def _ends_of(words: Iterable[str]) -> set[tuple[bool, str]]:
    """Return what words begin and end with, by which a part of one is known in another."""
    some = [word for word in words if len(word) >= LIKE_START]
    return {(True, word[:TAKEN_ENDS]) for word in some} | {
        (False, word[-TAKEN_ENDS:]) for word in some
    }


def _whole_words(text: str, edit: TextEdit) -> tuple[list[str], list[str]]:
    """Return the words that an edit changes, before it and after."""
    start, end, new = edit
    first, last = start, end
    while first and text[first - 1].isalnum():
        first -= 1
    while last < len(text) and text[last].isalnum():
        last += 1
    after = text[first:start] + new + text[end:last]
    return _LETTERS.findall(text[first:last]), _LETTERS.findall(after)


def is_other(before: str, after: str) -> bool:
    """Whether most words of a text are not those of the text before, nor written much like them."""
    old, new = ({*map(bare, text.split())} for text in (before, after))
    return 2 * len(old & new) < len(new) and not _is_like(before, after)


def _is_like(before: str, after: str) -> bool:
    """Whether two short texts are written much alike; in long ones most words are hardly wrong.

    Letters beside each other tell most that are not: if one letter of four is another, half of the
    pairs of letters are still those of the text.
    """
    if max(len(before), len(after)) > LIKE_LENGTH:
        return False
    old, new = (
        Counter(zip(letters, letters[1:], strict=False))
        for letters in ([c for c in text.casefold() if c.isalnum()] for text in (before, after))
    )
    if 2 * (old & new).total() < LIKE_PAIRS * (old.total() + new.total()):
        return False
    return similarity(before, after) >= LIKE_BEFORE


def _joins(*texts: str) -> bool:
    """Whether a text begins with what belongs to the character before it."""
    return any(
        text and (unicodedata.category(text[0])[0] == "M" or EMOJI_JOINER in text[:2])
        for text in texts
    )


def divided(texts: Sequence[str], line: str) -> tuple[list[str], bool]:
    """Divide a line like some texts that made one; return whether that is an estimate.

    Spaces stay on the side of a border where they were.
    """
    if len(texts) == 1:
        return [line], False
    whole = "".join(texts)
    words, old = re.findall(r"\S+\s*", line), whole.split()
    words[:1] = [line[: len(line) - len(line.lstrip())] + word for word in words[:1]]
    new = [word.strip() for word in words]
    parts: list[list[str]] = [[] for _ in texts]
    borders = [*accumulate(map(len, texts))]
    begins = [word.start() for word in re.finditer(r"\S+", whole)]
    if not begins or not words:  # or nothing but spaces is left
        return [line, *[""] * (len(texts) - 1)], False
    for word, place in zip(words, places(new, old), strict=True):
        parts[bisect_right(borders, begins[place])].append(word)  # the text in which it begins
    return _with_spaces(texts, ["".join(each) for each in parts]), is_other(whole, line)


def _with_spaces(
    texts: Sequence[str], parts: list[str], are_marked: Sequence[bool] = ()
) -> list[str]:
    """Move spaces at borders to the sides where they were, and out of marks at new borders."""
    found = [*parts]
    for i in range(len(found) - 1):
        space = found[i][len(found[i].rstrip()) :]
        leaves_mark = any(are_marked[i : i + 1]) and not are_marked[i + 1]
        is_outside = texts[i + 1][:1].isspace() or (texts[i] and not texts[i + 1]) or leaves_mark
        if space and not texts[i][-1:].isspace() and is_outside:
            found[i] = found[i][: -len(space)]
            found[i + 1] = space + found[i + 1]
    return found
