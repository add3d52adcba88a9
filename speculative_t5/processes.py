"""Several processes that do the same work together, by MLX's distributed layer.

They compare what they are about to do before they begin, so that one that would do something else
is found out at once; and they can take the first one's results. Imports `errors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx

from .errors import printable

Message = Mapping[str, Any]  # JSON


class StartError(ValueError):
    """All processes raise it at once: they differ, or one of them could not start."""


def exchange(group: mx.distributed.Group, message: Message) -> list[Message]:
    """Send a message to all processes, and return everyone's, in the order of ranks.

    It waits until all have called it.
    """
    if group.size() == 1:
        return [message]
    own = json.dumps(dict(message)).encode()
    stored = mx.array(list(own), dtype=mx.uint8)
    lengths = mx.distributed.all_gather(mx.array([len(own)]), group=group)
    sizes = cast(list[int], lengths.tolist())
    padded = mx.pad(stored, (0, max(sizes) - len(own)))
    gathered = mx.distributed.all_gather(padded[None], group=group)
    rows = cast(list[list[int]], gathered.tolist())
    return [json.loads(bytes(row[:n])) for row, n in zip(rows, sizes, strict=True)]


def check_same(
    group: mx.distributed.Group, facts: Mapping[str, str], own: Message | None = None
) -> Message:
    """Wait for all processes; refuse to go on if a fact is not the same in all of them.

    Returns:
        The first process's `own`.

    Raises:
        StartError: If so, or if one process has called `give_up` instead. It names the process.
    """
    found = exchange(group, {"facts": dict(facts), "own": own or {}})
    for rank, message in enumerate(found):
        if "error" in message:
            raise StartError(f"{named(rank, group)}: {message['error']}")
    first = found[0]["facts"]
    for rank, message in enumerate(found):
        for name, value in message["facts"].items():
            if value != first.get(name):
                raise StartError(
                    f"{named(rank, group)} and process 1 differ in {name}: "
                    f"{printable(value)}, not {printable(first.get(name, 'none'))}; "
                    "use the same on all machines"
                )
    return cast(Message, found[0]["own"])


def give_up(group: mx.distributed.Group, error: str) -> None:
    """Tell the others, which wait in `check_same`, why this process cannot start."""
    exchange(group, {"error": error})


def named(rank: int, group: mx.distributed.Group) -> str:
    """Return a process's name in messages; they are counted from 1."""
    return f"process {rank + 1} of {group.size()}"


def of_first(array: mx.array, group: mx.distributed.Group) -> mx.array:
    """Return the first process's array of integers in all of them."""
    # Not zeros: the others must compute their arrays as well, for the sums that they take part in.
    own = array if group.rank() == 0 else array * 0
    return mx.distributed.all_sum(own, group=group)
