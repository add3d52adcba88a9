"""Reads PyTorch's .bin checkpoints without torch, and without running anything that they name.

A checkpoint is a pickle that says where in the file the numbers of each tensor are: in members of a
zip archive or, before torch 1.6, in a row after the pickle. Every such claim is checked against the
file, and numbers are mapped when they are read. (torch maps an archive as a whole without comparing
its sizes with the pickle's, and loads an old file into memory.)
"""

from __future__ import annotations

import errno
import io
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import first_line, printable
from .tensors import StoredTensor, map_file
from .unpickle import MAX_PICKLE, Machine, Refused, Tensor, expect, kind_of

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6
STORAGES = {"FloatStorage": mx.float32, "HalfStorage": mx.float16, "BFloat16Storage": mx.bfloat16}
# Raised for damaged archives, and for pickles that make no sense.
DAMAGE = (ValueError, EOFError, OverflowError, RuntimeError, struct.error, zipfile.BadZipFile)


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a .bin file, by name; refuse anything but plain tensors of floats."""
    try:
        return _read_archive(path) if zipfile.is_zipfile(path) else _read_old(path)
    except Refused as error:
        raise ValueError(
            f"{path}: {error}; "
            "choose a checkpoint in safetensors, or one of plain tensors of floats"
        ) from error
    except (OSError, *DAMAGE) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # an impossible offset
            raise
        raise ValueError(
            f"{path} is truncated or damaged: {first_line(error)}; download it again"
        ) from error


@dataclass(frozen=True)
class _Storage:
    """A row of numbers: their type, how many they are, and the byte where they start."""

    dtype: mx.Dtype
    numel: int
    start: int


def _read_archive(path: Path) -> dict[str, StoredTensor]:
    """Read a zip archive: data.pkl, and a member of numbers for each storage."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {member.filename: member for member in archive.infolist()}
        pickled = [name for name in members if name.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError(f"it has {len(pickled)} members data.pkl, expected one")
        root = pickled[0].removesuffix("data.pkl")
        order = members.get(f"{root}byteorder")
        if order and _read_member(archive, order) != b"little":
            raise Refused("its numbers are big-endian, expected little-endian")
        machine = Machine(io.BytesIO(_read_member(archive, members[pickled[0]])))
        held = machine.load()
        storages = {}
        for key, (type_name, numel) in machine.storages.items():
            member = members.get(f"{root}data/{key}")
            if member is None:
                raise ValueError(f"storage {printable(key)} is missing")
            start = _start_of(file, member, size)
            storages[key] = _check_storage(key, type_name, numel, start, member.file_size)
            if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > size:
                raise ValueError(f"storage {printable(key)} is compressed, or ends after the file")
    return _describe(path, held, storages)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Read a member, up to the size of a pickle."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise Refused(f"its {printable(member.filename)} is compressed")
    with archive.open(member) as opened:
        return opened.read(MAX_PICKLE)


def _start_of(file: BinaryIO, member: zipfile.ZipInfo, size: int) -> int:
    """Return where a member's contents begin, after its local header, name and extra field."""
    if not 0 <= member.header_offset < size:
        raise ValueError(f"its member {printable(member.filename)} lies outside of it")
    file.seek(member.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    return int(member.header_offset + 30 + name_length + extra_length)


def _read_old(path: Path) -> dict[str, StoredTensor]:
    """Read five pickles, the fourth of the tensors; then each storage's count and numbers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        pickles = io.BytesIO(file.read(MAX_PICKLE))
        if not pickles.getvalue().startswith(b"\x80"):
            raise ValueError("it is neither a zip archive nor a pickle")
        magic, protocol, system = (Machine(pickles).load() for _ in range(3))
        if (type(magic), type(protocol)) != (int, int) or (magic, protocol) != (MAGIC, PROTOCOL):
            raise ValueError("it is not a checkpoint of PyTorch")
        if expect(system, dict, "the system").get("little_endian") is not True:
            raise Refused("its numbers are big-endian, expected little-endian")
        machine = Machine(pickles)
        held = machine.load()
        storages: dict[str, _Storage] = {}
        keys = expect(Machine(pickles).load(), list, "the keys of storages")
        end = pickles.tell()
        for key in keys:
            if expect(key, str, "the key of a storage") not in machine.storages or key in storages:
                raise ValueError(f"storage {printable(key)} is unknown, or listed twice")
            type_name, numel = machine.storages[key]
            file.seek(end)
            count, start = int.from_bytes(file.read(8), "little"), end + 8
            nbytes = max(0, min(count * _dtype(type_name).size, size - start))
            storages[key] = _check_storage(key, type_name, numel, start, nbytes)
            end = start + nbytes
    return _describe(path, held, storages)


def _dtype(type_name: str) -> mx.Dtype:
    if type_name not in STORAGES:
        raise Refused(f"it holds a '{printable(type_name)}', expected {', '.join(STORAGES)}")
    return STORAGES[type_name]


def _check_storage(key: str, type_name: str, numel: int, start: int, nbytes: int) -> _Storage:
    dtype = _dtype(type_name)
    if numel * dtype.size != nbytes:
        raise ValueError(
            f"storage {printable(key)} declares {numel} numbers, the file has room for "
            f"{nbytes // dtype.size}"
        )
    return _Storage(dtype, numel, start)


def _describe(path: Path, held: Any, storages: Mapping[str, _Storage]) -> dict[str, StoredTensor]:
    if type(held) is not dict:
        raise Refused(f"it holds a {kind_of(held)}, expected tensors by name")
    tensors = {}
    for name, value in held.items():
        if type(value) is not Tensor:
            raise Refused(f"'{printable(name)}' is a {kind_of(value)}, expected a tensor")
        if value.key not in storages:
            raise ValueError(f"the storage of {printable(name)} is missing")
        storage, count = storages[value.key], math.prod(value.shape)
        # A view larger than its storage repeats numbers, and could take any amount of memory.
        if count > storage.numel or value.offset + _span(value) > storage.numel:
            raise ValueError(
                f"{printable(name)} of shape {value.shape} lies outside of {storage.numel} numbers"
            )
        read = partial(_read, path, storage, value)
        tensors[name] = StoredTensor(value.shape, storage.dtype, read)
    return tensors


def _span(tensor: Tensor) -> int:
    """Return the distance in numbers from a tensor's first one to behind its last."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))


def _read(path: Path, storage: _Storage, tensor: Tensor) -> np.ndarray:
    size = storage.dtype.size
    start = storage.start + tensor.offset * size
    flat = map_file(path, start, (_span(tensor),), storage.dtype)
    bytes_apart = [size * step for step in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, bytes_apart, writeable=False)
