"""Tensors in safetensors and npz files, each read when it is asked for, and written one by one.

numpy has no bfloat16: such an array is uint16, beside the MLX dtype that it stands for.
"""

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from ..errors import first_line, printable, refuse_pointer

Shape = tuple[int, ...]
# The name and shape of each stored tensor of a parameter, which stacks them by rows.
Sources = Mapping[str, Shape]
Layout = dict[str, tuple[Shape, mx.Dtype]]  # the tensors to write, by name

SHARD_BYTES = 5 * 10**9  # of a file that is written, as MLX's and transformers' programs have it
MADE_BY = "speculative_t5"
BLOCK_BYTES = 1 << 20  # what is done to a block finds it in the cache of a core

# The name of each type in safetensors, and the numpy type that holds it.
SAFETENSORS_TYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,  # parts of quantized matrices
}
NUMPY_TYPES = {mx.float32: "<f4", mx.float16: "<f2", mx.bfloat16: "<u2", mx.uint32: "<u4"}
# The name of each type in .npy files; MLX writes bfloat16 as two bytes of no type.
NPY_TYPES = NUMPY_TYPES | {mx.bfloat16: "<V2"}
_FROM_NPY = {np.dtype(name): dtype for dtype, name in NPY_TYPES.items()}
GET_MODEL_AGAIN = "download or convert the model again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    shape: Shape
    dtype: mx.Dtype
    open: Callable[[], np.ndarray]  # an array of that shape, mapped where the file allows

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def read(self) -> np.ndarray:
        """Return its contents as an array."""
        return self.open()

    def split(self, shapes: Iterable[Shape]) -> Iterator["StoredTensor"]:
        """Yield parts of those shapes, one below the other."""
        first = 0
        for shape in shapes:
            rows = slice(first, first := first + shape[0])
            yield StoredTensor(shape, self.dtype, partial(self._rows, rows))

    def _rows(self, rows: slice) -> np.ndarray:
        return self.open()[rows]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield its contents in order, some rows at a time."""
        array = np.atleast_1d(self.open())
        rows = max(1, BLOCK_BYTES // max(1, self.nbytes // max(1, len(array))))
        for first in range(0, len(array), rows):
            yield np.ascontiguousarray(array[first : first + rows])


def as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Copy an array that stands for `dtype` to MLX."""
    # Of some columns of a matrix MLX would copy, and keep, the others as well.
    copied = mx.array(np.asarray(array, order="C"))
    return copied.view(mx.bfloat16) if dtype == mx.bfloat16 else copied


def is_zero(tensor: StoredTensor) -> bool:
    """Whether all numbers of a tensor are 0 or -0."""
    return not any(as_mlx(block, tensor.dtype).any().item() for block in tensor.blocks())


def as_numpy(array: mx.array) -> np.ndarray:
    """Reverse `as_mlx`, without a copy."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def dtype_name(dtype: mx.Dtype) -> str:
    """Return for example "float32"."""
    return str(dtype).removeprefix("mlx.core.")


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Say of a file of tensors that cannot be read that it is damaged."""
    try:
        yield
    except PermissionError:  # not the file's fault
        raise
    except Exception as error:  # damaged zip entries and npy headers raise anything
        raise ValueError(
            f"{path} is truncated or damaged: {first_line(error)}; {GET_MODEL_AGAIN}"
        ) from error


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a safetensors file, by name; each is mapped when it is read."""
    # The library checks the header: names, types, sizes, and that they fill the file.
    with _damage_named(path), safe_open(str(path), framework="numpy"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in SAFETENSORS_TYPES:
            raise ValueError(
                f"{path}: {printable(name)} is of type {entry['dtype']}, "
                f"expected {', '.join(SAFETENSORS_TYPES)}; save the model in one of these"
            )
        dtype, shape = SAFETENSORS_TYPES[entry["dtype"]], tuple(entry["shape"])
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(shape, dtype, partial(map_file, path, offset, shape, dtype))
    return tensors


def map_file(path: Path, offset: int, shape: Shape, dtype: mx.Dtype) -> np.ndarray:
    """Map part of a file into memory as an array, for as long as the array lives."""
    if 0 in shape:
        return np.empty(shape, NUMPY_TYPES[dtype])
    return np.memmap(path, NUMPY_TYPES[dtype], "r", offset, shape)


def read_npz(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of an uncompressed .npz file, by name; reading one checks its checksum."""
    refuse_pointer(path)
    with _damage_named(path), path.open("rb") as file, zipfile.ZipFile(file) as archive:
        return {
            member.filename.removesuffix(".npy"): _open_npy(path, file, archive, member)
            for member in archive.infolist()
        }


def _open_npy(
    path: Path, file: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> StoredTensor:
    """Read the header of one array, and check it against its size in the file."""
    with archive.open(member) as npy:
        if (version := np.lib.format.read_magic(npy)) != (1, 0):
            raise ValueError(f"{member.filename} is in version {version} of the npy format")
        shape, by_columns, stored = np.lib.format.read_array_header_1_0(npy)
        header = npy.tell()
    if stored not in _FROM_NPY:
        raise ValueError(f"{member.filename}: expected tensors of floats, found {stored}")
    begin = _begin_of(member, file)
    entry = partial(_checked_entry, path, begin, member)
    array = partial(_array_in, entry, header, shape, _FROM_NPY[stored], "F" if by_columns else "C")
    tensor = StoredTensor(shape, _FROM_NPY[stored], array)
    sound = header + tensor.nbytes == member.file_size
    sound &= begin + member.file_size <= path.stat().st_size
    if not sound or member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{member.filename} declares {tensor.nbytes} bytes of numbers, "
            f"its place in the file has {member.compress_size - header}"
        )
    return tensor


