"""Checks of arithmetic: `float32` is that, `logits` are those of a plain CPU, `rows` are alike."""

import itertools
import math
import os
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ..checkpoints import DTYPES, dtype_name, load
from ..decoding import LanguageModel
from ..generation import rows_are_alike, steady_width
from ..kernels import accelerate
from ..measure import random_weights
from ..models import EncoderDecoder, ModelConfig
from . import tiny
from .checks import DRAFTED_TOKENS, Finding, Subject, dtype_of, promises_equal_rows

ROWS_MULTIPLIED = (1, 2, 5, 16, 64)
INNER_SIZE, OUTER_SIZE, NUM_HEADS, HEAD_SIZE = 512, 768, 8, 64  # of bare products and attention
# Errors here are 1e-7 to 3e-6 in float32, and 3e-4 to 8e-4 in TF32.
LEAST_TF32 = 3e-5
MOST_TF32 = 3e-3
TF32 = "MLX_ENABLE_TF32"  # the package switches it off when it is imported

# The largest error of a logit that counts as rounding, by the largest logit. A position that should
# be hidden, or a product in the next smaller type, gives several times as much.
LOGIT_TOLERANCES = {mx.float32: 2e-4, mx.bfloat16: 0.08, mx.float16: 0.01}
IN_TF32 = LOGIT_TOLERANCES[mx.float16]  # for float32: TF32 has float16's significant bits
SCORED_LENGTH = 24  # tokens of each output
PASS_SIZES = (1, 5, 2, 9, 1, 1, 17, 6)  # tokens of passes
NUM_REJECTED = 3  # more, that each pass is fed and that are rewound

PASS_WIDTHS = range(2, 18)  # tokens of passes whose rows are compared
FED_LENGTH = 48  # tokens that are fed in passes of any width: more than a cache's smallest capacity
# Of the model for the types that the subject is not computed in.
SIZES_OF_OTHER_T5: dict[str, Any] = {
    "d_model": 256,
    "d_ff": 512,
    "num_heads": 4,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "vocab_size": 256,
}


def float32(subject: Subject) -> Finding:
    """Compare products and attention of float32 with those of float64, computed by numpy."""
    errors = {f"product of {rows} rows": _product_error(rows) for rows in ROWS_MULTIPLIED}
    errors |= {f"attention of {rows} queries": _attention_error(rows) for rows in ROWS_MULTIPLIED}
    name, worst = max(errors.items(), key=lambda item: item[1])
    state = f"{TF32} is {os.environ[TF32]}"
    off = f"the {name} is off by {worst:.0e} of its largest value"
    fault, reason = f"{off}, as in TF32; {state}", ""
    if worst < LEAST_TF32:
        fault, reason = "", f"errors of at most {worst:.0e}, so TF32 is not in use ({state})"
    elif worst >= MOST_TF32:
        fault = f"{off}, more than TF32 explains; {state}"
    elif os.environ[TF32] != "0":
        fault, reason = "", f"{fault}, as you chose"
    return Finding.of("float32", fault, reason, {"errors": errors, TF32: os.environ[TF32]})


def _product_error(rows: int) -> float:
    x, w = _normal(rows, (1, rows, INNER_SIZE), (OUTER_SIZE, INNER_SIZE))
    found = mx.matmul(mx.array(x), mx.array(w).T)
    return _error(found, x.astype(np.float64) @ w.T.astype(np.float64))


def _attention_error(rows: int) -> float:
    q, k, v = _normal(rows, *((1, NUM_HEADS, length, HEAD_SIZE) for length in (rows, 128, 128)))
    scale = 1 / math.sqrt(HEAD_SIZE)
    found = mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=scale)
    scores = scale * q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return _error(found, weights @ v.astype(np.float64))


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


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
    tolerances = LOGIT_TOLERANCES | ({mx.float32: IN_TF32} if os.environ[TF32] != "0" else {})
    for dtype, tolerance in tolerances.items():
        found = errors[dtype_name(dtype)] = {}
        for name, config in tiny.TINY_FAMILIES.items():
            if dtype == mx.float16 and getattr(config, "gated", False):  # which may overflow
                continue
            for way, error in _errors(config, dtype).items():
                found[f"{name}, {way}"] = error
                if error > tolerance:
                    failures.append(f"{name} in {dtype_name(dtype)} is off by {error:.0e} in {way}")
    used = {dtype_name(dtype): tolerance for dtype, tolerance in tolerances.items()}
    more = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
    worst = ", ".join(f"{max(of.values()):.0e} in {name}" for name, of in errors.items())
    reason = (
        f"{len(tiny.TINY_FAMILIES)} families agree with plain float32 on the CPU within rounding: "
        f"errors of at most {worst}"
    )
    fault = failures[0] + more if failures else None
    return Finding.of("logits", fault, reason, {"errors": errors, "tolerances": used})


