"""Telling one T5 from another by a few numbers of each weight, whatever type they are stored in."""

from __future__ import annotations

import hashlib
import re
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .t5 import T5
from .t5_draft import plain_weight
from .t5_parallel import split_of

PLACES = 4  # of each weight
CLOSE = 1.3 * 2.0**-8  # relative: rounding to bfloat16, and to float16 there and here
TINY = 2e-7  # float16's rounding of the smallest numbers
_SAMPLE = re.compile(rf"([0-9a-f]{{16}})\.((?:[0-9a-f]{{{4 * (PLACES + 1)}}})+)")


def sample_weights(model: T5) -> str:
    """Return a sample of a model's weights as text, which `same_weights` compares.

    After a digest of all names and shapes it has, for each weight, float16 numbers in hexadecimal:
    some of its elements (NaN if it is split among processes), and how far quantization may have
    moved them.
    """
    shapes, numbers = [], []
    for name, module in sorted((n, m) for n, m in model.named_modules() if "weight" in m):
        shape, elements, step = _elements(name, module)
        split = split_of(f"{name}.weight", model.config) if model.num_processes > 1 else None
        if split is not None:
            whole = list(shape)
            whole[split.axis] *= model.num_processes
            shape, elements = tuple(whole), mx.full(elements.shape, mx.nan)
        shapes.append((name, shape))
        numbers.append(mx.concatenate([elements, step[None]]).astype(mx.float16))
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    words = np.array(mx.stack(numbers).view(mx.uint16)).reshape(-1).tolist()
    return f"{digest}." + "".join(f"{word:04x}" for word in words)


def same_weights(a: str, b: str) -> bool:
    """Whether two samples may be of the same model, perhaps in other types or quantized.

    Only `b` may be that of a model that is split.
    """
    (names, x), (others, y) = _parts(a), _parts(b)
    if names != others or x.shape != y.shape:
        return False
    (x, x_step), (y, y_step) = (np.split(each, [PLACES], axis=1) for each in (x, y))
    with np.errstate(invalid="ignore"):  # of infinities, and what is unknown
        room = CLOSE * np.maximum(np.abs(x), np.abs(y)) + TINY + x_step + y_step
        return bool(np.all((x == y) | (np.abs(x - y) <= room) | np.isnan(y)))


def is_sample(text: object) -> bool:
    """Whether a value from a file is a sample."""
    return isinstance(text, str) and _SAMPLE.fullmatch(text) is not None


def _elements(name: str, module: nn.Module) -> tuple[tuple[int, ...], mx.array, mx.array]:
    """Return a weight's shape, `PLACES` of its elements, and their quantization's step, ()."""
    scales = cast(mx.array | None, module.get("scales"))
    shape: tuple[int, ...] = module.weight.shape
    if scales is not None:
        shape = len(scales), scales.shape[1] * module.group_size
    digest = hashlib.sha256(name.encode()).digest()
    places = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(PLACES)]
    columns = mx.array([place % shape[-1] for place in places])
    if len(shape) == 1:
        return shape, module.weight[columns].astype(mx.float32), mx.zeros(())
    rows = mx.array([place // shape[1] % shape[0] for place in places])
    elements = mx.take_along_axis(plain_weight(module, rows), columns[:, None], axis=1)[:, 0]
    step = mx.zeros(())
    if scales is not None:
        step = mx.max(mx.abs(scales[rows, columns // module.group_size])).astype(mx.float32)
    return shape, elements.astype(mx.float32), step


def _parts(sample: str) -> tuple[str, np.ndarray]:
    """Return the digest in a sample, and its numbers, (weights, PLACES + 1) float32."""
    names, words = sample.split(".")
    numbers = np.array([int(words[i : i + 4], 16) for i in range(0, len(words), 4)], np.uint16)
    return names, numbers.view(np.float16).astype(np.float32).reshape(-1, PLACES + 1)