def _begin_of(member: zipfile.ZipInfo, file: BinaryIO) -> int:
    """Return where the contents of an entry begin: its own header has fields of its own."""
    file.seek(member.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))  # their sizes, at the header's end
    begin: int = member.header_offset + 30 + name + extra
    return begin


def _checked_entry(path: Path, begin: int, member: zipfile.ZipInfo) -> np.ndarray:
    """Map the bytes of an entry, and compare their checksum with the archive's."""
    with _damage_named(path):
        entry = np.memmap(path, np.uint8, "r", begin, member.file_size)
        if zlib.crc32(entry.data) != member.CRC:
            raise ValueError(f"the checksum of {printable(member.filename)} is wrong")
    return entry


def _array_in(
    entry: Callable[[], np.ndarray],
    header: int,
    shape: Shape,
    dtype: mx.Dtype,
    order: Literal["C", "F"],
) -> np.ndarray:
    """Return the array after a header; an entry may begin at any byte, an array may not."""
    numbers = entry()[header:].view(NUMPY_TYPES[dtype])
    return np.require(numbers.reshape(shape, order=order), requirements="A")


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write; its blocks are C-contiguous arrays of its rows, in order."""

    name: str
    shape: Shape
    dtype: mx.Dtype
    blocks: Iterable[np.ndarray]


def write_npz(path: Path, tensors: Iterable[NewTensor]) -> None:
    """Write a .npz file one tensor at a time; the same weights give the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for tensor in tensors:
            member = zipfile.ZipInfo(f"{tensor.name}.npy")  # in 1980, so that times do not differ
            size = member.file_size = math.prod(tensor.shape) * tensor.dtype.size
            with archive.open(member, "w") as stream:
                described = {"descr": NPY_TYPES[tensor.dtype], "fortran_order": False}
                np.lib.format.write_array_header_1_0(stream, described | {"shape": tensor.shape})
                for block in tensor.blocks:
                    assert block.dtype == NUMPY_TYPES[tensor.dtype]
                    stream.write(block.data)
                    size -= block.nbytes
            assert size == 0, (tensor.name, size)


def shards_of(layout: Layout, most: int) -> dict[str, Layout]:
    """Divide tensors among files, of at most `most` bytes unless one tensor has more."""
    shards: list[Layout] = [{}]
    size = 0
    for name, (shape, dtype) in layout.items():
        size += math.prod(shape) * dtype.size
        if size > most and shards[-1]:
            shards.append({})
            size = math.prod(shape) * dtype.size
        shards[-1][name] = shape, dtype
    if len(shards) == 1:
        return {"model.safetensors": layout}
    count = len(shards)
    return {f"model-{i + 1:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards)}


def write_safetensors(
    folder: Path,
    layout: Layout,
    tensors: Iterable[NewTensor],
) -> None:
    """Write tensors, made and stored one at a time, to model.safetensors, or to shards.

    Their names, shapes and types are those of `layout`. The same weights give the same bytes.
    """
    shards = shards_of(layout, SHARD_BYTES)
    with ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file, part in shards.items():
            opened = stack.enter_context((folder / file).open("wb"))
            header, begins = _safetensors_header(part)
            opened.write(header)
            places |= {name: (opened, begin) for name, begin in begins.items()}
        for tensor in tensors:
            stream, begin = places.pop(tensor.name)
            assert layout[tensor.name] == (tensor.shape, tensor.dtype)
            stream.seek(begin)
            for block in tensor.blocks:
                assert block.dtype == NUMPY_TYPES[tensor.dtype]
                stream.write(block.data)
            assert stream.tell() - begin == math.prod(tensor.shape) * tensor.dtype.size
        assert not places, places
    if len(shards) > 1:
        total = sum(math.prod(shape) * dtype.size for shape, dtype in layout.values())
        files = {name: file for file, part in shards.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _safetensors_header(layout: Layout) -> tuple[bytes, dict[str, int]]:
    """Return the beginning of a file of tensors, and where in the file each one begins."""
    types = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx", "made_by": MADE_BY}}
    end = 0
    # Those of the widest type come first, so that each begins at a multiple of its own.
    for name, (shape, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].size):
        begin, end = end, end + math.prod(shape) * dtype.size
        entries[name] = {"dtype": types[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    begins = {name: first + entries[name]["data_offsets"][0] for name in layout}
    return len(text).to_bytes(8, "little") + text, begins


def names_this_package(path: Path) -> bool:
    """Whether a file of safetensors says that this package has written it."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            return (file.metadata() or {}).get("made_by") == MADE_BY
    except (SafetensorError, OSError):  # what cannot be read was written by somebody else
        return False


def parameters_of(module: nn.Module) -> dict[str, mx.array]:
    """Return a module's parameters by name."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))


def module_shapes(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of a module's parameters by name."""
    return {name: tuple(array.shape) for name, array in parameters_of(module).items()}


def check_tensors(
    where: Path,
    expected: Mapping[str, Shape],
    found: Mapping[str, StoredTensor],
    kind: str,
    *,
    again: str = GET_MODEL_AGAIN,
) -> None:
    """Refuse tensors that are missing, misshapen or unknown to a model of that `kind`."""
    advice = f"{again}, with its config.json"
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(
                f"{where} has no tensor {name}, expected one of shape {shape}: {advice}"
            )
        stored = found[name].shape
        if stored != shape:
            raise ValueError(f"{where}: {name} has shape {stored}, expected {shape}: {advice}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"{where} has tensors that a {kind} does not: {printable(unknown[0])}{more}; "
            "merge adapters into the model, or leave out what was added to it"
        )
