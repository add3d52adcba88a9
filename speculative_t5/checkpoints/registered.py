"""Models of other families: those that an installed package, or an extra of this one, registers.

An entry point of the group `speculative_t5.models` names a `model_type`, or `decoder-only` for all
decoder-only models that have no entry of their own. What it leads to is a `Family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from ..decoding import LanguageModel
from ..device import DefaultType
from ..models import is_decoder_only
from ..tokenizers import Tokenizer

if TYPE_CHECKING:
    from .model_folder import ModelFolder

GROUP = "speculative_t5.models"
DECODER_ONLY = "decoder-only"


class Family(Protocol):
    """What reads the folders of a family's models."""

    def name(self, config: Mapping[str, Any]) -> str:
        """Return the family's name for people."""

    def check(self, folder: ModelFolder) -> None:
        """Raise ValueError if config.json alone shows that a model cannot be read."""

    def default_type(self, folder: ModelFolder) -> DefaultType:
        """Return the type that a model computes in if none is asked for."""

    def read_tokenizer(self, folder: ModelFolder) -> Tokenizer:
        """Read the tokenizer alone."""

    def load(self, folder: ModelFolder, dtype: mx.Dtype | None) -> tuple[LanguageModel, Tokenizer]:
        """Read a model and its tokenizer."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return what reads models with this config.json; None for this package's own."""
    kind = config.get("model_type")
    return _registered(kind) if isinstance(kind, str) and is_decoder_only(config) else None


@cache
def _registered(model_type: str) -> Family | None:
    """Return what is registered for a `model_type`, else for decoder-only models, if anything."""
    known = {point.name: point for point in entry_points(group=GROUP)}
    found = known.get(model_type) or known.get(DECODER_ONLY)
    return cast(Family, found.load()) if found else None
