"""`T5GemmaConfig`: the shape of a T5Gemma of either generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal

from .config import (
    MAX_LAYERS,
    T5GEMMA_TYPES,
    Activation,
    T5Config,
    check_architectures,
    is_encoder_alone,
    model_type,
    read_flag,
    read_size,
    refuse_quantized,
    spread,
    wrong,
)
from .quantization import Quantization, read_quantization

T5GEMMA_ARCHITECTURES = tuple(
    f"T5Gemma{generation}{kind}"
    for generation in ("", "2")
    for kind in ("ForConditionalGeneration", "Model")
)
GELU_NAMES = ("gelu_pytorch_tanh", "gelu_new")  # two names of one function
MAX_NUMBER = 1e15
LAYER_TYPES = ("sliding_attention", "full_attention")
# Of transformers, where config.json says nothing.
_PATTERNS = {1: 2, 2: 6}  # by generation: every second or sixth layer attends to everything
_CAPS = {1: (50.0, 30.0), 2: (None, None)}  # on attention's scores and on logits
_IDS = {
    "decoder_start_token_id": "bos_token_id",
    "pad_token_id": "pad_token_id",
    "eos_token_ids": "eos_token_id",
}
_STACK_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "query_pre_attn_scalar",
)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: frequencies theta ** (-2 i / D), positions divided by `factor`."""

    theta: float
    factor: float = 1.0


@dataclass(frozen=True)
class StackConfig:
    """The encoder or the decoder, in the names of Hugging Face's config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int  # each serves as many heads of queries
    head_dim: int
    layer_types: tuple[str, ...]  # each of LAYER_TYPES
    sliding_window: int
    query_pre_attn_scalar: int  # scores are divided by its square root
    rms_norm_eps: float
    ropes: tuple[Rope, Rope]  # for LAYER_TYPES
    attn_logit_softcapping: float | None = None

    # What its feed-forward is in the names of `T5Config`.
    gated = True
    activation: ClassVar[Activation] = "gelu_new"
    d_model = property(attrgetter("hidden_size"))
    d_ff = property(attrgetter("intermediate_size"))

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    def rope(self, layer_type: str) -> Rope:
        return self.ropes[LAYER_TYPES.index(layer_type)]


@dataclass(frozen=True)
class T5GemmaConfig:
    """A T5Gemma's shape."""

    generation: Literal[1, 2]
    encoder: StackConfig
    decoder: StackConfig
    vocab_size: int
    final_logit_softcapping: float | None = None
    own_head: bool = False  # whether the output is a matrix of its own, not the embedding
    decoder_start_token_id: int = 2
    pad_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)  # each ends an output; the first is the usual one
    n_positions: int = 8192  # source tokens that it was made for; more are no error
    quantization: Quantization | None = None
    encoder_only: bool = False  # whether there is no decoder

    # What it is in the names of `T5Config`.
    gated, activation = StackConfig.gated, StackConfig.activation
    d_model = property(attrgetter("decoder.hidden_size"))
    d_ff = property(attrgetter("decoder.intermediate_size"))
    d_kv = property(attrgetter("decoder.head_dim"))
    num_heads = property(attrgetter("decoder.num_attention_heads"))
    num_key_heads = property(attrgetter("decoder.num_key_value_heads"))
    num_layers = property(attrgetter("encoder.num_hidden_layers"))
    num_decoder_layers = property(attrgetter("decoder.num_hidden_layers"))

    @property
    def eos_token_id(self) -> int:
        return self.eos_token_ids[0]

    def of_draft(self, num_layers: int, d_ff: int, d_model: int | None = None) -> T5GemmaConfig:
        """Return the config of a draft, as `T5Config.of_draft` does, with evenly spaced layers."""
        kept = spread(num_layers, self.num_decoder_layers)
        types = tuple(self.decoder.layer_types[i] for i in kept)
        width = d_model or self.d_model
        decoder = dataclasses.replace(
            self.decoder, layer_types=types, intermediate_size=d_ff, hidden_size=width
        )
        return dataclasses.replace(self, decoder=decoder, quantization=None)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> T5GemmaConfig:
        """Read a config.json; refuse all but a T5Gemma with whole sizes."""
        generation: Any = T5GEMMA_TYPES[model_type(raw)]
        check_architectures(raw, T5GEMMA_ARCHITECTURES)
        refuse_quantized(raw, "convert the original, with --quantize")
        encoder, decoder = _object(raw, "encoder"), _object(raw, "decoder")
        if generation == 2 and "text_config" in encoder:
            encoder = _object(encoder, "text_config")
        size = read_size(decoder, "vocab_size")
        if generation == 2 and encoder.get("hidden_size") != decoder.get("hidden_size"):
            raise wrong("hidden_size", encoder.get("hidden_size"), "the same in both stacks")
        ids: dict[str, Any] = {}
        for ours, name in _IDS.items():
            value = raw.get(name, decoder.get(name))
            each = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(i) is int and 0 <= i < size for i in each):
                raise wrong(name, value, f"an id from 0 to {size - 1}")
            if each:
                ids[ours] = tuple(each) if name == "eos_token_id" else each[0]
        cap = _cap(decoder, "final_logit_softcapping", _CAPS[generation][1])
        return cls(
            generation=generation,
            encoder=_stack(encoder, generation),
            decoder=_stack(decoder, generation),
            vocab_size=size,
            **ids,
            final_logit_softcapping=cap,
            own_head=not read_flag(raw, "tie_word_embeddings", True),
            n_positions=read_size(encoder, "max_position_embeddings", default=8192),
            quantization=read_quantization(raw),
            encoder_only=is_encoder_alone(raw),
        )


