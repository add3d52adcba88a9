"""What messages are made of, and checks of options and text that raise them."""

from __future__ import annotations

import operator
import reprlib
from numbers import Real
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec/v1"


def check_utf8(name: str, text: str) -> None:
    """Refuse a string that holds bytes of no text, as Python passes them on from the system.

    Raises:
        ValueError: If it does; `name` says what the string is.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise ValueError(
            f"{name} is not UTF-8: byte {byte:#04x} at character {error.start}; give it in UTF-8"
        ) from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that were to be text, and what to do."""
    byte = error.object[error.start]
    return f"not UTF-8: byte {byte:#04x} at offset {error.start}; convert it to UTF-8"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or what kind of error it is if it has none.

    Libraries quote what they find in a file: what cannot be printed is escaped, and the line cut.
    """
    lines = str(error).strip().splitlines() or [""]
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in lines[0][:300])
    return " ".join(line.split()).rstrip(" :;,.!?") or type(error).__name__


def printable(name: str) -> str:
    """A name from a file as a message can show it: in one line, without controls, not too long."""
    short = name if len(name) <= 80 else f"{name[:80]}..."
    return short if short.isprintable() else ascii(short)


def shown(value: Any) -> str:
    """A value from a file as a message can show it, however long or deeply nested it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def refuse_pointer(path: Path) -> None:
    """Refuse the few lines that Git LFS leaves in the place of a file that it has not fetched.

    Raises:
        ValueError: If that is what the file holds.
    """
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, and not the file itself: run git lfs pull in its "
                "repository"
            )


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An option as an integer, whichever type of integer it is.

    Raises:
        ValueError: If it is not an integer, or out of its range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool) or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}")
    return number


def check_number(name: str, value: Any) -> float:
    """An option as a float.

    Raises:
        ValueError: If it is not a real number.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)
