"""Options as fields of dataclasses: their checks, their words for help, and their errors."""

import inspect
import operator
import re
import string
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import cache, wraps
from numbers import Real
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from .errors import shown

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")
Options = TypeVar("Options")
Taken = TypeVar("Taken", covariant=True)

_FLAG = re.compile(r"--([a-z][a-z-]*)")


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
    python: str | None = None,
    panel: str | None = None,
    shown: str | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return the field of a dataclass for an option, with its range and the words of --help.

    `python` is what docstrings say instead, where it takes another form in Python or there is more
    to say. `panel` is its heading in --help, and `shown` its default there where that is not the
    value itself. The `least` value of a number is an integer if the option is one.
    """
    about = {"help": help, "panel": panel, "shown": shown, "least": least, "most": most}
    return field(default=default, metadata={**about, "python": python})


def python_option(
    default: Any, text: str, *, least: float | None = None, most: float | None = None
) -> Any:
    """Return the field for an option that no command line has, with what docstrings say of it."""
    about = {"help": None, "least": least, "most": most, "python": text}
    return field(default=default, metadata=about)


def described(options: Any) -> Any:
    """Add to the docstring of a dataclass of options what each does; see `option`."""
    options.__doc__ = _with_options(options.__doc__, options)
    return options


def _with_options(doc: str | None, options: Any) -> str | None:
    """Return a docstring with a section of what each option does."""
    if not doc:  # python -OO leaves docstrings out
        return doc
    *_, indent = doc.split("\n")  # before the quotes that end it
    indent = "" if indent.strip() else indent
    told = [
        each
        for each in sorted(fields(options), key=lambda each: bool(each.kw_only))
        if each.metadata
    ]
    texts = [(each.name, each.metadata["python"] or each.metadata["help"]) for each in told]
    lines = [_described_option(name, text, indent) for name, text in texts]
    return "\n".join([doc.rstrip(), "", f"{indent}Options:", *lines, indent])


@cache  # several methods take the same options
def _described_option(name: str, text: str, indent: str) -> str:
    text = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)
    first, others = f"{indent}    ", f"{indent}        "
    return textwrap.fill(f"{name}: {text}", 100, initial_indent=first, subsequent_indent=others)


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
            raise option_error(each.name, f"between {least:,.10g} and {most:,.10g}", value)


def settle(options: object, **values: object) -> None:
    """Give fields of a frozen value their final form; for its `__post_init__` alone."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


class _Taking(Protocol[P, Taken]):
    """Changes the type of a method of one argument and options, or of such a function."""

    @overload
    def __call__(self, method: Callable[[S, A, Taken], R]) -> Callable[Concatenate[S, A, P], R]: ...

    @overload
    def __call__(self, method: Callable[[A, Taken], R]) -> Callable[Concatenate[A, P], R]: ...


def takes(
    options: Callable[P, Options], other_names: Mapping[str, str] = MappingProxyType({})
) -> _Taking[P, Options]:
    """Let a method or function take the fields of its last argument, options, as keywords instead.

    Other keywords are refused, with the name or the place that they have here; `other_names` are
    those of other programs, with ours. Type checkers, editors and `help` know the options that
    there are.
    """

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        own, taken = inspect.signature(method), inspect.signature(options).parameters
        *before, _ = own.parameters.values()
        signature = own.replace(parameters=[*before, *taken.values()])
        title = method.__qualname__
        for name in taken:
            _takers.setdefault(name, []).append(title)

        @wraps(method)
        def call(*args: Any, **keywords: Any) -> R:
            for name in keywords:
                if name not in signature.parameters:
                    raise _unknown_keyword(title, name, signature.parameters, other_names)
            try:
                given = signature.bind(*args, **keywords).arguments
            except TypeError as error:  # it does not say whose arguments
                raise TypeError(f"{title}(): {error}") from None
            arguments = [given.pop(each.name) for each in before]
            return method(*arguments, options(**given))  # type: ignore[call-arg]

        call.__doc__ = _with_options(method.__doc__, options)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return cast(_Taking[P, Options], decorate)


_takers: dict[str, list[str]] = {}  # the methods that take an option, in the order of definition


def _unknown_keyword(
    title: str, name: str, known: Iterable[str], other_names: Mapping[str, str]
) -> TypeError:
    """Return the error for a keyword that a method does not take, with what to write instead."""
    wrong = f"{title}() got an unexpected keyword argument {name!r}"
    ours = other_names.get(name, name)
    if ours in known:
        return TypeError(f"{wrong}: write {ours}")
    if ours in _takers:
        *_, where = _takers[ours][0].split(".")
        where = "the constructor" if where == "__init__" else where
        named = "" if ours == name else f"{ours} here, "
        return TypeError(f"{wrong}, which is {named}an option of {where}: give it there")
    import difflib  # which an import of the package can do without

    if near := difflib.get_close_matches(name, [*known, *_takers], 1, cutoff=0.8):
        return TypeError(f"{wrong}: write {near[0]} if you meant that")
    return TypeError(f"{wrong}: help() of it lists all options")
