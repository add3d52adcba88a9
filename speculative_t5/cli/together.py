"""Commands that a launcher, such as mlx.launch, has started in several processes at once.

The first process speaks for all of them until they have started, so that what one of them lacks is
one line, too. MLX's operations that wait for other processes cannot be interrupted from Python: as
long as there may be one, signals end a process at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from .. import __version__, processes

# Set in each process by mlx.launch; by Open MPI; by MPICH and others.
RANKS = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class Together:
    """This process, as one of several.

    Attributes:
        group: All of them.
        started: Whether all have said that they can begin.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.started = False

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints."""
        return self.group.rank() == 0

    def start(
        self, facts: Mapping[str, str], own: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Wait until all can begin; refuse to if they differ in a fact.

        Returns:
            The first process's `own`.
        """
        first = processes.check_same(self.group, facts, own)
        self.started = True
        return first

    def fail(self, error: BaseException | None, line: str, say: Callable[[str], None]) -> None:
        """Report this process's error, unless another one does."""
        if self.started:
            say(f"{processes.named(self.group.rank(), self.group)}: {line}")
            return
        if self.is_first:
            say(line)
        if not isinstance(error, processes.StartError):  # which the others have, too
            processes.give_up(self.group, line.removeprefix("error: "))


_current: Together | None = None


def is_launched() -> bool:
    """Whether this process may be one of several; one with a shard of its own works by itself."""
    own = any(argument.split("=")[0] == "--shard" for argument in sys.argv[1:])
    return not own and any(name in os.environ for name in RANKS)


def join() -> None:
    """Find the other processes; refuse to go on if one runs another version or command line.

    Standard output is then the first process's alone.
    """
    global _current
    group = mx.distributed.init()
    if group.size() > 1:
        _current = Together(group)
        if not _current.is_first:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        line = {"the command line": str(sys.argv[1:])}
        processes.check_same(group, {"the version of speculative_t5": __version__} | line)


def others() -> Together | None:
    """Return this process as one of several; None if it is alone."""
    return _current
