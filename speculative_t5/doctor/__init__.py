"""`doctor`: checks that prove, on the machine they run on, what the package promises.

A check takes a `Subject` and returns a `Finding`, in a process of its own. Imports `measure` and
the packages below it.
"""

from collections.abc import Collection

from . import arithmetic, environment, outputs, speed
from .checks import Check, Finding, Subject, run_check
from .report import as_markdown

ALL_CHECKS = (
    Check(environment.versions, "the versions of what is installed; MLX is new enough"),
    Check(environment.device, "what MLX computes on, its memory and its limits"),
    Check(environment.kernels, "which kernels for Metal this machine uses, and why", loads=True),
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
    Check(speed.speed, "what passes cost here, and what the draft gains", loads=True),
)


def chosen(only: Collection[str] = ()) -> list[Check]:
    """Return the checks named by `only`; all of them if it is empty."""
    names = [check.name for check in ALL_CHECKS]
    for name in only:
        if name not in names:
            raise ValueError(f"there is no check {name!r}: choose from {', '.join(names)}")
    return [check for check in ALL_CHECKS if check.name in (only or names)]
