"""Reading any model's config.json: its kind, and values that are checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import printable, shown

MODEL_TYPES = ("t5", "mt5", "umt5")
DRAFT_TYPE = "t5-draft"  # ours: a draft that shares its target's encoder
# Types known not to be decoder-only: encoders, and encoder-decoders other than T5.
OTHER_TYPES = (
    "albert", "bart", "bert", "blenderbot", "camembert", "clip", "deberta", "deberta-v2",
    "distilbert", "electra", "led", "longformer", "longt5", "m2m_100", "marian", "mbart",
    "modernbert", "mpnet", "pegasus", "roberta", "siglip", "switch_transformers", "t5gemma",
    "t5gemma2", "vit", "wav2vec2", "whisper", "xlm-roberta",
)  # fmt: skip
_OTHER_HEAD = re.compile(
    r"\w+For(MaskedLM|PreTraining|\w*Classification|QuestionAnswering|MultipleChoice|CTC)"
)
MAX_SIZE = 2**24  # of any dimension: products of larger ones overflow MLX's shapes
MAX_LAYERS = 256  # of one stack, as a model takes memory for each before its weights are checked


def is_decoder_only(config: Mapping[str, Any]) -> bool:
    """Whether a config.json seems to describe a decoder-only model."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in (*MODEL_TYPES, DRAFT_TYPE, *OTHER_TYPES):
        return False
    return not config.get("is_encoder_decoder") and not other_heads(config)


def other_heads(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures in a config.json that do not generate text."""
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return [name for name in names if _OTHER_HEAD.fullmatch(name)]


def model_type(config: Mapping[str, Any]) -> str:
    """Return a config.json's model_type for a message."""
    kind = config.get("model_type")
    return printable(kind) if kind and isinstance(kind, str) else "model of unknown type"


def read_flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a config.json's `name`, true or false; `default` if it is missing or null."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} in config.json is {shown(value)}, expected true or false")
    return default if value is None else value


def read_size(raw: Mapping[str, Any], name: str) -> int:
    """Read a config.json's `name`, a positive integer that MLX's shapes can hold."""
    value = raw.get(name)
    if value is None:
        raise ValueError(f"{name} in config.json is missing, expected a positive integer")
    if type(value) is not int or not 0 < value <= MAX_SIZE:
        raise ValueError(
            f"{name} in config.json is {shown(value)}, expected a positive integer up to {MAX_SIZE}"
        )
    return value