def _errors(config: ModelConfig, dtype: mx.Dtype) -> dict[str, float]:
    """Return the errors of a family's logits in a type, by the way in which it computes them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 160, length).tolist() for length in (9, 14)]
    outputs = [rng.integers(3, 160, SCORED_LENGTH).tolist() for _ in prompts]
    model, plain = (random_weights(config) for _ in range(2))
    model.set_dtype(dtype)
    # The same weights for both: only the arithmetic differs.
    plain.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            exact = np.array(_whole(plain, prompts, outputs))
    finally:
        mx.enable_compile()
    accelerate(model)
    return {
        "whole sequences": _error(_whole(model, prompts, outputs), exact),
        "steps": _error(_stepped(model, prompts, outputs), exact),
        "steady steps": _error(_stepped(model, prompts, outputs, width=6), exact),
    }


def _whole(
    model: EncoderDecoder, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> mx.array:
    """Score each output in one pass: logits (B, L, V) float32 of its tokens."""
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        start = model.config.decoder_start_token_id
        row = model(mx.array([prompt]), mx.array([[start, *output[:-1]]]))[0]
        rows.append(row.astype(mx.float32))
    return mx.stack(rows)


def _stepped(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
    *,
    sizes: Sequence[int] = PASS_SIZES,
    rejected: int = NUM_REJECTED,
    width: int | None = None,
) -> mx.array:
    """Score outputs as decoding does, in passes of these sizes again and again: (B, L, V) float32.

    Every pass is also fed tokens that are rejected, which differ from those that follow, and the
    second row keeps fewer of the others than the first.
    """
    session, contexts = model.start(prompts, width=width)
    begin, length = session.lengths, len(outputs[0])
    fed = [[c[-1], *o[:-1]] for c, o in zip(contexts, outputs, strict=True)]
    done = [0] * len(prompts)
    parts: list[list[mx.array]] = [[] for _ in prompts]
    for size in itertools.cycle(sizes):
        tokens = []
        for row, kept in zip(fed, done, strict=True):
            right = row[kept : kept + size]
            wrong = [3 + (7 * (kept + i)) % 150 for i in range(size + rejected - len(right))]
            tokens.append(right + wrong)
        found = session.step(mx.array(tokens, dtype=mx.int32))
        for i, kept in enumerate(done):
            more = min(max(1, size - i), length - kept)
            parts[i].append(found[i, :more])
            done[i] = kept + more
        session.truncate([b + kept for b, kept in zip(begin, done, strict=True)])
        mx.eval(found)
        if min(done) == length:
            break
    return mx.stack([mx.concatenate(each) for each in parts])


def rows(subject: Subject) -> Finding:
    """Compare the rows of passes over 2 to 17 tokens bit by bit, in each type.

    Three things are asked. In which passes does a position have the same bits in every row? At the
    width that steady mode chooses among them, are a text's logits the same however it is fed? They
    have to be. And which passes have the bits of passes over single tokens? That is promised only
    where `promises_equal_rows` says so.

    The subject's own type is checked with its target, the others with a small random T5.
    """
    details: dict[str, Any] = {}
    failures, notes, slow = list[str](), list[str](), list[str]()
    target = load(subject.model, dtype=subject.dtype)[0]
    own = dtype_of(target)
    for name, dtype in DTYPES.items():
        model = target if dtype == own else tiny.t5(dtype=dtype, **SIZES_OF_OTHER_T5)
        width, apart = steady_width(model, DRAFTED_TOKENS + 1), unlike_single_rows(model)
        unlike = [width for width in PASS_WIDTHS if not rows_are_alike(model, width)]
        unsteady = not fed_alike(model, width)
        details[name] = {
            "steady_width": width,
            "steady": not unsteady,
            "unlike_rows": unlike,
            "unlike_single_rows": apart,
        }
        if unsteady:
            failures.append(f"in {name} steady logits depend on how the tokens before were fed")
        if apart and promises_equal_rows(model):
            failures.append(
                f"in {name} passes over {_comma_separated(apart)} tokens differ from single ones"
            )
        alike = (
            f"rows alike except in passes over {_comma_separated(unlike)}"
            if unlike
            else "rows alike"
        )
        bits = "with the bits of single tokens"
        if apart:
            bits = f"with other bits than single tokens at {_comma_separated(apart)}"
        notes.append(f"{name}: {alike}, {bits}")
        if width == 1:
            slow.append(name)
            notes.append(f"{name}: steady mode takes one token a pass, and gains nothing")
    reason = "steady mode has passes whose rows are computed alike, in every type"
    if slow:
        reason = f"steady mode is steady in every type, but slow in {', '.join(slow)}"
    return Finding.of("rows", "; ".join(failures), reason, details, notes)


def unlike_single_rows(model: LanguageModel) -> list[int]:
    """Return the widths of passes whose logits are not those of passes over single tokens."""
    single = _fed(model, PASS_WIDTHS[-1], [1])
    return [w for w in PASS_WIDTHS if not _same_bits(_fed(model, w, [w]), single[:, :w])]


def fed_alike(model: LanguageModel, width: int) -> bool:
    """Whether logits of steady passes have the same bits however the text before was fed."""
    single = _fed(model, FED_LENGTH, [1], width)
    others = ([width], [3, 1, width, 2])
    return all(_same_bits(single, _fed(model, FED_LENGTH, sizes, width)) for sizes in others)


def _fed(
    model: LanguageModel, length: int, sizes: Sequence[int], width: int | None = None
) -> mx.array:
    """Score the beginning of a random text in passes of these sizes: logits (1, L, V)."""
    rng = random.Random(0)
    ids = rng.choices(range(model.info.vocab_size), k=FED_LENGTH + 7)
    prompt = [*ids[:7], model.info.eos_token_id]
    return _stepped(model, [prompt], [ids[7:][:length]], sizes=sizes, rejected=0, width=width)


def _same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b, equal_nan=True).item())


def _comma_separated(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
