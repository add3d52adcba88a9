"""Which rounds of a batch take what others like them take."""

from speculative_t5.decoding import counters, loop
from speculative_t5.decoding.loop import Stopwatch

import pytest


class Clock:
    """Stands for `time`; it goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop, "time", made)
    return made


def lap(watch: Stopwatch, clock: Clock, *, begun: bool = False, begins: bool = False) -> loop.Lap:
    """Run a round that drafts for 2 seconds and verifies for 8."""
    watch.begin(begun_early=begun)
    clock.now += 2
    watch.drafted()
    clock.now += 8
    return watch.end(begins_next=begins)


def test_a_round_is_divided_where_its_draft_is_made(clock: Clock) -> None:
    assert lap(Stopwatch(), clock) == (2, 8, 0, True)


def test_a_round_with_more_to_do_is_not_typical(clock: Clock) -> None:
    watch = Stopwatch()
    counters.extra_work += 1
    assert not lap(watch, clock).typical
    assert lap(watch, clock).typical


def test_a_round_that_runs_a_pass_more_or_less_is_not_typical(clock: Clock) -> None:
    watch = Stopwatch()
    passes = [(False, True), (True, True), (True, False), (False, False)]
    found = [lap(watch, clock, begun=begun, begins=begins).typical for begun, begins in passes]
    assert found == [False, True, False, True]


@pytest.mark.parametrize(("gap", "typical"), [(0.9, True), (1.1, False)])
def test_a_pass_that_ran_on_in_a_long_gap_is_not_typical(
    gap: float, typical: bool, clock: Clock
) -> None:
    watch = Stopwatch()
    lap(watch, clock, begins=True)
    clock.now += gap  # a tenth of the next round's time is 1
    assert lap(watch, clock, begun=True, begins=True).typical == typical


@pytest.mark.parametrize(("between", "counted"), [(0.5, 0.5), (2.9, 2.9), (3.1, 0)])
def test_what_the_host_does_between_rounds_counts_unless_somebody_waits(
    between: float, counted: float, clock: Clock
) -> None:
    watch = Stopwatch()
    watch.enter()
    assert lap(watch, clock).between_seconds == 0  # nothing was before it
    clock.now += 1  # a schedule learns
    watch.leave()
    clock.now += between
    watch.enter()
    clock.now += 1  # another thread has the device
    assert lap(watch, clock).between_seconds == pytest.approx(counted)


def test_pauses_do_not_count(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 3
    with watch.paused():
        clock.now += 50
    clock.now += 4
    assert watch.seconds() == 7
