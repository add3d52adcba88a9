"""The command `distill`: its account, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints import load, save_draft
from speculative_t5.cli.distill import Stages
from speculative_t5.distill import DistillOptions, Judgement, judgement, new_draft
from speculative_t5.distill import run as stages_of_run

import pytest
from commands import Call, Done, Printed, caller
from conftest import REPOSITORY
from messages import check_message

SENTENCES = (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()[:40]
SHORT = ("--steps", "4", "--batch-tokens", "200", "--max-tokens", "6", "--dtype", "float32")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Measure little."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MEASURED_TURNS": 1, "MAX_PROMPTS": 2, "MAX_DRAFTED": 2}.items():
            patch.setattr(judgement, name, value)
        yield


@pytest.fixture(scope="module")
def here(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of `place` and a file of prompts, some of which cannot be used."""
    here = tmp_path_factory.mktemp("distill")
    (here / "weights").mkdir()
    for name in ("weights/target", "weights/draft", "weights/other", "bert"):
        (here / name).symlink_to(place / name)
    unusable = [*SENTENCES[:3], "", "many words " * 300]
    (here / "prompts.txt").write_text("\n".join([*SENTENCES, *unusable]) + "\n")
    return here


@pytest.fixture(autouse=True)
def left_as_it_was(here: Path, finished: Finished) -> Iterator[None]:
    """Remove what a test has written, as others share the folder."""
    before = {*here.rglob("*")}
    yield
    for path in {*here.rglob("*")} - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def distill(call: Call, *more: str, model: str = "target", data: str = "prompts.txt") -> Done:
    return call("distill", "--model", model, "--data", data, *more)


@dataclass(frozen=True)
class Finished:
    """A run that was interrupted, and calls after it."""

    interrupted: Done
    left: set[str]  # the names in weights/ then
    other: Done  # with another option
    resumed: Done
    again: Done  # once the draft was there

    @property
    def usage(self) -> str:
        """The command that the run shows at its end."""
        return self.resumed.out.splitlines()[-1]


@pytest.fixture(scope="module")
def finished(here: Path, short: None) -> Finished:
    def interrupt(self: object, now: Any) -> None:
        if (now.stage, now.done) == ("training", 3):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        call = caller(here, patch, Printed(patch))
        patch.setattr(Judgement, "pays", True)
        with patch.context() as stopping:
            stopping.setattr(stages_of_run, "SAVE_EVERY", 2)
            stopping.setattr(Stages, "show", interrupt)
            interrupted = distill(call, *SHORT)
        left = {path.name for path in (here / "weights").iterdir()}
        other = distill(call, *SHORT, "--prefix", "fix: ")
        resumed, again = distill(call, *SHORT), distill(call, *SHORT)
        return Finished(interrupted, left, other, resumed, again)


def test_an_interrupted_run_says_where_its_progress_is(finished: Finished) -> None:
    assert finished.interrupted.code == 130
    assert finished.interrupted.err[-2:] == [
        "progress is kept in weights/target-draft.distill; run the same command again to resume",
        "error: interrupted",
    ]
    assert "target-draft.distill" in finished.left and "target-draft" not in finished.left


def test_a_run_with_other_options_does_not_go_on_with_what_is_left(finished: Finished) -> None:
    assert finished.other.code == 2 and "has --prefix 'fix: ':" in finished.other.err[-1]


def test_a_resumed_run_ends_and_leaves_the_draft_alone(here: Path, finished: Finished) -> None:
    assert finished.resumed.code == 0, finished.resumed.err
    folder = here / "weights" / "target-draft"
    assert folder.exists() and not folder.with_name("target-draft.distill").exists()
    step = r"training: step 4, loss [\d.]+, [\d.]+ tokens per"
    assert any(re.match(step, line) for line in finished.resumed.err)


def test_every_line_of_the_data_is_accounted_for(finished: Finished) -> None:
    account, *figures, where, usage = finished.resumed.out.splitlines()
    assert account == (
        "read 45 lines: 40 labelled (2 of them held out), 5 skipped (3 repeated, 1 empty, "
        "1 too long)"
    )
    assert any("held-out output" in line for line in figures)


def test_a_folder_says_what_its_draft_was_made_of(here: Path, finished: Finished) -> None:
    folder = here / "weights" / "target-draft"
    assert json.loads((folder / "config.json").read_text())["target"] == "target"
    options = json.loads((folder / "judgement.json").read_text())["made_by"]
    made = {"steps": 4, "labels": 38, "held_out": 2, "batch_tokens": 200, "field": "prompt"}
    assert options.items() >= made.items() and options["dtype"] == "float32"


