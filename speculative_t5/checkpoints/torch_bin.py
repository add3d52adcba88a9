"""Reads PyTorch's .bin checkpoints without torch, and without running anything that they name.

A checkpoint is a pickle that says where in the file the numbers of each tensor are: in members of a
zip archive or, before torch 1.6, in a row after the pickle. Every such claim is checked against the
file, and numbers are mapped when they are read.

A pickle is a program. `Machine` follows only the few opcodes that a dictionary of tensors needs,
and describes what the pickle would have called. (The standard `Unpickler` has no bounds:
keys that are nested deeply crash it when they are hashed.)
"""

from __future__ import annotations

import errno
import io
import math
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import first_line, printable
from .tensors import StoredTensor, map_file

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before torch 1.6
STORAGES = {"FloatStorage": mx.float32, "HalfStorage": mx.float16, "BFloat16Storage": mx.bfloat16}
# Raised for damaged archives, and for pickles that make no sense.
DAMAGE = (ValueError, EOFError, OverflowError, RuntimeError, struct.error, zipfile.BadZipFile)
# A tensor takes 30 opcodes and 150 bytes: these are enough for 30,000 of them in one file.
MAX_OPCODES = 10**6
MAX_PICKLE = 16 << 20
MAX_DIMENSIONS = 32  # numpy 1's limit
MAX_SIDE = 2**31 - 1  # of a tensor in MLX
MAX_NUMBER = 2**63  # of bytes or numbers, in any file
# Opcodes whose argument is the value that they push.
_LITERALS = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINSTRING "
    "SHORT_BINSTRING".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}

_ORDERED_DICT = "collections.OrderedDict"
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"


class Refused(Exception):
    """Raised for a file that is not damaged, but holds something unsupported."""


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


@dataclass(eq=False)
class Storage:
    """A row of numbers that a pickle declares; then the file says at which byte it starts."""

    dtype: mx.Dtype
    numel: int
    start: int | None = None

    def place(self, key: str, start: int, nbytes: int) -> None:
        """Note where it starts; refuse any other number of bytes than it has declared."""
        if self.numel * self.dtype.size != nbytes:
            raise ValueError(
                f"storage {printable(key)} declares {self.numel} numbers, the file has room for "
                f"{nbytes // self.dtype.size}"
            )
        self.start = start


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
        for key, storage in machine.storages.items():
            member = members.get(f"{root}data/{key}")
            if member is None:
                raise ValueError(f"storage {printable(key)} is missing")
            start = _start_of(file, member, size)
            storage.place(key, start, member.file_size)
            if member.compress_type != zipfile.ZIP_STORED or start + member.file_size > size:
                raise ValueError(f"storage {printable(key)} is compressed, or ends after the file")
    return _describe(path, held)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
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
        keys = expect(Machine(pickles).load(), list, "the keys of storages")
        end = pickles.tell()
        for key in keys:
            storage = machine.storages.get(expect(key, str, "the key of a storage"))
            if storage is None or storage.start is not None:
                raise ValueError(f"storage {printable(key)} is unknown, or listed twice")
            file.seek(end)
            count, start = int.from_bytes(file.read(8), "little"), end + 8
            nbytes = max(0, min(count * storage.dtype.size, size - start))
            storage.place(key, start, nbytes)
            end = start + nbytes
    return _describe(path, held)


def _describe(path: Path, held: Any) -> dict[str, StoredTensor]:
    if type(held) is not dict:
        raise Refused(f"it holds a {kind_of(held)}, expected tensors by name")
    tensors = {}
    for name, value in held.items():
        if type(value) is not Tensor:
            raise Refused(f"'{printable(name)}' is a {kind_of(value)}, expected a tensor")
        numel = value.storage.numel
        if value.storage.start is None:
            raise ValueError(f"the storage of {printable(name)} is missing")
        # A view larger than its storage repeats numbers, and could take any amount of memory.
        if math.prod(value.shape) > numel or value.offset + _span(value) > numel:
            raise ValueError(
                f"{printable(name)} of shape {value.shape} lies outside of {numel} numbers"
            )
        start = value.storage.start + value.offset * value.storage.dtype.size
        read = partial(_read, path, start, value)
        tensors[name] = StoredTensor(value.shape, value.storage.dtype, read)
    return tensors


