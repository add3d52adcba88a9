"""Models of other families: those that an installed package, or an extra of this one, registers.

An entry point of the group `speculative_t5.models` names a `model_type`, or `decoder-only` for all
decoder-only models that have no entry of their own. What it leads to is a `Family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from ..decoding import LanguageModel
from ..device import DefaultType
from ..errors import first_line
from ..models import OWN_TYPES, is_decoder_only
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

    def describe(self, folder: ModelFolder) -> tuple[int, tuple[str, ...]]:
        """Return the number of parameters, and the types that they are stored in, by name."""

    def default_type(self, folder: ModelFolder) -> DefaultType:
        """Return the type that a model computes in if none is asked for."""

    def read_tokenizer(self, folder: ModelFolder) -> Tokenizer:
        """Read the tokenizer alone."""

    def load(self, folder: ModelFolder, dtype: mx.Dtype | None) -> tuple[LanguageModel, Tokenizer]:
        """Read a model and its tokenizer."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return what reads models with this config.json; None for this package's own."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in OWN_TYPES:
        return None
    names = (kind, DECODER_ONLY) if is_decoder_only(config) else (kind,)
    return next(filter(None, map(_registered, names)), None)


@cache
def _registered(name: str) -> Family | None:
    """Return what is registered by a name, if anything."""
    for point in entry_points(group=GROUP):
        if point.name == name:
            return _loaded(point)
    return None


def _loaded(point: EntryPoint) -> Family:
    """Return what an entry point leads to; refuse one that is broken."""
    where = f"the entry point {point.name} of the group {GROUP} ({point.value})"
    try:
        found = point.load()
    except Exception as error:  # whatever a package raises when it is imported
        raise ValueError(
            f"{where} cannot be loaded ({type(error).__name__}: {first_line(error)}): install or "
            "remove the package that registers it"
        ) from error
    if not callable(getattr(found, "load", None)):
        raise ValueError(f"{where} is no Family: leave out the package that registers it")
    return cast(Family, found)
