"""How `batch` divides a job among processes, if there are several: its lines, or the model.

Each process that has some of the lines writes a part of the records, and the first one joins the
parts. Part 2 of 3 of `out.jsonl` is the file `out.jsonl.2-of-3`: the records of `--shard 2/3`. If
a process dies, only its own lines are missing; the same command with --resume adds them.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal, cast

import mlx.core as mx
import typer

from ..distributed import ProcessGroup
from ..errors import count
from ..files import lock, replacing
from ..tokenizers import Line, Shard
from .job import MAX_RECORD, Earlier, check_record, parse_record, says_undone, shown_name
from .terminal import FAILED, Failure, handle_signals, note

Shown = Literal["all", "errors", "nothing"]  # of a run, on standard error
POLL = 0.1  # seconds

Read = Callable[[Shard], Iterator[Line]]  # the lines of a shard


class Division:
    """What this process does of a job: all of it, or the shard that the user wants.

    Attributes:
        shard: The lines that it decodes.
        output: The file that it writes.
        resume: Whether it keeps what is in that file.
        force: Whether it replaces that.
        group: The processes that share the model.
        shown: What of its progress is shown to the user.
        label: Put before its summary.
    """

    group: mx.distributed.Group | None = None
    shown: Shown = "all"
    label = ""

    def __init__(self, output: str, shard: Shard, *, resume: bool, force: bool) -> None:
        self.output, self.shard = output, shard
        self.resume, self.force = resume, force

    def is_done(self, read: Read) -> bool:
        """Whether there is nothing left to do."""
        return False

    def start(self, done: int) -> int:
        """Begin, with `done` records there already; return how many lines to skip besides them."""
        return 0

    def finish(self, read: Read, failed: int) -> int:
        """End the job, of which `failed` records here have errors.

        Returns:
            The number of records with errors that decides on the exit code.
        """
        return failed


class ByModel(Division):
    """Processes that share the model decode the same lines; the first one writes the records."""

    def __init__(self, processes: ProcessGroup, division: Division, facts: dict[str, str]) -> None:
        if processes.is_first:
            own = (division.output, division.resume, division.force)
        else:
            own = (os.devnull, False, False)
        super().__init__(own[0], division.shard, resume=own[1], force=own[2])
        self.group, self.shown = processes.group, "all" if processes.is_first else "nothing"
        self._processes, self._facts = processes, facts

    def start(self, done: int) -> int:
        first = int(self._processes.compare(self._facts, {"done": done})["done"])
        self._processes.start({})
        return 0 if self._processes.is_first else first

    def finish(self, read: Read, failed: int) -> int:
        # Launchers end all processes when one ends with an error.
        return failed if self._processes.is_first else 0


class ByLines(Division):
    """Each process has some of the lines, and writes a part of the records.

    From the start to the end none of them waits for another one.
    """

    def __init__(self, processes: ProcessGroup, division: Division, facts: dict[str, str]) -> None:
        shard = Shard(processes.group.rank() + 1, processes.group.size())
        self._processes, self._whole, self._facts = processes, division.output, facts
        if not division.force:
            check_parts(division.output, shard.count)
        output = part_name(division.output, shard)
        super().__init__(output, shard, resume=division.resume, force=division.force)
        self.shown, self.label = "all" if processes.is_first else "errors", f"{processes.name}: "

    def is_done(self, read: Read) -> bool:
        """Whether the first process, on whose machine the output is, finds that all is done."""
        if not self.resume:
            return False
        found = self._processes.is_first and is_done(self._whole, read(Shard()))
        done = bool(self._processes.compare(self._facts, {"done": found})["done"])
        if done:
            note(f"{self._whole} has all records already")
        return done

    def start(self, done: int) -> int:
        self._processes.compare(self._facts)
        # By now each process has locked its part: what has no lock is of an earlier run.
        if self.force and self._processes.is_first:
            remove_stale_parts(self._whole)
            if os.path.exists(self._whole):
                os.truncate(self._whole, 0)
        self._processes.start({})
        handle_signals()  # from here on it waits for none of them
        return 0

    def finish(self, read: Read, failed: int) -> int:
        if not self._processes.is_first:
            return 0  # see `ByModel`
        missing = wait_for_parts(self._whole, self.shard.count)
        if missing:
            names = " and ".join(map(str, missing))
            note(
                f"not on this machine: {names}; copy what is missing, then run batch with --join, "
                "without a launcher"
            )
            raise typer.Exit(FAILED)
        try:
            joined = join_parts(self._whole, read(Shard()), self.shard.count)
        except ValueError as error:
            raise Failure(str(error)) from error
        processes = f"of {self.shard.count} processes"
        errors = f", {joined.failed:,} with errors" if joined.failed else ""
        note(f"[{count(joined.done, 'record')} {processes} in {self._whole}{errors}]")
        return joined.failed


def divide(
    processes: ProcessGroup | None,
    parallel: str,
    division: Division,
    stream: BinaryIO,
    facts: Callable[[], dict[str, str]],
) -> Division:
    """Return what this process does of a job.

    Args:
        processes: This process, if it is one of several.
        parallel: What they divide, data or tensor.
        division: What it would do if it were alone.
        stream: The input.
        facts: Returns the facts that must be the same in all processes.
    """
    if parallel not in ("data", "tensor"):
        raise ValueError(f"--parallel must be data or tensor, got {parallel!r}")
    if processes is None:
        return division
    if not stream.seekable():
        raise ValueError(
            "several processes cannot read one pipe: write the prompts to a file, and give that"
        )
    same = facts() | {"the input": _digest(stream)}
    if parallel == "tensor":
        return ByModel(processes, division, same)
    found = Path(division.output)
    if division.output == "-" or (found.exists() and not found.is_file()):
        raise ValueError(
            f"several processes write parts beside their output, and {shown_name(division.output)} "
            "is not a file: give an --output that is one"
        )
    return ByLines(processes, division, same)


def _digest(stream: BinaryIO) -> str:
    at = stream.tell()
    found = hashlib.file_digest(cast(BufferedReader, stream), "sha256").hexdigest()
    stream.seek(at)
    return f"SHA-256 {found[:16]}"


def part_name(output: str, shard: Shard) -> str:
    """Return the name of the file for a shard's records."""
    return f"{output}.{shard.number}-of-{shard.count}"