def _span(tensor: Tensor) -> int:
    """Return the numbers from a tensor's first one to its last."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))


def _read(path: Path, start: int, tensor: Tensor) -> np.ndarray:
    flat = map_file(path, start, (_span(tensor),), tensor.storage.dtype)
    bytes_apart = [flat.itemsize * step for step in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, bytes_apart, writeable=False)


@dataclass(frozen=True)
class _Global:
    """The name of a function or type that a pickle asks for; nothing looks it up."""

    name: str


@dataclass(frozen=True)
class Tensor:
    """A view of a storage, its strides in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Machine:
    """Follows one pickle, whose bytes are in memory: no argument can be longer than they are.

    A few bytes can make a value that is nested a million deep, or that has 2**60 parts: no value is
    hashed, compared or shown before its type is known to be plain.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.storages: dict[str, Storage] = {}  # that it declares, by their keys
        self._file = file
        self._stack: list[Any] = []  # since the last mark
        self._outer: list[list[Any]] = []  # the parts of the stack before each mark
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the value of the pickle, and leave the file positioned after it."""
        # This takes no more than the file has, whatever length an argument announces.
        with warnings.catch_warnings(action="ignore"):  # Python's, of escapes that it does not know
            for opcode, argument, _ in islice(pickletools.genops(self._file), MAX_OPCODES):
                if opcode.name == "STOP":
                    return self._last(1)[0]
                if opcode.name in _LITERALS:
                    self._stack.append(argument)
                elif opcode.name in _CONSTANTS:
                    self._stack.append(_CONSTANTS[opcode.name])
                else:
                    self._follow(opcode.name, argument)
        raise Refused(f"it has more than {MAX_OPCODES} opcodes")

    def _follow(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._outer.append(stack)
                self._stack = []
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                values = self._since_mark()
                self._stack.append(tuple(values))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._last(int(name[-1]))))
            case "BINGET" | "LONG_BINGET":
                if argument not in self._memo:
                    raise ValueError("its pickle recalls a value that it has not stored")
                stack.append(self._memo[argument])
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                place = len(self._memo) if argument is None else argument
                self._memo[place] = self._top()
            case "GLOBAL":
                stack.append(_find_global(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_find_global(*self._last(2)))
            case "BINPERSID":
                stack.append(self._declare(*self._last(1)))
            case "REDUCE":
                stack.append(_reduce(*self._last(2)))
            case "SETITEM" | "SETITEMS":
                values = self._since_mark() if name == "SETITEMS" else self._last(2)
                pairs = [values[start : start + 2] for start in range(0, len(values), 2)]
                _set_items(self._top(), pairs)
            case "APPEND" | "APPENDS":
                values = self._since_mark() if name == "APPENDS" else self._last(1)
                expect(self._top(), list, "what is appended to").extend(values)
            case "BUILD":  # attributes of a state_dict, such as _metadata: dropped
                self._last(1)
                expect(self._top(), dict, "what gets attributes")
            case _:
                raise Refused(f"it uses the opcode {name}, which plain weights do not need")

    def _top(self) -> Any:
        self._stack += (last := self._last(1))
        return last[0]

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("its pickle takes a value where there is none")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _since_mark(self) -> list[Any]:
        """Pop the values since the last mark, and the mark."""
        if not self._outer:
            raise ValueError("its pickle goes back to a mark where there is none")
        values, self._stack = self._stack, self._outer.pop()
        return values

    def _declare(self, saved: Any) -> Storage:
        """Note a storage, described by its kind, type, key, device and how many numbers it has."""
        if type(saved) is not tuple or not 5 <= len(saved) <= 6:
            raise ValueError(f"it describes a storage by a {kind_of(saved)}")
        kind, wanted, key, _device, numel, *view = saved
        known = type(kind) is str and kind == "storage" and type(wanted) is _Global
        whole = all(part is None for part in view)
        if not known or not whole or type(key) is not str or not _is_size(numel):
            described = ", ".join(map(kind_of, saved))
            raise ValueError(f"it describes a storage by {described}")
        name = wanted.name.removeprefix("torch.")
        if name not in STORAGES:
            raise Refused(f"it holds a '{printable(name)}', expected {', '.join(STORAGES)}")
        storage = self.storages.setdefault(key, Storage(STORAGES[name], numel))
        if (storage.dtype, storage.numel) != (STORAGES[name], numel):
            raise ValueError(f"storage {printable(key)} is declared twice")
        return storage


def kind_of(value: Any) -> str:
    """Name an untrusted value's type for a message, which must not show the value itself."""
    return type(value).__name__.lstrip("_").lower()


def expect(value: Any, kind: type, what: str) -> Any:
    """Return a value of that type; a message names it by `what`."""
    if type(value) is not kind:
        raise ValueError(f"{what} in its pickle is a {kind_of(value)}, expected a {kind.__name__}")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _find_global(module: Any, name: Any) -> _Global:
    wanted = f"{expect(module, str, 'a module')}.{expect(name, str, 'a name')}"
    known = wanted in (_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER)
    if not known and not (module == "torch" and name.endswith("Storage")):
        raise Refused(f"it asks for {printable(wanted)}, which is no part of plain weights")
    return _Global(wanted)


def _reduce(function: Any, arguments: Any) -> Any:
    wanted = expect(function, _Global, "what is called").name
    values = expect(arguments, tuple, "what a function gets")
    if wanted == _ORDERED_DICT and len(values) <= 1:
        made: dict[str, Any] = {}
        for pairs in values:  # Python 2 wrote lists of two
            entries = [expect(pair, list, "an entry") for pair in expect(pairs, list, "entries")]
            _set_items(made, entries)
            pairs.clear()  # moved, not copied: a pickle could have it done again and again
        return made
    if wanted == _REBUILD_TENSOR and len(values) >= 4:
        return _rebuild_tensor(*values[:4])
    if wanted == _REBUILD_PARAMETER and values:
        return values[0]
    raise ValueError(f"its pickle calls {printable(wanted)} with {len(values)} arguments")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
    expect(storage, Storage, "a tensor's storage")
    for name, numbers in (("offset", (offset,)), ("shape", shape), ("strides", strides)):
        if len(expect(numbers, tuple, f"a tensor's {name}")) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor's {name} in its pickle has {len(numbers)} dimensions")
        if not all(map(_is_size, numbers)):
            raise ValueError(f"a tensor's {name} in its pickle has a part that is not a size")
    if any(n > MAX_SIDE for n in shape) or math.prod(n or 1 for n in shape) >= MAX_NUMBER:
        raise ValueError("a tensor's shape in its pickle is larger than MLX can hold")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    return Tensor(storage, offset, shape, strides)


def _set_items(held: Any, entries: Iterable[Sequence[Any]]) -> None:
    held = expect(held, dict, "what gets entries")
    for entry in entries:
        if len(entry) != 2:
            raise ValueError(f"an entry in its pickle has {len(entry)} parts, expected 2")
        name, value = entry
        if type(name) is not str:
            raise Refused(f"it has an entry under a {kind_of(name)}, expected a name")
        held[name] = value
