"""Reads and writes .npz files: uncompressed zip archives of .npy files, of any size.

`zipfile` would write them too, but more slowly: zlib's CRC-32 runs at 1.4 to 2.5 GB/s where files
are copied at 3. The headers are those of APPNOTE.TXT 6.3 (sections 4.3 and 4.5.3), every entry in
its zip64 form.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np
from isal.isal_zlib import crc32

from ..errors import first_line, refuse_pointer
from .pipeline import WriteBehind
from .tensors import NUMPY, Shape, StoredTensor

# The name of each type in .npy files; MLX writes bfloat16 as two bytes of no type.
_NPY = {mx.float32: "<f4", mx.float16: "<f2", mx.bfloat16: "<V2", mx.uint32: "<u4"}
_FROM_NPY = {np.dtype(name): dtype for dtype, name in _NPY.items()}

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
    described = {"descr": _NPY[tensor.dtype], "fortran_order": False, "shape": tensor.shape}
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


def read_npz(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of an uncompressed .npz file, by name; reading one checks its checksum."""
    refuse_pointer(path)
    tensors = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                tensors[name] = _read_member(path, archive, member)
    except PermissionError:  # not the file's fault
        raise
    except Exception as error:  # damaged zip entries and npy headers raise anything
        raise _damaged(path, error) from error
    return tensors


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredTensor:
    """Read the header of one array, and check it against its size in the file."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise ValueError(f"{member.filename} is in version {version} of the npy format")
        shape, _, stored = read_header(file)
        start = file.tell()
    if stored not in _FROM_NPY:
        raise ValueError(f"{member.filename}: expected tensors of floats, found {stored}")
    tensor = StoredTensor(
        shape, _FROM_NPY[stored], partial(_read_array, path, member.filename, shape, stored)
    )
    end = member.header_offset + member.file_size
    sound = start + tensor.nbytes == member.file_size and end <= path.stat().st_size
    if not sound or member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{member.filename} declares {tensor.nbytes} bytes of numbers, "
            f"its place in the file has {member.compress_size - start}"
        )
    return tensor


def _read_array(path: Path, member: str, shape: Shape, stored: np.dtype[Any]) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
            file.read(1)  # the checksum is compared at the end
    except Exception as error:  # as above
        raise _damaged(path, error) from error
    assert (array.shape, array.dtype) == (shape, stored)
    return array.view(NUMPY[_FROM_NPY[stored]])


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is truncated or damaged ({first_line(error)}); convert the model again"
    )
