"""Files that are written whole or not at all, and what is done so far beside them."""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..checkpoints import lock
from ..errors import count
from .terminal import note, signals_held

SUFFIX = ".partial.jsonl"
Header = dict[str, Any]


def is_special(name: str) -> bool:
    """Whether a name is of something that is no plain file, such as a pipe or a device."""
    return os.path.exists(name) and not os.path.isfile(name)


def is_same(name: str, other: str) -> bool:
    """Whether two names are of one file, which need not exist yet."""
    if os.path.realpath(name) == os.path.realpath(other):
        return True
    return os.path.exists(name) and os.path.exists(other) and os.path.samefile(name, other)


def check_target(name: str, stream: BinaryIO, *, force: bool) -> None:
    """Refuse to write a file over the input, or without `force` over anything else."""
    if not name:
        raise ValueError(f"the output must be the name of a file, got {name!r}")
    try:
        found = os.stat(name)
    except FileNotFoundError:
        Path(name).resolve().parent.stat()  # which has to exist
        return
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{name} is a folder, expected the name of a file to write")
    if not stat.S_ISREG(found.st_mode):
        return
    if os.path.samestat(found, os.fstat(stream.fileno())):
        raise ValueError(f"the output {name} is the input itself: give another name")
    if not force:
        raise ValueError(f"{name} exists: use --force to replace it, or give another name")


def write_whole(name: str, data: bytes) -> None:
    """Write a file at once, so that nobody sees half of it; what is no plain file is written to."""
    if is_special(name):
        Path(name).write_bytes(data)
        return
    path = Path(name).resolve()  # a link may lead to another disk
    new = path.with_name(f".{path.name}.partial")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    except OSError as error:
        error.filename, error.filename2 = name, None
        raise
    finally:
        new.unlink(missing_ok=True)


class PartialFile:
    """The pieces done so far, a line of JSON each, in NAME.partial.jsonl beside the output.

    The file is created and locked when it is entered (`with`). It is removed when the block is
    done, or ends before any piece was kept; otherwise it stays, and a note says so.

    Args:
        name: The output.
        header: What a resumed run must share with the one before, by what a message calls it.
        resume: Keep the pieces of an earlier run.
        force: Drop the pieces of an earlier run, unless `resume` is set.

    Raises:
        ValueError: When it is entered, if there are pieces of an earlier run and neither option is
            given, if they are of another run, or if another process is writing; without `force`
            also if the file holds anything else.
    """

    def __init__(self, name: str, header: Header, *, resume: bool, force: bool) -> None:
        self.path = Path(str(Path(name).resolve()) + SUFFIX)
        self._header = header
        self._resume, self._force = resume, force
        self._file = -1
        self.earlier: dict[int, Header] = {}  # pieces of an earlier run
        self.count = 0  # pieces in the file

    def __enter__(self) -> PartialFile:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with ExitStack() as undo:
            undo.callback(os.close, self._file)
            self._lock()
            undo.callback(self._drop_if_empty)
            self._begin()
            undo.pop_all()
        return self

    def _drop_if_empty(self) -> None:
        """Remove the file if its first line could not be written."""
        if not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)

    def _lock(self) -> None:
        busy = (
            f"another process is writing to {self.path}: wait for it to end, or give another "
            "--output"
        )
        lock(self._file, busy)
        if not os.fstat(self._file).st_nlink:  # another run has just removed it
            raise ValueError(busy)

    def _begin(self) -> None:
        """Take over the pieces of an earlier run, or write the first line."""
        end = 0
        with open(self._file, "rb", closefd=False) as reader:
            first = reader.readline()
            if self._resume and first.endswith(b"\n"):
                self._check(_parse(first))
                end = len(first)
                for raw in reader:
                    if not raw.endswith(b"\n"):  # torn
                        break
                    piece = _parse(raw)
                    self.earlier[self._number(piece)] = piece
                    end += len(raw)
        if first.endswith(b"\n") and not (self._resume or self._force):
            raise ValueError(
                f"{self.path} holds the pieces of an earlier run: use --resume to continue after "
                "them, or --force to start over"
            )
        torn = _line(self._header).startswith(first)  # or nothing yet
        if not (first.endswith(b"\n") or torn) and (self._resume or not self._force):
            raise ValueError(
                f"{self.path} holds something other than pieces: give another --output, or use "
                "--force without --resume to replace it"
            )
        os.truncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        if not end:
            self._write(self._header)
        self.count = len(self.earlier)

    def _check(self, found: Header) -> None:
        """Refuse the pieces of another run."""
        for name, value in self._header.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self.path} is from a run with another {name}: use the same as that run, or "
                    "--force without --resume to start over"
                )

    def _number(self, piece: Header) -> int:
        number = piece.get("piece")
        if isinstance(number, int) and {"output", "reason"} <= piece.keys():
            return number
        raise ValueError(
            f"{self.path} holds a line that is not a piece: use --force without --resume to start "
            "over"
        )

    def append(self, piece: Header) -> None:
        """Keep a piece that is done."""
        with signals_held():
            self._write(piece)
            self.count += 1

    def _write(self, record: Header) -> None:
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        rest = _line(record)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with suppress(OSError):  # the first error is the one to report
                os.truncate(self._file, start)
            error.filename = str(self.path)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self.count:
            self.path.unlink(missing_ok=True)
        else:
            done = count(self.count, "piece")
            note(f"the work so far ({done}) is kept; --resume continues from there")
        os.close(self._file)


def _line(record: Header) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _parse(raw: bytes) -> Header:
    """Parse a line; what is no object becomes one without anything."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
