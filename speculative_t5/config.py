"""`T5Config`: what the model code needs to know of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["relu", "gelu", "gelu_new", "silu"]

MODEL_TYPES = ("t5",)

# `feed_forward_proj` of config.json -> activation.
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "silu": "silu",
    "gated-relu": "relu",
    "gated-gelu": "gelu_new",  # the tanh approximation is meant
    "gated-gelu_new": "gelu_new",
    "gated-silu": "silu",
}


@dataclass(frozen=True)
class T5Config:
    """A T5 model's shape, in the names of Hugging Face's config.json.

    Attributes:
        d_kv: Size of one head; num_heads * d_kv may differ from d_model.
        num_layers: Depth of the encoder.
        num_decoder_layers: Depth of the decoder.
        vocab_size: Rows of the embedding, padding included.
        gated: Whether the feed-forward has a gate (v1.1, flan) or not (v1.0).
        own_head: Whether the output head is a matrix of its own, or the shared embedding.
        scale_decoder_outputs: Whether the decoder's output is multiplied by d_model ** -0.5.
    """

    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    vocab_size: int
    activation: Activation = "relu"
    gated: bool = False
    own_head: bool = False
    scale_decoder_outputs: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    decoder_start_token_id: int = 0
    pad_token_id: int = 0
    eos_token_id: int = 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> T5Config:
        """Read the contents of a config.json, Hugging Face's or our own.

        Raises:
            ValueError: If the model is not a T5, or a size is missing or not a positive integer.
        """
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(
                f"this is a {model_type or 'model of unknown type'}"
                f" (model_type in config.json), expected one of: {', '.join(MODEL_TYPES)}"
            )
        sizes = {name: _size(raw, name) for name in ("d_model", "d_kv", "d_ff", "num_heads",
                                                     "num_layers", "vocab_size")}  # fmt: skip
        sizes["num_decoder_layers"] = (
            _size(raw, "num_decoder_layers")
            if raw.get("num_decoder_layers") is not None
            else sizes["num_layers"]
        )
        projection = str(raw.get("feed_forward_proj", "relu"))
        activation = ACTIVATIONS.get(projection)
        if activation is None:
            raise ValueError(
                f"feed_forward_proj in config.json is {projection!r}, "
                f"expected one of: {', '.join(ACTIVATIONS)}"
            )
        tied = bool(raw.get("tie_word_embeddings", True))
        scaled = raw.get("scale_decoder_outputs")
        given = {name for name in _OPTIONAL if raw.get(name) is not None}
        optional: dict[str, Any] = {
            name: _token(raw, name, sizes["vocab_size"])
            if name.endswith("_token_id")
            else _size(raw, name)
            for name in given
        }
        epsilon = raw.get("layer_norm_epsilon", 1e-6)
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise ValueError(f"layer_norm_epsilon in config.json is {epsilon!r}, expected a float")
        return cls(
            **sizes,
            activation=activation,
            gated=projection.startswith("gated-"),
            own_head=not tied,
            scale_decoder_outputs=tied if scaled is None else bool(scaled),
            layer_norm_epsilon=epsilon,
            **optional,
        )

    def to_dict(self) -> dict[str, Any]:
        """The contents of a config.json that `from_dict` reads back to an equal config."""
        raw = dataclasses.asdict(self)
        activation, gated = raw.pop("activation"), raw.pop("gated")
        raw["feed_forward_proj"] = f"gated-{activation}" if gated else activation
        raw["tie_word_embeddings"] = not raw.pop("own_head")
        return {"model_type": "t5", **raw}


_OPTIONAL = (
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "decoder_start_token_id",
    "pad_token_id",
    "eos_token_id",
)


def _size(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{name} in config.json is {value!r}, expected a positive integer")
    return value


def _token(raw: Mapping[str, Any], name: str, vocab_size: int) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ValueError(
            f"{name} in config.json is {value!r}, expected an id from 0 to {vocab_size - 1}"
        )
    return value
