"""Writes model folders: config.json, weights.npz and tokenizer files, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np
from isal.isal_zlib import crc32

from .tensors import NPY, NUMPY, Shape


def check_replaceable(folder: Path) -> None:
    """Refuse to write where there is anything but a model folder."""
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{folder} is the current folder: choose another --output")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "weights.npz").exists():
        raise ValueError(f"{folder} exists and is not a converted model: choose another --output")
    if others := sorted(path.name for path in folder.iterdir() if path.is_dir()):
        raise ValueError(f"{folder} also holds {others[0]}: choose another --output")


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[NewTensor],
    tokenizer_files: Iterable[Path],
    *,
    num_bytes: int = 0,
) -> None:
    """Write a model folder, whole or not at all; an existing one is replaced at the end.

    Args:
        folder: The folder to write.
        config: Contents of its config.json.
        tensors: Contents of its weights.npz, made and stored one at a time.
        tokenizer_files: Files to copy.
        num_bytes: The size of all tensors; nothing is written where less space is free.

    Raises:
        ValueError: If `folder` exists and is not a model folder.
        OSError: If it cannot be written.
    """
    check_replaceable(folder)
    with _replacing(folder) as new:
        free = shutil.disk_usage(new).free
        if free < num_bytes:
            lack = f"it takes {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
            advice = "free some, or choose another --output"
            raise OSError(errno.ENOSPC, f"No space left on device: {lack}; {advice}")
        write_npz(new / "weights.npz", tensors)
        for path in tokenizer_files:
            shutil.copyfile(path, new / path.name)
        text = json.dumps(config, indent=2) + "\n"
        (new / "config.json").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` if the body succeeds, and is removed otherwise.

    It clears away anything that a killed process has left.
    """
    folder = folder.resolve()  # a link may lead to another disk
    workplace = folder.parent / f".{folder.name}.partial"
    new, old = workplace / "new", workplace / "old"
    made = [parent for parent in folder.parents if not parent.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            workplace.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(workplace / "lock"))
            stack.callback(shutil.rmtree, workplace, ignore_errors=True)
            if old.exists() and not folder.exists():  # killed between the two renames below
                os.rename(old, folder)
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)
            new.mkdir()
            yield new
            if folder.exists():
                os.rename(folder, old)
            try:
                os.rename(new, folder)
            finally:
                if old.exists() and not folder.exists():
                    os.rename(old, folder)
        except OSError as error:
            if error.filename and not Path(error.filename).is_relative_to(workplace):
                raise  # it is about a file to read
            raise OSError(
                error.errno, f"cannot be written: {error.strerror}", str(folder)
            ) from error


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders that exist and are empty, the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of that file."""
    busy = "another conversion is at work on it: wait for it to end, or choose another --output"
    with path.open("w") as file:
        try:
            lock(file.fileno(), busy)
        except ValueError as error:
            raise OSError(errno.EAGAIN, busy) from error
        yield


def lock(file: int, busy: str) -> None:
    """Take the lock of an open file; the system releases it when the process ends, even if killed.

    Raises:
        ValueError: If another process holds it; `busy` is the message.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(busy) from None


_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # the number is in a zip64 field instead
_VERSION = 45  # of the format, the first with zip64
_DATE = 0x21  # 1 January 1980: a fixed date, so that the same weights give the same bytes
_CRC_OFFSET = 14  # in a local header


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write; its blocks are C-contiguous arrays of its rows, in order."""

    name: str
    shape: Shape
    dtype: mx.Dtype
    blocks: Iterable[np.ndarray]


@dataclass
class _Entry:
    """A member of the archive; its CRC is known once it is written."""

    name: bytes
    size: int
    offset: int
    crc: int = 0

    def local_header(self) -> bytes:
        fields = (_VERSION, 0, 0, 0, _DATE, self.crc, _FULL32, _FULL32, len(self.name), 20)
        extra = struct.pack("<HHQQ", 1, 16, self.size, self.size)
        return struct.pack("<4s5HLLLHH", b"PK\3\4", *fields) + self.name + extra

    def central_header(self) -> bytes:
        made_on_unix, mode = 3 << 8 | _VERSION, 0o600 << 16
        fields = (made_on_unix, _VERSION, 0, 0, 0, _DATE, self.crc, _FULL32, _FULL32)
        lengths = (len(self.name), 28, 0, 0, 0, mode, _FULL32)
        extra = struct.pack("<HHQQQ", 1, 24, self.size, self.size, self.offset)
        return struct.pack("<4s6HLLL5HLL", b"PK\1\2", *fields, *lengths) + self.name + extra


def write_npz(path: Path, tensors: Iterable[NewTensor]) -> None:
    """Write a .npz file one tensor at a time; a block must not change once it is yielded."""
    entries: list[_Entry] = []
    with path.open("wb") as file:
        with WriteBehind(file) as behind:
            for tensor in tensors:
                entries.append(_write_member(behind, tensor))
        end = file.tell()
        for entry in entries:
            file.write(entry.central_header())
        file.write(_end_of_archive(len(entries), file.tell() - end, end))
        for entry in entries:
            file.seek(entry.offset + _CRC_OFFSET)
            file.write(struct.pack("<L", entry.crc))


def _write_member(behind: WriteBehind, tensor: NewTensor) -> _Entry:
    header = _npy_header(tensor)
    size = len(header) + math.prod(tensor.shape) * tensor.dtype.size
    entry = _Entry(f"{tensor.name}.npy".encode(), size, behind.written)
    behind.write(entry.local_header())
    start = behind.written
    entry.crc = crc32(header)
    behind.write(header)
    for block in tensor.blocks:
        assert block.dtype == NUMPY[tensor.dtype]
        entry.crc = crc32(block.data, entry.crc)
        behind.write(block.data)
    assert behind.written - start == size, (tensor.name, behind.written - start, size)
    return entry


def _npy_header(tensor: NewTensor) -> bytes:
    header: IO[bytes] = io.BytesIO()
    described = {"descr": NPY[tensor.dtype], "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(header, described)
    header.seek(0)
    return header.read()


def _end_of_archive(count: int, size: int, offset: int) -> bytes:
    """Return the end of the central directory: zip64 record, its locator, classic record."""
    record = (44, _VERSION, _VERSION, 0, 0, count, count, size, offset)
    classic = (0, 0, _FULL16, _FULL16, _FULL32, _FULL32, 0)
    return (
        struct.pack("<4sQHHLLQQQQ", b"PK\6\6", *record)
        + struct.pack("<4sLQL", b"PK\6\7", 0, offset + size, 1)
        + struct.pack("<4s4HLLH", b"PK\5\6", *classic)
    )


DEPTH = 2  # blocks that may wait between one thread and the other


class WriteBehind:
    """Writes to a file in a thread; data must not change once they are given to it.

    As a context manager it waits for pending writes on a clean exit.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[int]] = deque()
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        self._waiting.append(self._thread.submit(self._file.write, data))
        self.written += data.nbytes if isinstance(data, memoryview) else len(data)
        if len(self._waiting) > DEPTH:
            self._waiting.popleft().result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._thread:
            while self._waiting and kind is None:
                self._waiting.popleft().result()
