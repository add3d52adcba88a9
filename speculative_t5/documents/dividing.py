"""Which words of a translation stand for the marked words of its source, without a model.

The marks of a line are in order, so a translation is divided by one cut for each border between two
parts. The cuts are those that cost least: what both texts have (names, numbers, addresses) belongs
to the same side of a border, punctuation before a border stays before it, marks are about as long
as they were, and all else goes in proportion. A mark is never left without words while there are
some.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from .placeholders import PLACEHOLDER_PATTERN

IntArray = NDArray[np.int_]
FloatArray = NDArray[np.float64]

# Chinese and Japanese have no spaces, so that each of their signs counts as a word. What programs
# replace by a value is one.
_WORD = re.compile(
    rf"""{PLACEHOLDER_PATTERN}
    | [\u3040-\u9fff\uf900-\ufaff]
    | [^\W\u3040-\u9fff\uf900-\ufaff]++ (?:[^\w\s]++[^\W\u3040-\u9fff\uf900-\ufaff]++)*+
    | [^\w\s{{}}$%]++ | [{{}}$%]""",
    re.VERBOSE,
)
_DIGITS = re.compile(r"\d+")
_WEB_ADDRESS = re.compile(r"(?:https?://|www\.)\S*\w")
DIVIDING_STEPS = 1_000_000  # parts times words; a line of more is divided in proportion
NEAR_PLACES = 24  # places on both sides of where a border is in proportion that are tried
LETTERS_OF_A_WORD = 6.0  # differences of lengths are counted in words
# What each costs.
SIZE_COST = 1 / LETTERS_OF_A_WORD  # a letter that a mark is longer or shorter
SHARED_SIZE_COST = 3 * SIZE_COST  # the same, of a mark whose words both texts have
PLACE_COST = 0.35  # a word that a border is away from where it was in proportion
NAME_COST, WORD_COST = 3.0, 1.0  # a name or number, another word of both texts on the other side
SIGN_COST = 0.7  # other punctuation at a border
FIXED_COST = 1000.0  # a border that cuts what has to stay
SAME_START = 4  # letters that two forms of a word begin with at least


@dataclass(frozen=True)
class TextPart:
    """A part of the source."""

    text: str
    is_marked: bool = False  # whether it may not be empty
    is_fixed: bool = False  # whether it has to stay as it is


@dataclass(frozen=True, order=True)
class _Shared:
    """A word that both texts have."""

    old: int  # where it begins in the source, and in the translation
    new: int
    length: int
    cost: float  # of parting it from its side

    @property
    def end(self) -> int:
        """Where it ends in the translation."""
        return self.new + self.length


def cuts_of(parts: Sequence[TextPart], line: str) -> list[int] | None:
    """Return where a translation is cut, once between each two parts.

    The result is None if the line is too long for that, or has fewer words than marks.
    """
    whole = "".join(part.text for part in parts)
    found = sorted({0, len(line)} | {word.start() for word in _WORD.finditer(line)})
    if len(parts) * (len(found) + len(whole) // 4) > DIVIDING_STEPS:
        return None
    numbers = _shared_numbers(parts, line)
    shared = _SharedWords([*_shared_words(whole, line), *numbers])
    borders = [*accumulate(len(part.text) for part in parts)][:-1]
    inner = _with_inner(found, parts, borders, shared.words, line)
    places = np.array(sorted({*inner, *(at for each in numbers for at in (each.new, each.end))}))
    signs = np.array([_signs_at(line, at) for at in places.tolist()])
    ratio = len(line) / max(len(whole), 1)
    best, costs = np.array([0]), np.array([0.0])  # places of the last border, what each costs
    back: list[dict[int, int]] = []
    for number, part in enumerate(parts):
        near, own = np.array([len(line)]), np.array([0.0])  # what a cut at each costs
        if number < len(borders):
            aim = _aim(borders[number], len(whole), len(line), shared.names)
            middle = int(np.searchsorted(places, aim))
            some = slice(max(0, middle - NEAR_PLACES), middle + NEAR_PLACES + 1)
            near, around = places[some], (part, parts[number + 1])
            own = _border_costs(line, borders[number], near, aim, shared, around)
            own += SIGN_COST * (signs[some] != _signs_at(whole, borders[number]))
        begin = borders[number - 1] if number else 0
        ends = begin, begin + len(part.text)
        is_shared = shared.has_all_of(part.text, begin)
        size = len(part.text) * (1.0 if is_shared else ratio)
        cost = SHARED_SIZE_COST if is_shared else SIZE_COST
        if part.is_marked:
            placed = shared.misplaced(ends, best), shared.misplaced(ends, near)
            reached = _marked_segments(near, best, costs, (size, cost), placed)
        else:
            reached = _free_segments(near, best, costs)
        at, starts, least = reached
        if not len(at):
            return None
        back.append(dict(zip(near[at].tolist(), starts.tolist(), strict=True)))
        best, costs = near[at], least + own[at]
    cuts = [len(line)]
    for each in reversed(back):
        cuts.append(each[cuts[-1]])
    return cuts[-2:0:-1]


class _SharedWords:
    """The words that both texts have, in order of the translation's."""

    def __init__(self, words: Sequence[_Shared]) -> None:
        self.words = sorted(words, key=lambda each: (each.new, each))
        self.names = sorted((each.old, each.new) for each in words if each.cost == NAME_COST)
        self.old = np.array([each.old for each in self.words], int)
        self.new = np.array([each.new for each in self.words], int)
        self.length = np.array([each.length for each in self.words], int)
        self.cost = np.array([each.cost for each in self.words], float)

    def has_all_of(self, text: str, begin: int) -> bool:
        """Whether the other text has all words of a part that begins at a place."""
        is_inner = (begin <= self.old) & (self.old < begin + len(text))
        return 0 < sum(map(str.isalnum, text)) <= int(self.length @ is_inner)

    def around(self, place: int) -> int | None:
        """Return the number of the word that a place of the source is within."""
        found = np.flatnonzero((self.old < place) & (place < self.old + self.length))
        return int(found[0]) if len(found) else None

    def summed(self, costs: FloatArray, places: IntArray, first: float = 0.0) -> FloatArray:
        """Return for places of the translation what the words before them cost together."""
        totals = np.empty(len(costs) + 1)
        totals[0], totals[1:] = first, costs
        found: FloatArray = totals.cumsum()[self.new.searchsorted(places)]
        return found

    def misplaced(self, part: tuple[int, int], places: IntArray) -> FloatArray:
        """Return for places what words before them cost in a part: others' add, its own take off.

        The part is where it begins and ends in the source.
        """
        is_own = (part[0] <= self.old) & (self.old < part[1])
        return self.summed(np.where(is_own, -self.cost, self.cost), places)


