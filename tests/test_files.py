"""Files written whole or not at all, and the pieces kept beside them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5.cli.document import PartialFile
from speculative_t5.files import replacing, write_whole

import pytest
from conftest import REPOSITORY
from messages import check_message

HEADER = {"text": "a1", "model": "b2"}
PIECES = [{"piece": i, "output": f"\u2603 {i}", "reason": None} for i in range(3)]


def entered(path: Path, header: Any = HEADER, *, resume: bool = False, force: bool = False) -> Any:
    return PartialFile(str(path), header, resume=resume, force=force)


def leave(path: Path, pieces: Any = PIECES) -> Path:
    """Make a run that stops after some pieces; return its partial file."""
    with pytest.raises(KeyboardInterrupt), entered(path, force=True) as partial:
        for piece in pieces:
            partial.append(piece)
        raise KeyboardInterrupt
    return partial.path  # type: ignore[no-any-return]


def test_processes_that_write_a_file_at_once_do_not_mix(tmp_path: Path) -> None:
    """Calibrations of processes that start together do, for example."""
    path = tmp_path / "out"
    with replacing(path) as ours:
        ours.write_bytes(b"ours")
        other = (
            f"from speculative_t5.files import write_whole; write_whole({str(path)!r}, b'theirs')"
        )
        subprocess.run([sys.executable, "-c", other], check=True, cwd=REPOSITORY)
        assert path.read_bytes() == b"theirs" and ours.read_bytes() == b"ours"
    assert path.read_bytes() == b"ours" and list(tmp_path.iterdir()) == [path]


def test_pieces_are_kept_until_the_run_is_done(tmp_path: Path) -> None:
    assert leave(tmp_path / "out").name == "out.partial.jsonl"
    with entered(tmp_path / "out", resume=True) as partial:
        assert list(partial.earlier.values()) == PIECES
        partial.append({**PIECES[0], "piece": 7})
    assert not list(tmp_path.iterdir())
    leave(tmp_path / "out", [])
    assert not list(tmp_path.iterdir()), "nothing was done"


def test_torn_lines_are_cut_off(tmp_path: Path) -> None:
    path = leave(tmp_path / "out")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        with pytest.raises(KeyboardInterrupt), entered(tmp_path / "out", resume=True) as partial:
            assert len(partial.earlier) == max(lines - 1, 0)
            partial.append({"piece": 9})  # shorter than what is torn
            kept = path.read_bytes()
            raise KeyboardInterrupt
        assert kept.endswith(b"\n") and kept.count(b"\n") == max(lines, 1) + 1


def test_nothing_stays_if_the_first_line_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"), entered(tmp_path / "out"):
            pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("header", "more", "options", "found"),
    [
        (HEADER, b"", {}, "holds the pieces of an earlier run"),
        ({**HEADER, "text": "c3"}, b"", {"resume": True}, "another text"),
        ({**HEADER, "model": "c3"}, b"", {"resume": True}, "another model"),
        (HEADER, b"no piece\n", {"resume": True}, "a line that is not a piece"),
        (HEADER, b'{"piece": "1"}\n', {"resume": True}, "a line that is not a piece"),
    ],
)
def test_pieces_of_other_runs_are_left_alone(
    tmp_path: Path, header: Any, more: bytes, options: Any, found: str
) -> None:
    path = leave(tmp_path / "out")
    path.write_bytes(path.read_bytes() + more)
    before = path.read_bytes()
    with pytest.raises(ValueError) as raised, entered(tmp_path / "out", header, **options):
        pass
    check_message(str(raised.value), found)
    assert path.read_bytes() == before
    with entered(tmp_path / "out", header, force=True) as partial:
        assert partial.earlier == {}


@pytest.mark.parametrize("notes", [b"my notes", b'{"text": "a1"} and more', b"{", b'{"text": "c'])
@pytest.mark.parametrize("options", [{}, {"resume": True}, {"resume": True, "force": True}])
def test_what_is_of_no_run_is_left_alone(tmp_path: Path, notes: bytes, options: Any) -> None:
    path = tmp_path / "out.partial.jsonl"
    path.write_bytes(notes)
    if notes == b"{":  # the first line of any run may be torn there
        with entered(tmp_path / "out", **options):
            return
    with pytest.raises(ValueError) as raised, entered(tmp_path / "out", **options):
        pass
    check_message(str(raised.value), "holds something other than pieces")
    assert path.read_bytes() == notes
    with entered(tmp_path / "out", force=True):
        assert path.read_bytes().endswith(b"}\n")


def test_only_one_run_writes(tmp_path: Path) -> None:
    with entered(tmp_path / "out") as first:
        first.append(PIECES[0])
        with pytest.raises(ValueError) as raised, entered(tmp_path / "out", force=True):
            pass
        check_message(str(raised.value), "another process is writing")
        assert first.path.read_bytes().count(b"\n") == 2


def test_a_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    path.write_bytes(b"before")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(str(link), b"a\r\n")
    assert link.is_symlink() and path.read_bytes() == b"a\r\n"
    assert path.stat().st_mode & 0o777 == 0o640

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(str(path), b"b")
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"a\r\n" and {p.name for p in tmp_path.iterdir()} == {"out", "link"}
