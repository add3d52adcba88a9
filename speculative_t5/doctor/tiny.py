"""Tiny random models of every family, for checks that need no text."""

from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..cpu import accelerate
from ..models import (
    T5,
    T5GEMMA_TYPES,
    DecoderOnlyModel,
    EncoderDecoder,
    T5Config,
    T5Gemma,
    T5GemmaConfig,
    build,
)

SIZES: dict[str, Any] = {
    "d_model": 128, "d_kv": 64, "d_ff": 192, "num_heads": 3, "num_layers": 2,
    "num_decoder_layers": 2, "vocab_size": 160,
}  # fmt: skip
# What tells T5's families apart, as their checkpoints' config.json says it.
_UNTIED = {"own_head": True, "scale_decoder_outputs": False}
_STACK: dict[str, Any] = {  # of T5Gemma
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "sliding_window": 8,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 64, "vocab_size": 160,
}  # fmt: skip
_GATED: dict[str, Any] = {"gated": True, "activation": "gelu_new", **_UNTIED}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5 v1.1": _GATED,
    "ul2": _GATED | {"activation": "silu"},
    "umt5": _GATED | {"bias_per_layer": True},
    "madlad": _GATED | {"num_heads": 5, "pad_token_id": 1, "eos_token_id": 2},
    "byt5": _GATED | {"num_layers": 4, "num_decoder_layers": 1},
    "opt": {},
} | {name: {"gated": True, "encoder": _STACK, "decoder": _STACK} for name in T5GEMMA_TYPES}
OPT: dict[str, Any] = {
    "model_type": "opt", "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2,
    "ffn_dim": 192, "word_embed_proj_dim": 64, "max_position_embeddings": 256, "vocab_size": 160,
}  # fmt: skip
EOS = 1
Module = TypeVar("Module", bound=nn.Module)


def family(name: str) -> nn.Module:
    """Make a float32 model of a family with the same random weights every time."""
    if name == "opt":
        return randomized(build(OPT))
    if name in T5GEMMA_TYPES:
        config = T5GemmaConfig.from_dict({"model_type": name} | FAMILIES[name])
        return randomized(T5Gemma(config))
    return randomized(T5(T5Config(**SIZES | FAMILIES[name])))


def ready(module: nn.Module) -> EncoderDecoder | DecoderOnlyModel:
    """Return a model as `load` returns it: accelerated, or wrapped if it is decoder-only."""
    if isinstance(module, EncoderDecoder):
        accelerate(module)
        return module
    return DecoderOnlyModel(module, eos_token_id=EOS, max_context=OPT["max_position_embeddings"])


def t5(*, dtype: mx.Dtype = mx.float32, seed: int = 0, **sizes: Any) -> T5:
    """Make a random T5 with a head of its own, accelerated."""
    model = randomized(T5(T5Config(**SIZES | _UNTIED | sizes)), seed)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    accelerate(model)
    return model


def tied_t5(dtype: mx.Dtype) -> T5:
    """Make a random T5 whose logits are as close to each other as the type's rounding."""
    model = t5()
    common, *_ = weight = model.lm_head.weight
    model.lm_head.weight = common + 8 * mx.finfo(dtype).eps * weight
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def randomized(module: Module, seed: int = 0) -> Module:
    """Give a module random weights with which outputs depend on all that came before them."""
    mx.random.seed(seed)
    module.update(tree_map_with_path(_random, module.parameters()))
    mx.eval(module.parameters())
    return module


def _random(path: str, weight: mx.array) -> mx.array:
    values: mx.array = mx.random.normal(weight.shape)
    if weight.ndim == 1:  # of a norm, about 1, or a bias, about 0
        return 0.2 * values + (not path.endswith("bias"))
    if any(name in path for name in ("shared", "embed", "position_bias")):
        return values
    scale: float = 0.7 * weight.shape[1] ** -0.5
    return scale * values
