"""What two texts have in common: as difflib finds it, or where that takes long, in windows."""

import random
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from speculative_t5.documents import alignment
from speculative_t5.documents.alignment import least_opcodes
from speculative_t5.documents.comparison import changes, edits
from speculative_t5.documents.layout import places, similarity

import pytest


def sequences(seed: int, size: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    kinds = rng.choice((2, 5, 30))
    a = [rng.randrange(kinds) for _ in range(rng.randint(0, size))]
    b = [each for each in a if rng.random() < 0.8] if seed % 2 else a[:]
    for _ in range(rng.randint(0, 4)):
        b.insert(rng.randint(0, len(b)), rng.randrange(kinds))
    return a, b


def most_in_common(a: Sequence[int], b: Sequence[int]) -> int:
    row = [0] * (len(b) + 1)
    for each in a:
        last = row
        row = [0]
        for j, other in enumerate(b):
            row.append(last[j] + 1 if each == other else max(last[j + 1], row[-1]))
    return row[-1]


def test_short_texts_are_compared_by_difflib() -> None:
    for seed in range(300):
        a, b = sequences(seed, 40)
        matcher = SequenceMatcher(None, a, b, autojunk=False)
        assert alignment.opcodes(a, b) == matcher.get_opcodes()
        assert alignment.ratio(a, b) == matcher.ratio()


@pytest.mark.parametrize("window", [8, 1024])
def test_long_ones_are_compared_in_windows(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(alignment, "DIFFLIB_STEPS", -(10**9))
    monkeypatch.setattr(alignment, "ALIGNED_WINDOW", window)
    for seed in range(300):
        a, b = sequences(seed, 40)
        end_a = end_b = common = 0
        for kind, i1, i2, j1, j2 in alignment.opcodes(a, b):
            assert (i1, j1) == (end_a, end_b)
            end_a, end_b = i2, j2
            assert (a[i1:i2] == b[j1:j2]) == (kind == "equal")
            assert (
                kind == "equal"
                or (i1 < i2, j1 < j2)
                == {"replace": (True, True), "delete": (True, False), "insert": (False, True)}[kind]
            )
            common += i2 - i1 if kind == "equal" else 0
        assert (end_a, end_b) == (len(a), len(b))
        if window > 40:
            assert common == most_in_common(a, b)
        assert alignment.ratio(a, b) == (2 * common / (len(a) + len(b)) if a or b else 1)


def test_long_texts_that_differ_a_little_are_found_alike() -> None:
    rng = random.Random(0)
    words = [f"w{rng.randrange(300)}" for _ in range(6000)]
    changed = [word if rng.random() < 0.9 else "x" for word in words]
    text, other = (" the ".join(each) for each in (words, changed))
    assert "".join(old for old, _ in changes(text, other)) == text
    assert "".join(new for _, new in changes(text, other)) == other
    found = edits(text, other)
    assert all(a[1] <= b[0] for a, b in pairwise(found))
    done, at = "", 0
    for start, end, new in found:
        done, at = done + text[at:start] + new, end
    assert done + text[at:] == other
    assert similarity(text, other) > 0.9 and similarity("a" * 9000, "b" * 9000) == 0
    same = places(text.split(), other.split())
    assert sum(i == place for i, place in enumerate(same)) > 0.95 * len(same)


def test_the_least_opcodes_change_the_fewest_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(a: list[str], b: list[str]) -> int:
        if not (a and b):
            return len(a) + len(b)
        least = distance(a[1:], b[1:]) + (a[0] != b[0])
        return min(least, 1 + distance(a[1:], b), 1 + distance(a, b[1:]))

    rng = random.Random(1)
    for _ in range(500):
        a, b = ([rng.choice("abc") for _ in range(rng.randrange(7))] for _ in range(2))
        at, cost = (0, 0), 0
        for kind, i1, i2, j1, j2 in least_opcodes(a, b):
            assert (i1, j1) == at and (kind == "equal") == (a[i1:i2] == b[j1:j2])
            cost += max(i2 - i1, j2 - j1) * (kind != "equal")
            at = i2, j2
        assert at == (len(a), len(b)) and cost <= distance(a, b)
    monkeypatch.setattr(alignment, "MOST_CELLS", 3)
    assert [*least_opcodes("abcd", "xbcy")] == [*alignment.opcodes("abcd", "xbcy")]
