"""A few numbers of each weight, by which a draft knows its target in whatever type it is stored."""

import hashlib
import re
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .encoder_decoder import EncoderDecoder
from .quantization import plain_weight
from .t5_parallel import split_of

NUM_SAMPLED = 4  # numbers of each weight
RELATIVE_ROUNDING = 1.3 * 2.0**-8  # to bfloat16, and to float16 there and here
LEAST_ROUNDING = 2e-7  # of the smallest numbers, to float16
_SAMPLE = re.compile(rf"([0-9a-f]{{16}})\.((?:[0-9a-f]{{{4 * (NUM_SAMPLED + 1)}}})+)")


def sample_weights(model: EncoderDecoder) -> str:
    """Return a sample of a model's weights as text, which `same_weights` compares.

    A digest of all names and shapes, and for each weight float16 numbers in hexadecimal: some of
    its elements (NaN if it is split), and how far quantization may have moved them.
    """
    shapes, numbers, steps = [], [], dict(model.quantization_steps)
    for name, module in sorted((n, m) for n, m in model.named_modules() if "weight" in m):
        shape, elements, step = _elements(name, module)
        step = mx.array(steps[name]) if name in steps else step
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
    """Whether two samples may be of one model, if in other types or quantized; `b` may be split."""
    (names, x), (others, y) = _split_sample(a), _split_sample(b)
    if names != others or x.shape != y.shape:
        return False
    (x, x_step), (y, y_step) = (np.split(each, [NUM_SAMPLED], axis=1) for each in (x, y))
    with np.errstate(invalid="ignore"):  # of infinities, and what is unknown
        rounding = RELATIVE_ROUNDING * np.maximum(np.abs(x), np.abs(y)) + LEAST_ROUNDING
        room = rounding + x_step + y_step
        return bool(np.all((x == y) | (np.abs(x - y) <= room) | np.isnan(y)))


def is_sample(text: object) -> bool:
    """Whether a value from a file is a sample."""
    return isinstance(text, str) and _SAMPLE.fullmatch(text) is not None


def _elements(name: str, module: nn.Module) -> tuple[tuple[int, ...], mx.array, mx.array]:
    """Return a weight's shape, `NUM_SAMPLED` of its elements, and their quantization's step, ()."""
    scales = cast(mx.array | None, module.get("scales"))
    shape: tuple[int, ...] = module.weight.shape
    if scales is not None:
        shape = len(scales), scales.shape[1] * module.group_size
    rows, columns = _sampled_places(name, shape)
    if len(shape) == 1:
        return shape, module.weight[columns].astype(mx.float32), mx.zeros(())
    elements = mx.take_along_axis(plain_weight(module, rows), columns[:, None], axis=1)[:, 0]
    step = mx.zeros(())
    if scales is not None:
        step = mx.array(quantization_step(name, scales, module.group_size))
    return shape, elements.astype(mx.float32), step


def quantization_step(name: str, scales: mx.array, group_size: int) -> float:
    """Return how far quantization may have moved the sampled elements of a matrix.

    Its scales are (rows, groups), of any float type.
    """
    rows, columns = _sampled_places(name, (len(scales), scales.shape[1] * group_size))
    largest = mx.max(mx.abs(scales[rows, columns // group_size])).astype(mx.float32)
    return cast(float, largest.item())


def _sampled_places(name: str, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Return the rows and columns, (NUM_SAMPLED,) int32, of a weight's sampled elements."""
    digest = hashlib.sha256(name.encode()).digest()
    places = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(NUM_SAMPLED)]
    columns = mx.array([place % shape[-1] for place in places])
    return mx.array([place // shape[-1] % shape[0] for place in places]), columns


def _split_sample(sample: str) -> tuple[str, np.ndarray]:
    """Return the digest in a sample, and its numbers, (weights, NUM_SAMPLED + 1) float32."""
    names, words = sample.split(".")
    numbers = np.array([int(words[i : i + 4], 16) for i in range(0, len(words), 4)], np.uint16)
    return names, numbers.view(np.float16).astype(np.float32).reshape(-1, NUM_SAMPLED + 1)
