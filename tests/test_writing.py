"""Writing model folders: whole or not at all, and nothing else is replaced."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints.conversion import Observer, convert

import pytest
from checkpoints import refused
from conftest import REPOSITORY
from families import write_family


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_family(folder, "t5_v1_1")
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "source"))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> bytes:
    return (folder / "weights.npz").read_bytes()


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_interrupted_run_keeps_the_old_folder_and_leaves_nothing_else(
    source: Path, tmp_path: Path, failure: BaseException
) -> None:
    convert(str(source), tmp_path / "out")
    before = contents(tmp_path / "out")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    for output in (tmp_path / "out", tmp_path / "some" / "where" / "new"):
        with pytest.raises(type(failure)):
            convert(str(source), output, dtype="float16", force=True, observer=Observer(interrupt))
        assert left(tmp_path) == ["out", "source"]
    assert contents(tmp_path / "out") == before


KILLED = """
import os, signal, sys
from pathlib import Path
from speculative_t5.checkpoints.conversion import Observer, convert

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "swap":
    rename = os.rename
    os.rename = lambda a, b: die() if Path(a).name == "new" else rename(a, b)
observer = Observer(die if sys.argv[3] == "half" else print)
convert(sys.argv[1], Path(sys.argv[2]), force=True, observer=observer)
"""


@pytest.mark.parametrize("when", ["half", "swap"])
def test_the_remains_of_a_killed_run_are_cleared_away_by_the_next(
    source: Path, tmp_path: Path, when: str
) -> None:
    convert(str(source), tmp_path / "out")
    before = contents(tmp_path / "out")
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), when]
    killed = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert ".out.partial" in left(tmp_path)
    seen: list[bytes] = []
    observer = Observer(lambda *_: seen.append(contents(tmp_path / "out")))
    convert(str(source), tmp_path / "out", force=True, observer=observer)
    assert seen[0] == before, "whole all the time, or brought back"
    assert left(tmp_path) == ["out", "source"]
    assert load(tmp_path / "out")


def test_two_conversions_to_one_folder_are_refused(source: Path, tmp_path: Path) -> None:
    messages: list[str] = []

    def another(done: int, total: int) -> None:
        if not messages:
            with pytest.raises(OSError, match="another conversion is at work") as caught:
                convert(str(source), tmp_path / "out")
            messages.append(str(caught.value))

    convert(str(source), tmp_path / "out", observer=Observer(another))
    assert messages and left(tmp_path) == ["out", "source"]


def test_a_lack_of_space_is_reported_before_reading(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    observer = Observer(lambda *_: pytest.fail("something was read"))
    with pytest.raises(OSError, match="No space left on device: it takes 0.00 GB") as caught:
        convert(str(source), tmp_path / "out", observer=observer)
    assert caught.value.errno == errno.ENOSPC and left(tmp_path) == ["source"]


def test_a_failed_swap_brings_the_old_folder_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(convert(str(source), tmp_path / "out"))
    rename, calls = os.rename, iter([False, True, False])

    def fail_second(a: Path, b: Path) -> None:
        if next(calls):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "out", dtype="float16", force=True)
    assert left(tmp_path) == ["out", "source"]
    assert contents(tmp_path / "out") == before


def test_an_existing_model_is_replaced_only_when_forced(source: Path, tmp_path: Path) -> None:
    before = contents(convert(str(source), tmp_path / "out"))
    with refused("out exists: use --force to replace it, or --output to"):
        convert(str(source), tmp_path / "out", dtype="float16")
    assert contents(tmp_path / "out") == before
    convert(str(source), tmp_path / "out", dtype="float16", force=True)
    assert len(contents(tmp_path / "out")) < 0.6 * len(before)


def test_nothing_but_a_model_folder_is_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("words")
    folder = convert(str(source), tmp_path / "out")
    inner = Path(shutil.copytree(source, folder / "inner"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for model, output, message in (
        (source, source, "is or holds the checkpoint itself"),
        (source, other, "other exists and is not a converted model"),
        (source, tmp_path / "thesis", "thesis exists and is not a converted model"),
        (source, folder, "also holds inner"),
        (inner, folder, "is or holds the checkpoint"),
        (source, Path("."), "is the current folder: choose another --output"),
    ):
        before = left(output)
        with refused(message):
            convert(str(model), output, force=True)
        assert left(output) == before
    assert left(inner) == left(source)


def test_a_link_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    convert(str(source), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "disk" / "model")


SLOW = """
import sys, time
from speculative_t5.checkpoints import conversion
from speculative_t5.cli import convert_main
checked = conversion._checked
conversion._checked = lambda tensor: (time.sleep(0.03) or item for item in checked(tensor))
convert_main()
"""


def interrupted(source: Path, number: int, handler: Any) -> subprocess.Popen[bytes]:
    """Start a conversion to out, beside the source, and send it a signal on its way."""
    output = source.parent / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "--model", str(source), "--output", str(output)],
        cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, handler),
    )  # fmt: skip
    while not (source.parent / ".out.partial" / "new" / "weights.npz").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing_behind(source: Path, tmp_path: Path, number: int) -> None:
    process = interrupted(source, number, signal.SIG_DFL)
    assert process.communicate(timeout=30)[1] in (b"", b"error: interrupted\n")
    assert process.returncode == 128 + number
    assert left(tmp_path) == ["source"]


def test_nohup_is_respected(source: Path, tmp_path: Path) -> None:
    process = interrupted(source, signal.SIGHUP, signal.SIG_IGN)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 0
    assert left(tmp_path) == ["out", "source"]
