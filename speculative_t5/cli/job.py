"""What `batch` does: from lines to records of their outputs, in the same order.

Several processes write a part each: `out.jsonl.2-of-3` has the records of `--shard 2/3`. If a
process dies, only its own lines are missing; the same command with --resume adds them.
"""

import json
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from ..decoding import RowError
from ..files import LineFile, json_line, json_object, lock, private_mode, replacing
from ..generation import OPTIONAL_FIELDS, OUTCOME_FIELDS, Generation, as_outcome
from ..tables import write_table
from ..tokenizers import MAX_LINE, Line, Source
from .options import as_typed
from .terminal import signals_held

MAX_RECORD = 8 * MAX_LINE  # bytes; JSON may take 6 for a character, and the output adds some
MAX_HELD, MAX_HELD_SIZE = 1000, 2**24  # of records with errors that wait for their turn
GIVEN_FIELD = "given"  # the field of a record for fields of the line that have names in use
TABLE_COLUMNS = ("id", "prompt", "text", "finish_reason", "error")  # of each table, before others
NOT_DECODED = "not decoded when the run ended: run it again with --resume"
RESUME_ADVICE = "--resume to continue it, or --force to start over"

Requests = Iterable[tuple[int, list[int]]]
Generating = Callable[[Requests], Iterator[tuple[int, Generation]]]


@dataclass(frozen=True)
class Record:
    """The output for a line, or why there is none."""

    line: Line
    done: Generation | None = None
    error: str = ""
    source: Source | None = None
    earlier: bytes = b""  # the whole record, if an earlier run has made it
    outcome: Collection[str] = OUTCOME_FIELDS  # names that fields of the line must leave to it

    def to_json(self) -> bytes:
        """Return one line of JSON, newline included.

        It holds no times, so that with a fixed number of drafted tokens a job gives the same bytes
        at any batch size, in shards, or resumed.
        """
        if self.earlier:
            return self.earlier
        record = fields_of(self.line, self.outcome)
        if self.done is None:
            record["error"] = f"{self.line.place}: {self.error}"
        else:
            is_cut = self.source is not None and self.source.cut > 0
            record |= as_outcome(self.done, truncated=is_cut)
        return json_line(record)


def says_undone(record: Mapping[str, Any], line: Line) -> bool:
    """Whether a record of a file says that its line was not decoded when the run ended."""
    return bool(record.get("error") == f"{line.place}: {NOT_DECODED}")


def fields_of(line: Line, outcome: Collection[str] = OUTCOME_FIELDS) -> dict[str, Any]:
    """Return the fields of a line's record that come from the line.

    Those with names in use, as of the `outcome`, are in one more field.
    """
    fields: dict[str, Any] = {"id": line.id, "prompt": line.prompt}
    given: dict[str, Any] = {}
    taken = (*fields, GIVEN_FIELD, *outcome)
    for name, value in (line.columns or {}).items():
        (given if name in taken else fields)[name] = value
    return fields | ({GIVEN_FIELD: given} if given else {})


def process(
    lines: Iterable[Line],
    generate: Generating,
    encode: Callable[[str], Source],
    emit: Callable[[Record], None],
    *,
    watch: Callable[[Record], None] = lambda _: None,
    kept: Mapping[int, bytes] = MappingProxyType({}),
    outcome: Collection[str] = OUTCOME_FIELDS,
) -> None:
    """Make a record of each line, and emit the records in the order of the lines.

    If it is interrupted, or fails, it emits what is decoded, and for lines before that records
    which say that they are not. `generate` takes indices and source ids when it has room, and
    yields outputs as they end. A ValueError of `encode` becomes the line's error, and so does a
    RowError of `generate`, after which the lines beside that one are decoded again. `watch` takes
    each record as soon as it is made, perhaps before those ahead of it. `kept` are whole records
    of an earlier run, by the number of their line. For `outcome` see `fields_of`.
    """
    run = _LinesInOrder(iter(lines), encode, emit, watch, kept, partial(Record, outcome=outcome))
    try:
        while not run.at_end:
            for index, done in _generate_all(lambda: generate(run.requests()), run.fail):
                run.succeed(index, done)
    finally:
        run.emit_rest()


