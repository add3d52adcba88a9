"""Tiny random models of every family, for checks that need no text."""

from typing import Any

import mlx.core as mx

from ..kernels import accelerate
from ..measure import random_weights
from ..models import T5, T5GEMMA_TYPES, ModelConfig, T5Config, T5GemmaConfig

T5_SIZES: dict[str, Any] = {
    "d_model": 128,
    "d_kv": 64,
    "d_ff": 192,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": 160,
}
# What tells T5's families apart, as their checkpoints' config.json says it.
_UNTIED = T5_SIZES | {"own_head": True, "scale_decoder_outputs": False}
_GATED = _UNTIED | {"gated": True, "activation": "gelu_new"}
_STACK: dict[str, Any] = {  # of T5Gemma
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 64,
    "vocab_size": 160,
}
EOS_ID = 1
TINY_FAMILIES: dict[str, ModelConfig] = {
    "t5": T5Config(**T5_SIZES),
    "t5 v1.1": T5Config(**_GATED),
    "ul2": T5Config(**_GATED | {"activation": "silu"}),
    "umt5": T5Config(**_GATED | {"bias_per_layer": True}),
    "madlad": T5Config(**_GATED | {"num_heads": 5, "pad_token_id": 1, "eos_token_id": 2}),
    "byt5": T5Config(**_GATED | {"num_layers": 4, "num_decoder_layers": 1}),
}
TINY_FAMILIES |= {
    kind: T5GemmaConfig.from_dict({"model_type": kind, "encoder": _STACK, "decoder": _STACK})
    for kind in T5GEMMA_TYPES
}


def t5(*, dtype: mx.Dtype = mx.float32, seed: int = 0, **sizes: Any) -> T5:
    """Make a random T5 with a head of its own, accelerated."""
    config = T5Config(**_UNTIED | sizes)
    model = random_weights(config, dtype=dtype, seed=seed)
    assert isinstance(model, T5)
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