ModelConfig = T5Config | T5GemmaConfig


def _stack(raw: Mapping[str, Any], generation: int) -> StackConfig:
    sizes = {name: read_size(raw, name) for name in _STACK_SIZES}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise wrong(
            "num_key_value_heads",
            sizes["num_key_value_heads"],
            f"a divisor of num_attention_heads, {sizes['num_attention_heads']}",
        )
    if sizes["head_dim"] % 2:
        raise wrong("head_dim", sizes["head_dim"], "an even number")
    if raw.get("hidden_activation", GELU_NAMES[0]) not in GELU_NAMES:
        raise wrong("hidden_activation", raw["hidden_activation"], GELU_NAMES[0])
    if read_flag(raw, "attention_bias", False):
        raise wrong("attention_bias", True, "false")
    depth = read_size(raw, "num_hidden_layers", MAX_LAYERS)
    types = raw.get("layer_types")
    if types is None:
        every = read_size(raw, "sliding_window_pattern", default=_PATTERNS[generation])
        types = [LAYER_TYPES[(i + 1) % every == 0] for i in range(depth)]
    known = isinstance(types, list) and all(each in LAYER_TYPES for each in types)
    if not known or len(types) != depth:
        raise wrong("layer_types", types, f"{depth} times one of {', '.join(LAYER_TYPES)}")
    cap = _cap(raw, "attn_logit_softcapping", _CAPS[generation][0])
    return StackConfig(
        **sizes,
        layer_types=tuple(types),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        ropes=(_rope(raw, generation, LAYER_TYPES[0]), _rope(raw, generation, LAYER_TYPES[1])),
        attn_logit_softcapping=cap if generation == 1 else None,  # as in transformers
    )


def _rope(raw: Mapping[str, Any], generation: int, layer_type: str) -> Rope:
    """Read the embedding of layers of a type, as transformers 4 or 5 writes it."""
    is_full = layer_type == "full_attention"
    found = _object(raw, "rope_parameters", optional=True)  # T5Gemma 2's are by type
    own = _object(found, layer_type) if layer_type in found else found
    if is_full:
        own = _object(raw, "rope_scaling", optional=True) | own
    how = own.get("rope_type", own.get("type", "default"))
    if how not in ("default", "linear"):
        raise wrong("rope_type", how, "default or linear")
    old_name = "rope_theta" if is_full or generation == 1 else "rope_local_base_freq"
    default = 1e6 if is_full and generation == 2 else 1e4
    theta = _number(own, "rope_theta", _number(raw, old_name, default))
    return Rope(theta, _number(own, "factor", 1.0) if how == "linear" else 1.0)


def _object(raw: Mapping[str, Any], name: str, *, optional: bool = False) -> dict[str, Any]:
    found = raw.get(name)
    if found is None and optional:
        return {}
    if found is None:
        raise ValueError(f"{name} in config.json is missing, expected an object")
    if not isinstance(found, dict):
        raise wrong(name, found, "an object")
    return found


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
        raise wrong(name, value, f"a number above 0 and below {MAX_NUMBER:g}")
    return float(value)


def _cap(raw: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """Read a cap; null is none."""
    return None if raw.get(name, default) is None else _number(raw, name, default or 0)
