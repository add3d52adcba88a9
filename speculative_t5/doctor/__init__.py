"""`doctor`: checks that prove, on the machine they run on, what the package promises.

A check takes a `Subject` and returns a `Finding`, in a process of its own. Imports `bench` and the
packages below it.
"""

from collections.abc import Sequence

from . import arithmetic, environment, outputs, speed
from .checks import Check, Finding, Status, Subject, run
from .report import as_markdown

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
    Check(speed.speed, "what passes cost here, and what the draft gains", loads=True),
    Check(speed.t5_base, "the same for random weights of t5-base and t5-small", takes_long=True),
    Check(speed.t5_large, "the same for random weights of t5-large and t5-small", takes_long=True),
)


def chosen(
    only: Sequence[str] = (), skip: Sequence[str] = (), *, everything: bool = False
) -> list[Check]:
    """Return the checks named by `only`, without those named by `skip`.

    If `only` is empty, these are all checks, but those that take long if `everything` is asked for.
    """
    names = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in names:
            raise ValueError(f"there is no check {name!r}: choose from {', '.join(names)}")
    usual = [check.name for check in CHECKS if everything or not check.takes_long]
    left = [c for c in CHECKS if c.name in (only or usual) and c.name not in skip]
    if not left:
        raise ValueError(f"no check is left to run without {', '.join(skip)}: leave out fewer")
    return left
