"""Reads PyTorch's .bin checkpoints without torch, and without running anything that they name.

A checkpoint is a pickle that says where in the file the numbers of each tensor are: in members of a
zip archive or, before torch 1.6, in a row after the pickle. Every such claim is checked against the
file, and numbers are mapped when they are read.

A pickle is a program. `Machine` follows only the few opcodes that a dictionary of tensors needs.
(The standard `Unpickler` has no bounds: keys that are nested deeply crash it when they are hashed.)
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import first_line, printable
from .tensors import StoredTensor, map_file

OLD_MAGIC, OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6
STORAGE_TYPES = {
    "FloatStorage": mx.float32,
    "HalfStorage": mx.float16,
    "BFloat16Storage": mx.bfloat16,
}
# Buffers of older models that say which positions a token sees; they are no weights.
MASK_TYPES = {"BoolStorage": mx.bool_, "ByteStorage": mx.uint8}
# A tensor takes 30 opcodes and 150 bytes: these are enough for 30,000 of them in one file.
MAX_OPCODES = 10**6
MAX_PICKLE = 16 << 20
MAX_DIMENSIONS = 32  # numpy 1's limit
MAX_SIDE = 2**31 - 1  # of a tensor in MLX
MAX_COUNT = 2**63  # of bytes or numbers, in any file
# Opcodes whose argument is the value that they push.
LITERAL_OPCODES = (
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINSTRING "
    "SHORT_BINSTRING".split()
)


class Unsupported(Exception):
    """Raised for a file that is not damaged, but holds something unsupported."""


def read_bin(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a .bin file, by name; refuse anything but plain tensors of floats.

    Masks of positions, which GPT-2s were saved with, are left out.
    """
    try:
        return _read_archive(path) if zipfile.is_zipfile(path) else _read_old(path)
    except Unsupported as error:
        raise ValueError(
            f"{path}: {error}; "
            "choose a checkpoint in safetensors, or one of plain tensors of floats"
        ) from error
    except Exception as error:  # damaged archives and senseless pickles raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # an impossible offset
            raise
        raise ValueError(
            f"{path} is truncated or damaged: {first_line(error)}; download it again"
        ) from error


def _read_archive(path: Path) -> dict[str, StoredTensor]:
    """Read a zip archive: data.pkl, and a member of numbers for each storage."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickled = [name for name in members if name.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError(f"it has {len(pickled)} members data.pkl, expected one")
        root = pickled[0].removesuffix("data.pkl")
        order = members.get(f"{root}byteorder")
        if order and _read_zip_member(archive, order) != b"little":
            raise Unsupported("its numbers are big-endian, expected little-endian")
        machine = Machine(io.BytesIO(_read_zip_member(archive, members[pickled[0]])))
        held = machine.load()
        for key, storage in machine.storages.items():
            member = members.get(f"{root}data/{key}")
            if member and member.file_size == storage.nbytes and not member.compress_type:
                with archive.open(member):  # reads what comes before the numbers
                    assert archive.fp is not None
                    storage.start = archive.fp.tell()
    return _describe(path, machine.storages, held)


def _read_zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.compress_type != zipfile.ZIP_STORED:
        raise Unsupported(f"its {printable(member.filename)} is compressed")
    with archive.open(member) as opened:
        return opened.read(MAX_PICKLE)


def _read_old(path: Path) -> dict[str, StoredTensor]:
    """Read five pickles, the fourth of the tensors; then each storage's count and numbers."""
    with path.open("rb") as file:
        pickles = io.BytesIO(file.read(MAX_PICKLE))
        if not pickles.getvalue().startswith(b"\x80"):
            raise ValueError("it is neither a zip archive nor a pickle")
        magic, protocol, system = (Machine(pickles).load() for _ in range(3))
        are_numbers = (type(magic), type(protocol)) == (int, int)
        if not are_numbers or (magic, protocol) != (OLD_MAGIC, OLD_PROTOCOL):
            raise ValueError("it is not a checkpoint of PyTorch")
        if expect(system, dict).get("little_endian") is not True:
            raise Unsupported("its numbers are big-endian, expected little-endian")
        machine = Machine(pickles)
        held = machine.load()
        keys = expect(Machine(pickles).load(), list)
        file.seek(pickles.tell())
        for key in keys:
            storage = machine.storages.get(expect(key, str))
            if storage is None or int.from_bytes(file.read(8), "little") != storage.numel:
                raise ValueError(f"storage {printable(key)} is not as its pickle declares it")
            storage.start = file.tell()
            file.seek(storage.nbytes, os.SEEK_CUR)
    return _describe(path, machine.storages, held)


