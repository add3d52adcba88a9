"""Reads pickles of plain values by a small machine that calls nothing.

A pickle is a program. This machine follows only the few opcodes that a dictionary of tensors needs.
Where the pickle would call a function to make a tensor or a storage, it keeps a description.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import printable

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
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OTHERS = frozenset(
    "PROTO FRAME STOP MARK EMPTY_DICT EMPTY_LIST TUPLE GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID "
    "BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE SETITEM SETITEMS APPEND APPENDS".split()
)
_ALLOWED = _LITERALS | _CONSTANTS.keys() | _TUPLES.keys() | _OTHERS
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}

_ORDERED_DICT = "collections.OrderedDict"
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"


class Refused(Exception):
    """Raised for a file that is not damaged, but holds something unsupported."""


@dataclass(frozen=True)
class _Global:
    """The name of a function or type that a pickle asks for; nothing looks it up."""

    name: str


@dataclass(frozen=True)
class _Key:
    """The key of a storage, standing for the storage itself."""

    key: str


@dataclass(frozen=True)
class Tensor:
    """A view of a storage, its strides in numbers."""

    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Machine:
    """Follows one pickle.

    A few bytes can make a value that is nested a million deep, or that has 2**60 parts: no value is
    hashed, compared or shown before its type is known to be plain.

    Args:
        file: The pickle's bytes in memory, so that no argument can be longer than they are.

    Attributes:
        storages: For each key, the name of its type and how many numbers it has.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.storages: dict[str, tuple[str, int]] = {}
        self._file = file
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the value of the pickle, and leave the file positioned after it."""
        for _ in range(MAX_OPCODES):
            name, argument = self._next()
            if name == "STOP":
                return self._pop()
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            else:
                self._follow(name, argument)
        raise Refused(f"it has more than {MAX_OPCODES} opcodes")

    def _next(self) -> tuple[str, Any]:
        code = self._file.read(1)
        if code not in _OPCODES:
            found = f"{code!r} is not an opcode" if code else "it ends early"
            raise ValueError(f"at byte {self._file.tell()} of its pickle, {found}")
        opcode = _OPCODES[code]
        if opcode.name not in _ALLOWED:
            raise Refused(f"it uses the opcode {opcode.name}, which plain weights do not need")
        if opcode.name == "GLOBAL":  # its reader would take backslashes for escapes
            return opcode.name, (self._line(), self._line())
        # These readers take no more than the file has, whatever length it announces.
        return opcode.name, opcode.arg.reader(self._file) if opcode.arg else None

    def _line(self) -> str:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ValueError("its pickle ends within a name")
        return line[:-1].decode("utf-8")

    def _follow(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._last(_TUPLES[name])))
            case "BINGET" | "LONG_BINGET":
                stack.append(self._recall(argument))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._top()
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            case "GLOBAL":
                stack.append(_find_global(*argument))
            case "STACK_GLOBAL":
                attribute, module = self._pop(), self._pop()
                stack.append(_find_global(module, attribute))
            case "BINPERSID":
                stack.append(self._declare(self._pop()))
            case "REDUCE":
                arguments, function = self._pop(), self._pop()
                stack.append(_reduce(function, arguments))
            case _:
                self._fill(name)

    def _fill(self, name: str) -> None:
        """Follow an opcode that puts values into an existing one."""
        match name:
            case "SETITEM" | "SETITEMS":
                values = self._since_mark() if name == "SETITEMS" else self._last(2)
                pairs = [values[start : start + 2] for start in range(0, len(values), 2)]
                _set_items(self._top(), pairs)
            case "APPEND" | "APPENDS":
                values = self._since_mark() if name == "APPENDS" else [self._pop()]
                expect(self._top(), list, "what is appended to").extend(values)
            case "BUILD":  # attributes of a state_dict, such as _metadata: dropped
                self._pop()
                expect(self._top(), dict, "what gets attributes")

    def _pop(self) -> Any:
        return self._last(1)[0]

    def _top(self) -> Any:
        self._stack += (last := self._last(1))
        return last[0]

    def _last(self, count: int) -> list[Any]:
        """Pop the last values."""
        if len(self._stack) < count:
            raise ValueError("its pickle takes a value where there is none")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle goes back to a mark where there is none")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _recall(self, place: int) -> Any:
        if place not in self._memo:
            raise ValueError("its pickle recalls a value that it has not stored")
        return self._memo[place]

    def _declare(self, saved: Any) -> _Key:
        """Note a storage, described by its kind, type, key, device and how many numbers it has."""
        if type(saved) is not tuple or not 5 <= len(saved) <= 6:
            raise ValueError(f"it describes a storage by a {kind_of(saved)}")
        kind, wanted, key, _device, numel, *view = saved
        known = type(kind) is str and kind == "storage" and type(wanted) is _Global
        whole = all(part is None for part in view)
        if not known or not whole or type(key) is not str or not _is_size(numel):
            described = ", ".join(map(kind_of, saved))
            raise ValueError(f"it describes a storage by {described}")
        entry = (wanted.name.removeprefix("torch."), numel)
        if self.storages.setdefault(key, entry) != entry:
            raise ValueError(f"storage {printable(key)} is declared twice")
        return _Key(key)


def kind_of(value: Any) -> str:
    """Name an untrusted value's type for a message, which must not show the value itself."""
    return type(value).__name__.lstrip("_").lower()


def expect(value: Any, kind: type, what: str) -> Any:
    """Return the value if it is of that type; `what` names it in the message otherwise."""
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
    """Describe the result of one of the known functions."""
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
    key = expect(storage, _Key, "a tensor's storage").key
    for name, numbers in (("offset", (offset,)), ("shape", shape), ("strides", strides)):
        if len(expect(numbers, tuple, f"a tensor's {name}")) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor's {name} in its pickle has {len(numbers)} dimensions")
        if not all(map(_is_size, numbers)):
            raise ValueError(f"a tensor's {name} in its pickle has a part that is not a size")
    if any(n > MAX_SIDE for n in shape) or math.prod(n or 1 for n in shape) >= MAX_NUMBER:
        raise ValueError("a tensor's shape in its pickle is larger than MLX can hold")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    return Tensor(key, offset, shape, strides)


def _set_items(held: Any, entries: Iterable[Sequence[Any]]) -> None:
    held = expect(held, dict, "what gets entries")
    for entry in entries:
        if len(entry) != 2:
            raise ValueError(f"an entry in its pickle has {len(entry)} parts, expected 2")
        name, value = entry
        if type(name) is not str:
            raise Refused(f"it has an entry under a {kind_of(name)}, expected a name")
        held[name] = value
