"""Tensors in files: a checked header says where each is, and each is read by itself.

numpy has no bfloat16: such an array is uint16, beside the MLX dtype that it stands for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import first_line, printable

Shape = tuple[int, ...]

BLOCK_BYTES = 4 << 20

# The name of each type in safetensors, and the numpy type that holds it.
SAFETENSORS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
NUMPY: dict[mx.Dtype, np.dtype[Any]] = {
    mx.float32: np.dtype("<f4"),
    mx.float16: np.dtype("<f2"),
    mx.bfloat16: np.dtype("<u2"),
    mx.uint32: np.dtype("<u4"),
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    shape: Shape
    dtype: mx.Dtype
    read: Callable[[], np.ndarray]  # an array of that shape, mapped where the file allows

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield its contents in order, some rows at a time."""
        array = np.atleast_1d(self.read())
        rows = max(1, BLOCK_BYTES // max(1, self.nbytes // max(1, len(array))))
        for first in range(0, len(array), rows):
            yield np.ascontiguousarray(array[first : first + rows])


def as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Copy an array that stands for `dtype` to MLX."""
    # Of some columns of a matrix MLX would copy, and keep, the others as well.
    copied = mx.array(np.asarray(array, order="C"))
    return copied.view(mx.bfloat16) if dtype == mx.bfloat16 else copied


def as_numpy(array: mx.array) -> np.ndarray:
    """Reverse `as_mlx`, without a copy."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def dtype_name(dtype: mx.Dtype) -> str:
    """Return for example "float32"."""
    return str(dtype).removeprefix("mlx.core.")


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a safetensors file, by name; each is mapped when it is read."""
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
    """Map part of a file into memory as an array, for as long as the array lives."""
    if 0 in shape:
        return np.empty(shape, NUMPY[dtype])
    return np.memmap(path, NUMPY[dtype], "r", offset, shape)
