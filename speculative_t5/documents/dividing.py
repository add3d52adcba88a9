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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .placeholders import PLACEHOLDER_PATTERN

# Chinese and Japanese have no spaces, so that each of their signs counts as a word. What programs
# replace by a value is one.
_WORD = re.compile(
    rf"""{PLACEHOLDER_PATTERN}
    | [\u3040-\u9fff\uf900-\ufaff]
    | [^\W\u3040-\u9fff\uf900-\ufaff]++ (?:[^\w\s]++[^\W\u3040-\u9fff\uf900-\ufaff]++)*+
    | [^\w\s{{}}$%]++ | [{{}}$%]""",
    re.VERBOSE,
)
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


def cuts_of(parts: Sequence[TextPart], line: str) -> list[int] | None:
    """Return where a translation is cut, once between each two parts.

    The result is None if the line is too long for that, or has fewer words than marks.
    """
    whole = "".join(part.text for part in parts)
    places = sorted({0, len(line)} | {word.start() for word in _WORD.finditer(line)})
    if len(parts) * (len(places) + len(whole) // 4) > DIVIDING_STEPS:
        return None
    shared = _shared_words(whole, line)
    borders = [*accumulate(len(part.text) for part in parts)][:-1]
    places = _with_inner(places, parts, borders, shared, line)
    ratio = len(line) / max(len(whole), 1)
    names = sorted((each.old, each.new) for each in shared if each.cost == NAME_COST)
    best: dict[int, float] = {0: 0.0}  # by places of the last border
    back: list[dict[int, int]] = []
    for number, part in enumerate(parts):
        own: Iterable[float] = [0.0]  # what a cut at each costs
        near: Sequence[int] = [len(line)]
        if number < len(borders):
            aim = _aim(borders[number], len(whole), len(line), names)
            middle = bisect_left(places, aim)
            near = places[max(0, middle - NEAR_PLACES) : middle + NEAR_PLACES + 1]
            around = part, parts[number + 1]
            own = _border_costs(whole, line, borders[number], near, aim, shared, around)
        begin = borders[number - 1] if number else 0
        placed = _misplaced(begin, begin + len(part.text), [*best, *near], shared)
        is_shared = _is_shared(part.text, begin, shared)
        size = len(part.text) * (1.0 if is_shared else ratio)
        cost = SHARED_SIZE_COST if is_shared else SIZE_COST
        found = _segments(part.is_marked, near, best, (size, cost), placed)
        best = {at: found[at][0] + cost for at, cost in zip(near, own, strict=True) if at in found}
        if not best:
            return None
        back.append({at: start for at, (_, start) in found.items()})
    cuts = [len(line)]
    for starts in reversed(back):
        cuts.append(starts[cuts[-1]])
    return cuts[-2:0:-1]


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
    for text in {part.text.strip() for part in parts if part.is_fixed} - {""}:
        at = line.find(text)
        while at >= 0:
            more |= {at, at + len(text)}
            at = line.find(text, at + len(text))
    return sorted({*places, *more})


def _is_in(word: _Shared, at: int) -> bool:
    return word.old < at < word.old + word.length


def _segments(
    is_marked: bool,
    ends: Sequence[int],
    best: Mapping[int, float],
    size: tuple[float, float],
    placed: Mapping[int, float],
) -> dict[int, tuple[float, int]]:
    """Return the least cost of a part that ends at each place, and where it begins.

    The size is what it is to be, and what each letter more or less costs. Marks are
    to be as long as before and to hold their own words; other parts may be of any size.
    """
    if not is_marked:
        pairs = sorted((start, cost) for start, cost in best.items())
        return {
            end: min((cost, start) for start, cost in pairs if start <= end)
            for end in ends
            if pairs[0][0] <= end
        }
    found = {}
    wanted, each = size
    for end in ends:
        costs = (
            (
                cost + placed[end] - placed[start] + each * abs(end - start - wanted),
                start,
            )
            for start, cost in best.items()
            if start < end
        )
        if least := min(costs, default=None):
            found[end] = least
    return found


def _is_shared(text: str, begin: int, shared: Sequence[_Shared]) -> bool:
    """Whether the other text has all words of a part that begins at a place."""
    inner = sum(each.length for each in shared if begin <= each.old < begin + len(text))
    return 0 < sum(map(str.isalnum, text)) <= inner


def _misplaced(
    begin: int, end: int, places: Iterable[int], shared: Sequence[_Shared]
) -> dict[int, float]:
    """Return for places what words before them cost in a part: others' add, its own take off."""
    found, total, i = dict[int, float](), 0.0, 0
    words = sorted((each.new, each) for each in shared)
    for at in sorted({*places}):
        while i < len(words) and words[i][0] < at:
            each = words[i][1]
            total += -each.cost if begin <= each.old < end else each.cost
            i += 1
        found[at] = total
    return found


def _aim(border: int, size: int, new_size: int, names: Sequence[tuple[int, int]]) -> float:
    """Return where a border is in proportion between the names before and behind it."""
    at = bisect_left(names, (border, 0))
    left = names[at - 1] if at else (0, 0)
    right = names[at] if at < len(names) else (size, new_size)
    if left[1] > right[1]:
        left, right = (0, 0), (size, new_size)
    return left[1] + (border - left[0]) * (right[1] - left[1]) / max(right[0] - left[0], 1)


def _border_costs(
    whole: str,
    line: str,
    border: int,
    near: Sequence[int],
    aim: float,
    shared: Sequence[_Shared],
    around: tuple[TextPart, TextPart],
) -> Iterator[float]:
    """Yield what it costs to cut a line at places that stand for a border, in order."""
    left, right = around
    cut = next((each for each in shared if _is_in(each, border)), None)
    changes = sorted(  # where a cut that is farther to the right costs less, or more
        (each.new, -each.cost if each.old < border else each.cost)
        for each in shared
        if each is not cut and not (left.is_marked or right.is_marked)
    )
    parted, i = sum(-cost for _, cost in changes if cost < 0), 0
    for at in near:
        while i < len(changes) and changes[i][0] < at:
            parted += changes[i][1]
            i += 1
        cost = parted + PLACE_COST * abs(at - aim) / LETTERS_OF_A_WORD
        if cut:
            cost += NAME_COST * (at != cut.new + border - cut.old)
        before = line[max(0, at - len(left.text) - 1) : at]
        if left.is_fixed and not before.rstrip().endswith(left.text.strip()):
            cost += FIXED_COST
        if right.is_fixed and not line.startswith(right.text.strip(), at):
            cost += FIXED_COST
        yield cost + SIGN_COST * (_signs_at(whole, border) != _signs_at(line, at))


def _signs_at(text: str, at: int) -> tuple[bool, bool]:
    """Return whether punctuation is before a place, and behind it."""
    before, behind = text[max(0, at - 2) : at].rstrip()[-1:], text[at : at + 2].lstrip()[:1]
    return not (before or "a").isalnum(), not (behind or "a").isalnum()


def divided_by_words(parts: Sequence[TextPart], line: str) -> list[str] | None:
    """Divide a translation like its source; None if it is too long for that."""
    cuts = cuts_of(parts, line)
    if cuts is None:
        return None
    return [line[start:end] for start, end in pairwise([0, *cuts, len(line)])]