def test_the_command_that_is_shown_uses_the_draft(call: Call, finished: Finished) -> None:
    where = finished.resumed.out.splitlines()[-2]
    assert where.startswith("weights/target-draft: ") and where.endswith(" MB; to use it:")
    named = "  python -m speculative_t5 --model target --draft-model target-draft --num-draft "
    assert finished.usage.startswith(named)
    asked = ("--prompt", SENTENCES[0], "--json", "--dtype", "float32")
    used = call(*finished.usage.split()[3:], *asked)
    plain = call("--model", "target", *asked, "--regular-decode")
    assert used.code == 0 and used.records[0]["tokens"] == plain.records[0]["tokens"]


def test_a_draft_that_is_there_is_not_replaced(finished: Finished) -> None:
    assert finished.again.code == 2 and "weights/target-draft exists" in finished.again.err[-1]


def test_labelling_ends_early_and_a_draft_that_does_not_pay_comes_without_a_command(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Judgement, "pays", False)
    monkeypatch.setattr(stages_of_run, "LABEL_CHUNK", 8)
    done = distill(call, "--steps", "1", "--batch-tokens", "90", "--output", "out")
    assert re.fullmatch(r"out: \d+\.\d MB", done.out.splitlines()[-1])
    assert done.out.startswith(
        "read 45 lines: 10 labelled (2 of them held out), 30 not needed, 5 skipped (3 repeated"
    )


def test_targets_in_folders_of_one_name_get_outputs_of_their_own(call: Call, here: Path) -> None:
    for run in ("runA", "runB"):
        target = f"{run}/checkpoint-500"
        shutil.copytree(here / "weights" / "target", here / target)
        done = distill(call, "--dry-run", model=target)
        assert done.out.endswith(f"\noutput: weights/{run}-checkpoint-500-draft\n")


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """A file of JSON Lines, every second with a completion."""
    data = tmp_path / "pairs.jsonl"
    rows = [{"text": s, "completion": s} if i % 2 else {"text": s} for i, s in enumerate(SENTENCES)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(data)


DRY = ("--layers", "2", "--output", "new", "--dry-run")


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    call: Call, here: Path, pairs: str
) -> None:
    before = {*here.rglob("*")}
    done = distill(call, "--prompt-field", "text", *DRY, data=pairs)
    assert done.code == 0 and {*here.rglob("*")} == before
    lines = done.out.splitlines()
    assert lines[0] == "read 40 lines: 40 usable (2 of them held out), 0 skipped"
    given, wanted = map(int, re.findall(r"\d+", lines[1]))
    assert "have completions" in lines[1] and given + wanted == 40 and given > 10
    assert lines[2:] == [
        "the draft: 2 layers of width 24, 0.0 M parameters of its own, 0.0 MB",
        "training: 2,000 steps of 2,048 tokens, loss ce",
        "output: new",
    ]


def test_the_field_of_prompts_has_a_short_name_and_has_to_be_there(call: Call, pairs: str) -> None:
    assert distill(call, "--field", "text", *DRY, data=pairs).code == 0
    wrong = distill(call, *DRY, data=pairs)
    wrong.check_error(f"{pairs}, line 1: no field 'prompt' (found: 'text')")


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
def inputs(here: Path) -> Path:
    """The folder of tests with things that a draft cannot be made of."""
    (here / "empty.txt").write_text("")
    (here / "long.txt").write_text("".join(f"{'many words ' * 300}{i}\n" for i in range(3)))
    target, _ = load(here / "weights" / "target")
    save_draft(here / "made", new_draft(target, DistillOptions()), "target")  # type: ignore[arg-type]
    return here


def test_bad_input_is_one_line_and_leaves_nothing(inputs: Path, call: Call) -> None:
    before = {*inputs.rglob("*")}
    for arguments, found in BAD.items():
        given = {"--model": "target", "--data": "prompts.txt", "--output": "new"}
        given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
        done = call("distill", *(word for pair in given.items() for word in pair))
        assert done.code == 2, done.err
        (line,) = done.err
        assert found in line and done.out == ""
        check_message(line.removeprefix("error: "))
    cache = inputs / "cache"  # matplotlib's
    left = {path for path in inputs.rglob("*") if cache not in (path, *path.parents)} - before
    assert not left
