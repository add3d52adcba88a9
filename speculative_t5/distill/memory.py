"""How much memory training takes, estimated before it begins."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models import T5, SharingDraft
from .options import DistillOptions


def own_parameters(draft: SharingDraft) -> int:
    """Return the number of weights that are the draft's own."""
    weights = cast(list[tuple[str, mx.array]], tree_flatten(draft.parameters()))
    return sum(weight.size for _, weight in weights)


def training_memory(target: T5, options: DistillOptions) -> int:
    return 0
