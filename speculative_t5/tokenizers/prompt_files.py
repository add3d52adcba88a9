"""Files of prompts, line by line."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from ..errors import first_line, not_utf8
from ..files import parse_json
from ..tables import TABLES, read_rows

Format = Literal["text", "jsonl", "csv", "tsv", "parquet"]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PROMPT_SUFFIXES = dict.fromkeys(JSON_SUFFIXES, "jsonl") | {each: each[1:] for each in TABLES}
PROMPT_FIELD = "prompt"  # of a JSON object, unless another one is given
EMPTY_LINE = "empty: write a prompt there, or delete the line"
ONE_OBJECT = "write one JSON object on each line, or use --format text"
FieldNames = tuple[str, str | None, str | None]  # of the fields for prompt, completion and id
A_STRING, HALF_OF_PAIR = "a string", "half of a surrogate pair"
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
    """One line of the input, or one row of a table."""

    number: int  # counted from 1 in the whole file, also in a shard
    id: str | int  # the record's own id, or the number
    place: str  # "line 1", or "row 1" of a table
    prompt: str | None = None  # None if the line has none
    error: str | None = None  # why the line cannot be used
    completion: str | None = None  # an output that the record gives, where one was asked for
    columns: Mapping[str, Any] | None = None  # all fields but id and prompt; None if not JSON
    size: int = 0  # of what was read of it, in bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in the line, or nothing in its prompt."""
        return self.error == EMPTY_LINE or (self.prompt is not None and not self.prompt.strip())


def count_lines(
    stream: BinaryIO, form: Format = "text", *, delimiter: str | None = None
) -> int | None:
    """Count the lines of a file; return None for what can be read only once, such as a pipe."""
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return None
    start, lines, last = stream.tell(), 0, b"\n"
    if f".{form}" in TABLES:
        lines = sum(1 for _ in read_rows(stream, f".{form}", delimiter))
        stream.seek(0, os.SEEK_END)
    while block := stream.read(2**20):
        lines += block.count(b"\n")
        last = block[-1:]
    stream.seek(start)
    return lines + (last != b"\n")


def read_lines(
    stream: BinaryIO,
    form: Format,
    field: str,
    shard: Shard,
    *,
    completion: str | None = None,
    id_field: str | None = None,
    delimiter: str | None = None,
) -> Iterator[Line]:
    """Yield the lines of a stream that are in the shard; a bad line has an error.

    The prompt of a JSON object is in `field`; `completion` names one that may have its output, or
    null. Its `id`, if any, is the line's; an `id_field` must be there, and stays among the columns.
    A row of a table is read as the JSON object that it would be; its cells are parted by the
    `delimiter`, see `read_rows`.
    """
    unit, lines, names = "line", _raw_lines(stream), (field, completion, id_field)
    if f".{form}" in TABLES:
        unit, lines, form = "row", read_rows(stream, f".{form}", delimiter), "jsonl"
    for number, raw in enumerate(lines, 1):
        if number in shard:
            found: dict[str, Any] = {"number": number, "id": number, "size": len(raw)}
            found["place"] = f"{unit} {number}"
            try:
                _read_line(raw, form, names, found)
            except ValueError as error:
                found["error"] = str(error)
            yield Line(**found)


def _raw_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream; of one that is too long its beginning."""
    while raw := stream.readline(MAX_LINE + 1):
        yield raw
        while len(raw) > MAX_LINE and not raw.endswith(b"\n"):
            raw = stream.readline(MAX_LINE + 1)


def _read_line(raw: bytes, form: Format, names: FieldNames, found: dict[str, Any]) -> None:
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
        _refuse_nul("the line", text)
        found["prompt"] = text
    if not text.strip():
        raise ValueError(EMPTY_LINE)
    if form == "jsonl":
        _read_json(text, names, found)


def _read_json(text: str, names: FieldNames, found: dict[str, Any]) -> None:
    """Put the fields of a record into the attributes of its `Line`."""
    field, completion, id_field = names
    record = _parse_record(text)
    moved = (field,) if id_field else (field, "id")
    found["columns"] = {key: value for key, value in record.items() if key not in moved}
    own = _own_id(record, id_field)
    if own is not None:
        found["id"] = own
    if field not in record:
        there = ", ".join(repr(name[:40]) for name in list(record)[:8]) or "nothing"
        raise ValueError(
            f"no field {field!r} (found: {there}): give the prompt's field with --prompt-field"
        )
    _check_text(field, record[field])
    output = None
    if completion is not None and (output := record.get(completion)) is not None:
        _check_text(completion, output)
    found |= {"prompt": record[field], "completion": output}
    if not record[field].strip():
        raise ValueError(f"{field!r} is empty, expected a prompt")


def _parse_record(text: str) -> dict[str, Any]:
    """Parse a line of JSON Lines; refuse what is no object, or nested deeply."""
    try:
        record = parse_json(text)
    except json.JSONDecodeError as error:
        fault = f"{error.msg.rstrip(': ').removesuffix(' at')} at character {error.pos + 1}"
        raise ValueError(f"not JSON: {fault}; {ONE_OBJECT}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {first_line(error)}; {ONE_OBJECT}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {_kind(record)}; {ONE_OBJECT}")
    if _is_deeper(record, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} deep: leave out what is")
    return record


def _own_id(record: Mapping[str, Any], id_field: str | None) -> str | int | None:
    """Return a record's id; None if it has none, and need not have one."""
    own = record.get(key := id_field or "id")
    if own is None and not id_field:
        return None
    if type(own) is int or (isinstance(own, str) and _kind(own) == A_STRING):
        return own
    kind = _kind(own) if key in record else "missing"
    raise ValueError(f"{key!r} is {kind}, expected a string or an integer")


def _check_text(name: str, value: object) -> None:
    """Refuse a field that is no text."""
    if (kind := _kind(value)) == HALF_OF_PAIR:
        raise ValueError(f"{name!r} holds {HALF_OF_PAIR}, expected text")
    if kind != A_STRING:
        raise ValueError(f"{name!r} is {kind}, expected a string")
    _refuse_nul(repr(name), str(value))


def _refuse_nul(name: str, text: str) -> None:
    """Refuse a character that no text has, but files in UTF-16 and binary ones have many of."""
    if (place := text.find("\0")) >= 0:
        raise ValueError(
            f"{name} has a NUL at character {place + 1}, as other encodings have: leave it out, or "
            "convert the file to UTF-8"
        )


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
            return HALF_OF_PAIR
    names = {dict: "an object", list: "an array", str: A_STRING, bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
