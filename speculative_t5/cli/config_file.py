"""Files of options, for commands that have many."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..errors import first_line, not_utf8, shown

KINDS = {
    str: "a string",
    Path: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


def read_options(path: Path, command: Callable[..., None]) -> dict[str, Any]:
    """Read the options of a command from a TOML, JSON or YAML file.

    Args:
        path: The file, whose suffix says which of them it is.
        command: Its parameters are the options, with - or _ in the file.

    Raises:
        ValueError: If the file is not of its kind, or an entry is not an option or of another type.
        OSError: If it cannot be read.
    """
    kinds = {
        name: KINDS[kind]
        for name, hint in get_type_hints(command).items()
        for kind in (get_args(hint) or (hint,))
        if kind in KINDS and name != "config"
    }
    options: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = key.replace("-", "_") if isinstance(key, str) else None
        if name not in kinds:
            raise ValueError(_unknown(path, key, kinds))
        if name in options:
            raise ValueError(f"{path}: {name} is there twice: leave one of them out")
        if not _fits(value, kinds[name]):
            raise ValueError(f"{path}: {key} is {shown(value)}, expected {kinds[name]}")
        options[name] = value
    return options


def _read(path: Path) -> Mapping[Any, Any]:
    """Parse a file into names and values."""
    parsers: dict[str, tuple[str, Callable[[str], Any]]] = {
        ".toml": ("TOML", tomllib.loads),
        ".json": ("JSON", json.loads),
        ".yaml": ("YAML", _parse_yaml),
        ".yml": ("YAML", _parse_yaml),
    }
    if path.suffix not in parsers:
        raise ValueError(f"{path} has the suffix {path.suffix!r}, expected {', '.join(parsers)}")
    kind, parse = parsers[path.suffix]
    try:
        found = parse(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is {not_utf8(error)}") from error
    except (ValueError, RecursionError) as error:  # of any of the parsers
        raise ValueError(f"{path} is not {kind} ({first_line(error)}): check the file") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} is {shown(found)}, expected names and values of options")
    return found


def _parse_yaml(text: str) -> Any:
    import yaml

    # PyYAML takes 1e-3 for a string; in YAML 1.2, as in TOML and JSON, it is a number.
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    number = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        found = yaml.load(text, loader)  # a safe one
    except yaml.YAMLError as error:
        raise ValueError(_yaml_fault(error)) from error
    return {} if found is None else found


def _yaml_fault(error: Exception) -> str:
    """Return what is wrong with a YAML file, and where in it."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{problem or first_line(error)}{where}"


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == KINDS[bool]
    types = {KINDS[str]: (str,), KINDS[int]: (int,), KINDS[float]: (int, float)}
    return isinstance(value, types.get(kind, ()))


def _unknown(path: Path, key: Any, names: Mapping[str, str]) -> str:
    """Say that a key is none of the names, and which of them may have been meant."""
    wrong = f"{path}: {shown(key)} is not an option"
    near = difflib.get_close_matches(str(key).replace("-", "_"), names, 1)
    return f"{wrong}: write {near[0]} if you meant that" if near else f"{wrong}: leave it out"
