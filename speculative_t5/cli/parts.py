"""The records of a job in parts, one for each of several processes, and how they are joined.

Part 2 of 3 of `out.jsonl` is the file `out.jsonl.2-of-3`: what `--shard 2/3` writes. A process that
dies costs its own lines alone; the same command with --resume goes on with all parts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ..checkpoints import lock
from ..tokenizers import Line, Shard
from .job import MAX_RECORD, Earlier, check_record, parse_record

POLL = 0.1  # seconds


def part_name(output: str, shard: Shard) -> str:
    """Return the name of the file for a shard's records."""
    return f"{output}.{shard.number}-of-{shard.count}"


def find_parts(output: str) -> dict[Path, Shard]:
    """Find the parts of an output, in order."""
    pattern = re.compile(re.escape(Path(output).name) + r"\.([0-9]{1,9})-of-([0-9]{1,9})")
    try:
        paths = list(Path(output).parent.iterdir())
    except OSError:
        return {}
    found = {path: pattern.fullmatch(path.name) for path in paths}
    parts = {path: Shard(int(m[1]), int(m[2])) for path, m in found.items() if m}
    return dict(sorted(parts.items(), key=lambda item: (item[1].count, item[1].number)))


def check_count(output: str, count: int) -> None:
    """Refuse to go on with parts of another number of processes."""
    for path, shard in find_parts(output).items():
        if shard.count != count:
            raise ValueError(
                f"{path} is the part of one of {shard.count} processes, and {count} run now: "
                f"run {shard.count} again, or give --force to start anew"
            )


def remove_parts(output: str, *, keep: int | None = None) -> None:
    """Remove the parts of an output; those of `keep` processes stay."""
    for path, shard in find_parts(output).items():
        if shard.count != keep:
            path.unlink(missing_ok=True)


def is_done(output: str, lines: Iterator[Line]) -> bool:
    """Whether an output has a record of each line; refuse one that has some of them."""
    try:
        if not os.path.getsize(output):
            return False
    except FileNotFoundError:
        return False
    for _ in records([Path(output)], lines, "run the command again without a launcher"):
        pass
    return True


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
    with path.open("rb") as file:
        try:
            lock(file.fileno(), "")
        except ValueError:
            return True
    return False


def join_parts(output: str, lines: Iterator[Line]) -> Earlier:
    """Write the records of all parts to the output, in the order of the lines; remove the parts.

    The output is replaced as a whole, or not at all.

    Raises:
        ValueError: If a part is missing, not whole, still being written or of other lines.
    """
    parts = find_parts(output)
    if not parts:
        raise ValueError(
            f"there are no parts of {output} beside it, such as {part_name(output, Shard(1, 2))}: "
            "copy them there, or give another --output"
        )
    counts = {shard.count for shard in parts.values()}
    if len(counts) > 1:
        raise ValueError(
            f"{output} has parts of {' and of '.join(map(str, sorted(counts)))} processes: "
            "delete those of one run"
        )
    (count,) = counts
    for number in range(1, count + 1):
        path = Path(part_name(output, Shard(number, count)))
        if path not in parts:
            raise ValueError(f"{path} is missing: copy it from the machine that has written it")
    joined = Earlier()
    temporary = Path(f"{output}.joining")
    with ExitStack() as undo:
        for path in parts:
            part = undo.enter_context(path.open("rb"))
            lock(part.fileno(), f"a process is writing to {path}: wait for it to end")
        undo.callback(temporary.unlink, missing_ok=True)
        with temporary.open("wb") as file:
            for raw in records([*parts], lines, "run the command again with --resume"):
                joined.count(parse_record(raw) or {})
                file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    remove_parts(output)
    return joined


def records(parts: Sequence[Path], lines: Iterable[Line], advice: str) -> Iterator[bytes]:
    """Yield the records of files that have those of the lines, one after another.

    Raises:
        ValueError: If one is missing, or of another line.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("rb")) for part in parts]
        for number, line in enumerate(lines):
            path, file = parts[number % len(parts)], files[number % len(parts)]
            raw = file.readline(MAX_RECORD)
            if not raw.endswith(b"\n"):
                raise ValueError(f"{path} has no record of line {line.number}: {advice}")
            check_record(f"{path}, line {number // len(parts) + 1},", parse_record(raw), line)
            yield raw
        for path, file in zip(parts, files, strict=True):
            if file.read(1):
                raise ValueError(
                    f"{path} has more records than the input has lines for it: "
                    "give the input that it is of, or another --output"
                )
