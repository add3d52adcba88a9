"""Writing .npz files: uncompressed zip archives of .npy files, of any size.

`zipfile` would do, but for its CRC-32: zlib's runs at 1.4 to 2.5 GB/s where files are copied at 3.
The headers are those of APPNOTE.TXT 6.3 (sections 4.3 and 4.5.3), every entry in its zip64 form.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import mlx.core as mx
import numpy as np
from isal.isal_zlib import crc32

from .pipeline import WriteBehind
from .tensors import NPY, NUMPY, Shape

_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # where a zip64 field has the number
_VERSION = 45  # of the format, the first with zip64
_DATE = 0x21  # 1 January 1980: without the time of writing, the same weights give the same bytes
_CRC_AT = 14  # of a local header


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write, made block by block: C-contiguous arrays of its rows, in order."""

    name: str
    shape: Shape
    dtype: mx.Dtype
    blocks: Iterable[np.ndarray]


@dataclass
class _Entry:
    """A member of the archive; its CRC is known at its end."""

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
    """Write a .npz file one tensor at a time; their blocks must stay as they are once given."""
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
            file.seek(entry.offset + _CRC_AT)
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
    """The central directory's own end: zip64 record, its locator, and the record of old."""
    record = (44, _VERSION, _VERSION, 0, 0, count, count, size, offset)
    old = (0, 0, _FULL16, _FULL16, _FULL32, _FULL32, 0)
    return (
        struct.pack("<4sQHHLLQQQQ", b"PK\6\6", *record)
        + struct.pack("<4sLQL", b"PK\6\7", 0, offset + size, 1)
        + struct.pack("<4s4HLLH", b"PK\5\6", *old)
    )
