"""Models' config.json: the kind of model, values that are checked, and `T5Config`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ..errors import printable, shown
from .quantization import QUANTIZATION_CONFIG, Quantization, is_of_mlx, read_quantization

ENCODER_ALONE = "EncoderModel"  # the end of the names of transformers' encoders
MODEL_TYPES = ("t5", "mt5", "umt5")
T5GEMMA_TYPES = {"t5gemma": 1, "t5gemma2": 2}  # and their generations
DRAFT_TYPE = "t5-draft"  # ours: a draft that shares its target's encoder
OWN_TYPES = (*MODEL_TYPES, *T5GEMMA_TYPES, DRAFT_TYPE)
_OTHER_HEAD = re.compile(
    r"(?>\w+?For)\w*Classification"
    r"|\w+For(?:MaskedLM|PreTraining|QuestionAnswering|MultipleChoice|CTC)"
)
# Classes of PEFT, torch and DeepSpeed around a model.
_WRAPPER = re.compile(
    r"Peft(Mixed)?Model\w*|Lora(Model)?|OptimizedModule|DeepSpeedEngine"
    r"|(Distributed|FullySharded)?DataParallel"
)
MAX_SIZE = 2**24  # of any dimension: products of larger ones overflow MLX's shapes
MAX_LAYERS = 256  # of one stack, as a model takes memory for each before its weights are checked


def is_decoder_only(config: Mapping[str, Any]) -> bool:
    """Whether a config.json seems to describe a decoder-only model."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in OWN_TYPES:
        return False
    return not config.get("is_encoder_decoder") and not other_heads(config)


