"""Checks of the arithmetic: `float32` is that, and `logits` are those of a plain CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from ..checkpoints import dtype_name
from ..models import T5, CausalModel
from . import tiny
from .findings import Finding, Subject

ROWS = (1, 2, 5, 16, 64)
WIDTH, INNER, HEADS, HEAD_SIZE = 768, 512, 8, 64
# Errors here are 1e-7 to 3e-6 in float32, and 3e-4 to 8e-4 in TF32.
LEAST_TF32 = 3e-5
MOST_TF32 = 3e-3
TF32 = "MLX_ENABLE_TF32"

# The largest error of a logit that counts as rounding, by the largest logit. A position that should
# be hidden, or a product in the next smaller type, gives several times as much.
TOLERANCES = {mx.float32: 2e-4, mx.bfloat16: 0.08, mx.float16: 0.01}
IN_TF32 = TOLERANCES[mx.float16]  # for float32: TF32 has float16's significant bits
LENGTH = 24  # tokens of each output
SIZES = (1, 5, 2, 9, 1, 1, 17, 6)  # tokens of passes
REJECTED = 3  # more, that each pass is fed and that are rewound


def float32(subject: Subject) -> Finding:
    """Compare products and attention of float32 with those of float64, computed by numpy."""
    errors = {f"product of {rows} rows": _product_error(rows) for rows in ROWS}
    errors |= {f"attention of {rows} queries": _attention_error(rows) for rows in ROWS}
    worst = max(errors, key=lambda name: errors[name])
    state = f"{TF32} is {os.environ[TF32]}"
    details = {"errors": errors, TF32: os.environ[TF32]}
    if errors[worst] < LEAST_TF32:
        reason = f"errors of at most {errors[worst]:.0e}, so TF32 is not in use ({state})"
        return Finding("float32", "ok", reason, details=details)
    reason = f"the {worst} is off by {errors[worst]:.0e} of its largest value"
    if errors[worst] >= MOST_TF32:
        reason += f", more than TF32 explains; {state}"
        return Finding("float32", "failed", reason, details=details)
    reason += f", as in TF32; {state}"
    if _chose_tf32():
        return Finding("float32", "ok", f"{reason}, as you chose", details=details)
    return Finding("float32", "failed", reason, details=details)


def _chose_tf32() -> bool:
    """Whether the user has switched TF32 on; the package switches it off when it is imported."""
    return os.environ[TF32] != "0"


def _product_error(rows: int) -> float:
    rng = np.random.default_rng(rows)
    x, w = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((1, rows, INNER), (WIDTH, INNER))
    )
    return _error(
        mx.matmul(mx.array(x), mx.array(w).T), x.astype(np.float64) @ w.T.astype(np.float64)
    )


def _attention_error(rows: int) -> float:
    rng = np.random.default_rng(rows)
    q, k, v = (
        rng.standard_normal((1, HEADS, length, HEAD_SIZE)).astype(np.float32)
        for length in (rows, 128, 128)
    )
    scale = 1 / math.sqrt(HEAD_SIZE)
    found = mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=scale)
    scores = scale * q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return _error(found, weights @ v.astype(np.float64))


def _error(found: mx.array, exact: np.ndarray) -> float:
    """Return the largest error, as a share of the largest value; a million if some are NaN."""
    values = np.array(found.astype(mx.float32))
    largest = float(np.abs(values - exact).max() / np.abs(exact).max())
    return min(largest, 1e6) if largest == largest else 1e6


def logits(subject: Subject) -> Finding:
    """Compare tiny models of every family on this device with plain MLX on the CPU in float32.

    Whole sequences are scored, and steps between which rejected tokens are rewound, in passes of
    any width and in steady ones.
    """
    errors: dict[str, dict[str, float]] = {}
    failures = []
    tolerances = TOLERANCES | ({mx.float32: IN_TF32} if _chose_tf32() else {})
    for dtype, tolerance in tolerances.items():
        found = errors[dtype_name(dtype)] = {}
        for name in tiny.FAMILIES:
            if dtype == mx.float16 and tiny.is_gated(name):
                continue
            for way, error in _errors(name, dtype).items():
                found[f"{name}, {way}"] = error
                if error > tolerance:
                    failures.append(f"{name} in {dtype_name(dtype)} is off by {error:.0e} in {way}")
    used = {dtype_name(dtype): tolerance for dtype, tolerance in tolerances.items()}
    details = {"errors": errors, "tolerances": used}
    if failures:
        more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        return Finding("logits", "failed", failures[0] + more, details=details)
    worst = ", ".join(f"{max(of.values()):.0e} in {name}" for name, of in errors.items())
    reason = (
        f"{len(tiny.FAMILIES)} families agree with plain float32 on the CPU within rounding: "
        f"errors of at most {worst}"
    )
    return Finding("logits", "ok", reason, details=details)


def _errors(name: str, dtype: mx.Dtype) -> dict[str, float]:
    """Return the errors of a family's logits in a type, by the way in which it computes them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 160, length).tolist() for length in (9, 14)]
    outputs = [rng.integers(3, 160, LENGTH).tolist() for _ in prompts]
    module, plain = tiny.family(name), tiny.family(name)
    module.set_dtype(dtype)
    # The same weights for both: only the arithmetic differs.
    plain.update(tree_map(lambda weight: weight.astype(mx.float32), module.parameters()))
    exact = np.array(_on_plain_cpu(plain, prompts, outputs))
    model = tiny.ready(module)
    return {
        "whole sequences": _error(_whole(model, prompts, outputs), exact),
        "steps": _error(_stepped(model, prompts, outputs), exact),
        "steady steps": _error(_stepped(model, prompts, outputs, width=6), exact),
    }


