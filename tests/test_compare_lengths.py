"""Comparing "auto" with fixed lengths: processes of their own, on a tiny pair, and the ratios."""

import json
import time
from pathlib import Path
from typing import Any

import compare_lengths
import pytest
from compare_lengths import Measured, against_best, read_numbers
from programs.length_worker import load_way

pytestmark = pytest.mark.cpu  # outputs do not depend on what is drafted there
PROMPTS = ["He go home.", "She have a apple.", "I is late.", "It are good."]
SPEC = {"draft": None, "max_tokens": 12, "temperature": 0.0, "busy": False}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{line}\n" for line in PROMPTS))
    return path


def compare(prompts: Path, model: Path, **changes: Any) -> None:
    options: dict[str, Any] = {
        "draft": str(model.with_name("draft")), "num_draft": "0,2", "turns": 2, "count": 2,
        "before": 1, "later": 2, "max_tokens": 12, "temperature": 0.0, "also": None, "busy": False,
        "as_json": True,
    }  # fmt: skip
    compare_lengths.compare_lengths(prompts, str(model), **(options | changes))


def test_each_way_is_measured_in_processes_of_its_own(
    prompts: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(prompts, place / "weights" / "target")
    found = json.loads(capsys.readouterr().out)
    for when in ("first", "later"):
        ways = found[when]["ways"]
        assert [*ways] == ["0", "2", "auto"]
        assert all(min(way["tokens_per_second"]) > 0 for way in ways.values())
        assert all(len(way["tokens_per_processor_second"]) == 2 for way in ways.values())
        assert ways["0"]["tokens_per_pass"] == 1 < ways["2"]["tokens_per_pass"] <= 3
        assert [len(turn) for turn in ways["auto"]["rounds"]] == [2, 2]
        for ratios in found[when]["of_best_fixed"].values():
            assert len(ratios) == 2 and min(ratios) > 0
    # Each turn begins with nothing learned.
    begun = [turn[0][0][:2] for turn in found["first"]["ways"]["auto"]["rounds"]]
    assert begun[0] == begun[1]


def test_a_way_notes_what_each_round_drafted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPEC | {"model": str(place / "weights" / "target")}
    answer, _ = load_way(spec | {"num_draft": 2, "draft": str(place / "weights" / "draft")})
    found = answer({"prompt": PROMPTS[0]})
    again = answer({"prompt": PROMPTS[0]})
    assert found["tokens"] == again["tokens"]
    assert len(found["rounds"]) == len(again["rounds"]) > 1
    for by_model, wanted, drafted, accepted, milliseconds, _ in found["rounds"][:-1]:
        assert by_model == wanted == drafted == 2 >= accepted and milliseconds > 0
    assert found["emitted"] >= sum(1 + accepted for *_, accepted, _, _ in found["rounds"][:-1])
    plain, _ = load_way(spec | {"num_draft": 0})
    found = plain({"prompt": PROMPTS[0]})
    assert found["tokens"] == again["tokens"]
    assert {(by_model, wanted) for by_model, wanted, *_ in found["rounds"]} == {(0, 0)}


def test_on_a_busy_machine_processor_time_is_taken_for_time(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # which is put back
    model = str(place / "weights" / "target")
    answer, _ = load_way(SPEC | {"model": model, "num_draft": 0, "busy": True})
    assert time.perf_counter is time.process_time
    found = answer({"prompt": PROMPTS[0]})
    assert 0 < found["seconds"] <= found["processor"]


def test_a_table_says_what_auto_reached_and_drafted(
    prompts: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"also": ["other=" + str(Path(compare_lengths.__file__).parents[2])]}
    compare(prompts, place / "weights" / "target", as_json=False, num_draft="2", **other)
    title, _, header, fixed, auto, other_auto, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith("2 prompts after 1, 2 turns") and "after 2 more" in header
    assert [line.split("  ")[0] for line in (fixed, auto, other_auto)] == [
        "2",
        "auto",
        "auto other",
    ]
    assert {line.split()[-1] for line in (fixed, auto, other_auto)} == {"0"}  # other outputs
    assert sum(" of the best fixed number, 2 (" in line for line in lines) == 8
    assert sum("drafted later, by the model + by a lookup: " in line for line in lines) == 2


def test_too_few_prompts_and_ways_that_cannot_load_are_named(prompts: Path, place: Path) -> None:
    with pytest.raises(SystemExit, match=r"prompts.txt has 4 prompts, fewer than 24"):
        compare(prompts, place / "weights" / "target", count=20, before=4)
    with pytest.raises(SystemExit, match=r"^error: 0: .*no-model"):
        compare(prompts, place / "weights" / "no-model", draft=None)


def test_other_turns_choose_the_best_fixed_length() -> None:
    turns = [
        {"1": 100.0, "2": 90.0, "auto": 95.0, "auto old": 80.0},
        {"1": 200.0, "2": 400.0, "auto": 190.0, "auto old": 100.0},
        {"1": 100.0, "2": 90.0, "auto": 90.0, "auto old": 50.0},
    ]
    assert against_best(turns) == pytest.approx([95 / 90, 190 / 200, 90 / 90])
    assert against_best(turns, "auto old") == pytest.approx([80 / 90, 100 / 200, 50 / 90])
    assert read_numbers("0-2,5,4-4") == [0, 1, 2, 4, 5]


def test_speeds_are_those_of_whole_turns() -> None:
    answers = [
        {"emitted": 10, "seconds": 1.0, "processor": 0.5, "rounds": [[2, 4, 4, 4, 1.0, True]] * 2},
        {"emitted": 20, "seconds": 2.0, "processor": 1.0, "rounds": [[0, 0, 0, 0, 1.0, True]] * 8},
    ]
    measured = Measured([answers, answers[:1]])
    assert measured.speeds("seconds") == [10, 10] and measured.speeds("processor") == [20, 20]
    assert measured.tokens_per_pass == pytest.approx(40 / 12)
    assert measured.ms_per_pass == pytest.approx((300 + 500) / 2)
    assert measured.drafted() == [
        ("0 + 0", pytest.approx(8 / 12)),
        ("2 + 2", pytest.approx(4 / 12)),
    ]
