"""PyTorch's .bin checkpoints, read without running anything that they name.

Files of torch 1.6 and newer are zip archives, which torch itself maps into memory. Older ones
torch can only load as a whole, however large, so their layout is read here: a few pickles, of which
only those names are followed that weights need, and then the raw numbers.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from .tensors import StoredTensor, map_file

REMAP_BYTES = 256 << 20
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_FOREIGN = "it asks for {}, which is no part of plain weights"
STORAGES = {
    "FloatStorage": mx.float32,
    "HalfStorage": mx.float16,
    "BFloat16Storage": mx.bfloat16,
}


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a .bin file, by name.

    Raises:
        ValueError: If the file is damaged, holds anything but tensors, or needs torch to be read
            and there is none.
    """
    try:
        return _Archive(path).tensors() if zipfile.is_zipfile(path) else _read_legacy(path)
    except _Refused as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # unpicklers raise anything
        cause = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is truncated or damaged: {cause}") from error


class _Refused(Exception):
    """What is wrong with a file that is not damaged."""


class _Archive:
    """A zip archive of torch 1.6 or newer.

    What has been read stays resident while the file is mapped, so it is mapped anew every so often.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: dict[str, Any] = {}
        self._touched = 0

    def tensors(self) -> dict[str, StoredTensor]:
        return {name: self._describe(name, tensor) for name, tensor in self._map().items()}

    def _map(self) -> dict[str, Any]:
        try:
            import torch
        except ImportError as error:
            raise _Refused(
                "a pickled checkpoint, which takes torch to read: pip install torch, "
                "or convert a safetensors version"
            ) from error
        try:
            loaded = torch.load(self._path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            # Its message is a page long, and says how to run what the file names.
            if named := re.search(
                r"unsupported GLOBAL (\S+)|Unsupported \w+: \w+ (\S+)", str(error)
            ):
                raise _Refused(_FOREIGN.format(named[1] or named[2])) from error
            raise
        if not isinstance(loaded, dict):
            raise _Refused(f"it holds a {type(loaded).__name__}, expected tensors by name")
        for name, value in loaded.items():
            if not isinstance(value, torch.Tensor):
                raise _Refused(f"{name} is a {type(value).__name__}, expected a tensor")
        return loaded

    def _describe(self, name: str, tensor: Any) -> StoredTensor:
        kind = str(tensor.dtype).removeprefix("torch.")
        dtypes = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
        if kind not in dtypes:
            raise _Refused(f"{name} is of type {kind}, expected {', '.join(dtypes)}")
        return StoredTensor(tuple(tensor.shape), dtypes[kind], partial(self._read, name))

    def _read(self, name: str) -> np.ndarray:
        if not self._mapped or self._touched > REMAP_BYTES:
            self._mapped = {}
            self._mapped, self._touched = self._map(), 0
        import torch

        tensor = self._mapped[name].detach()
        self._touched += tensor.nbytes
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        array: np.ndarray = tensor.numpy()
        return array.view(np.uint16) if array.dtype == np.int16 else array


@dataclass
class _Storage:
    """Numbers of one type in a row; `start` is where in the file, known once the pickles end."""

    dtype: mx.Dtype
    numel: int
    start: int = 0


@dataclass(frozen=True)
class _View:
    """A tensor: a view of a storage, in elements of its type."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.strides)
        if any(type(n) is not int or n < 0 for n in numbers) or self.end > self.storage.numel:
            raise pickle.UnpicklingError(
                f"a tensor of shape {self.shape} lies outside of its {self.storage.numel} numbers"
            )

    @property
    def end(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        span = 1 + sum((n - 1) * step for n, step in steps)
        return self.offset + (span if math.prod(self.shape) else 0)

    def read(self, path: Path) -> np.ndarray:
        size, dtype = self.storage.dtype.size, self.storage.dtype
        start = self.storage.start + self.offset * size
        flat = map_file(path, start, (self.end - self.offset,), dtype)
        bytes_apart = [size * step for step in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, bytes_apart, writeable=False)


class _Unpickler(pickle.Unpickler):
    """Follows only what a dictionary of tensors is made of, to our own stand-ins."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        }
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if (module, name) not in allowed:
            raise _Refused(_FOREIGN.format(f"{module}.{name}"))
        return allowed[module, name]

    def persistent_load(self, saved: Any) -> _Storage:
        kind, dtype, key, _device, numel, view = saved
        if kind != "storage" or dtype not in STORAGES.values() or view is not None or numel < 0:
            raise pickle.UnpicklingError(f"unknown storage {saved!r}")
        return self.storages.setdefault(key, _Storage(dtype, numel))


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _View:
    return _View(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(view: _View, *_: Any) -> _View:
    return view


def _read_legacy(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if _Unpickler(file).load() != MAGIC or _Unpickler(file).load() != PROTOCOL:
            raise ValueError("it is no checkpoint of PyTorch")
        system = _Unpickler(file).load()
        if not system["little_endian"]:
            raise _Refused("its numbers are big-endian, which is not supported")
        unpickler = _Unpickler(file)
        views = unpickler.load()
        for key in _Unpickler(file).load():
            storage = unpickler.storages[key]
            count = int.from_bytes(file.read(8), "little")
            storage.start = file.tell()
            end = file.seek(storage.numel * storage.dtype.size, 1)
            if count != storage.numel or end > size:
                raise ValueError(
                    f"storage {key} declares {storage.numel} numbers, its place in the file holds "
                    f"{min(count, (size - storage.start) // storage.dtype.size)}"
                )
    if not isinstance(views, dict):
        raise _Refused(f"it holds a {type(views).__name__}, expected tensors by name")
    for name, view in views.items():
        if not isinstance(view, _View) or not view.storage.start:
            raise _Refused(f"{name} is a {type(view).__name__}, expected a tensor")
    return {
        str(name): StoredTensor(view.shape, view.storage.dtype, partial(view.read, path))
        for name, view in views.items()
    }
