"""`Subject`, what checks are about, and `Finding`, what one of them returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from .. import device
from ..checkpoints import (
    find_folder,
    holds_causal,
    holds_draft,
    inspect_causal,
    load,
    open_checkpoint,
    weights_folders,
)
from ..decoding import LanguageModel, Vocabulary
from ..generation import SpeculativeDecoder
from ..models import T5
from ..tokenizers import load_tokenizer

Status = Literal["ok", "failed", "skipped"]
SHIPPED = "correct-base"
NUM_DRAFT = 5  # tokens to draft, unless a check tries several numbers


@dataclass(frozen=True)
class Subject:
    """The models that the checks are about; a check loads them if it needs them.

    Attributes:
        model: The target's folder, or its name.
        draft: The draft's; None for prompt lookup, which needs no model.
        dtype: The type to compute in, by its name; None for what `load` chooses.
    """

    model: str = SHIPPED
    draft: str | None = None
    dtype: str | None = None

    @property
    def is_shipped(self) -> bool:
        """Whether the target is the one that the package ships, and no other of its name."""
        found = find_folder(self.model)
        return bool(found and found.resolve() == (weights_folders()[-1] / SHIPPED).resolve())

    def check(self) -> None:
        """Refuse folders without a model, and a draft that does not fit.

        Weights are read only where a draft shares its target's encoder: they tell its target.
        """
        ours = _vocabulary(self.model)
        if self.draft is None:
            return
        if holds_draft(find_folder(self.draft) or Path(self.draft)):
            self.decoder()
        elif ours != (theirs := _vocabulary(self.draft)):
            raise ValueError(
                f"the draft {self.draft} does not fit the target {self.model}: the target is "
                f"{_described(*ours)}, the draft {_described(*theirs)}; choose another draft, "
                "or 'lookup'"
            )

    def decoder(self, dtype: mx.Dtype | None = None) -> SpeculativeDecoder:
        """Load the models, by default in the type of this subject, or else as `load` chooses."""
        return SpeculativeDecoder.from_pretrained(
            self.model, self.draft or "lookup", dtype=dtype or self.dtype, num_draft=NUM_DRAFT
        )

    def target(self) -> LanguageModel:
        """Load the target."""
        return load(self.model, dtype=self.dtype)[0]


def _vocabulary(name: str) -> tuple[bool, Vocabulary]:
    """Return whether a folder's model is decoder-only, and its tokenizer's vocabulary."""
    folder = find_folder(name) or Path(name)
    if holds_causal(folder):
        return True, inspect_causal(folder)[-1]
    return False, load_tokenizer(folder, open_checkpoint(folder).config).vocabulary


def _described(is_decoder_only: bool, vocabulary: Vocabulary) -> str:
    kind = "decoder-only" if is_decoder_only else "an encoder-decoder"
    return f"{kind} with a tokenizer of {vocabulary}"


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


def dtype_of(model: LanguageModel) -> mx.Dtype:
    """Return the type that a model computes in, which is that of its logits."""
    session, (context,) = model.start([[model.eos_token_id]])
    return session.step(mx.array([context[-1:]], dtype=mx.int32)).dtype
