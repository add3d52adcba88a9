"""Numbers that are none: a model whose type is too small for it, or whose weights are damaged.

Where logits are NaN no token is better than another. A round marks such a place in the ids that the
host reads in any case, so that looking costs no wait and no pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import Any

import mlx.core as mx

from .logits import NOTHING_LEFT

# In place of an id, as `history.NO_TOKEN`: the target's logits are NaN, or the draft model's are.
BROKEN, BROKEN_DRAFT = -2, -3


class RowError(ValueError):
    """Why a row of a batch cannot go on."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index  # of its request, or of its prompt in errors of a decoder
        self.reason = reason  # without the index, which the message may have

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self.reason), {"args": self.args}


def marked(ids: mx.array, values: mx.array) -> mx.array:
    """Put `BROKEN` in place of ids (...) int32 that were chosen by NaN values (..., V).

    The values of id 0 stand for all: NaN in a model's hidden state makes all logits NaN, and one
    NaN among logits makes all probabilities NaN.
    """
    return mx.where(mx.isnan(values[..., 0]), BROKEN, ids)


def why(tokens: list[int], model: object, draft: object, *, processed: bool = False) -> str:
    """Say why a row that a round gave `tokens`, none or a mark, cannot go on.

    The model and the draft, whatever drafts, have a `dtype` if it is known; `processed` says that
    logits went through a processor of the user's own.
    """
    if not tokens:
        return NOTHING_LEFT
    is_draft = tokens[0] == BROKEN_DRAFT
    whose = "the draft's logits" if is_draft else "the logits"
    if processed:
        whose += ", or what a logits processor made of them,"
    return not_a_number(whose, getattr(draft if is_draft else model, "dtype", None))


def not_a_number(whose: str, dtype: mx.Dtype | None) -> str:
    """Return the message about numbers that are NaN in a type."""
    name = "float32" if dtype is None else str(dtype).removeprefix("mlx.core.")
    if name == "float16":
        return f"{whose} are NaN in float16, which ends at 65504: use dtype bfloat16 or float32"
    better = "" if name == "float32" else "use dtype float32, or "
    return f"{whose} are NaN in {name}: {better}check the weights, which may be damaged"


def check_numbers(values: Iterable[float], whose: str, dtype: mx.Dtype | None) -> None:
    """Refuse NaN among numbers that a model has computed."""
    if any(map(isnan, values)):
        raise ValueError(not_a_number(whose, dtype))
