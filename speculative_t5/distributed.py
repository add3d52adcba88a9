"""Several processes that do the same work together, by MLX's distributed layer.

Until all have started, the first process reports for the others, so that an error is one line
however many have it. MLX's waiting operations cannot be interrupted. Imports `errors`.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ._version import __version__
from .errors import first_line, printable

ProcessMessage = Mapping[str, Any]  # JSON

# The rank and the number of processes, as set by mlx.launch; by Open MPI; by MPICH and others.
RANK_VARIABLES = {
    "MLX_RANK": "MLX_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
}


class StartError(ValueError):
    """All processes raise it at once: they differ, or one of them could not start."""


def exchange_messages(group: mx.distributed.Group, message: ProcessMessage) -> list[ProcessMessage]:
    """Wait for all processes, and return everyone's message, in the order of ranks."""
    own = json.dumps(dict(message)).encode()
    stored = mx.array(list(own), dtype=mx.uint8)
    lengths = mx.distributed.all_gather(mx.array([len(own)]), group=group)
    sizes = cast(list[int], lengths.tolist())
    padded = mx.pad(stored, (0, max(sizes) - len(own)))
    gathered = mx.distributed.all_gather(padded[None], group=group)
    rows = cast(list[list[int]], gathered.tolist())
    return [json.loads(bytes(row[:n])) for row, n in zip(rows, sizes, strict=True)]


def broadcast(array: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return the first process's array of integers in all of them."""
    # Not zeros: the others must compute their arrays as well, for the sums that they take part in.
    own = array if group.rank() == 0 else array * 0
    return mx.distributed.all_sum(own, group=group)


@dataclass
class ProcessGroup:
    """The processes in which a launcher, such as mlx.launch, has started one command."""

    group: mx.distributed.Group
    started: bool = False  # whether all have said that they can begin

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints."""
        return self.group.rank() == 0

    @property
    def name(self) -> str:
        """This process's name in messages, such as "process 1 of 2"."""
        return self._name(self.group.rank())

    def _name(self, rank: int) -> str:
        return f"process {rank + 1} of {self.group.size()}"

    def compare(
        self, facts: Mapping[str, str], own: ProcessMessage | None = None
    ) -> ProcessMessage:
        """Wait for all processes, and return the first one's `own`.

        Raises:
            StartError: If they differ in a fact, or one has sent an error instead. It names one.
        """
        found = exchange_messages(self.group, {"facts": dict(facts), "own": own or {}})
        for rank, message in enumerate(found):
            if "error" in message:
                raise StartError(f"{self._name(rank)}: {message['error']}")
        first = found[0]["facts"]
        for rank, message in enumerate(found):
            for name, value in message["facts"].items():
                if value != first.get(name):
                    raise StartError(
                        f"{self._name(rank)} and process 1 differ in {name}: "
                        f"{printable(value)}, not {printable(first.get(name, 'none'))}; "
                        "use the same on all machines"
                    )
        return cast(ProcessMessage, found[0]["own"])

    def start(self, facts: Mapping[str, str]) -> None:
        """Wait until all can begin; see `compare`."""
        self.compare(facts)
        self.started = True

    def join(self) -> None:
        """Refuse to go on if one of them runs another version or command line.

        Standard output is then the first process's alone.
        """
        if not self.is_first:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        line = {"the command line": str(sys.argv[1:])}
        self.compare({"the version of speculative_t5": __version__} | line)

    def fail(self, error: BaseException | None, text: str, say: Callable[[str], None]) -> None:
        """Report this process's error, with its text, unless another one does."""
        line = f"error: {text}"
        if self.started:
            say(f"{self.name}: {line}")
            return
        if self.is_first:
            say(line)
        with contextlib.suppress(RuntimeError):  # the others are gone
            if not isinstance(error, StartError):  # which the others have, too
                exchange_messages(self.group, {"error": text})
            # Launchers end all processes when one ends: none may before the line is written.
            exchange_messages(self.group, {})


def is_launched() -> bool:
    """Whether this process may be one of several; one with a shard of its own works by itself."""
    words = [word for argument in sys.argv[1:] for word in argument.split("=", 1)]
    by_itself = "--shard" in words and "tensor" not in words
    hostfile = os.environ.get("MLX_HOSTFILE")  # mlx.launch -n 1 leaves it empty
    is_alone = hostfile and os.path.exists(hostfile) and not os.path.getsize(hostfile)
    return not by_itself and not is_alone and any(name in os.environ for name in RANK_VARIABLES)


def found_processes() -> ProcessGroup | None:
    """Return this process and the others that a launcher has started; None if it is alone."""
    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise ValueError(
            f"the processes cannot be connected, as {first_line(error)}: check the hostfile, and "
            "that all of them were started"
        ) from error
    if group.size() == 1:
        for rank, size in RANK_VARIABLES.items():
            if os.environ.get(rank, "0") != "0" or int(os.environ.get(size) or 1) > 1:
                raise ValueError(
                    "this is one of several processes, and MLX finds no others: run them with "
                    "mlx.launch, or give each one a --shard of its own"
                )
        return None
    return ProcessGroup(group)
