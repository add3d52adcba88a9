"""Runs of `distill` go on after a kill, and touch nothing that is not theirs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from distilling import DATA, SHORT, Stop, Watch, go, labels_of, target
from messages import check_message

# Weights are compared byte for byte.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("quick")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "draft"
    go(output)
    return output


# Moments at which a run is killed, one after the other: those before a call of the system, by the
# file that it would write, and those at a report. With the first step that the run had trained.
KILLS = [
    ("replace run.json", 1, None),
    ("replace run.json", 2, None),  # between the stages
    ("train", 50, None),
    ("trained", 3, 1),
    ("replace state.safetensors", 2, 1),  # between the history and the state of step 8
    ("checked", 9, 5),
    ("judging", 3, 9),
    ("rename draft", 2, None),
]
KILLED = """
import os, signal, sys
from pathlib import Path
import speculative_t5
from distilling import Watch, go
kind, at = sys.argv[2], sys.argv[3]
counts = {}
def act(found, value):
    if found == "trained" and counts.setdefault(found, value) == value:
        print(value, flush=True)
    if (found, str(value)) == (kind, at):
        os.kill(os.getpid(), signal.SIGKILL)
def fatal(call):
    whole = getattr(os, call)
    def replaced(old, new):
        name = f"{call} {Path(new).name}"
        counts[name] = counts.get(name, 0) + 1
        act(name, counts[name])
        whole(old, new)
    return replaced
os.replace, os.rename = fatal("replace"), fatal("rename")
go(Path(sys.argv[1]), Watch(act))
"""


def test_a_run_killed_many_times_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    places = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    for kind, at, first in KILLS:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(output), kind, str(at)],
            env=os.environ | {"PYTHONPATH": places}, capture_output=True, check=False, text=True,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout == (f"{first}\n" if first else ""), "it went on"
        assert not output.exists()
    watch = Watch()
    judgement = go(output, watch)
    stored = json.loads((output / "judgement.json").read_text())
    assert stored == json.loads(json.dumps(judgement.to_json()))
    labelled = [judgement.made_by[name] for name in ("held_out", "labels")]
    assert labelled == [len(DATA.valid), len(DATA.train)]
    assert watch.of("trained") == []
    for name in ("weights.npz", "history.json", "config.json"):
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"options": replace(SHORT, learning_rate=0.01)},
            "with --learning-rate 0.003, and this one has --learn",
        ),
        ({"options": replace(SHORT, steps=9)}, "with --steps 14, and this one has --steps 9"),
        (
            {"options": replace(SHORT, steps=None, minutes=1.0)},
            "with --steps 14, and this one has no --steps",
        ),
        ({"data": replace(DATA, digest="f" * 64)}, "started with other data"),
        ({"model": target(seed=19)}, "started with another target"),
        ({"prefix": "correct: "}, "no --prefix, and this one has --prefix 'correct: '"),
    ],
    ids=["learning_rate", "steps", "minutes", "data", "target", "prefix"],
)
def test_a_resumed_run_must_be_the_same(
    changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    labels_of(tmp_path)
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft", **changes)
    check_message(str(caught.value), found)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder around a run that was stopped after it had saved its state."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stop):
        go(folder / "draft", Watch(stop_at_step_9))
    return folder


def stop_at_step_9(kind: str, at: object) -> None:
    if (kind, at) == ("trained", 9):
        raise Stop


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("run.json", b"", "run.json is not JSON: Expecting value"),
        ("run.json", None, "run.json is not JSON: Expecting ',' delimiter"),
        ("run.json", b'{"settings": "8"}', "run.json has '8' as settings"),
        ("state.safetensors", None, "state.safetensors is truncated or damaged"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_and_can_be_deleted(
    name: str, content: bytes | None, found: str, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    """None is for the file without its last bytes."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "draft.distill" / name
    path.write_bytes(path.read_bytes()[:-3] if content is None else content)
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft")
    assert f"{tmp_path / 'draft.distill'}{os.sep}{found}" in str(caught.value)
    check_message(str(caught.value))
    if "delete the folder to start over" in str(caught.value):
        shutil.rmtree(path.parent)
    else:
        assert "delete the file, and run the same command again" in str(caught.value)
        path.unlink()
    go(tmp_path / "draft")
    for file in ("weights.npz", "history.json"):
        assert (tmp_path / "draft" / file).read_bytes() == (whole / file).read_bytes(), file


def test_one_process_at_a_time_works_on_a_draft(tmp_path: Path) -> None:
    def act(kind: str, _: object) -> None:
        if kind == "trained":
            with pytest.raises(ValueError) as caught:
                go(tmp_path / "draft")
            check_message(str(caught.value), "another process is at work in")
            raise Stop

    with pytest.raises(Stop):
        go(tmp_path / "draft", Watch(act))


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "draft.distill"
    folder.mkdir()
    files = {"thesis.txt": "all of it", "lock": "a key", "settings.json.new": "{"}
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft")
    check_message(str(caught.value), "exists and is not the working folder of a run")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_an_output_that_appears_during_the_run_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "draft"

    def act(kind: str, at: object) -> None:
        if (kind, at) == ("judging", 1):
            output.mkdir()
            (output / "weights.npz").write_text("another model")

    with pytest.raises(ValueError) as caught:
        go(output, Watch(act))
    check_message(str(caught.value), f"{output} exists")
    assert [path.read_text() for path in output.iterdir()] == ["another model"]
