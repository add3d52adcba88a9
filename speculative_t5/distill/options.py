"""The options of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..decoding import Sampler
from ..errors import check_integer, check_number
from .losses import LOSSES, LossName

DEFAULT_STEPS = 2000


@dataclass(frozen=True)
class DistillOptions:
    """How to distill a draft.

    Attributes:
        layers: Decoder layers of the draft.
        d_ff: Width of the draft's feed-forward layers; None for the target's.
        steps: Optimizer steps; with neither steps nor minutes, `DEFAULT_STEPS`.
        minutes: Time for the whole run instead, of which labelling takes `LABEL_SHARE` at most.
        batch_tokens: Tokens of a step, sources and labels, padding included.
        learning_rate: The largest, after a short warm-up; it falls to 0.
        loss: One of `LOSSES`, see `losses.loss_and_gradient`.
        draft_vocab: Let the draft propose only the first ids; None for all.
        max_tokens: The longest label.
        temperature: Of labels: 0 for the target's greedy outputs, above 0 to sample them.
        label_batch: Prompts that are labelled side by side.
        seed: For the order of prompts and for sampled labels.

    Raises:
        ValueError: If one is out of its range.
    """

    layers: int = 1
    d_ff: int | None = None
    steps: int | None = None
    minutes: float | None = None
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    loss: LossName = "ce"
    draft_vocab: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    label_batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "batch_tokens", "max_tokens", "label_batch"):
            check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, 0)
        if self.steps is not None and self.minutes is not None:
            raise ValueError("steps and minutes exclude each other: give one of them")
        if self.steps is not None:
            check_integer("steps", self.steps, 1)
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < check_number(name, value) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        Sampler(self.temperature)  # which refuses other temperatures
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        for name in ("d_ff", "draft_vocab"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps; None if there are minutes instead."""
        return self.steps or (DEFAULT_STEPS if self.minutes is None else None)
