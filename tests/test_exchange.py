"""Files replaced in their place while other programs write to them, and what kills leave."""

import errno
import fcntl
import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speculative_t5 import exchange
from speculative_t5.exchange import check_replaceable, digest, recover, replace_unchanged

import pytest
from checkpoints import refused

OLD, NEW, SAVED, LATER = b"old", b"new", b"saved", b"later"
# Saves a file again and again, as editors do: in its place, or by renaming another one.
WRITER = """
import os, random, sys, time
path, seed, until = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
chance, number = random.Random(seed), 0
while time.monotonic() < until:
    number += 1
    text = f"{seed} {number}".encode()
    if chance.random() < 0.5:
        with open(path, "wb") as file:
            time.sleep(chance.random() * 1e-3)
            file.write(text)
    else:
        open(path + ".new", "wb").write(text)
        os.rename(path + ".new", path)
    time.sleep(chance.random() * 4e-3)
print(number)
"""


def replaced(folder: Path, *, keep: bool = False, over: bool = False, ready: Any = None) -> bool:
    return replace_unchanged(
        folder / "a",
        folder / "a.old",
        NEW,
        OLD,
        keep=keep,
        over=over,
        ready=ready or (lambda: None),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(params=["exchanged", "replaced"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """How files are replaced: with the system's exchange, and where there is none."""
    if request.param == "replaced":
        monkeypatch.setattr(exchange, "_exchange_call", lambda: None)
    elif exchange._exchange_call() is None:
        pytest.skip("this system has no exchange")
    return str(request.param)


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_is_replaced_with_all_that_is_not_its_text(
    tmp_path: Path, way: str, keep: bool
) -> None:
    path = tmp_path / "a"
    path.write_bytes(OLD)
    path.chmod(0o2640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
        path.chmod(0o4640)
    attributes = hasattr(os, "setxattr")
    try:
        if attributes:
            os.setxattr(path, "user.note", b"mine")
    except OSError as error:  # of a disk in memory, say
        assert error.errno == errno.ENOTSUP
        attributes = False
    before = path.stat()
    assert replaced(tmp_path, keep=keep)
    after = path.stat()
    assert contents(tmp_path) == {"a": NEW} | ({"a.old": OLD} if keep else {})
    for found in (after, *([(tmp_path / "a.old").stat()] if keep else [])):
        assert [found.st_mode, found.st_uid, found.st_gid] == [
            before.st_mode,
            before.st_uid,
            before.st_gid,
        ]
    assert not attributes or os.getxattr(path, "user.note") == b"mine"


def test_what_was_saved_before_is_left_alone(tmp_path: Path, way: str) -> None:
    (tmp_path / "a").write_bytes(SAVED)
    assert not replaced(tmp_path, keep=True)
    assert contents(tmp_path) == {"a": SAVED}


def test_another_old_file_is_replaced_only_if_asked(tmp_path: Path, way: str) -> None:
    (tmp_path / "a").write_bytes(OLD)
    (tmp_path / "a.old").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        replaced(tmp_path, keep=True)
    assert contents(tmp_path) == {"a": OLD, "a.old": b"kept"}
    assert replaced(tmp_path, keep=True, over=True)
    assert contents(tmp_path) == {"a": NEW, "a.old": OLD}


@pytest.mark.parametrize("saved", [[SAVED], [SAVED, LATER], [SAVED, LATER, b"last"]])
@pytest.mark.parametrize("renames", [False, True])
def test_what_is_saved_in_the_moment_of_the_exchange_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[bytes], renames: bool
) -> None:
    """Each exchange finds a file that was saved just before."""
    if (swap := exchange._exchange_call()) is None:
        pytest.skip("this system has no exchange")
    left = list(saved)

    def late(one: bytes, other: bytes) -> Any:
        if left:
            path = Path(os.fsdecode(other))
            if renames:
                (tmp_path / "editor").write_bytes(left[0])
                path.unlink()
                (tmp_path / "editor").rename(path)
            else:
                path.write_bytes(left[0])
            left.pop(0)
        return swap(one, other)

    (tmp_path / "a").write_bytes(OLD)
    monkeypatch.setattr(exchange, "_exchange_call", lambda: late)
    assert not replaced(tmp_path)
    assert contents(tmp_path) == {"a": saved[-1]}


def test_a_file_that_is_removed_meanwhile_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (swap := exchange._exchange_call()) is None:
        pytest.skip("this system has no exchange")

    def late(one: bytes, other: bytes) -> Any:
        Path(os.fsdecode(other)).unlink()
        return swap(one, other)

    (tmp_path / "a").write_bytes(OLD)
    monkeypatch.setattr(exchange, "_exchange_call", lambda: late)
    assert not replaced(tmp_path)
    assert contents(tmp_path) == {}


def knows_writers(path: Path) -> bool:
    """Whether the system refuses a lease on a file that is open for writing."""
    with path.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
    return False


@pytest.mark.linux
def test_a_file_that_a_program_is_writing_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(OLD)
    monkeypatch.setattr(exchange, "WRITER_SECONDS", 0.05)
    with (tmp_path / "a").open("r+b") as file:
        if not knows_writers(tmp_path / "a"):
            pytest.skip("this disk has no leases")
        assert not replaced(tmp_path)
        file.write(SAVED)
    assert contents(tmp_path) == {"a": SAVED}
    assert not exchange._is_written(tmp_path / "a")


@pytest.mark.linux
def test_a_program_that_saves_all_the_time_loses_nothing(tmp_path: Path) -> None:
    path, aside = tmp_path / "a", tmp_path / "aside"
    path.write_bytes(b"0")
    command = [sys.executable, "-c", WRITER, str(path), "7", "2"]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    chance, made = random.Random(7), 0
    while writer.poll() is None:
        seen = path.read_bytes()
        if not seen.endswith(b"!"):
            made += replace_unchanged(
                path, aside, seen + b"!", seen, keep=False, over=False, ready=lambda: None
            )
        time.sleep(chance.random() * 2e-3)
    last = f"7 {int(writer.communicate()[0])}".encode()
    assert contents(tmp_path) in ({"a": last}, {"a": last + b"!"}) and made > 3


STATES = {  # the file and the other one, when the run goes on: what they are afterwards
    "before": ((OLD, NEW), (OLD, None)),
    "saved before": ((SAVED, NEW), (SAVED, None)),
    "exchanged": ((NEW, OLD), (NEW, OLD)),
    "saved in that moment": ((NEW, SAVED), (SAVED, None)),
    "put back": ((SAVED, NEW), (SAVED, None)),
    "saved later": ((LATER, OLD), (LATER, OLD)),
    "saved before and later": ((LATER, SAVED), (LATER, SAVED)),
    "a copy": ((OLD, OLD), (OLD, None)),
    "done": ((NEW, None), (NEW, None)),
    "removed": ((None, OLD), (None, OLD)),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_what_a_kill_left_is_finished(tmp_path: Path, state: str, keep: bool) -> None:
    if exchange._exchange_call() is None:
        pytest.skip("this system has no exchange")
    paths = [tmp_path / "a", tmp_path / "a.old"]
    left, expected = STATES[state]
    for path, data in zip(paths, left, strict=True):
        if data is not None:
            path.write_bytes(data)
    for _ in range(2):  # the second time there is nothing to do
        recover(*paths, digest(NEW), digest(OLD), keep=keep)
        found = [path.read_bytes() if path.exists() else None for path in paths]
        wanted = [*expected]
        if not keep and wanted[0] is not None and wanted[1] == OLD:
            wanted[1] = None
        assert found == wanted


@pytest.fixture
def plain_file(tmp_path: Path) -> Path:
    """A file that may be replaced."""
    path = tmp_path / "a"
    path.write_bytes(OLD)
    check_replaceable(path)
    return path


def test_a_write_protected_file_is_not_replaced(plain_file: Path) -> None:
    plain_file.chmod(0o444)
    with refused("a is write-protected"):
        check_replaceable(plain_file)


def test_a_file_in_a_write_protected_folder_is_not_replaced(
    plain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda name, _: name != plain_file.parent)
    with refused("a is in a folder that may not be written"):
        check_replaceable(plain_file)


def test_a_file_of_two_names_is_not_replaced(plain_file: Path) -> None:
    os.link(plain_file, plain_file.with_name("b"))
    with refused("a has 2 names .hard links."):
        check_replaceable(plain_file)


def test_a_file_of_another_user_is_not_replaced(
    plain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: plain_file.stat().st_uid + 1)
    with refused("a belongs to another user or group"):
        check_replaceable(plain_file)


def test_a_pipe_is_not_replaced(plain_file: Path) -> None:
    plain_file.unlink()
    os.mkfifo(plain_file)
    with refused("a is no plain file"):
        check_replaceable(plain_file)


def test_what_a_new_file_cannot_be_given_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "a").write_bytes(OLD)
    monkeypatch.setattr(os, "fchmod", forbidden)
    with refused("cannot be given to a new file"):
        replaced(tmp_path)
    assert contents(tmp_path) == {"a": OLD}


def test_the_new_file_is_private_until_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(OLD)
    (tmp_path / "a").chmod(0o600)
    seen = {}

    def look() -> None:
        seen.update({path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()})

    assert replaced(tmp_path, ready=look)
    assert len(seen) == 2 and {*seen.values()} == {0o600}


def test_a_disk_without_leases_does_not_keep_files_from_being_replaced(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network disks may refuse leases in the words that mean that a file is written to."""
    monkeypatch.setattr(exchange, "_is_leased", lambda _: False)
    exchange._has_leases.cache_clear()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits for nobody"))
    (tmp_path / "a").write_bytes(OLD)
    assert replaced(tmp_path)
    exchange._has_leases.cache_clear()
    assert contents(tmp_path) == {"a": NEW}


@pytest.mark.linux
@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL, errno.EAGAIN])
def test_files_are_replaced_where_the_system_gives_no_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Root in a container may not take one on another user's file, and network disks have none."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(exchange, "WRITER_SECONDS", 0.05)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    exchange._has_leases.cache_clear()
    (tmp_path / "a").write_bytes(OLD)
    assert replaced(tmp_path) and contents(tmp_path) == {"a": NEW}
    exchange._has_leases.cache_clear()
