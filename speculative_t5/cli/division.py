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
from .parts import (
    check_count,
    is_done,
    join_parts,
    part_name,
    remove_parts,
    wait_for_parts,
)
from .progress import Shown
from .terminal import Failure, handle_signals, note
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
        shown: What it shows the user of its progress.
    """

    group: mx.distributed.Group | None = None
    shown: Shown = "all"

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
        """End the job; of `failed` records with errors return those to answer for."""
        return failed


class ByModel(Division):
    """Processes that share the model decode the same lines; the first one writes the records."""

    def __init__(self, one: Together, division: Division, stream: BinaryIO) -> None:
        if one.is_first:
            super().__init__(division.output, division.shard, resume=division.resume,
                             force=division.force)  # fmt: skip
        else:
            super().__init__(os.devnull, division.shard, resume=False, force=False)
        self.group, self.shown = one.group, "all" if one.is_first else "nothing"
        self._one, self._facts = one, {"the input": _digest(stream)}

    def start(self, done: int) -> int:
        first = int(self._one.start(self._facts, {"done": done})["done"])
        return 0 if self._one.is_first else first

    def finish(self, read: Read, failed: int) -> int:
        return failed if self._one.is_first else 0  # launchers end all when one ends with an error


class ByLines(Division):
    """Each process has some of the lines, and writes a part of the records.

    From the start to the end none of them waits for another one.
    """

    def __init__(
        self, one: Together, division: Division, stream: BinaryIO, facts: dict[str, str]
    ) -> None:
        shard = Shard(one.group.rank() + 1, one.group.size())
        self._one, self._whole = one, division.output
        self._facts = facts | {"the input": _digest(stream)}
        if not division.force:
            check_count(division.output, shard.count)
        output = part_name(division.output, shard)
        super().__init__(output, shard, resume=division.resume, force=division.force)
        self.shown = "all" if one.is_first else "errors"

    def is_done(self, read: Read) -> bool:
        if not self.resume or not is_done(self._whole, read(Shard())):
            return False
        self._begin(done=True)
        return True

    def start(self, done: int) -> int:
        if self._begin(done=False):
            Path(self.output).unlink()
            raise typer.Exit
        return 0

    def _begin(self, *, done: bool) -> bool:
        """Wait for the others; return whether the first one finds that all is done."""
        is_done = bool(self._one.start(self._facts, {"done": done})["done"])
        handle_signals()  # from here on it waits for none of them
        if self._one.is_first and (is_done or self.force):
            remove_parts(self._whole, keep=None if is_done else self.shard.count)
        if is_done:
            note(f"{self._whole} has all records already")
        return is_done

    def finish(self, read: Read, failed: int) -> int:
        if not self._one.is_first:
            return 0  # see `ByModel`
        missing = wait_for_parts(self._whole, self.shard.count)
        if missing:
            names = " and ".join(map(str, missing))
            note(f"not on this machine: {names}; copy what is missing, then run batch with --join")
            return failed
        try:
            joined = join_parts(self._whole, read(Shard()))
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
    *,
    to_file: bool,
) -> Division:
    """Return what this process does of a job.

    Args:
        one: This process, if it is one of several.
        parallel: What they divide, data or tensor.
        division: What it would do if it were alone.
        stream: The input.
        facts: Returns those in which processes may not differ.
        to_file: Whether the output is a file.
    """
    if parallel not in ("data", "tensor"):
        raise ValueError(f"--parallel must be data or tensor, got {parallel!r}")
    if one is None:
        return division
    if not stream.seekable():
        raise ValueError(
            "several processes cannot read one pipe: write the prompts to a file, and give that"
        )
    if parallel == "tensor":
        return ByModel(one, division, stream)
    if not to_file:
        raise ValueError(
            f"several processes write parts beside a file, which {division.output} is not: give "
            "an --output that is one"
        )
    return ByLines(one, division, stream, facts())


def _digest(stream: BinaryIO) -> str:
    at = stream.tell()
    found = hashlib.file_digest(cast(BufferedReader, stream), "sha256").hexdigest()
    stream.seek(at)
    return f"SHA-256 {found[:16]}"