def _describe(path: Path, storages: Mapping[str, Storage], held: Any) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    for key, storage in storages.items():
        if storage.start is None or storage.start + storage.nbytes > size:
            raise ValueError(
                f"storage {printable(key)} declares {storage.numel} numbers, which are not there"
            )
    if type(held) is not dict:
        raise Unsupported(f"it holds a {type_name(held)}, expected tensors by name")
    tensors = {}
    for name, value in held.items():
        if type(value) is not Tensor:
            raise Unsupported(f"'{printable(name)}' is a {type_name(value)}, expected a tensor")
        numel = value.storage.numel
        # A view larger than its storage repeats numbers, and could take any amount of memory.
        if math.prod(value.shape) > numel or value.offset + value.span > numel:
            raise ValueError(
                f"{printable(name)} of shape {value.shape} lies outside of {numel} numbers"
            )
        if value.storage.dtype in MASK_TYPES.values():
            _check_mask(name, value)
        else:
            read = partial(value.read, path)
            tensors[name] = StoredTensor(value.shape, value.storage.dtype, read)
    return tensors


def _check_mask(name: str, value: Tensor) -> None:
    """Refuse a tensor of bool or uint8 that is no mask (1, 1, L, L), such as packed weights."""
    *before, last = value.shape or (0,)
    if before != [1, 1, last]:
        kind = next(kind for kind in MASK_TYPES if MASK_TYPES[kind] == value.storage.dtype)
        raise Unsupported(f"'{printable(name)}' is a '{kind}', expected {', '.join(STORAGE_TYPES)}")


@dataclass(eq=False)
class Storage:
    """A row of numbers that a pickle declares."""

    dtype: mx.Dtype
    numel: int
    start: int | None = None  # the byte in the file, which tells it

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.size


@dataclass(frozen=True)
class Tensor:
    """A view of a storage, its strides in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """The numbers from its first one to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def read(self, path: Path) -> np.ndarray:
        """Map its numbers, whose storage has its place in the file."""
        dtype, start = self.storage.dtype, self.storage.start
        assert start is not None
        flat = map_file(path, start + self.offset * dtype.size, (self.span,), dtype)
        bytes_apart = [flat.itemsize * step for step in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, bytes_apart, writeable=False)


