"""Files of prompts, line by line."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ..errors import first_line, not_utf8

Format = Literal["text", "jsonl"]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PROMPT_FIELD = "prompt"  # of a JSON object, unless another one is given
EMPTY = "empty: write a prompt there, or delete the line"
ONE_OBJECT = "write one JSON object on each line, or use --format text"
TEXT, HALF = "a string", "half of a surrogate pair"
MAX_DEPTH = 100  # of objects and arrays in one another: more could be read, but not written
MAX_LINE = 2**24  # bytes; no prompt is longer, but a binary file may be a single line


@dataclass(frozen=True)
class Shard:
    """Every `count`-th line, from line `number` on (both from 1)."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse text such as "2/8"; refuse anything else."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"a shard must be 1/N to N/N, such as 2/8, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    def __contains__(self, line: int) -> bool:
        return line % self.count == self.number % self.count

    def size(self, lines: int) -> int:
        """Return how many of the first `lines` lines are in the shard."""
        return len(range(self.number, lines + 1, self.count))


@dataclass(frozen=True)
class Line:
    """One line of the input."""

    number: int  # counted from 1 in the whole file, also in a shard
    id: str | int  # the record's own id, or the number
    prompt: str | None = None  # None if the line has none
    error: str | None = None  # why the line cannot be used
    completion: str | None = None  # an output that the record gives, where one was asked for
    columns: Mapping[str, Any] | None = None  # all fields but id and prompt; None if not JSON
    size: int = 0  # of what was read of it, in bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in the line, or nothing in its prompt."""
        return self.error == EMPTY or (self.prompt is not None and not self.prompt.strip())


def open_input(name: str) -> BinaryIO:
    """Open a file of text; "-" is standard input. Refuses folders."""
    if name == "-":
        return open(0, "rb", closefd=False)
    if not name:
        raise ValueError("the input must be the name of a file, or -, got ''")
    if Path(name).is_dir():
        raise ValueError(f"{name} is a folder, expected a file")
    return open(name, "rb")


def count_lines(stream: BinaryIO) -> int | None:
    """Count the lines of a file; return None for what can be read only once, such as a pipe."""
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return None
    start, lines, last = stream.tell(), 0, b"\n"
    while block := stream.read(2**20):
        lines += block.count(b"\n")
        last = block[-1:]
    stream.seek(start)
    return lines + (last != b"\n")


def read_lines(
    stream: BinaryIO, form: Format, field: str, shard: Shard, *, completion: str | None = None
) -> Iterator[Line]:
    """Yield the lines of a stream that are in the shard; a bad line has an error.

    The prompt of a JSON object is in `field`; `completion` names one that may have its output, or
    null.
    """
    for number in count(1):
        raw = stream.readline(MAX_LINE + 1)
        if not raw:
            return
        whole = raw
        while len(whole) > MAX_LINE and not whole.endswith(b"\n"):
            whole = stream.readline(MAX_LINE + 1)
            if not whole:
                break
        if number in shard:
            found: dict[str, Any] = {"number": number, "id": number, "size": len(raw)}
            try:
                _read_line(raw, form, field, completion, found)
            except ValueError as error:
                found["error"] = str(error)
            yield Line(**found)


def _read_line(
    raw: bytes, form: Format, field: str, completion: str | None, found: dict[str, Any]
) -> None:
    """Put what is in a line into the attributes of its `Line`."""
    if len(raw) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE // 2**20} MiB: split it into several")
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    if found["number"] == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    if form == "text":
        found["prompt"] = text
    if not text.strip():
        raise ValueError(EMPTY)
    if form == "jsonl":
        _read_json(text, field, completion, found)


def _read_json(text: str, field: str, completion: str | None, found: dict[str, Any]) -> None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        fault = first_line(error)
        if isinstance(error, json.JSONDecodeError):
            fault = f"{error.msg.rstrip(': ').removesuffix(' at')} at character {error.pos + 1}"
        raise ValueError(f"not JSON: {fault}; {ONE_OBJECT}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {_kind(record)}; {ONE_OBJECT}")
    if _is_deeper(record, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} deep: leave out what is")
    found["columns"] = {key: value for key, value in record.items() if key not in ("id", field)}
    own = record.get("id")
    if own is not None:
        if type(own) is not int and _kind(own) != TEXT:
            raise ValueError(f"'id' is {_kind(own)}, expected a string or an integer")
        found["id"] = own
    if field not in record:
        names = ", ".join(repr(name[:40]) for name in list(record)[:8]) or "nothing"
        raise ValueError(
            f"no field {field!r} (found: {names}): give the prompt's field with --field"
        )
    for name in (field, completion):
        value = record.get(name)
        if name == completion and value is None:
            continue
        if (kind := _kind(value)) == HALF:
            raise ValueError(f"{name!r} holds {HALF}, expected text")
        if kind != TEXT:
            raise ValueError(f"{name!r} is {kind}, expected a string")
    found |= {"prompt": record[field], "completion": record.get(completion)}
    if not record[field].strip():
        raise ValueError(f"{field!r} is empty, expected a prompt")


def _is_deeper(value: object, most: int) -> bool:
    """Whether objects and arrays stand in one another more than `most` times."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(each, most - 1) for each in inner)


def _kind(value: object) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return HALF
    names = {dict: "an object", list: "an array", str: TEXT, bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
