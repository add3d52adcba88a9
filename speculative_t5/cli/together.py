"""Commands that a launcher, such as mlx.launch, has started in several processes at once.

Until all have started, the first process reports for the others, so that an error is one line
however many processes have it. MLX's operations that wait for other processes cannot be interrupted
from Python: as long as there may be one, signals end a process at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from .. import __version__, processes
from ..errors import first_line

# The rank and, where a launcher gives it, the number of processes, as set by mlx.launch; by Open
# MPI; by MPICH and others.
RANKS = {
    "MLX_RANK": "MLX_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
}


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

    @property
    def name(self) -> str:
        """This process's name in messages, such as "process 1 of 2"."""
        return processes.named(self.group.rank(), self.group)

    def start(self, facts: Mapping[str, str]) -> None:
        """Wait until all can begin; refuse to if they differ in a fact."""
        self.compare(facts)
        self.started = True

    def compare(self, facts: Mapping[str, str], own: processes.Message | None = None) -> Any:
        """Wait for all processes; refuse to go on if they differ in a fact.

        Returns:
            The first process's `own`.
        """
        return processes.check_same(self.group, facts, own)

    def fail(self, error: BaseException | None, line: str, say: Callable[[str], None]) -> None:
        """Report this process's error, unless another one does."""
        if self.started:
            say(f"{self.name}: {line}")
            return
        if self.is_first:
            say(line)
        with contextlib.suppress(RuntimeError):  # the others are gone
            if not isinstance(error, processes.StartError):  # which the others have, too
                processes.give_up(self.group, line.removeprefix("error: "))
            # Launchers end all processes when one ends: none may before the line is written.
            processes.exchange(self.group, {})


_current: Together | None = None


def is_launched() -> bool:
    """Whether this process may be one of several; one with a shard of its own works by itself."""
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    by_itself = "--shard" in words and "tensor" not in words
    hostfile = os.environ.get("MLX_HOSTFILE")  # mlx.launch -n 1 leaves it empty
    is_alone = hostfile and os.path.exists(hostfile) and not os.path.getsize(hostfile)
    return not by_itself and not is_alone and any(name in os.environ for name in RANKS)


def join() -> None:
    """Find the other processes; refuse to go on if one runs another version or command line.

    Standard output is then the first process's alone.
    """
    global _current
    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise ValueError(
            f"the processes cannot be connected, as {first_line(error)}: check the hostfile, and "
            "that all of them were started"
        ) from error
    if group.size() == 1:
        for rank, size in RANKS.items():
            if os.environ.get(rank, "0") != "0" or int(os.environ.get(size) or 1) > 1:
                raise ValueError(
                    "this is one of several processes, and MLX finds no others: run them with "
                    "mlx.launch, or give each one a --shard of its own"
                )
        return
    _current = Together(group)
    if not _current.is_first:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    line = {"the command line": str(sys.argv[1:])}
    _current.compare({"the version of speculative_t5": __version__} | line)


def others() -> Together | None:
    """Return this process as one of several; None if it is alone."""
    return _current
