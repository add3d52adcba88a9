"""The parts of an output that several processes write, and how they are joined.

Part 2 of 3 of `out.jsonl` is the file `out.jsonl.2-of-3`: the records of `--shard 2/3`. If a
process dies, only its own lines are missing; the same command with --resume adds them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..files import lock, replacing
from ..tokenizers import Line, Shard
from .job import MAX_RECORD, Counts, check_record, parse_record, says_undone

POLL = 0.1  # seconds


def part_name(output: str, shard: Shard) -> str:
    """Return the name of the file for a shard's records."""
    return f"{output}.{shard.number}-of-{shard.count}"


def part_paths(output: str, count: int) -> list[Path]:
    """Return the names of all parts of an output, in order."""
    return [Path(part_name(output, Shard(number, count))) for number in range(1, count + 1)]


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


def has_all_records(output: str, lines: Iterator[Line]) -> bool:
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
    return path.stat().st_size if path.exists() else 0


def wait_for_parts(output: str, count: int) -> list[Path]:
    """Wait until no process writes to a part; return those that are not on this machine."""
    parts = part_paths(output, count)
    for path in parts:
        while path.exists() and is_busy(path):
            time.sleep(POLL)
    return [path for path in parts if not path.exists()]


def is_busy(path: Path) -> bool:
    with path.open("r+b") as file:  # some network disks lock only files that may be written
        try:
            lock(file.fileno(), "")
        except ValueError:
            return True
    return False


def join_parts(output: str, lines: Iterator[Line], count: int | None = None) -> Counts:
    """Write the records of all parts to the output, in the order of the lines; remove the parts.

    The output is replaced as a whole, or not at all. With the `count` of parts, it must not have
    got records meanwhile; without, they are those that are there.

    Raises:
        ValueError: If a part is missing, not whole, still being written or of other lines.
    """
    if count is not None and _size(Path(output)):
        raise ValueError(
            f"{output} meanwhile holds records of another job: save it elsewhere, and run batch "
            "with --join"
        )
    parts = _all_parts(output, count)
    joined = Counts()
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
    parts = part_paths(output, size)
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
