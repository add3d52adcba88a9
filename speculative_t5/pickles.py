"""PyTorch's .bin checkpoints, read without torch and without running anything that they name.

A checkpoint is a pickle that says where in the file the numbers of each tensor are: in members of a
zip archive, or, before torch 1.6, one after the other behind the pickle. Only what a dictionary of
tensors takes is followed, to tuples of plain values; they are checked against the file once all
pickles have been read, and numbers are mapped when they are asked for. (torch itself maps archives
as a whole, without comparing their sizes with what the pickle says, and old files take it as much
memory as they are large.)
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .tensors import StoredTensor, map_file

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6
STORAGES = {
    "FloatStorage": mx.float32,
    "HalfStorage": mx.float16,
    "BFloat16Storage": mx.bfloat16,
}


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a .bin file, by name.

    Raises:
        ValueError: If the file is damaged, or holds anything but plain tensors of floats.
    """
    try:
        return _read_archive(path) if zipfile.is_zipfile(path) else _read_old(path)
    except _Refused as error:
        raise ValueError(
            f"{path}: {error}; "
            "choose a checkpoint in safetensors, or one of plain tensors of floats"
        ) from error
    except PermissionError:  # no fault of the file
        raise
    except Exception as error:  # unpicklers raise anything
        cause = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is truncated or damaged: {cause}; download it again") from error


class _Refused(Exception):
    """What is wrong with a file that is not damaged."""


@dataclass(frozen=True)
class _Storage:
    """Numbers in a row: of which type, how many, and from which byte of the file on."""

    dtype: mx.Dtype
    numel: int
    start: int


class _Unpickler(pickle._Unpickler):
    """Follows what a dictionary of tensors is made of; of each tensor it makes a tuple.

    Tuples and not objects of our own, since a pickle may set attributes of what it has made. The
    Python version of the class, since the other one takes as much memory as a pickle cares to name.

    Attributes:
        storages: By key, the name of the type, and how many numbers there are.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, tuple[str, int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        def tensor(key: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> tuple[Any, ...]:
            return ("tensor", key, offset, shape, strides)

        def parameter(value: Any, *_: Any) -> Any:
            return value

        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("torch._utils", "_rebuild_parameter"): parameter,
        }
        if module == "torch" and name.endswith("Storage"):
            return name
        if (module, name) not in allowed:
            raise _Refused(f"it asks for {module}.{name}, which is no part of plain weights")
        return allowed[module, name]

    def persistent_load(self, saved: Any) -> str:
        kind, type_name, key, _device, numel, *view = saved
        if kind != "storage" or not isinstance(key, str) or any(view):
            raise ValueError(f"unknown storage {saved!r}")
        if self.storages.setdefault(key, (type_name, numel)) != (type_name, numel):
            raise ValueError(f"storage {key} is declared twice")
        return key


def _read_archive(path: Path) -> dict[str, StoredTensor]:
    """A zip archive: data.pkl, and a member of numbers for each storage."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {member.filename: member for member in archive.infolist()}
        (pickled,) = [name for name in members if name.endswith("/data.pkl")]
        root = pickled.removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in members and archive.read(order) != b"little":
            raise _Refused("its numbers are big-endian, expected little-endian")
        with archive.open(pickled) as opened:
            unpickler = _Unpickler(opened)  # type: ignore[arg-type]
            held = unpickler.load()
        storages = {}
        for key, (type_name, numel) in unpickler.storages.items():
            member = members[f"{root}data/{key}"]
            start = _start_of(file, member)
            storages[key] = _check_storage(key, type_name, numel, start, member.file_size)
            end = start + member.file_size
            if member.compress_type != zipfile.ZIP_STORED or end > path.stat().st_size:
                raise ValueError(f"storage {key} is compressed, or ends behind the file")
    return _describe(path, held, storages)


def _start_of(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Where a member's contents begin: behind its local header, and a name and extra field."""
    file.seek(member.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    return int(member.header_offset + 30 + name_length + extra_length)


def _read_old(path: Path) -> dict[str, StoredTensor]:
    """Five pickles, the fourth one of the tensors; then each storage's count and numbers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if _Unpickler(file).load() != MAGIC or _Unpickler(file).load() != PROTOCOL:
            raise ValueError("it is no checkpoint of PyTorch")
        if not _Unpickler(file).load()["little_endian"]:
            raise _Refused("its numbers are big-endian, expected little-endian")
        unpickler = _Unpickler(file)
        held = unpickler.load()
        storages = {}
        for key in _Unpickler(file).load():
            type_name, numel = unpickler.storages[key]
            count = int.from_bytes(file.read(8), "little")
            start = file.tell()
            nbytes = min(count * _dtype(type_name).size, size - start)
            storages[key] = _check_storage(key, type_name, numel, start, nbytes)
            file.seek(nbytes, 1)
    return _describe(path, held, storages)


def _dtype(type_name: str) -> mx.Dtype:
    if type_name not in STORAGES:
        raise _Refused(f"it holds a {type_name!r}, expected {', '.join(STORAGES)}")
    return STORAGES[type_name]


def _check_storage(key: str, type_name: str, numel: Any, start: int, nbytes: int) -> _Storage:
    dtype = _dtype(type_name)
    if type(numel) is not int or numel < 0 or numel * dtype.size != nbytes:
        raise ValueError(
            f"storage {key} declares {numel} numbers, its place in the file holds "
            f"{nbytes // dtype.size}"
        )
    return _Storage(dtype, numel, start)


def _describe(path: Path, held: Any, storages: Mapping[str, _Storage]) -> dict[str, StoredTensor]:
    if not isinstance(held, dict):
        raise _Refused(f"it holds a {type(held).__name__}, expected tensors by name")
    tensors = {}
    for name, value in held.items():
        is_tensor = isinstance(value, tuple) and len(value) == 5 and value[0] == "tensor"
        if not isinstance(name, str) or not is_tensor:
            raise _Refused(f"{name!r} is a {type(value).__name__}, expected a tensor")
        _, key, offset, shape, strides = value
        storage = storages[key]
        numbers = (offset, *shape, *strides)
        if any(type(n) is not int or n < 0 for n in numbers) or len(shape) != len(strides):
            raise ValueError(f"{name} has the shape {shape!r} in steps of {strides!r}")
        span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if offset + (span if math.prod(shape) else 0) > storage.numel:
            raise ValueError(f"{name} of shape {shape} lies outside of {storage.numel} numbers")
        read = partial(_read, path, storage, offset, tuple(shape), tuple(strides))
        tensors[name] = StoredTensor(tuple(shape), storage.dtype, read)
    return tensors


def _read(
    path: Path, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """A view of a storage; `strides` are in numbers."""
    size = storage.dtype.size
    steps = zip(shape, strides, strict=True)
    span = 1 + sum((n - 1) * step for n, step in steps) if math.prod(shape) else 0
    flat = map_file(path, storage.start + offset * size, (span,), storage.dtype)
    bytes_apart = [size * step for step in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, bytes_apart, writeable=False)
