"""What two sequences have in common, in time that grows with their length and not with its cube."""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

# Steps of difflib, about 60 ns each, before a faster way is taken: sentences need some thousands,
# and paragraphs of two thousand letters less than these.
DIFFLIB_STEPS, DIFFLIB_STEPS_EACH = 4_000_000, 100  # in any case, and for each element
MOST_CELLS = 40_000  # of a table of Levenshtein's, some 10 ms
ALIGNED_WINDOW = 1024  # elements of both sequences that are looked at together in the faster way

Opcode = tuple[str, int, int, int, int]
Pair = tuple[int, int]


class _TooManyStepsError(Exception):
    """Difflib takes too long for two sequences."""


class _CountingMatcher(SequenceMatcher[Any]):
    """Difflib's matcher, which gives up when it has taken too many steps."""

    def __init__(self, a: Sequence[Any], b: Sequence[Any]) -> None:
        super().__init__(None, a, b, autojunk=False)
        self._size = len(a)
        self._left = DIFFLIB_STEPS + DIFFLIB_STEPS_EACH * (len(a) + len(b))
        self._steps = [0]  # for the elements of `a` before each place
        places: dict[Any, list[int]] = self.b2j  # type: ignore[attr-defined]
        for each in a:
            self._steps.append(self._steps[-1] + len(places.get(each, ())))

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> Any:
        ahi = self._size if ahi is None else ahi
        self._left -= self._steps[ahi] - self._steps[alo]
        if self._left < 0:
            raise _TooManyStepsError
        return super().find_longest_match(alo, ahi, blo, bhi)


def opcodes(a: Sequence[Any], b: Sequence[Any]) -> list[Opcode]:
    """Return how to turn one sequence into the other, as difflib's `get_opcodes` does.

    Where difflib would take too many steps, the elements that both have in order are found in one
    window after the other, as many as may be in each.
    """
    try:
        return [*_CountingMatcher(a, b).get_opcodes()]
    except _TooManyStepsError:
        return [*_opcodes(pairs_in_common(a, b), len(a), len(b))]


