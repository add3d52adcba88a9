"""The check `rows`: whether the rows of a pass have the same bits, and those of single tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..checkpoints import DTYPES
from ..decoding import LanguageModel
from ..generation import rows_are_alike, steady_width
from . import tiny
from .findings import NUM_DRAFT, Finding, Subject, dtype_of, promises_equal_rows

WIDTHS = range(2, 18)
SHAPE: dict[str, Any] = {  # of the model for the types that the subject is not computed in
    "d_model": 256, "d_ff": 512, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1,
    "vocab_size": 256,
}  # fmt: skip
LENGTH = 48  # of a text
INNER, OUTER = 512, 1024  # of the bare product


def rows(subject: Subject) -> Finding:
    """Compare the rows of passes over 2 to 17 tokens bit by bit, in each type.

    Three things are asked. In which passes does a position have the same bits in every row? At the
    width that steady mode chooses among them, are a text's logits the same however it is fed? They
    have to be. And which passes have the bits of passes over single tokens? That is promised only
    where `promises_equal_rows` says so.

    The subject's own type is checked with its target, the others with a small random T5.
    """
    details: dict[str, Any] = {}
    failures: list[str] = []
    notes: list[str] = []
    slow: list[str] = []
    target = subject.target()
    own = dtype_of(target)
    for name, dtype in DTYPES.items():
        model = target if dtype == own else tiny.t5(dtype=dtype, **SHAPE)
        width, apart = steady_width(model, NUM_DRAFT + 1), unlike_single_rows(model)
        unlike = [width for width in WIDTHS if not rows_are_alike(model, width)]
        unsteady = not fed_alike(model, width)
        details[name] = {
            "steady_width": width,
            "steady": not unsteady,
            "unlike_rows": unlike,
            "unlike_rows_of_a_product": [w for w in WIDTHS if not product_is_alike(w, dtype)],
            "unlike_single_rows": apart,
        }
        if unsteady:
            failures.append(f"in {name} steady logits depend on how the tokens before were fed")
        if apart and promises_equal_rows(model):
            failures.append(
                f"in {name} passes over {_listed(apart)} tokens differ from single ones"
            )
        notes.append(f"{name}: {_rows_note(unlike)}, {_single_note(apart)}")
        if width == 1:
            slow.append(name)
            notes.append(f"{name}: steady mode takes one token a pass, and gains nothing")
    if failures:
        return Finding("rows", "failed", "; ".join(failures), tuple(notes), details)
    reason = "steady mode has passes whose rows are computed alike, in every type"
    if slow:
        reason = f"steady mode is steady in every type, but slow in {', '.join(slow)}"
    return Finding("rows", "ok", reason, tuple(notes), details)


def unlike_single_rows(model: LanguageModel) -> list[int]:
    """Return the widths of passes whose logits are not those of passes over single tokens."""
    single = _fed(model, [1] * WIDTHS[-1])
    return [width for width in WIDTHS if not _same_bits(_fed(model, [width]), single[:, :width])]


def fed_alike(model: LanguageModel, width: int) -> bool:
    """Whether logits of steady passes have the same bits however the text before was fed.

    It is longer than the smallest capacity of a cache.
    """
    ways = ([1] * LENGTH, [width] * (LENGTH // width), [3, 1, width, 2] * LENGTH)
    single, *others = (_fed(model, way, width)[:, : LENGTH - width] for way in ways)
    return all(_same_bits(single, other) for other in others)


def _fed(model: LanguageModel, sizes: Sequence[int], width: int | None = None) -> mx.array:
    """Feed a random text in parts of these sizes, as long as it lasts; return logits (1, L, V)."""
    rng = random.Random(0)
    ids = rng.choices(range(model.vocab_size), k=LENGTH + 7)
    session, (context,) = model.start([[*ids[:7], model.eos_token_id]], width=width)
    tokens = mx.array([[context[-1], *ids[8:]]], dtype=mx.int32)
    parts, end = [], 0
    for size in sizes:
        if end + size > LENGTH:
            break
        parts.append(session.step(tokens[:, end : end + size]))
        end += size
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=1)


def product_is_alike(width: int, dtype: mx.Dtype) -> bool:
    """Whether a product's rows keep their bits when each moves to the next place."""
    keys = mx.random.split(mx.random.key(width), 2)
    x = mx.random.normal((1, width, INNER), key=keys[0]).astype(dtype)
    weight = mx.random.normal((OUTER, INNER), key=keys[1]).astype(dtype)
    moved = mx.roll(x, 1, 1) @ weight.T
    return _same_bits(mx.roll(x @ weight.T, 1, 1), moved)


def _same_bits(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b, equal_nan=True).item())


def _rows_note(unlike: Sequence[int]) -> str:
    return f"rows alike except in passes over {_listed(unlike)}" if unlike else "rows alike"


def _single_note(apart: Sequence[int]) -> str:
    if not apart:
        return "with the bits of single tokens"
    return f"with other bits than single tokens at {_listed(apart)}"


def _listed(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges, such as 2, 4-9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
