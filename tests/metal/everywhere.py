"""Lets every T5 of a test run use all kernels for Metal, which the CPU runs.

    SPECULATIVE_T5_TEST_METAL=1 python -m pytest tests/test_decoder.py

It is slow, and for one process; a run in which none is called fails. MLX compiles nothing
meanwhile, as the interpreter needs the numbers that a kernel is given.
"""

from typing import Any
from unittest.mock import patch

from speculative_t5 import kernels
from speculative_t5.checkpoints import loading, t5_draft
from speculative_t5.kernels import metal
from speculative_t5.kernels.metal.choice import MAX_ROWS, Choice
from speculative_t5.measure import random_models
from speculative_t5.models import CompiledModel

import mlx.core as mx

from . import interpreter

# What keeps matrices in 16 bits beside rows in 32, as the C parts take them.
DECIDING = kernels, loading, t5_draft, random_models
_made: list[interpreter.Kernel] = []


def use() -> None:
    """Use them from now on, in models that are loaded or accelerated."""
    mx.disable_compile()
    for module, name, value in (
        (mx.fast, "metal_kernel", _kernel),
        (kernels, "on_metal", lambda: True),
        *((module, "takes_stored", lambda: False) for module in DECIDING),
        (metal, "kernel_choices", _all_of),
    ):
        patch.object(module, name, value).start()


def calls() -> int:
    """Return how often kernels were called."""
    return sum(kernel.calls for kernel in _made)


def _kernel(**described: Any) -> interpreter.Kernel:
    _made.append(interpreter.Kernel(**described))
    _made[-1].orders = [interpreter.BY_CHANCE]
    return _made[-1]


def _all_of(model: CompiledModel, *_: Any) -> dict[str, Choice]:
    return {key: Choice(MAX_ROWS, "forced") for key, _ in metal.kernel_trials(model)}
