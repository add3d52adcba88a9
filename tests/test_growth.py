"""The time that patterns, loops and libraries take grows with the text, and not with its square.

A sample of what scripts/checks/growth.py measures, at sizes that take moments.
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

from speculative_t5.documents import alignment

import pytest
from conftest import REPOSITORY
from growth import MOST, Row, loop_rows, measured, pattern_rows, runs_of, worst
from growth_loops import LOCAL, LOOPS, repeated
from growth_patterns import find_patterns, imports_other_engines, near_misses

SIZE = 12_500  # characters, and four times as many
FEW = 40  # texts for each pattern; the script takes ten times as many
SOME = 6  # texts for each loop, of about 60
# Times as long for four times the text: at these sizes more than the script's 6, as windows are not
# much smaller than the texts. What grows with the square takes 16.
BOUND = 10.0
PATTERNS = {pattern.key: pattern for pattern in find_patterns(REPOSITORY)}


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    """Its time grows with all that other tests have left."""
    gc.disable()
    yield
    gc.enable()


def check(row: Row) -> None:
    assert row.ratio <= BOUND, f"{row.file}, {row.name}: {row.text} takes {row.seconds} s"


@pytest.mark.parametrize("key", PATTERNS, ids=lambda key: f"{key[0].partition('/')[2]} {key[1]}")
def test_patterns_take_time_that_grows_with_the_text(key: tuple[str, str]) -> None:
    for row in pattern_rows([PATTERNS[key]], SIZE, FEW, kept=1):
        check(row)


def test_each_pattern_is_measured_or_said_to_see_no_text_from_outside() -> None:
    unknown = {key for key, pattern in PATTERNS.items() if pattern.value is None}
    assert unknown == {*LOCAL}, "give an example of the pattern in LOCAL of growth_loops.py"
    assert not imports_other_engines(REPOSITORY), "which near-misses are not made for"
    assert len(PATTERNS) > 50 and all(
        [*runs_of(pattern)] for pattern in PATTERNS.values() if pattern.value is not None
    )


@pytest.mark.parametrize("pattern", [r"%[-+0#]*\d*x", r"\s*\S+\s*", r"\{(.*?)\}"])
def test_near_misses_show_patterns_whose_time_grows_with_the_square(pattern: str) -> None:
    value = re.compile(pattern)
    row = worst("", pattern, value.findall, near_misses(value, most=FEW), SIZE // 4, kept=1)
    assert row.ratio > MOST, row


def test_near_misses_show_a_pattern_whose_time_grows_with_the_power_of_one_and_a_half() -> None:
    """Which takes eight times as long, so the time has to be long enough to be measured well."""
    value = re.compile(r"(?:\s|<[^>]*>)*(.*?)(?:\s)*")
    row = worst("", "", value.fullmatch, near_misses(value, most=FEW), SIZE, kept=1)
    assert row.ratio > MOST, row


def test_a_pattern_is_found_wherever_it_stands(tmp_path: Path) -> None:
    package = tmp_path / "speculative_t5"
    (package / "deep").mkdir(parents=True)
    (package / "deep" / "a.py").write_text(
        "import re\ndef f(x):\n    return re.sub(x + 'a*', '', x)\n"
    )
    (package / "b.py").write_text("from re import compile\nimport regex\n")
    found = find_patterns(tmp_path, values=False)
    assert [(each.file, each.source) for each in found] == [
        ("speculative_t5/deep/a.py", "x + 'a*'")
    ]
    assert imports_other_engines(tmp_path) == ["speculative_t5/b.py"] * 2


@pytest.mark.parametrize("name", LOOPS)
def test_loops_and_libraries_take_time_that_grows_with_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        alignment, "DIFFLIB_STEPS", 100_000
    )  # beyond which the time grows with the text
    for row in loop_rows([name], SIZE, SOME, kept=1):
        check(row)


def test_loops_whose_time_grows_with_the_square_are_seen() -> None:
    def counted(text: str) -> int:
        return sum(len([*text[:i]]) for i in range(0, len(text), 20))

    size, times = measured(counted, repeated("a"), SIZE // 4)
    assert Row("", "", "", size, times).ratio > BOUND