def find_parts(output: str) -> dict[Path, Shard]:
    """Find the parts of an output, in order."""
    number = "([1-9][0-9]{0,8})"
    pattern = re.compile(re.escape(Path(output).name) + rf"\.{number}-of-{number}")
    found = {path: pattern.fullmatch(path.name) for path in Path(output).parent.iterdir()}
    parts = {path: Shard(int(m[1]), int(m[2])) for path, m in found.items() if m}
    return dict(sorted(parts.items(), key=lambda item: (item[1].count, item[1].number)))


def check_parts(output: str, count: int) -> None:
    """Refuse to go on with records of another number of processes."""
    for path, shard in find_parts(output).items():
        if shard.count != count and path.stat().st_size:
            raise ValueError(
                f"{path} was written by one of {shard.count} processes, and {count} are running: "
                f"run {shard.count} again, or give --force to start over"
            )


def remove_stale_parts(output: str) -> None:
    """Remove the parts of an output that no process has locked."""
    for path in find_parts(output):
        if not _is_busy(path):
            path.unlink(missing_ok=True)


def is_done(output: str, lines: Iterator[Line]) -> bool:
    """Whether an output has a record of each line.

    Raises:
        ValueError: If it has some of them only, or if there are records in parts as well.
    """
    if not _size(Path(output)):
        return False
    for part in find_parts(output):
        if _size(part):
            raise ValueError(
                f"both {output} and its part {part} have records: delete those that you do not need"
            )
    for _ in _records([Path(output)], lines, "run the command again without a launcher"):
        pass
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_for_parts(output: str, count: int) -> list[Path]:
    """Wait until no process writes to a part; return those that are not on this machine."""
    missing = []
    for number in range(1, count + 1):
        path = Path(part_name(output, Shard(number, count)))
        while path.exists() and _is_busy(path):
            time.sleep(POLL)
        if not path.exists():
            missing.append(path)
    return missing


def _is_busy(path: Path) -> bool:
    with path.open("r+b") as file:  # some network disks lock only files that may be written
        try:
            lock(file.fileno(), "")
        except ValueError:
            return True
    return False


def join_parts(output: str, lines: Iterator[Line], count: int | None = None) -> Earlier:
    """Write the records of all parts to the output, in the order of the lines; remove the parts.

    The output is replaced as a whole, or not at all.

    Args:
        output: The file; a link is followed.
        lines: The whole input.
        count: The number of parts; by default that of those that are there. If it is given, the
            output must not have got records meanwhile.

    Raises:
        ValueError: If a part is missing, not whole, still being written or of other lines.
    """
    if count is not None and _size(Path(output)):
        raise ValueError(
            f"{output} meanwhile holds records of another job: save it elsewhere, and run batch "
            "with --join"
        )
    parts = _all_parts(output, count)
    joined = Earlier()
    with ExitStack() as undo:
        for path in parts:
            part = undo.enter_context(path.open("r+b"))
            lock(part.fileno(), f"a process is writing to {path}: wait for it to end")
        with replacing(output) as new, new.open("wb") as file:
            for raw in _records(parts, lines, "run the command again with --resume"):
                joined.count(parse_record(raw) or {})
                file.write(raw)
        for path in parts:
            path.unlink(missing_ok=True)
    return joined


def _all_parts(output: str, count: int | None) -> list[Path]:
    """Return the parts in order; refuse to go on if one is missing, or some are of other runs."""
    found = find_parts(output)
    if not found:
        raise ValueError(
            f"there are no parts of {output} beside it, such as {part_name(output, Shard(1, 2))}: "
            "copy them there, or give another --output"
        )
    counts = {shard.count for path, shard in found.items() if _size(path)}
    counts = {count} if count else counts or {shard.count for shard in found.values()}
    if len(counts) > 1:
        raise ValueError(
            f"{output} has parts of {' and of '.join(map(str, sorted(counts)))} processes: "
            "delete those of one run"
        )
    (size,) = counts
    parts = [Path(part_name(output, Shard(number, size))) for number in range(1, size + 1)]
    for path in parts:
        if not path.exists():
            raise ValueError(f"{path} is missing: copy it from the machine that wrote it")
    return parts


def _records(parts: Sequence[Path], lines: Iterable[Line], advice: str) -> Iterator[bytes]:
    """Yield the records of files that have those of the lines in turn.

    Raises:
        ValueError: If one is missing, or of another line.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("rb")) for part in parts]
        for number, line in enumerate(lines):
            path, file = parts[number % len(parts)], files[number % len(parts)]
            raw = file.readline(MAX_RECORD)
            record = parse_record(raw)
            if not raw.endswith(b"\n") or (record is not None and says_undone(record, line)):
                raise ValueError(f"{path} has no record of line {line.number}: {advice}")
            check_record(f"{path}, line {number // len(parts) + 1},", record, line)
            yield raw
        for path, file in zip(parts, files, strict=True):
            if file.read(1):
                raise ValueError(
                    f"{path} has more records than the input has lines for it: "
                    "give the input that it is of, or another --output"
                )
