"""The table of checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .arithmetic import float32, logits
from .environment import device, versions
from .findings import Finding, Subject
from .outputs import greedy, known, threads
from .rows import rows
from .sampling import sampling
from .speed import speed


@dataclass(frozen=True)
class Check:
    """A check: a function from the subject to a finding.

    Attributes:
        proves: What it proves, in a line.
        deadline: Seconds after which its process is ended.
        loads: Whether it loads the subject's models.
    """

    find: Callable[[Subject], Finding]
    proves: str
    deadline: float = 300.0
    loads: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__


CHECKS = (
    Check(versions, "the versions of what is installed; MLX is new enough", 60),
    Check(device, "what MLX computes on, its memory and its limits", 60),
    Check(float32, "matrix products and attention in float32 are not rounded to TF32", 60),
    Check(logits, "models of every family compute here what they compute on a plain CPU"),
    Check(rows, "every row of a pass is computed alike, as steady mode needs", loads=True),
    Check(greedy, "greedy outputs are the same with a draft and without", loads=True),
    Check(sampling, "sampled outputs follow the target's distribution"),
    Check(threads, "threads that share a decoder get the outputs of a single thread", loads=True),
    Check(
        known, "the shipped pair gives the outputs here that it gave where it was made", loads=True
    ),
    Check(speed, "what passes cost here, and how many tokens to draft", loads=True),
)


def chosen(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Check]:
    """Return the checks named by `only`, all if it is empty, without those named by `skip`.

    Raises:
        ValueError: If there is no check of some name, or none is left.
    """
    names = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in names:
            raise ValueError(f"there is no check {name!r}: choose from {', '.join(names)}")
    left = [c for c in CHECKS if (not only or c.name in only) and c.name not in skip]
    if not left:
        raise ValueError(f"no check is left to run without {', '.join(skip)}: leave out fewer")
    return left