class Machine:
    """Follows one pickle, whose bytes are in memory: no argument can be longer than they are.

    A few bytes can make a value that is nested a million deep, or that has 2**60 parts: no value is
    hashed, compared or shown before its type is known to be plain. A pickle that makes no sense
    raises what Python does for it.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.storages: dict[str, Storage] = {}  # that it declares, by their keys
        self._file = file
        self._stack: list[Any] = []
        self._marks: list[int] = []  # sizes of the stack
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the value of the pickle, and leave the file positioned after it."""
        # This takes no more than the file has, whatever length an argument announces.
        with warnings.catch_warnings(action="ignore"):  # Python's, of escapes that it does not know
            for opcode, argument, _ in islice(pickletools.genops(self._file), MAX_OPCODES):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._follow(opcode.name, argument)
        raise Unsupported(f"it has more than {MAX_OPCODES} opcodes")

    def _follow(self, name: str, argument: Any) -> None:
        if name not in OPCODES:
            raise Unsupported(f"it uses the opcode {name}, which plain weights do not need")
        OPCODES[name](self, argument)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self, _: Any) -> None:
        """Note where the values begin that an opcode without a count takes."""
        self._marks.append(len(self._stack))

    def make_tuple(self, count: int | None = None) -> None:
        """Put a tuple in the place of the last values."""
        self.push(tuple(self._pop(count)))

    def recall(self, number: int) -> None:
        """Push a value that was stored."""
        if number not in self._memo:
            raise ValueError("its pickle recalls a value that it has not stored")
        self.push(self._memo[number])

    def store(self, number: int | None) -> None:
        """Store the last value under a number, or under the next one."""
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def find(self, line: str | None) -> None:
        """Push what stands for a function or a type, named by a line or by the last values."""
        names = self._pop(2) if line is None else line.split(" ", 1)
        self.push(_find_global(*names))

    def call(self, _: Any) -> None:
        """Put what a known function returns in the place of the function and its arguments."""
        function, arguments = self._pop(2)
        self.push(expect(function, FunctionType)(*expect(arguments, tuple)))

    def set_items(self, count: int | None = None) -> None:
        """Put names and values into the dictionary below them."""
        values = self._pop(count)
        _set_items(self._stack[-1], zip(values[::2], values[1::2], strict=True))

    def extend(self, count: int | None = None) -> None:
        """Append values to the list below them."""
        values = self._pop(count)
        expect(self._stack[-1], list).extend(values)

    def build(self, _: Any) -> None:
        """Drop the attributes of a state_dict, such as _metadata."""
        self._stack.pop()
        expect(self._stack[-1], dict)

    def _pop(self, count: int | None = None) -> list[Any]:
        """Pop the last values; without a count those since the last mark, and the mark."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if start < 0:
            raise ValueError("its pickle takes a value where there is none")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def declare(self, _: Any) -> None:
        """Note a storage, described by its kind, type, key, device and how many numbers it has."""
        kind, dtype, key, _device, numel, *view = expect(self._stack.pop(), tuple)
        if kind != "storage" or any(part is not None for part in view) or not _is_size(numel):
            raise ValueError("its pickle describes a storage as torch never does")
        new = Storage(expect(dtype, mx.Dtype), numel)
        storage = self.storages.setdefault(expect(key, str), new)
        if (storage.dtype, storage.numel) != (dtype, numel):
            raise ValueError(f"storage {printable(key)} is declared twice")
        self.push(storage)


# What is done at each opcode, given the machine and the opcode's argument.
OPCODES: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    **dict.fromkeys(LITERAL_OPCODES, Machine.push),
    "MARK": Machine.mark,
    "TUPLE": lambda machine, _: machine.make_tuple(),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "BINGET": Machine.recall,
    "LONG_BINGET": Machine.recall,
    "BINPUT": Machine.store,
    "LONG_BINPUT": Machine.store,
    "MEMOIZE": Machine.store,
    "GLOBAL": Machine.find,
    "STACK_GLOBAL": Machine.find,
    "BINPERSID": Machine.declare,
    "REDUCE": Machine.call,
    "SETITEM": lambda machine, _: machine.set_items(2),
    "SETITEMS": lambda machine, _: machine.set_items(),
    "APPEND": lambda machine, _: machine.extend(1),
    "APPENDS": lambda machine, _: machine.extend(),
    "BUILD": Machine.build,
}


def type_name(value: Any) -> str:
    """Name an untrusted value's type for a message, which must not show the value itself."""
    return type(value).__name__.lower()


def expect(value: Any, kind: type) -> Any:
    """Return a value of exactly that type."""
    if type(value) is not kind:
        raise TypeError(f"its pickle has a {type_name(value)} where a {kind.__name__} belongs")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _set_items(held: Any, entries: Iterable[Any]) -> None:
    held = expect(held, dict)
    for name, value in entries:
        if type(name) is not str:
            raise Unsupported(f"it has an entry under a {type_name(name)}, expected a name")
        held[name] = value


def _ordered_dict(pairs: Any = None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if pairs is not None:  # Python 2 wrote lists of two
        _set_items(made, expect(pairs, list))
        pairs.clear()  # moved, not copied: a pickle could have it done again and again
    return made


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    numbers = expect(shape, tuple), expect(strides, tuple), (offset,)
    known = all(len(each) <= MAX_DIMENSIONS and all(map(_is_size, each)) for each in numbers)
    known = known and len(shape) == len(strides) and max(shape, default=0) <= MAX_SIDE
    if not known or math.prod(n or 1 for n in shape) >= MAX_COUNT:
        raise ValueError("a tensor in its pickle has a shape that MLX cannot hold")
    return Tensor(expect(storage, Storage), offset, shape, strides)


# What a pickle may call, and what stands for it.
KNOWN_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}


def _find_global(module: Any, name: Any) -> Any:
    """Return what stands for a function, or the type of a storage; refuse all others."""
    wanted = f"{expect(module, str)}.{expect(name, str)}"
    if wanted in KNOWN_CALLS:
        return KNOWN_CALLS[wanted]
    if module != "torch" or not name.endswith("Storage"):
        raise Unsupported(f"it asks for {printable(wanted)}, which is no part of plain weights")
    known = STORAGE_TYPES | MASK_TYPES
    if name not in known:
        raise Unsupported(f"it holds a '{printable(name)}', expected {', '.join(STORAGE_TYPES)}")
    return known[name]
