"""Tensors in files: known from a header that is checked first, and read one at a time.

numpy has no bfloat16: arrays of it come as uint16, beside the dtype they stand for.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import first_line, printable, refuse_pointer

Shape = tuple[int, ...]

BLOCK_BYTES = 4 << 20

# How each type is called in safetensors, and held by numpy here.
SAFETENSORS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
NUMPY: dict[mx.Dtype, np.dtype[Any]] = {
    mx.float32: np.dtype("<f4"),
    mx.float16: np.dtype("<f2"),
    mx.bfloat16: np.dtype("<u2"),
    mx.uint32: np.dtype("<u4"),
}
# As .npy files name them: MLX's own name for bfloat16 is two bytes of no type.
NPY = {mx.float32: "<f4", mx.float16: "<f2", mx.bfloat16: "<V2", mx.uint32: "<u4"}
_FROM_NPY = {np.dtype(name): dtype for dtype, name in NPY.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        shape: Its shape.
        dtype: Its type in MLX.
        read: Its contents as an array of that shape, mapped into memory where the file allows.
    """

    shape: Shape
    dtype: mx.Dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def blocks(self) -> Iterator[np.ndarray]:
        """Its contents in order, some rows at a time."""
        array = np.atleast_1d(self.read())
        rows = max(1, BLOCK_BYTES // max(1, self.nbytes // max(1, len(array))))
        for first in range(0, len(array), rows):
            yield np.ascontiguousarray(array[first : first + rows])


def as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """A copy in MLX of an array that stands for `dtype`."""
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


def as_numpy(array: mx.array) -> np.ndarray:
    """The reverse of `as_mlx`."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name; each is mapped when it is read, for itself.

    Raises:
        ValueError: If the file is truncated or damaged, or holds a type that is not supported.
    """
    try:
        # The library checks the header: names, types, sizes, and that they fill the file.
        with safe_open(str(path), framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated or damaged: {first_line(error)}; download it again"
        ) from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in SAFETENSORS:
            raise ValueError(
                f"{path}: {printable(name)} is of type {entry['dtype']}, "
                f"expected {', '.join(SAFETENSORS)}; save the model in one of these"
            )
        dtype, shape = SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(shape, dtype, partial(map_file, path, offset, shape, dtype))
    return tensors


def map_file(path: Path, offset: int, shape: Shape, dtype: mx.Dtype) -> np.ndarray:
    """Part of a file, mapped into memory as an array until the array goes."""
    if 0 in shape:
        return np.empty(shape, NUMPY[dtype])
    return np.memmap(path, NUMPY[dtype], "r", offset, shape)


def read_npz(path: Path) -> dict[str, StoredTensor]:
    """The tensors of an uncompressed .npz file, by name; checksums are verified as they are read.

    Raises:
        ValueError: If the file is truncated or damaged, or holds what is not supported.
    """
    refuse_pointer(path)
    tensors = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                tensors[name] = _read_member(path, archive, member)
    except PermissionError:  # no fault of the file
        raise
    except Exception as error:  # zip entries and npy headers that make no sense raise anything
        raise _damaged(path, error) from error
    return tensors


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredTensor:
    """What the header of one array says, checked against its size in the file."""
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
            file.read(1)  # at its end the checksum is compared
    except Exception as error:  # as above
        raise _damaged(path, error) from error
    assert (array.shape, array.dtype) == (shape, stored)
    return array.view(NUMPY[_FROM_NPY[stored]])


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is truncated or damaged ({first_line(error)}); convert the model again"
    )
