"""Draft lengths: a schedule's expectations, choices and learning, and the costs that it goes by."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import draft_length
from speculative_t5.decoding.draft_length import (
    MAX_DRAFT,
    PROBE_SHARE,
    AdaptiveSchedule,
    Calibration,
    Counts,
    Outcome,
    Schedule,
    cache_folder,
    calibrate,
)
from speculative_t5.decoding.results import Round

import numpy as np
import pytest
from conftest import tiny_pair


def outcome(num_draft: int, accepted: Sequence[int], drafted: Sequence[int] = ()) -> Outcome:
    return Outcome(num_draft, drafted or [num_draft] * len(accepted), accepted, 0.0, 0.0)


@lru_cache
def counted(rate: float, rounds: int = 10_000, num_draft: int = MAX_DRAFT) -> Counts:
    """Return counts of drafts whose tokens are each accepted with the same probability."""
    rng = np.random.default_rng(0)
    passed = np.cumprod(rng.random((rounds, num_draft)) < rate, axis=1).sum(axis=1)
    counts = Counts()
    counts.add(outcome(num_draft, passed.tolist()))
    return counts


def calibration(counts: Counts, *, draft: float = 0.1, num_prompts: int = 1000) -> Calibration:
    """Make a pass over one token take a second, and 0.02 more per further token."""
    drafting = [draft * k for k in range(MAX_DRAFT + 1)]
    verifying = [1 + 0.02 * k for k in range(2 * MAX_DRAFT + 1)]
    return Calibration(drafting, verifying, counts.values, num_prompts)


@pytest.mark.parametrize(
    ("asked", "drafted", "accepted", "expected"),
    [
        (6, 6, 3, {1: (1, 1), 2: (2, 2), 3: (3, 3), 4: (3, 4), 6: (3, 6)}),  # the fourth never is
        (3, 5, 4, {2: (3, 4), 3: (4, 5)}),  # a drafter that adds two tokens to those asked for
        (8, 2, 2, {8: (2, 2)}),  # and one that drafts fewer
    ],
)
def test_places_have_rates_of_their_own(
    asked: int, drafted: int, accepted: int, expected: dict[int, tuple[int, int]]
) -> None:
    counts = Counts()
    counts.add(outcome(asked, [accepted] * 10_000, [drafted] * 10_000))
    accepts, drafts = counts.expected(counts.pooled())
    for length, found in expected.items():
        assert (accepts[length], drafts[length]) == pytest.approx(found, abs=0.05)


def test_the_length_is_as_good_as_the_best_by_theory() -> None:
    for rate, draft in product((0.02, 0.3, 0.6, 0.8, 0.95), (0.02, 0.1, 0.3)):
        schedule = AdaptiveSchedule(calibration(counted(rate), draft=draft))
        # (1 - a^(K + 1)) / (1 - a) / (1 + K c) for K = 0 to MAX_DRAFT (2211.17192, theorem 3.8).
        k = np.arange(MAX_DRAFT + 1)
        speed = (1 - rate ** (k + 1)) / (1 - rate) / (1 + k * (draft + 0.02))
        assert speed[schedule.next(1000)] > 0.97 * speed.max()
        assert min(speed) < 0.9 * speed.max()


def test_a_calibration_counts_more_the_more_prompts_it_has() -> None:
    def length(rate: float, num_prompts: int, draft: float = 0.02) -> int:
        counts = counted(rate)
        return AdaptiveSchedule(calibration(counts, draft=draft, num_prompts=num_prompts)).next(99)

    assert length(0.2, 1) > length(0.2, 4) > length(0.2, 1000)
    assert length(0.95, 1, 0.1) < length(0.95, 1000, 0.1)
    assert length(0.01, 1, 0.4) == 0


def test_a_step_in_the_costs_is_seen() -> None:
    """Passes over up to 6 tokens cost the same, and longer ones three times as much."""
    costs = [1.0 if length <= 6 else 3.0 for length in range(1, 2 * MAX_DRAFT + 2)]
    found = Calibration([0.0] * (MAX_DRAFT + 1), costs, counted(0.9).values, 1000)
    schedule = AdaptiveSchedule(found)
    assert schedule.next(1000) == 5


def test_it_learns_from_rounds() -> None:
    schedule = AdaptiveSchedule(calibration(counted(0.8)))
    before = schedule.next(1000)
    assert [schedule.next(remaining) for remaining in (3, 2, 1)] == [2, 1, 0], "there is no room"
    for _ in range(40):
        schedule.observe(outcome(before, [before]))
    assert schedule.next(1000) > before
    for _ in range(200):
        schedule.observe(outcome(schedule.next(1000), [0]))
    assert schedule.next(1000) == 0
    for _ in range(150):
        length = schedule.next(1000)
        schedule.observe(outcome(length, [length]))
    assert schedule.next(1000) >= 3, "it probes"
    assert AdaptiveSchedule(schedule.calibration).next(1000) == before


@pytest.mark.parametrize("draft", [0.03, 0.5])
def test_it_stops_drafting_and_probes_later_and_later(draft: float) -> None:
    """Probes are so rare that they cost little, and rarer after each failure, up to a limit."""
    schedule = AdaptiveSchedule(calibration(counted(0.001), draft=draft))
    probes = []
    for round_ in range(2000):
        length = schedule.next(1000)
        if length:
            probes.append(round_)
        schedule.observe(outcome(length, [0]))
    gaps = np.diff([-1, *probes]) - 1
    assert gaps[0] == pytest.approx((draft + 0.02) / PROBE_SHARE, abs=1)
    np.testing.assert_allclose(gaps[1:4] / gaps[:3], 2, rtol=0.2)
    assert len(gaps) > 4 and (gaps[4:] == gaps[3]).all()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for calibrations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


class Machine:
    """A rehearsal on a machine with known costs, which counts its runs."""

    def __init__(self, *, rounds: int = 5, rows: int = 2) -> None:
        self.runs = 0
        self._rounds, self._rows = rounds, rows

    def __call__(self, schedule: Schedule, seed: int) -> Iterator[Round]:
        self.runs += 1
        for round_ in range(self._rounds):
            num_draft = schedule.next(128)
            slow = 9.0 if round_ == 0 and num_draft else 0.0  # the draft's encoder
            rows = self._rows - (round_ == 4)  # one row has ended, and all is cheaper
            drafted, accepted = [num_draft] * rows, [min(num_draft, 2)] * rows
            cost = 0.5 + 0.1 * num_draft + slow if num_draft else 0.0
            verify = 10.0 + num_draft if rows == self._rows else 1.0
            schedule.observe(Outcome(num_draft, drafted, accepted, cost, verify))
            yield None  # type: ignore[misc]

    def measures(self, *settings: object) -> bool:
        """Whether a calibration is not found, but measured."""
        runs = self.runs
        calibrate(self, 2, *settings)
        return self.runs > runs


def test_costs_are_measured() -> None:
    brief, found = calibrate(Machine(rounds=1, rows=1), 2, "brief"), calibrate(Machine(), 2)
    assert brief.draft_seconds[1] > 9, "the encoder is part of every draft"
    assert brief.verify_seconds == pytest.approx(found.verify_seconds)
    expected = [0, *0.5 + 0.1 * np.arange(1, MAX_DRAFT + 1)]
    np.testing.assert_allclose(found.draft_seconds, expected)
    np.testing.assert_allclose(found.verify_seconds, 10.0 + np.arange(2 * MAX_DRAFT + 1))
    assert found.num_prompts == 2
    reached, passed, asked, had = np.array(found.counts)
    assert passed[1] == reached[1] == asked[1] == had[1] > 0
    assert passed[3] == 0 < reached[3]


def test_a_calibration_is_kept_under_its_settings_and_hardware(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    settings = [("this", 1), ("this", 1), ("that", 1)]
    assert [machine.measures(*each) for each in settings] == [True, False, True]
    for name in ("a.home", "a.office"):  # a laptop's name changes with its network
        monkeypatch.setattr("platform.node", lambda name=name: name)
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert not machine.measures("this", 1)

    def device_info(device: Any) -> dict[str, str | int]:
        return {"device_name": "another GPU" if device == "a GPU" else "another CPU"}

    changes: list[tuple[str, Any]] = [
        ("platform.machine", lambda: "another architecture"),
        ("speculative_t5.cpu.libraries.num_threads", lambda: 1000),
        ("mlx.core.device_info", device_info),
        ("mlx.core.default_device", lambda: "a GPU"),
    ]
    for name, value in changes:
        monkeypatch.setattr(name, value)
        assert machine.measures("this", 1), name
    assert len(list(cache.iterdir())) == 2 + len(changes)


def test_a_damaged_file_is_measured_again(cache: Path) -> None:
    machine = Machine()
    first = calibrate(machine, 2)
    (path,) = cache.iterdir()
    whole = json.loads(path.read_text())
    costs = [1.0], [math.nan] * (MAX_DRAFT + 1)
    short, odd = (json.dumps(whole | {"draft_seconds": each}) for each in costs)
    for content in ("", "[]", "{}", '{"counts": 3}', "\xff", short, odd):
        path.write_text(content, encoding="latin-1")
        assert machine.measures(), content
        assert calibrate(machine, 2) == first and json.loads(path.read_text())["counts"]


def test_calibration_works_without_a_writable_cache(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    assert isinstance(calibrate(Machine(), 2), Calibration)
    assert cache.read_text() == "in the way"


def test_a_slow_machine_is_measured_once_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    machine = Machine()
    calibrate(machine, 2)
    assert machine.runs <= 8


PROMPTS = [[10, 1], [5, 6, 7, 1], [3, 1], [12, 13, 1]]


def make_decoder(**options: Any) -> SpeculativeDecoder:
    pair = tiny_pair("t5", vocab_size=20, layers=2, seed=3)
    return SpeculativeDecoder(*pair, num_draft="auto", **options)


def test_auto_keeps_greedy_outputs_and_calibrates_for_the_batch_size(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = draft_length.measure  # costs that this machine's load cannot change
    monkeypatch.setattr(draft_length, "measure", lambda _, count: measure(Machine(), count))
    auto = make_decoder()
    plain = auto.generate_batch(PROMPTS, max_tokens=40, speculative=False)
    assert not cache.exists(), "there is nothing to calibrate"
    single = [auto.generate(prompt, max_tokens=40) for prompt in PROMPTS]
    assert len(list(cache.iterdir())) == 1
    batch = auto.generate_batch(PROMPTS, max_tokens=40)
    assert len(list(cache.iterdir())) == 2
    for outputs in (single, batch):
        assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    assert len({n for o in single for n in o.stats.num_draft}) > 1


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_auto_repeats_itself(
    cache: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After other prompts, and in a later process, which finds the calibration."""
    for name in ("BUDGET", "SETTLING"):
        monkeypatch.setattr(draft_length, name, 0)
    decoding: dict[str, Any] = {"lookup": True} if temperature else {"delta": 0.5}
    one = make_decoder(**decoding)
    options: dict[str, Any] = {"max_tokens": 40, "seed": 5, "temperature": temperature}
    first = one.generate(PROMPTS[0], **options)
    for prompt in PROMPTS[1:]:
        one.generate(prompt, **options)
    files = list(cache.iterdir())
    for again in (one, make_decoder(**decoding)):
        out = again.generate(PROMPTS[0], **options)
        assert (out.tokens, out.stats.num_draft) == (first.tokens, first.stats.num_draft)
        chunks = again.stream(PROMPTS[0], **options)
        assert [t for chunk in chunks for t in chunk.tokens] == first.tokens
    assert list(cache.iterdir()) == files
