"""The command `distill`: its account, and what it refuses."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints import load, save_draft
from speculative_t5.cli.distill import Stages
from speculative_t5.distill import DistillOptions, Judgement, judgement, new_draft
from speculative_t5.distill import run as stages_of_run

import pytest
from commands import Call
from conftest import REPOSITORY
from messages import check_message

SENTENCES = (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()[:40]
SHORT = ("--steps", "4", "--batch-tokens", "200", "--max-tokens", "6", "--dtype", "float32")


@pytest.fixture(autouse=True)
def short(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"MEASURED_TURNS": 1, "MAX_PROMPTS": 2, "MAX_DRAFTED": 2}.items():
        monkeypatch.setattr(judgement, name, value)
    before = {*place.rglob("*")}
    yield
    for path in {*place.rglob("*")} - before:  # other tests share the folder
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*SENTENCES, *SENTENCES[:3], "", "many words " * 300]) + "\n")
    return path


def distill(call: Call, prompts: Path, *more: str, model: str = "target") -> Any:
    return call("distill", "--model", model, "--data", str(prompts), *more)


def test_a_stopped_run_goes_on_and_its_draft_is_judged_drawn_and_used(
    call: Call, place: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: object, now: Any) -> None:
        if (now.stage, now.done) == ("training", 3):
            raise KeyboardInterrupt

    monkeypatch.setattr(Judgement, "pays", True)
    with monkeypatch.context() as patch:
        patch.setattr(stages_of_run, "SAVE_EVERY", 2)
        patch.setattr(Stages, "show", interrupt)
        stopped = distill(call, prompts, *SHORT)
    assert stopped.code == 130 and stopped.err[-2:] == [
        "progress is kept in weights/target-draft.distill; run the same command again to resume",
        "error: interrupted",
    ]
    assert not (place / "weights" / "target-draft").exists()
    other = distill(call, prompts, *SHORT, "--prefix", "fix: ")
    assert other.code == 2 and "has --prefix 'fix: ':" in other.err[-1]
    done = distill(call, prompts, *SHORT)
    assert done.code == 0, done.err
    account, *figures, where, usage = done.out.splitlines()
    assert account == (
        "read 45 lines: 40 labelled (2 of them held out), 5 skipped (3 repeated, 1 empty, "
        "1 too long)"
    )
    assert any("held-out output" in line for line in figures)
    folder = place / "weights" / "target-draft"
    assert not folder.with_name("target-draft.distill").exists()
    assert where.startswith("weights/target-draft: ") and where.endswith(" MB; to use it:")
    named = "  python -m speculative_t5 --model target --draft-model target-draft --num-draft "
    assert usage.startswith(named)
    assert any(re.match(r"training: step 4, loss [\d.]+, [\d.]+ tokens per", x) for x in done.err)
    stored = json.loads((folder / "config.json").read_text())
    assert stored["target"] == "target"
    options = json.loads((folder / "judgement.json").read_text())["made_by"]
    made = {"steps": 4, "labels": 38, "held_out": 2, "batch_tokens": 200, "field": "prompt"}
    assert options.items() >= made.items() and options["dtype"] == "float32"
    asked = ("--prompt", SENTENCES[0], "--json", "--dtype", "float32")
    used = call(*usage.split()[3:], *asked)
    plain = call("--model", "target", *asked, "--regular-decode")
    assert used.code == 0 and used.records[0]["tokens"] == plain.records[0]["tokens"]
    again = distill(call, prompts, *SHORT)
    assert again.code == 2 and "weights/target-draft exists" in again.err[-1]


def test_labelling_ends_early_and_a_draft_that_does_not_pay_comes_without_a_command(
    call: Call, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Judgement, "pays", False)
    monkeypatch.setattr(stages_of_run, "LABEL_CHUNK", 8)
    done = distill(call, prompts, "--steps", "1", "--batch-tokens", "90", "--output", "out")
    assert re.fullmatch(r"out: \d+\.\d MB", done.out.splitlines()[-1])
    assert done.out.startswith(
        "read 45 lines: 10 labelled (2 of them held out), 30 not needed, 5 skipped (3 repeated"
    )


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    call: Call, place: Path, prompts: Path, tmp_path: Path
) -> None:
    for run in ("runA", "runB"):  # whose targets get outputs of their own
        target = f"{run}/checkpoint-500"
        shutil.copytree(place / "weights" / "target", place / target)
        done = distill(call, prompts, "--dry-run", model=target)
        assert done.out.endswith(f"\noutput: weights/{run}-checkpoint-500-draft\n")
    data = tmp_path / "pairs.jsonl"
    rows = [{"text": s, "completion": s} if i % 2 else {"text": s} for i, s in enumerate(SENTENCES)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = {*place.rglob("*")}
    options = ("--layers", "2", "--dry-run")
    done = distill(call, data, "--prompt-field", "text", *options)
    assert done.code == 0 and {*place.rglob("*")} == before
    assert distill(call, data, "--field", "text", *options).out == done.out
    wrong = distill(call, data, *options)
    wrong.check_error(f"{data}, line 1: no field 'prompt' (found: 'text')")
    lines = done.out.splitlines()
    assert lines[0] == "read 40 lines: 40 usable (2 of them held out), 0 skipped"
    given, wanted = map(int, re.findall(r"\d+", lines[1]))
    assert "have completions" in lines[1] and given + wanted == 40 and given > 10
    assert lines[2:4] == [
        "the draft: 2 layers of width 24, 0.0 M parameters of its own, 0.0 MB",
        "training: 2,000 steps of 2,048 tokens, loss ce",
    ]
    assert lines[4:] == ["output: weights/target-draft"]


BAD = {
    ("--steps", "0"): "steps must be an integer of at least 1, got 0",
    ("--minutes", "0"): "minutes must be above 0 and finite, got 0.0",
    ("--steps", "3", "--minutes", "3"): "--steps and --minutes exclude each other",
    ("--layers", "4"): "layers must be at most 3, the target's own decoder layers, got 4",
    ("--d-model", "4000"): "--d-model must be at most 24, the target's own, got 4000",
    ("--draft-vocab", "321"): "--draft-vocab must be from 2 to 320, got 321",
    ("--loss", "mse"): "loss must be one of ce, kl, got 'mse'",
    ("--temperature", "-1"): "temperature must be 0 or at least 1e-05, got -1.0",
    ("--dtype", "int8"): "dtype must be float32",
    ("--output", "weights/draft"): "weights/draft exists: choose another --output",
    ("--data", "absent.txt"): "absent.txt: No such file or directory; check the path",
    ("--data", "empty.txt"): "empty.txt has 0 usable prompts in 0 lines",
    ("--data", "long.txt"): "long.txt has 0 usable prompts in 3 lines (3 too long)",
    ("--model", "absent"): "is named 'absent'",
    ("--model", "bert"): "this is a bert (model_type in config.json)",
    ("--model", "made"): "made is a draft for target, whose encoder it shares",
    ("--start-from", "other"): "other is a whole model, expected a draft that `distill` has made",
    ("--learning-rate", "nan"): "--learning-rate must be above 0 and finite, got nan",
    ("--field", "text"): "is text, whose lines have no fields",
    ("--format", "csv"): "--format must be text or jsonl, got 'csv'",
}


@pytest.fixture
def inputs(place: Path) -> Path:
    """The folder of tests with things that a draft cannot be made of."""
    (place / "empty.txt").write_text("")
    (place / "long.txt").write_text("".join(f"{'many words ' * 300}{i}\n" for i in range(3)))
    target, _ = load(place / "weights" / "target")
    save_draft(place / "made", new_draft(target, DistillOptions()), "target")  # type: ignore[arg-type]
    return place


def test_bad_input_is_one_line_and_leaves_nothing(inputs: Path, call: Call, prompts: Path) -> None:
    before = {*inputs.rglob("*")}
    for arguments, found in BAD.items():
        given = {"--model": "target", "--data": str(prompts), "--output": "new"}
        given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
        done = call("distill", *(word for pair in given.items() for word in pair))
        assert done.code == 2, done.err
        (line,) = done.err
        assert found in line and done.out == ""
        check_message(line.removeprefix("error: "))
    cache = inputs / "cache"  # matplotlib's
    left = {path for path in inputs.rglob("*") if cache not in (path, *path.parents)} - before
    assert not left
