"""`Subject`, what checks are about, and `Finding`, what one of them returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .. import device
from ..checkpoints import DTYPES, load
from ..decoding import LanguageModel
from ..generation import SpeculativeDecoder
from ..models import T5

Status = Literal["ok", "failed", "skipped"]
SHIPPED = "correct-base"
NUM_DRAFT = 5  # tokens to draft, unless a check tries several numbers


@dataclass(frozen=True)
class Subject:
    """The models that the checks are about; a check loads them if it needs them.

    Attributes:
        model: The target's folder, or its name.
        draft: The draft's; None for prompt lookup, which needs no model.
        dtype: The type to compute in, by its name; None for this device's default.
    """

    model: str = SHIPPED
    draft: str | None = None
    dtype: str | None = None

    @property
    def kind(self) -> mx.Dtype:
        """The type to compute in."""
        return DTYPES[self.dtype] if self.dtype else device.default_dtype()

    @property
    def is_shipped(self) -> bool:
        """Whether the target is the one that the package ships."""
        return Path(self.model).name == SHIPPED

    def decoder(self, dtype: mx.Dtype | None = None) -> SpeculativeDecoder:
        """Load the models, by default in the type of this subject."""
        return SpeculativeDecoder.from_pretrained(
            self.model, self.draft or "lookup", dtype=dtype or self.kind, num_draft=NUM_DRAFT
        )

    def target(self) -> LanguageModel:
        """Load the target."""
        return load(self.model, dtype=self.kind)[0]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        name: The check's.
        reason: One line that says what was found.
        notes: Further lines, for tables.
        details: The numbers behind it, as JSON can hold them.
        seconds: How long it took.
    """

    name: str
    status: Status
    reason: str
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def promises_equal_rows(model: LanguageModel) -> bool:
    """Whether a pass over several tokens gives the bits of passes over one (docs/exactness.md)."""
    return (
        device.on_cpu()
        and device.parts.get("layers") == "loaded"
        and isinstance(model, T5)
        and model.dtype == mx.float32
        and model.config.quantization is None
    )


def name_of(dtype: mx.Dtype) -> str:
    """Return a type's name, without MLX's prefix."""
    return str(dtype).removeprefix("mlx.core.")