def _shared_words(whole: str, line: str) -> list[_Shared]:
    """Return the words that both texts have equally often, in order of those of each."""
    texts = [_words_by_form(text) for text in (whole, line)]
    found = []
    for form, olds in texts[0].items():
        news = texts[1].get(form, [])
        if len(olds) == len(news):
            is_name = any(c.isdigit() or c.isupper() for c in whole[olds[0]] + form[1:])
            is_name |= len(form) > SAME_START
            cost = NAME_COST if is_name else WORD_COST
            pairs = zip(olds, news, strict=True)
            found += [_Shared(old, new, len(form), cost) for old, new in pairs]
    starts = [_words_by_start(words, other) for words, other in (texts, texts[::-1])]
    for start, old in starts[0].items():
        if start in starts[1]:
            found.append(_Shared(old, starts[1][start], 0, WORD_COST))
    return found


def _shared_numbers(parts: Sequence[TextPart], line: str) -> list[_Shared]:
    """Return numbers that are marks of notes and the like, and may have no space before them."""
    whole = "".join(part.text for part in parts)
    ends = accumulate(len(part.text) for part in parts)
    marked = {
        end - len(part.text.lstrip())
        for part, end in zip(parts, ends, strict=True)
        if part.is_marked and part.text.strip().isdigit()
    }
    places: list[dict[str, list[int]]] = [{}, {}]
    for found, text in zip(places, (whole, line), strict=True):
        for number in _DIGITS.finditer(text):
            found.setdefault(number[0], []).append(number.start())
    return [
        _Shared(old, new, len(number), NAME_COST)
        for number, olds in places[0].items()
        if len(olds) == len(places[1].get(number, []))
        for old, new in zip(olds, places[1][number], strict=True)
        if old in marked
    ]


