"""Writing model folders: whole or not at all, and nothing else is replaced."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from speculative_t5 import load
from speculative_t5.checkpoints.conversion import convert

import pytest
from checkpoints import refused
from conftest import REPOSITORY
from families import write_family

OUT = Path("out")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and the model that it was converted to."""
    root = tmp_path_factory.mktemp("originals")
    write_family(root / "source", "t5_v1_1")
    convert(str(root / "source"), root / "out")
    return root


@pytest.fixture(autouse=True)
def here(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def left(folder: str = ".") -> list[str]:
    return sorted(os.listdir(folder))


def contents() -> bytes:
    return (OUT / "weights.npz").read_bytes()


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_interrupted_run_leaves_nothing_behind(failure: BaseException) -> None:
    before = contents()

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    for output in (OUT, Path("some", "where", "new")):
        with pytest.raises(type(failure)):
            convert("source", output, dtype="float16", force=True, progress=interrupt)
        assert left() == ["out", "source"] and contents() == before


KILLED = """
import os, signal, sys
from pathlib import Path
from speculative_t5.checkpoints import convert
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "swap":
    rename = os.rename
    os.rename = lambda a, b: die() if Path(a).name == "new" else rename(a, b)
progress = die if sys.argv[1] == "half" else print
convert("source", Path("out"), force=True, progress=progress)
"""


@pytest.mark.parametrize("when", ["half", "swap"])
def test_the_remains_of_a_killed_run_are_cleared_away_by_the_next(when: str) -> None:
    before = contents()
    killed = subprocess.run([sys.executable, "-c", KILLED, when], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL and ".out.partial" in left()
    seen: list[bytes] = []
    convert("source", OUT, force=True, progress=lambda *_: seen.append(contents()))
    assert seen[0] == before, "whole all the time, or brought back"
    assert left() == ["out", "source"] and load(OUT)


def test_two_conversions_to_one_folder_are_refused() -> None:
    with pytest.raises(OSError, match="another conversion is at work"):
        convert("source", OUT, progress=lambda *_: convert("source", OUT, force=True), force=True)
    assert left() == ["out", "source"]


def test_a_lack_of_space_is_reported_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    seen: list[tuple[int, int]] = []
    with pytest.raises(OSError, match="No space left on device: it takes 0.00 GB") as caught:
        convert("source", Path("new"), progress=lambda *counts: seen.append(counts))
    assert not seen, "nothing was read"
    assert caught.value.errno == errno.ENOSPC and left() == ["out", "source"]


def test_a_failed_swap_brings_the_old_folder_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename, calls = contents(), os.rename, iter([False, True, False])

    def fail_second(a: Path, b: Path) -> None:
        if next(calls):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(KeyboardInterrupt):
        convert("source", OUT, dtype="float16", force=True)
    assert left() == ["out", "source"] and contents() == before


def test_an_existing_model_is_replaced_only_when_forced() -> None:
    before = contents()
    with refused("out exists: use --force to replace it, or --output to"):
        convert("source", OUT, dtype="float16")
    assert contents() == before
    convert("source", OUT, dtype="float16", force=True)
    assert len(contents()) < 0.6 * len(before)
    Path("disk").mkdir()
    Path("link").symlink_to("disk/model")
    convert("source", Path("link"))
    assert Path("link").is_symlink() and load(Path("disk/model")), "a link is followed"


def test_nothing_but_a_model_folder_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("source", "thesis")
    shutil.copytree("source", "out/inner")
    for model, output, message in (
        ("source", "source", "is or holds the checkpoint itself"),
        ("source", "thesis", "thesis exists and is not a converted model"),
        ("source", "out", "also holds inner"),
        ("out/inner", "out", "is or holds the checkpoint"),
    ):
        before = left(output)
        with refused(message):
            convert(model, Path(output), force=True)
        assert left(output) == before
    monkeypatch.chdir("thesis")
    with refused("is the current folder: choose another --output"):
        convert("../source", Path("."))