@dataclass
class _LinesInOrder:
    """Lines that are being decoded, and records that wait for those of the lines before them."""

    remaining: Iterator[Line]
    encode: Callable[[str], Source]
    emit: Callable[[Record], None]
    watch: Callable[[Record], None]
    kept: Mapping[int, bytes]
    make: Callable[..., Record]
    order: deque[Line] = field(default_factory=deque)  # lines without a record in the output
    ready: dict[int, Record] = field(default_factory=dict)  # by the number of the line
    pending: dict[int, tuple[Line, Source]] = field(default_factory=dict)
    at_end: bool = False
    torn: bool = False  # whether a record may have been written in part

    def requests(self) -> Iterator[tuple[int, list[int]]]:
        """Yield index and ids of the next lines, as far as they can be used."""
        for line, source in [*self.pending.values()]:  # that were beside one that could not go on
            yield line.number - 1, source.ids
        for line in self.remaining:
            self.order.append(line)
            if line.number in self.kept:
                self.finish(self.make(line, earlier=self.kept[line.number]))
                continue
            try:
                if line.prompt is None or line.error:
                    raise ValueError(line.error)
                source = self.encode(line.prompt)
            except ValueError as error:
                self.finish(self.make(line, error=as_typed(error)))
                if self.is_full:
                    return  # until the prompts before them have ended
                continue
            self.pending[line.number] = line, source
            yield line.number - 1, source.ids
        self.at_end = True

    @property
    def is_full(self) -> bool:
        """Whether no more records should wait for their turn."""
        size = sum(record.line.size for record in self.ready.values())
        return len(self.ready) >= MAX_HELD or size >= MAX_HELD_SIZE

    def succeed(self, index: int, done: Generation) -> None:
        """Make the record of a line that has been decoded."""
        line, source = self.pending.pop(index + 1)
        self.finish(self.make(line, done, source=source))

    def fail(self, error: RowError) -> None:
        """Make the record of a line that could not go on."""
        line, _ = self.pending.pop(error.index + 1)
        self.finish(self.make(line, error=error.reason))

    def finish(self, record: Record) -> None:
        """Take a record, and emit all whose turn has come."""
        self.ready[record.line.number] = record
        self.watch(record)
        while self.order and self.order[0].number in self.ready:
            self.emit_first()

    def emit_first(self) -> None:
        """Emit the record of the first line, or one that says that it was not decoded."""
        with signals_held():
            self.torn, line = True, self.order.popleft()
            self.emit(self.ready.pop(line.number, self.make(line, error=NOT_DECODED)))
            self.torn = False

    def emit_rest(self) -> None:
        """Emit all records that are left, with those of the lines before them."""
        while self.ready and not self.torn:
            self.emit_first()


def _generate_all(
    generate: Callable[[], Iterator[tuple[int, Generation]]], fail: Callable[[RowError], None]
) -> Iterator[tuple[int, Generation]]:
    """Yield outputs; begin again after one that could not go on, which ends all beside it."""
    while True:
        try:
            yield from generate()
            return
        except RowError as error:
            fail(error)


@dataclass
class RecordCounts:
    """Counts of records that are written, and those behind a gap that an earlier run has left."""

    done: int = 0
    failed: int = 0  # records with errors
    cut: int = 0  # outputs that did not end by themselves
    kept: dict[int, bytes] = field(default_factory=dict)  # by the number of the line

    def count(self, record: Mapping[str, Any]) -> None:
        self.done += 1
        self.failed += "error" in record
        self.cut += record.get("finish_reason") == "length"


def shown_name(output: str) -> str:
    return "standard output" if output == "-" else output


