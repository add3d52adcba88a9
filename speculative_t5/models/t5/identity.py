"""Telling one T5 from another by a few of its weights, whatever type they are stored in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

SAMPLES = 32  # weights of norms and of matrices each
CLOSE = 2.0**-6  # relative; rounding to bfloat16, there and here, makes half of it at most
TINY = 1e-6  # float16's rounding of the smallest numbers


def sample_weights(model: nn.Module) -> str:
    """Return a sample of a model's weights as text, which `same_weights` compares.

    It has two parts of hexadecimal bfloat16 numbers, divided by a point: weights of norms, which
    are never quantized, and weights of matrices, which are left out if any of them is quantized.
    """
    weights = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
    names = sorted(weights)
    norms = [name for name in names if weights[name].ndim == 1]
    matrices = [name for name in names if weights[name].ndim == 2]
    if any(name.endswith(".scales") for name in names):
        matrices = []
    return ".".join(_as_hex([weights[name] for name in part]) for part in (norms, matrices))


def same_weights(a: str, b: str) -> bool:
    """Whether two samples may be of the same model, perhaps in other types or quantized."""
    parts = zip(a.split("."), b.split("."), strict=True)
    return all(not x or not y or _close(x, y) for x, y in parts)


def is_sample(text: object) -> bool:
    """Whether a value from a file is a sample."""
    if not isinstance(text, str) or text.count(".") != 1:
        return False
    return all(len(part) % 4 == 0 and _is_hex(part) for part in text.split("."))


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)


def _as_hex(weights: Sequence[mx.array]) -> str:
    """Return one number of each weight, or `SAMPLES` numbers of as many weights or fewer."""
    numbers = []
    for i in range(SAMPLES if weights else 0):
        weight = weights[i * len(weights) // SAMPLES]
        digest = hashlib.sha256(f"{i} {weight.shape}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") % weight.size
        numbers.append(weight.reshape(-1)[place].astype(mx.bfloat16).view(mx.uint16))
    mx.eval(numbers)
    return "".join(f"{number.item():04x}" for number in numbers)


def _close(a: str, b: str) -> bool:
    x, y = map(_numbers, (a, b))
    if len(x) != len(y):
        return False
    return bool(np.all(np.abs(x - y) <= CLOSE * np.maximum(np.abs(x), np.abs(y)) + TINY))


def _numbers(text: str) -> np.ndarray:
    high = np.array([int(text[i : i + 4], 16) for i in range(0, len(text), 4)], dtype=np.uint32)
    return (high << 16).view(np.float32)
