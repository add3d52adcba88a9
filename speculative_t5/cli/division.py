"""How `batch` divides a job among processes, if there are several: its lines, or the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx
import typer

from ..errors import count
from ..tokenizers import Line, Shard
from .job import shown_name
from .parts import (
    check_parts,
    is_done,
    join_parts,
    part_name,
    remove_stale_parts,
    wait_for_parts,
)
from .progress import Shown
from .terminal import FAILED, Failure, handle_signals, note
from .together import Together

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

    def __init__(self, one: Together, division: Division, facts: dict[str, str]) -> None:
        if one.is_first:
            own = (division.output, division.resume, division.force)
        else:
            own = (os.devnull, False, False)
        super().__init__(own[0], division.shard, resume=own[1], force=own[2])
        self.group, self.shown = one.group, "all" if one.is_first else "nothing"
        self._one, self._facts = one, facts

    def start(self, done: int) -> int:
        first = int(self._one.compare(self._facts, {"done": done})["done"])
        self._one.start({})
        return 0 if self._one.is_first else first

    def finish(self, read: Read, failed: int) -> int:
        return failed if self._one.is_first else 0  # launchers end all when one ends with an error


class ByLines(Division):
    """Each process has some of the lines, and writes a part of the records.

    From the start to the end none of them waits for another one.
    """

    def __init__(self, one: Together, division: Division, facts: dict[str, str]) -> None:
        shard = Shard(one.group.rank() + 1, one.group.size())
        self._one, self._whole, self._facts = one, division.output, facts
        if not division.force:
            check_parts(division.output, shard.count)
        output = part_name(division.output, shard)
        super().__init__(output, shard, resume=division.resume, force=division.force)
        self.shown, self.label = "all" if one.is_first else "errors", f"{one.name}: "

    def is_done(self, read: Read) -> bool:
        """Whether the first process, on whose machine the output is, finds that all is done."""
        if not self.resume:
            return False
        found = self._one.is_first and is_done(self._whole, read(Shard()))
        done = bool(self._one.compare(self._facts, {"done": found})["done"])
        if done:
            note(f"{self._whole} has all records already")
        return done

    def start(self, done: int) -> int:
        self._one.compare(self._facts)
        # By now each process has locked its part: what has no lock is of an earlier run.
        if self.force and self._one.is_first:
            remove_stale_parts(self._whole)
            if os.path.exists(self._whole):
                os.truncate(self._whole, 0)
        self._one.start({})
        handle_signals()  # from here on it waits for none of them
        return 0

    def finish(self, read: Read, failed: int) -> int:
        if not self._one.is_first:
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
    one: Together | None,
    parallel: str,
    division: Division,
    stream: BinaryIO,
    facts: Callable[[], dict[str, str]],
) -> Division:
    """Return what this process does of a job.

    Args:
        one: This process, if it is one of several.
        parallel: What they divide, data or tensor.
        division: What it would do if it were alone.
        stream: The input.
        facts: Returns the facts that must be the same in all processes.
    """
    if parallel not in ("data", "tensor"):
        raise ValueError(f"--parallel must be data or tensor, got {parallel!r}")
    if one is None:
        return division
    if not stream.seekable():
        raise ValueError(
            "several processes cannot read one pipe: write the prompts to a file, and give that"
        )
    same = facts() | {"the input": _digest(stream)}
    if parallel == "tensor":
        return ByModel(one, division, same)
    found = Path(division.output)
    if division.output == "-" or (found.exists() and not found.is_file()):
        raise ValueError(
            f"several processes write parts beside their output, and {shown_name(division.output)} "
            "is not a file: give an --output that is one"
        )
    return ByLines(one, division, same)


def _digest(stream: BinaryIO) -> str:
    at = stream.tell()
    found = hashlib.file_digest(cast(BufferedReader, stream), "sha256").hexdigest()
    stream.seek(at)
    return f"SHA-256 {found[:16]}"