class RecordFile(LineFile):
    """A file of records, appended a whole line at a time; "-" is standard output.

    The file is not created before it is entered (`with`), which also locks it. It must be another
    one than the input, the `stream`. If it has records, they are kept with `resume`, replaced with
    `force`, and otherwise refused, with `advice`: also if another run has written them meanwhile.
    """

    def __init__(
        self,
        name: str,
        stream: BinaryIO,
        *,
        resume: bool = False,
        force: bool = False,
        advice: str = RESUME_ADVICE,
        outcome: Collection[str] = OUTCOME_FIELDS,
    ) -> None:
        if not name:
            raise ValueError(f"the output must be the name of a file, or -, got {name!r}")
        try:
            found = os.fstat(1) if name == "-" else os.stat(name)
        except FileNotFoundError:
            found = None
        is_file = found is None or stat.S_ISREG(found.st_mode)
        if found and is_file and os.path.samestat(found, os.fstat(stream.fileno())):
            raise ValueError(f"the output {name} is the input itself: give another --output")
        self.is_file = is_file and name != "-"
        mode = private_mode(name, [os.fstat(stream.fileno())]) if self.is_file else 0
        super().__init__(name, ", or give another --output", special=not self.is_file, mode=mode)
        self._keep, self._replace, self._advice, self._outcome = resume, force, advice, outcome
        if resume and not self.is_file:
            raise ValueError(
                f"--resume needs an --output that is a file, which {shown_name(name)} is not: "
                "give one, or leave --resume out"
            )
        self._check_size(found.st_size if found and self.is_file else 0)

    def _check_size(self, size: int) -> None:
        if size and not (self._keep or self._replace):
            raise ValueError(f"the output {self._name} is not empty: use {self._advice}")

    def opened(self) -> None:
        self._check_size(self.size)  # another run may have written to it

    def begin(self) -> None:
        """Empty the file, unless its records are to be kept; until then nothing is changed."""
        if self.is_file and not self._keep:
            self.cut(0)

    def resume(
        self, lines: Iterator[Line], *, gaps: bool = True
    ) -> tuple[Iterator[Line], RecordCounts]:
        """Skip the lines that have records, up to the first without; cut off all behind it.

        Returns the lines still to do, and what is known of the records, with those that were cut
        off if `gaps` is set; refuses records of other lines.
        """
        earlier, at, end, ahead = RecordCounts(), 0, 0, list[Line]()
        for number, raw in enumerate(self.lines(MAX_RECORD), 1):
            at += len(raw)
            record, line = json_object(raw), next(lines, None)
            if (
                "id" not in record
                and line
                and at == self.size
                and _is_torn(raw, line, self._outcome)
            ):
                ahead.append(line)
                break
            line = check_record(f"{self._name}, line {number},", record, line)
            if says_undone(record, line):
                ahead.append(line)
                if gaps:
                    continue
                break
            earlier.count(record)
            if ahead:
                ahead.append(line)
                earlier.kept[line.number] = raw
            else:
                end += len(raw)
        self.cut(end)
        return chain(ahead, lines), earlier


def check_record_file(
    name: str, stream: BinaryIO, *, resume: bool, force: bool, advice: str = RESUME_ADVICE
) -> None:
    """Refuse what a `RecordFile` cannot be, before there is anything to write; change nothing."""
    RecordFile(name, stream, resume=resume, force=force, advice=advice)


def check_record(where: str, record: Mapping[str, Any], line: Line | None) -> Line:
    """Return the line of the input that a record, found at `where`, must be about."""
    advice = "give another --output, or --force to start over"
    if "id" not in record:
        raise ValueError(f"{where} is not a record of a batch: {advice}")
    if line is None:
        raise ValueError(f"{where} is more than the input has lines for: {advice}")
    found = _fields_in(record, line)
    if _as_text(found) != _as_text(fields_of(line)):
        raise ValueError(
            f"{where} is not about {line.place} of the input, as it has another id, prompt "
            f"or other field: {advice}"
        )
    return line


def _fields_in(record: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """Return the fields of a record that come from its line, in the form of `fields_of`.

    Those that have a name of `OPTIONAL_FIELDS` are in a field of their own only if the run had the
    option.
    """
    found = {name: value for name, value in record.items() if name not in OUTCOME_FIELDS}
    given = found.get(GIVEN_FIELD)
    moved = {name: record[name] for name in OPTIONAL_FIELDS if name in record}
    moved = {name: value for name, value in moved.items() if name in (line.columns or {})}
    if moved and (given is None or isinstance(given, dict)):
        found[GIVEN_FIELD] = moved | (given or {})
    return found


def _as_text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True)  # as text, NaN equals itself