def _on_plain_cpu(
    module: nn.Module, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> mx.array:
    with _cpu():
        model = module if isinstance(module, T5) else tiny.ready(module)
        exact = _whole(model, prompts, outputs)
        mx.eval(exact)
    return exact


@contextmanager
def _cpu() -> Iterator[None]:
    """Compute on the CPU, with nothing compiled."""
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            yield
    finally:
        mx.enable_compile()


def _whole(
    model: T5 | CausalModel, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> mx.array:
    """Score each output in one pass: logits (B, L, V) float32 of its tokens."""
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        if isinstance(model, CausalModel):
            row = model(mx.array([[*prompt, *output[:-1]]]))[0, len(prompt) - 1 :]
        else:
            start = model.config.decoder_start_token_id
            row = model(mx.array([prompt]), mx.array([[start, *output[:-1]]]))[0]
        rows.append(row.astype(mx.float32))
    return mx.stack(rows)


def _stepped(
    model: T5 | CausalModel,
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
    width: int | None = None,
) -> mx.array:
    """Score outputs as decoding does, (B, L, V) float32.

    Every pass is also fed tokens that are rejected, which differ from those that follow, and the
    second row keeps fewer of the others than the first.
    """
    session, contexts = model.start(prompts, width=width)
    begin = session.lengths
    length = len(outputs[0])
    fed = [[c[-1], *o[:-1]] for c, o in zip(contexts, outputs, strict=True)]
    places = [0] * len(prompts)
    parts: list[list[mx.array]] = [[] for _ in prompts]
    for size in (size for _ in range(length) for size in SIZES):
        tokens = []
        for row, place in zip(fed, places, strict=True):
            right = row[place : place + size]
            wrong = [3 + (7 * (place + i)) % 150 for i in range(size + REJECTED - len(right))]
            tokens.append(right + wrong)
        found = session.step(mx.array(tokens, dtype=mx.int32)).astype(mx.float32)
        for i, place in enumerate(places):
            kept = min(max(1, size - i), length - place)
            parts[i].append(found[i, :kept])
            places[i] = place + kept
        session.truncate([b + place for b, place in zip(begin, places, strict=True)])
        if min(places) == length:
            break
    return mx.stack([mx.concatenate(each) for each in parts])