def is_t5gemma(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is a T5Gemma's."""
    return model_type(config) in T5GEMMA_TYPES


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config.json names."""
    named = config.get("architectures") or []
    return [str(name) for name in named] if isinstance(named, list) else [str(named)]


def other_heads(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures in a config.json that do not generate text."""
    return [name for name in _architectures(config) if _OTHER_HEAD.fullmatch(name)]


def is_encoder_alone(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that a model has no decoder."""
    named = any(name.endswith(ENCODER_ALONE) for name in _architectures(config))
    return named or read_flag(config, "encoder_only", False)


def check_architectures(config: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a config.json whose `architectures` are not all among the known ones.

    Programs that wrap a model for training write their own class, or the model's with something
    before it (FSDPT5ForConditionalGeneration): then the tensors alone tell what it is.
    """
    others = [
        name
        for name in _architectures(config)
        if not name.endswith((*known, ENCODER_ALONE)) and not _WRAPPER.fullmatch(name)
    ]
    if others:
        raise ValueError(
            f"this is a {printable(others[0])} (architectures in config.json), "
            f"expected one that generates, such as {known[0]}"
        )


def model_type(config: Mapping[str, Any]) -> str:
    """Return a config.json's model_type for a message."""
    kind = config.get("model_type")
    return printable(kind) if kind and isinstance(kind, str) else "model of unknown type"


def wrong(name: str, value: object, expected: str) -> ValueError:
    """Return the error about a value in a config.json."""
    return ValueError(f"{name} in config.json is {shown(value)}, expected {expected}")


def refuse_quantized(config: Mapping[str, Any], advice: str) -> None:
    """Refuse a config.json of weights that a program other than MLX has quantized."""
    found = config.get(QUANTIZATION_CONFIG)
    if found and not is_of_mlx(found):
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise ValueError(
            f"its weights are quantized by {method or 'another program'} "
            f"({QUANTIZATION_CONFIG} in config.json): {advice}"
        )


def spread(count: int, total: int) -> list[int]:
    """Choose `count` of `total` layers, evenly spaced, the last among them."""
    return (
        [round(i * (total - 1) / (count - 1)) for i in range(count)] if count > 1 else [total - 1]
    )


def read_flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a config.json's `name`, true or false; `default` if it is missing or null."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return default if value is None else value


def read_size(
    raw: Mapping[str, Any], name: str, most: int = MAX_SIZE, *, default: int | None = None
) -> int:
    """Read a positive integer that MLX's shapes can hold, or the `default` of a missing one."""
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{name} in config.json is missing, expected a positive integer")
    if type(value) is not int or not 0 < value <= most:
        raise wrong(name, value, f"a positive integer up to {most}")
    return value


Activation = Literal["relu", "gelu", "gelu_new", "silu"]

# All others lack a decoder, or have another head on it.
T5_ARCHITECTURES = tuple(
    f"{prefix}{kind}"
    for kind in ("ForConditionalGeneration", "WithLMHeadModel", "Model")
    for prefix in ("T5", "MT5", "UMT5")
)

# `feed_forward_proj` of config.json -> activation.
PROJECTION_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "silu": "silu",
    "gated-relu": "relu",
    "gated-gelu": "gelu_new",  # the tanh approximation is meant
    "gated-gelu_new": "gelu_new",
    "gated-silu": "silu",
}

MAX_DISTANCE = 2**16
_SIZES = ("d_model", "d_kv", "d_ff", "num_heads", "vocab_size")
_OPTIONAL_SIZES = (
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "n_positions",
)
_TOKENS = ("decoder_start_token_id", "pad_token_id", "eos_token_id")


@dataclass(frozen=True)
class T5Config:
    """A T5 model's shape, in the names of Hugging Face's config.json."""

    d_model: int
    d_kv: int  # size of one head; num_heads * d_kv may differ from d_model
    d_ff: int
    num_heads: int
    num_layers: int  # of the encoder
    num_decoder_layers: int
    vocab_size: int  # rows of the embedding, padding included
    activation: Activation = "relu"
    gated: bool = False  # whether the feed-forward has a gate (v1.1, flan)
    own_head: bool = False  # whether the output is a matrix of its own, not the embedding
    scale_decoder_outputs: bool = True  # by d_model ** -0.5
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    decoder_start_token_id: int = 0
    pad_token_id: int = 0
    eos_token_id: int = 1  # the tokenizer's, which sources end with
    end_ids: tuple[int, ...] = ()  # that end outputs, if not this one alone
    bias_per_layer: bool = False  # as in umt5; otherwise layer 0's serves all of its stack
    n_positions: int = 512  # source tokens that it was made for; more are no error
    quantization: Quantization | None = None
    encoder_only: bool = False  # whether there is no decoder

    num_key_heads = property(attrgetter("num_heads"))  # those of keys and values

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.end_ids or (self.eos_token_id,)

    def of_draft(self, num_layers: int, d_ff: int, d_model: int | None = None) -> T5Config:
        """Return the config of a draft: its decoder layers, their units, and width if not this."""
        width = d_model or self.d_model
        return dataclasses.replace(
            self, num_decoder_layers=num_layers, d_ff=d_ff, d_model=width, quantization=None
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> T5Config:
        """Read a config.json, Hugging Face's or our own; refuse all but a T5 with whole sizes."""
        _check_kind(raw)
        given = [name for name in _OPTIONAL_SIZES if raw.get(name) is not None]
        sizes: dict[str, Any] = {name: read_size(raw, name) for name in (*_SIZES, *given)}
        if sizes["num_heads"] * sizes["d_kv"] > MAX_SIZE:
            raise ValueError(
                f"num_heads * d_kv in config.json is {sizes['num_heads']} * {sizes['d_kv']}, "
                f"expected at most {MAX_SIZE}"
            )
        ids = _read_ids(raw, sizes["vocab_size"])
        depth = read_size(raw, "num_layers", MAX_LAYERS)
        projection = str(raw.get("feed_forward_proj", "relu"))
        activation = PROJECTION_ACTIVATIONS.get(projection)
        if activation is None:
            raise wrong(
                "feed_forward_proj", projection, f"one of {', '.join(PROJECTION_ACTIVATIONS)}"
            )
        tied = read_flag(raw, "tie_word_embeddings", True)
        # transformers 5 writes the first as true for all, and the second for T5, from 5.24 on for
        # umt5, too; mt5 is never scaled.
        scaled = read_flag(raw, "scale_decoder_outputs", tied and raw["model_type"] != "mt5")
        epsilon = raw.get("layer_norm_epsilon", 1e-6)
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise wrong("layer_norm_epsilon", epsilon, "a float from 0 to 1")
        config = cls(
            **sizes,
            **ids,
            num_layers=depth,
            num_decoder_layers=read_size(raw, "num_decoder_layers", MAX_LAYERS, default=depth),
            activation=activation,
            gated=projection.startswith("gated-"),
            own_head=not tied,
            scale_decoder_outputs=scaled,
            layer_norm_epsilon=epsilon,
            bias_per_layer=read_flag(raw, "bias_per_layer", raw["model_type"] == "umt5"),
            quantization=read_quantization(raw),
            encoder_only=is_encoder_alone(raw),
        )
        buckets = config.relative_attention_num_buckets
        distance = config.relative_attention_max_distance
        # Half of the buckets are for one distance each, the others go by the logarithm.
        if buckets < 4 or buckets % 2 or not buckets // 2 < distance <= MAX_DISTANCE:
            raise ValueError(
                f"relative attention in config.json has {buckets} buckets up to a distance of "
                f"{distance}, expected an even number from 4 on, and a distance over half of it up "
                f"to {MAX_DISTANCE}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """The contents of a config.json that `from_dict` reads back to an equal config."""
        raw = dataclasses.asdict(self)
        activation, gated = raw.pop("activation"), raw.pop("gated")
        raw["feed_forward_proj"] = f"gated-{activation}" if gated else activation
        raw["tie_word_embeddings"] = not raw.pop("own_head")
        del raw["quantization"]
        if self.quantization:
            raw["quantization"] = self.quantization.to_dict()
        for name in ("end_ids", "encoder_only"):
            if not raw[name]:
                del raw[name]
        return {"model_type": "t5", **raw}


def _read_ids(raw: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Read the ids that a config.json names; several may end outputs."""
    ids: dict[str, Any] = {name: raw[name] for name in _TOKENS if raw.get(name) is not None}
    named, stored = ids.get("eos_token_id"), raw.get("end_ids") or []
    several = named if isinstance(named, list) else [] if named is None else [named]
    for name, value, each in (
        *((name, value, [value]) for name, value in ids.items() if name != "eos_token_id"),
        ("eos_token_id", named, several),
        ("end_ids", stored, stored if isinstance(stored, list) else [stored]),
    ):
        if not all(type(found) is int and 0 <= found < vocab_size for found in each):
            raise wrong(name, value, f"an id from 0 to {vocab_size - 1}")
    usual = several[0] if several else T5Config.eos_token_id
    ends = tuple(dict.fromkeys(stored or several))
    return ids | {"eos_token_id": usual, "end_ids": () if ends == (usual,) else ends}


def _check_kind(raw: Mapping[str, Any]) -> None:
    """Refuse a config.json that is not of a T5 that generates."""
    kind = model_type(raw)
    if is_decoder_only(raw):
        raise ValueError(
            f"this is a {kind} (model_type in config.json), which seems to be a decoder-only "
            "model, expected an encoder-decoder: use it as it is, or quantize it with "
            "mlx_lm.convert"
        )
    if kind == DRAFT_TYPE:
        raise ValueError(
            f"this is a draft for {printable(str(raw.get('target')))}, whose encoder it shares, "
            "and not a model of its own: give it as the draft of that model, with --draft-model"
        )
    if kind not in MODEL_TYPES:
        heads = other_heads(raw)
        found = f"{printable(heads[0])} (architectures" if heads else f"{kind} (model_type"
        raise ValueError(
            f"this is a {found} in config.json), expected one of the T5 family, "
            f"{', '.join([*MODEL_TYPES, *T5GEMMA_TYPES])}"
        )
    check_architectures(raw, T5_ARCHITECTURES)
    refuse_quantized(raw, "convert the original, with --quantize")