def _is_torn(raw: bytes, line: Line, outcome: Collection[str]) -> bool:
    """Whether this is the beginning of the line's record, perhaps followed by zeros."""
    written = raw.rstrip(b"\n").rstrip(b"\x00")
    head = Record(line, outcome=outcome).to_json().rpartition(b', "error": ')[0]
    return written.startswith(head) or head.startswith(written)


def part_paths(output: str, count: int) -> list[Path]:
    """Return the names of all parts of an output, in order."""
    return [Path(f"{output}.{number}-of-{count}") for number in range(1, count + 1)]


def find_parts(output: str) -> dict[Path, int]:
    """Return the parts of an output that are there, and how many belong together with each."""
    number = "([1-9][0-9]{0,8})"
    pattern = re.compile(re.escape(Path(output).name) + rf"\.{number}-of-{number}")
    found = {path: pattern.fullmatch(path.name) for path in sorted(Path(output).parent.iterdir())}
    return {path: int(match[2]) for path, match in found.items() if match}


def check_parts(output: str, count: int) -> None:
    """Refuse to go on with records of another number of processes."""
    for path, other in find_parts(output).items():
        if other != count and has_content(path):
            raise ValueError(
                f"{path} was written by one of {other} processes, and {count} are running: "
                f"run {other} again, or delete it"
            )


def has_content(path: str | Path) -> bool:
    return os.path.exists(path) and os.path.getsize(path) > 0


def join_parts(output: str, lines: Iterator[Line], parts: Sequence[Path]) -> RecordCounts:
    """Write the records of all parts to the output, in the order of the lines; remove the parts.

    The output is replaced as a whole, or not at all. A part that is not whole, still being written
    or of other lines is refused.
    """
    joined = RecordCounts()
    with ExitStack() as undo:
        for path in parts:
            part = undo.enter_context(path.open("r+b"))
            lock(part.fileno(), f"a process is writing to {path}: wait for it to end")
        mode = private_mode(output, map(Path.stat, parts))
        with replacing(output, mode) as new, new.open("wb") as file:
            for raw in _records(parts, lines, "run the command again with --resume"):
                joined.count(json_object(raw))
                file.write(raw)
        for path in parts:
            path.unlink(missing_ok=True)
    return joined


def all_parts(output: str) -> list[Path]:
    """Return the parts in order; refuse to go on if one is missing, or some are of other runs."""
    found = find_parts(output)
    if not found:
        raise ValueError(
            f"there are no parts of {output} beside it, such as {part_paths(output, 2)[0]}: "
            "copy them there, or give another --output"
        )
    counts = {count for path, count in found.items() if has_content(path)} or {*found.values()}
    if len(counts) > 1:
        raise ValueError(
            f"{output} has parts of {' and of '.join(map(str, sorted(counts)))} processes: "
            "delete those of one run"
        )
    (size,) = counts
    parts = part_paths(output, size)
    for path in parts:
        if not path.exists():
            raise ValueError(f"{path} is missing: copy it from the machine that wrote it")
    return parts


def _records(parts: Sequence[Path], lines: Iterable[Line], advice: str) -> Iterator[bytes]:
    """Yield the records of files that have those of the lines in turn; refuse any others."""
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("rb")) for part in parts]
        for number, line in enumerate(lines):
            path, file = parts[number % len(parts)], files[number % len(parts)]
            raw = file.readline(MAX_RECORD)
            record = json_object(raw)
            if not raw.endswith(b"\n") or says_undone(record, line):
                raise ValueError(f"{path} has no record of {line.place}: {advice}")
            check_record(f"{path}, line {number // len(parts) + 1},", record, line)
            yield raw
        for path, file in zip(parts, files, strict=True):
            if file.read(1):
                raise ValueError(
                    f"{path} has more records than the input has lines for it: "
                    "give the input that it is of, or another --output"
                )


def make_table(output: str, records: str) -> None:
    """Replace the output as a whole by a table of a file of records, which is then removed."""
    with replacing(output, private_mode(output, [os.stat(records)])) as new:
        write_table(
            new, Path(output).suffix.lower(), Path(records), TABLE_COLUMNS, without=("stats",)
        )
    os.unlink(records)