def ratio(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return difflib's ratio of two sequences, from 0 to 1 for the same; see `opcodes`."""
    try:
        return _CountingMatcher(a, b).ratio()
    except _TooManyStepsError:
        return 2 * len(pairs_in_common(a, b)) / (len(a) + len(b))


def _opcodes(pairs: Sequence[Pair], size_a: int, size_b: int) -> Iterator[Opcode]:
    i = j = 0
    equal = [0, 0, 0]  # where the last run of pairs begins, and how long it is
    for x, y in [*pairs, (size_a, size_b)]:
        start_a, start_b, length = equal
        if length and (x, y) == (start_a + length, start_b + length) and x < size_a:
            equal[2] += 1
            continue
        if length:
            yield from _changed(i, start_a, j, start_b)
            i, j = start_a + length, start_b + length
            yield "equal", start_a, i, start_b, j
        equal = [x, y, 1]
    yield from _changed(i, size_a, j, size_b)


def _changed(i1: int, i2: int, j1: int, j2: int) -> Iterator[Opcode]:
    if i1 < i2 or j1 < j2:
        yield (
            "replace" if i1 < i2 and j1 < j2 else "delete" if i1 < i2 else "insert",
            i1,
            i2,
            j1,
            j2,
        )


def pairs_in_common(a: Sequence[Any], b: Sequence[Any]) -> list[Pair]:
    """Return the places of elements that both sequences have, increasing in both."""
    found: list[Pair] = []
    x = y = 0
    while x < len(a) and y < len(b):
        some, others = a[x : x + ALIGNED_WINDOW], b[y : y + ALIGNED_WINDOW]
        pairs = _common(some, others)
        if x + ALIGNED_WINDOW >= len(a) and y + ALIGNED_WINDOW >= len(b):
            return found + [(x + i, y + j) for i, j in pairs]
        # What follows may fit better with the end.
        pairs = [(i, j) for i, j in pairs if max(i, j) < 3 * ALIGNED_WINDOW // 4]
        found += [(x + i, y + j) for i, j in pairs]
        i, j = pairs[-1] if pairs else (0, 0)
        if i + j < ALIGNED_WINDOW // 2:
            i = j = ALIGNED_WINDOW // 2
        x, y = x + i + 1, y + j + 1
    return found


def _common(a: Sequence[Any], b: Sequence[Any]) -> list[Pair]:
    """Return the places of a longest common subsequence, by Hyyrö's bit-parallel algorithm (2004).

    A row has a bit for each element of `a`: 0 where one more is in common with so much of `b`.
    """
    masks: dict[Any, int] = {}
    for i, each in enumerate(a):
        masks[each] = masks.get(each, 0) | 1 << i
    full = (1 << len(a)) - 1
    row, rows = full, [full]
    for each in b:
        both = row & masks.get(each, 0)
        row = ((row + both) | (row - both)) & full
        rows.append(row)
    pairs, i, j = [], len(a), len(b)
    while i and j:
        if rows[j] >> (i - 1) & 1:
            i -= 1
        else:
            j -= 1
            if rows[j] >> (i - 1) & 1:
                i -= 1
                pairs.append((i, j))
    return pairs[::-1]


def num_same(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of elements that two sequences begin with and that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def least_opcodes(a: Sequence[Any], b: Sequence[Any]) -> Iterator[Opcode]:
    """Yield the opcodes that change the fewest elements (Levenshtein); of many, difflib's.

    Difflib's keep the longest run that two sequences share, wherever it is: in "she have two, and i
    has one" and "she has two, and I have one" the two has.
    """
    same = num_same(a, b)
    ends = num_same(a[same:][::-1], b[same:][::-1])
    some, others = a[same : len(a) - ends], b[same : len(b) - ends]
    if len(some) * len(others) > MOST_CELLS:
        yield from opcodes(a, b)
        return
    kept = [
        *((i, i) for i in range(same)),
        *((same + i, same + j) for i, j in _pairs_kept(some, others)),
        *((len(a) - i, len(b) - i) for i in range(ends, 0, -1)),
    ]
    start = begun = (0, 0)
    for i, j in kept:
        if (i, j) != begun:
            if start != begun:
                yield "equal", start[0], begun[0], start[1], begun[1]
            yield "replace", begun[0], i, begun[1], j
            start = i, j
        begun = i + 1, j + 1
    if start != begun:
        yield "equal", start[0], begun[0], start[1], begun[1]
    if begun != (len(a), len(b)):
        yield "replace", begun[0], len(a), begun[1], len(b)


def _pairs_kept(a: Sequence[Any], b: Sequence[Any]) -> Iterator[Pair]:
    """Yield the places of elements that are kept where the fewest are changed."""
    apart = sum(x != y for x, y in zip(a, b, strict=False))
    if len(a) == len(b) and apart <= 2:  # an element put in and one left out are as many
        yield from ((i, i) for i, (x, y) in enumerate(zip(a, b, strict=True)) if x == y)
        return
    costs = [[*range(len(b), -1, -1)]]  # of the rests of both, from the last rows on
    for i in range(len(a) - 1, -1, -1):
        below, row, each = costs[-1], [len(a) - i], a[i]
        least = row[0]
        for j in range(len(b) - 1, -1, -1):
            least = least + 1 if least < below[j] else below[j] + 1
            if (kept := below[j + 1] + (each != b[j])) < least:
                least = kept
            row.append(least)
        costs.append(row[::-1])
    costs.reverse()
    i = j = 0
    while i < len(a) and j < len(b):
        is_kept = a[i] == b[j]
        if costs[i][j] == costs[i + 1][j + 1] + (not is_kept):
            if is_kept:
                yield i, j
            i, j = i + 1, j + 1
        elif costs[i][j] == 1 + costs[i + 1][j]:
            i += 1
        else:
            j += 1
