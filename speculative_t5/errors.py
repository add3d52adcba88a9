"""Checks of options and of text from outside, and the parts of messages that need care.

A message is one line: what was wrong, what was found, what to do. Text from files is shortened and
escaped before it gets into one. Imports nothing of the package.
"""

import json
import operator
import reprlib
import string
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from numbers import Real
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec/v1"


class OptionError(ValueError):
    """Bad values of options, whose names Python, JSON and a command line spell differently.

    `text` has the names of options in braces, in Python's spelling, and a pair of braces for each
    of `values`: OptionError("{num_draft} must be at least 1, got {!r}", 0).
    """

    def __init__(self, text: str, *values: object) -> None:
        super().__init__(text, *values)  # from which a copy in another process is made
        self._text, self._values = text, values

    def __str__(self) -> str:
        return self.spelled()

    def put_before(self, place: str) -> None:
        """Begin the message with where it was, such as "at index 3, "."""
        self._text = place + self._text
        self.args = (self._text, *self._values)

    @property
    def names(self) -> list[str]:
        """The options that the message names, in its order."""
        parts = string.Formatter().parse(self._text)
        return [name for _, name, *_ in parts if name]

    def spelled(
        self, spell: Callable[[str], str] = str, show: Callable[[object], str] | None = None
    ) -> str:
        """Return the message with names as `spell` and values as `show` makes them, or `shown`."""
        return _Spelling(spell, show or shown).vformat(self._text, self._values, {})


class _Spelling(string.Formatter):
    def __init__(self, spell: Callable[[str], str], show: Callable[[object], str]) -> None:
        self._spell, self._show = spell, show

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Any) -> Any:
        return args[key] if isinstance(key, int) else self._spell(key)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "r":
            return self._show(value)
        return super().convert_field(value, conversion)


def option_error(name: str, expected: str, found: object) -> OptionError:
    """Return the error for a value; a `name` that is no option's may have one in braces."""
    subject = f"{{{name}}}" if name.isidentifier() else name
    return OptionError(f"{subject} must be {{}}, got {{!r}}", expected, found)


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an option as an int, whichever integer type it has; refuse one out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool) or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise option_error(name, f"an integer {bounds}", value)
    return number


def check_number(name: str, value: Any) -> float:
    """Return an option as a float; refuse what is no real number, or an integer too large."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise option_error(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        subject = f"{{{name}}}" if name.isidentifier() else name
        wrong = f"{subject} must be a number that a float holds, got a larger one"
        raise OptionError(wrong) from None


def option(
    default: Any,
    help: str,
    *,
    panel: str | None = None,
    shown: str | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return the field of a dataclass for an option, with its range and the words of --help.

    `panel` is its heading there, and `shown` its default where that is not the value itself. The
    `least` value of a number is an integer if the option is one.
    """
    about = {"help": help, "panel": panel, "shown": shown, "least": least, "most": most}
    return field(default=default, metadata=about)


def described(options: Any) -> Any:
    """Add to a dataclass's docstring what its options do, in the words of --help; see `option`."""
    helps = [(each.name, each.metadata["help"]) for each in fields(options) if each.metadata]
    if options.__doc__:  # python -OO leaves docstrings out
        lines = ["\nOptions:", *(f"\n    {name}: {text}" for name, text in helps)]
        options.__doc__ += "".join(lines)
    return options


def check_options(options: Any) -> None:
    """Refuse values that are out of the ranges of their fields, or no numbers, see `option`.

    An option whose value is None was not given, and is not checked.
    """
    for each in fields(options):
        value, least = getattr(options, each.name), each.metadata.get("least")
        most: Any = each.metadata.get("most")
        if least is None or value is None:
            continue
        if isinstance(least, int):
            check_integer(each.name, value, least, most)
        elif not least <= check_number(each.name, value) <= most:
            raise option_error(each.name, f"between {least:g} and {most:g}", value)


def check_utf8(name: str, text: str) -> None:
    """Refuse a string, called `name`, with bytes that are not UTF-8: Python's surrogates."""
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
    """Read the object in a JSON file; refuse anything else, and say to do what `again` says."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; {again}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected an object: {again}")
    return raw


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
    """Return a number with so many decimals, and not below it: what is needed is enough then."""
    return _rounded(number, digits, ROUND_CEILING)


def rounded_down(number: float, digits: int) -> str:
    """Return a number with so many decimals, and not above it: what is there is there then."""
    return _rounded(number, digits, ROUND_FLOOR)


def _rounded(number: float, digits: int, way: str) -> str:
    return f"{Decimal(repr(float(number))).quantize(Decimal(1).scaleb(-digits), way):,}"


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
