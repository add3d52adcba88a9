"""`doctor`: checks that prove, on the machine they run on, what the package promises.

A check takes a `Subject` and returns a `Finding`, in a process of its own. Imports `bench` and the
packages below it.
"""

from collections.abc import Sequence

from . import arithmetic, environment, outputs, speed
from .checks import Check, Finding, Status, Subject, run

CHECKS = (
    Check(environment.versions, "the versions of what is installed; MLX is new enough"),
    Check(environment.device, "what MLX computes on, its memory and its limits"),
    Check(arithmetic.float32, "matrix products and attention in float32 are not rounded to TF32"),
    Check(
        arithmetic.logits, "models of every family compute here what they compute on a plain CPU"
    ),
    Check(
        arithmetic.rows, "every row of a pass is computed alike, as steady mode needs", loads=True
    ),
    Check(outputs.greedy, "greedy outputs are the same with a draft and without", loads=True),
    Check(outputs.sampling, "sampled outputs follow the target's distribution"),
    Check(
        outputs.threads,
        "threads that share a decoder get the outputs of a single thread",
        loads=True,
    ),
    Check(
        outputs.known,
        "the shipped pair gives the outputs here that it gave where it was made",
        loads=True,
    ),
    Check(speed.speed, "what passes cost here, and how many tokens to draft", loads=True),
)


def chosen(only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Check]:
    """Return the checks named by `only`, all if it is empty, without those named by `skip`."""
    names = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in names:
            raise ValueError(f"there is no check {name!r}: choose from {', '.join(names)}")
    left = [c for c in CHECKS if (not only or c.name in only) and c.name not in skip]
    if not left:
        raise ValueError(f"no check is left to run without {', '.join(skip)}: leave out fewer")
    return left
