"""Calibration: measured in a rehearsal, kept on disk, and measured again if lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.calibration import GRID, SAMPLES, cache_folder, calibrate, hardware
from speculative_t5.decoding.results import Round
from speculative_t5.decoding.schedule import MAX_DRAFT, Calibration, Outcome, Schedule

import numpy as np
import pytest
from conftest import tiny_draft, tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


SHORT = json.dumps(
    {"draft_seconds": [1.0], "verify_seconds": [1.0], "counts": [[1.0]], "num_prompts": 1}
)
NAN = json.dumps(
    {
        "draft_seconds": [float("nan")] * (MAX_DRAFT + 1),
        "verify_seconds": [1.0] * (2 * MAX_DRAFT + 1),
        "counts": [[1.0] * (MAX_DRAFT + 1)] * 4,
        "num_prompts": 1,
    }
)


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


def test_costs_are_measured() -> None:
    found = calibrate(Machine(), 2)
    k = np.arange(1, MAX_DRAFT + 1)
    np.testing.assert_allclose(found.draft_seconds[1:], 0.5 + 0.1 * k)
    assert found.draft_seconds[0] == 0
    np.testing.assert_allclose(found.verify_seconds, 10.0 + np.arange(2 * MAX_DRAFT + 1))
    assert found.num_prompts == 2
    reached, passed, asked, had = np.array(found.counts)
    assert passed[1] == reached[1] == asked[1] == had[1] > 0
    assert passed[3] == 0 < reached[3]


def test_rehearsals_of_one_round_are_enough() -> None:
    found = calibrate(Machine(rounds=1, rows=1), 2)
    np.testing.assert_allclose(found.verify_seconds, 10.0 + np.arange(2 * MAX_DRAFT + 1))
    assert found.draft_seconds[1] > 9, "the encoder is part of every draft"


def test_a_calibration_is_kept_under_its_settings(cache: Path) -> None:
    machine = Machine()
    first = calibrate(machine, 2, "this", 1)
    runs = machine.runs
    assert calibrate(machine, 2, "this", 1) == first
    assert machine.runs == runs
    calibrate(machine, 2, "that", 1)
    assert machine.runs > runs
    assert len(list(cache.iterdir())) == 2


def test_a_machine_is_identified_by_its_hardware_not_its_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    calibrate(machine, 2)
    runs = machine.runs
    for name in ("a.home", "a.office"):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        calibrate(machine, 2)
    assert machine.runs == runs

    def device_info(device: Any) -> dict[str, str | int]:
        return {"device_name": "another GPU" if device == "a GPU" else "another CPU"}

    changes: list[tuple[str, Any]] = [
        ("platform.machine", lambda: "another architecture"),
        ("speculative_t5.device.num_threads", lambda: 1000),
        ("mlx.core.device_info", device_info),
        ("mlx.core.default_device", lambda: "a GPU"),
    ]
    for count, (name, value) in enumerate(changes, start=2):
        monkeypatch.setattr(name, value)
        calibrate(machine, 2)
        assert len(list(cache.iterdir())) == count, name


def test_a_machine_has_a_name_for_its_processor() -> None:
    assert all(hardware())
    assert hardware() == hardware()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"counts": 3}', "\xff", SHORT, NAN])
def test_a_damaged_file_is_measured_again(cache: Path, content: str) -> None:
    machine = Machine()
    first = calibrate(machine, 2)
    (path,) = cache.iterdir()
    path.write_text(content, encoding="latin-1")
    runs = machine.runs
    assert calibrate(machine, 2) == first
    assert machine.runs > runs
    assert json.loads(path.read_text())["counts"]


def test_calibration_works_without_a_writable_cache(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    assert isinstance(calibrate(Machine(), 2), Calibration)
    assert cache.read_text() == "in the way"


def engine(**options: Any) -> SpeculativeDecoder:
    target = tiny_model(vocab_size=20, layers=2, seed=3)
    return SpeculativeDecoder(target, tiny_draft(target), num_draft="auto", **options)


def test_auto_keeps_greedy_outputs_and_varies_the_length() -> None:
    auto = engine()
    lengths = set()
    for prompt in ([10, 1], [5, 6, 7, 1], [3, 1], [12, 13, 1]):
        out = auto.generate(prompt, max_tokens=40)
        assert out.tokens == auto.generate(prompt, max_tokens=40, speculative=False).tokens
        lengths |= set(out.stats.num_draft)
    assert len(lengths) > 1


def test_lenient_outputs_repeat_themselves(cache: Path) -> None:
    """With delta even greedy outputs depend on the draft lengths."""
    lenient = engine(delta=0.5)
    first = lenient.generate([10, 1], max_tokens=40)
    for prompt in ([5, 6, 7, 1], [3, 1], [12, 13, 1]):
        lenient.generate(prompt, max_tokens=40)
    assert lenient.generate([10, 1], max_tokens=40).stats.num_draft == first.stats.num_draft


@pytest.mark.parametrize("lookup", [False, True])
def test_auto_repeats_itself_at_any_temperature(cache: Path, lookup: bool) -> None:
    """After other prompts, and in a later process, which finds the calibration."""
    one = engine(lookup=lookup)
    options = {"temperature": 2.0, "max_tokens": 40, "seed": 5}
    first = one.generate([10, 1], **options)
    one.generate([5, 6, 7, 1], **options)
    files = list(cache.iterdir())
    for again in (one, engine(lookup=lookup)):
        out = again.generate([10, 1], **options)
        assert (out.tokens, out.stats.num_draft) == (first.tokens, first.stats.num_draft)
        chunks = again.stream([10, 1], **options)
        assert [t for chunk in chunks for t in chunk.tokens] == first.tokens
    assert list(cache.iterdir()) == files


def test_batches_calibrate_for_their_size(cache: Path) -> None:
    auto = engine()
    prompts = [[10, 1], [5, 6, 7, 1], [3, 1], [12, 13, 1]]
    batch = auto.generate_batch(prompts, max_tokens=40)
    assert len(list(cache.iterdir())) == 1
    single = [auto.generate(p, max_tokens=40) for p in prompts]
    assert [o.tokens for o in batch] == [o.tokens for o in single]
    assert len(list(cache.iterdir())) == 2


def test_without_a_draft_there_is_nothing_to_calibrate(cache: Path) -> None:
    out = SpeculativeDecoder(tiny_model(), num_draft="auto").generate([3, 1], max_tokens=5)
    assert set(out.stats.num_draft) == {0}
    assert not cache.exists()


def test_a_slow_machine_is_measured_once_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    machine = Machine(rounds=5)
    calibrate(machine, 2)
    assert machine.runs <= 8


def test_the_grid_covers_the_lengths_of_schedules() -> None:
    assert GRID[0] == 0 and GRID[-1] == MAX_DRAFT and SAMPLES >= 4