def _words_by_form(text: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    at = 0
    while word := _WORD.search(text, at):
        whole = _WEB_ADDRESS.match(text, word.start()) or word
        at = whole.end()
        if word[0][0].isalnum():
            found.setdefault(_small(whole[0]), []).append(whole.start())
    return found


def _small(word: str) -> str:
    """Return a word in small letters, of which there are as many as it has: none becomes two."""
    small = word.lower()
    return small if len(small) == len(word) else word


def _words_by_start(words: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, int]:
    """Return where words that the other text lacks are, by their first letters if only one has."""
    found: dict[str, list[int]] = {}
    for form, places in words.items():
        if form not in other and len(form) >= SAME_START:
            found.setdefault(form[:SAME_START], []).extend(places)
    return {start: places[0] for start, places in found.items() if len(places) == 1}


def _with_inner(
    places: list[int],
    parts: Sequence[TextPart],
    borders: Sequence[int],
    shared: Sequence[_Shared],
    line: str,
) -> list[int]:
    """Add places within words: of borders within shared ones, and around what has to stay."""
    more = {each.new + at - each.old for each in shared for at in borders if _is_in(each, at)}
    whole = "".join(part.text for part in parts)
    begins = (end - len(part.text) for part, end in zip(parts, [*borders, len(whole)], strict=True))
    fixed: dict[str, bool] = {}  # whether it is a part of a word, as in `code`s
    for part, at in zip(parts, begins, strict=True):
        if part.is_fixed and (text := part.text.strip()):
            is_within = _is_in_word(whole, at) or _is_in_word(whole, at + len(part.text))
            fixed[text] = fixed.get(text, False) or is_within
    for text, is_within in fixed.items():
        at = line.find(text)
        while at >= 0:
            if is_within or not (_is_in_word(line, at) or _is_in_word(line, at + len(text))):
                more |= {at, at + len(text)}
            at = line.find(text, at + len(text))
    return sorted({*places, *more})


def _is_in_word(line: str, at: int) -> bool:
    return line[max(0, at - 1) : at].isalnum() and line[at : at + 1].isalnum()


def _is_in(word: _Shared, at: int) -> bool:
    return word.old < at < word.old + word.length


def _free_segments(
    ends: IntArray, starts: IntArray, costs: FloatArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return which ends a part of any size can have, where it begins then, and the least costs.

    Of starts that cost the same, the first is taken.
    """
    least = np.minimum.accumulate(costs)
    is_new = np.concatenate([[True], costs[1:] < least[:-1]])
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(costs)), 0))
    last = np.searchsorted(starts, ends, side="right") - 1
    at = np.flatnonzero(last >= 0)
    return at, starts[first[last[at]]], least[last[at]]


def _marked_segments(
    ends: IntArray,
    starts: IntArray,
    costs: FloatArray,
    size: tuple[float, float],
    placed: tuple[FloatArray, FloatArray],
) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the same of a mark, which has words, as many as before, and its own.

    The size is what it is to be, and what each letter more or less costs.
    """
    wanted, each = size
    other = np.abs((ends[:, None] - starts) - wanted)
    all_costs = ((costs + placed[1][:, None]) - placed[0]) + each * other
    all_costs[ends[:, None] <= starts] = np.inf
    first = all_costs.argmin(axis=1)
    at = np.flatnonzero(ends > starts[0])
    return at, starts[first[at]], all_costs[at, first[at]]


def _aim(border: int, size: int, new_size: int, names: Sequence[tuple[int, int]]) -> float:
    """Return where a border is in proportion between the names before and behind it."""
    at = bisect_left(names, (border, 0))
    left = names[at - 1] if at else (0, 0)
    right = names[at] if at < len(names) else (size, new_size)
    if left[1] > right[1]:
        left, right = (0, 0), (size, new_size)
    return left[1] + (border - left[0]) * (right[1] - left[1]) / max(right[0] - left[0], 1)


def _border_costs(
    line: str,
    border: int,
    near: IntArray,
    aim: float,
    shared: _SharedWords,
    around: tuple[TextPart, TextPart],
) -> FloatArray:
    """Return what it costs to cut a line at each place that may stand for a border.

    Signs beside the places are not counted here.
    """
    left, right = around
    cut = shared.around(border)
    costs: FloatArray = PLACE_COST * np.abs(near - aim) / LETTERS_OF_A_WORD
    if not (left.is_marked or right.is_marked):
        # Where a cut that is farther to the right costs less, or more.
        changes = np.where(shared.old < border, -shared.cost, shared.cost)
        if cut is not None:
            changes[cut] = 0.0
        costs += shared.summed(changes, near, -float(changes[changes < 0].sum()))
    if cut is not None:
        costs += NAME_COST * (near != shared.new[cut] + border - shared.old[cut])
    if left.is_fixed or right.is_fixed:
        costs += [_cost_of_fixed(line, at, left, right) for at in near.tolist()]
    return costs


def _cost_of_fixed(line: str, at: int, left: TextPart, right: TextPart) -> float:
    """Return what it costs that parts on both sides of a cut, if they have to stay, do not."""
    before = line[max(0, at - len(left.text) - 1) : at]
    cuts_left = left.is_fixed and not before.rstrip().endswith(left.text.strip())
    cuts_right = right.is_fixed and not line.startswith(right.text.strip(), at)
    return FIXED_COST * (cuts_left + cuts_right)


def _signs_at(text: str, at: int) -> int:
    """Return whether punctuation is before a place, and behind it, as two bits."""
    before, behind = text[max(0, at - 2) : at].rstrip()[-1:], text[at : at + 2].lstrip()[:1]
    return 2 * (not (before or "a").isalnum()) + (not (behind or "a").isalnum())


def divided_by_words(parts: Sequence[TextPart], line: str) -> list[str] | None:
    """Divide a translation like its source; None if it is too long for that."""
    cuts = cuts_of(parts, line)
    if cuts is None:
        return None
    return [line[start:end] for start, end in pairwise([0, *cuts, len(line)])]
