"""Checks of text from outside, and the parts of messages that need care.

A message is one line: what was wrong, what was found, what to do. Text from files is shortened and
escaped before it gets into one. Imports nothing of the package.
"""

import json
import reprlib
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec/v1"


def check_utf8(name: str, text: str) -> None:
    """Refuse a string, called `name`, with surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise ValueError(
            f"{name} is not UTF-8: byte {byte:#04x} at character {error.start}; give it in UTF-8"
        ) from error


def refuse_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer, which stands for a file that was not fetched."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, and not the file itself: run git lfs pull in its "
                "repository"
            )


def read_json(path: Path, again: str) -> dict[str, Any]:
    """Read the object in a JSON file; refuse anything else, with the advice `again`."""
    raw = _parsed_json(path, again)
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected an object: {again}")
    return raw


def read_json_list(path: Path, again: str) -> list[Any]:
    """Read the list in a JSON file; refuse anything else, with the advice `again`."""
    raw = _parsed_json(path, again)
    if not isinstance(raw, list):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected a list: {again}")
    return raw


def _parsed_json(path: Path, again: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; {again}") from error


def count(number: int, thing: str) -> str:
    """Return for example "1 prompt" or "2,000 prompts"."""
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def not_utf8(error: UnicodeDecodeError) -> str:
    """Say where bytes are not UTF-8, and what to do: the end of a message."""
    byte = error.object[error.start]
    return f"not UTF-8: byte {byte:#04x} at offset {error.start}; convert it to UTF-8"


def decoded(data: bytes, name: str) -> str:
    """Return the text that bytes, called `name`, hold in UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is {not_utf8(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened and escaped, or else its type."""
    lines = str(error).strip().splitlines() or [""]
    line = escaped(lines[0][:300])
    return " ".join(line.split()).rstrip(" :;,.!?") or type(error).__name__


def rounded_up(number: float, digits: int) -> str:
    """Return a number with so many decimals, rounded up: for what is needed at least."""
    return _rounded(number, digits, ROUND_CEILING)


def rounded_down(number: float, digits: int) -> str:
    """Return a number with so many decimals, rounded down: for what there is at most."""
    return _rounded(number, digits, ROUND_FLOOR)


def _rounded(number: float, digits: int, rounding: str) -> str:
    return f"{Decimal(repr(float(number))).quantize(Decimal(1).scaleb(-digits), rounding):,}"


def escaped(name: str) -> str:
    """Return a name with escapes for what a terminal would obey, such as ends of lines."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def printable(name: str) -> str:
    """Return a name from a file, shortened and escaped."""
    short = name if len(name) <= 80 else f"{name[:80]}..."
    return short if short.isprintable() else ascii(short)


def shown(value: Any) -> str:
    """Return a value from a file as source code, shortened, however long or nested it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    return short.repr(value)
