"""Shapes of published models, by name: their real costs can be measured without their weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ..models import ModelConfig, T5Config, T5GemmaConfig


def _t5(d_model: int, d_kv: int, d_ff: int, heads: int, layers: int) -> T5Config:
    return T5Config(d_model, d_kv, d_ff, heads, layers, layers, vocab_size=32128)


def _flan(d_model: int, d_ff: int, heads: int, layers: int) -> T5Config:
    shape = _t5(d_model, 64, d_ff, heads, layers)
    return replace(
        shape, gated=True, activation="gelu_new", own_head=True, scale_decoder_outputs=False
    )


def _t5gemma(
    generation: int, size: int, d_ff: int, depth: int, heads: int, key_heads: int, head_dim: int
) -> T5GemmaConfig:
    stack = {
        "hidden_size": size,
        "intermediate_size": d_ff,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "vocab_size": 256000 if generation == 1 else 262144,
        "sliding_window": 4096 if generation == 1 else 512,
    }
    kind = "t5gemma" if generation == 1 else "t5gemma2"
    return T5GemmaConfig.from_dict({"model_type": kind, "encoder": stack, "decoder": stack})


# Configurations are made when they are asked for, by `config_of_shape`.
SHAPES: Mapping[str, Callable[[], ModelConfig]] = {
    # d_model, d_kv, d_ff, heads, layers of each stack
    "t5-efficient-tiny": partial(_t5, 256, 64, 1024, 4, 4),
    "t5-small": partial(_t5, 512, 64, 2048, 8, 6),
    "t5-base": partial(_t5, 768, 64, 3072, 12, 12),
    "t5-large": partial(_t5, 1024, 64, 4096, 16, 24),
    "t5-3b": partial(_t5, 1024, 128, 16384, 32, 24),
    # d_model, d_ff, heads, layers of each stack
    "flan-t5-base": partial(_flan, 768, 2048, 12, 12),
    "flan-t5-large": partial(_flan, 1024, 2816, 16, 24),
    "flan-t5-xl": partial(_flan, 2048, 5120, 32, 24),
    # generation, size, d_ff, layers of each stack, heads, heads of keys, head's size
    "t5gemma-s": partial(_t5gemma, 1, 512, 1024, 8, 8, 8, 64),
    "t5gemma-b": partial(_t5gemma, 1, 768, 2048, 12, 12, 12, 64),
    "t5gemma-l": partial(_t5gemma, 1, 1024, 2816, 24, 16, 16, 64),
    "t5gemma-xl": partial(_t5gemma, 1, 2048, 5120, 24, 32, 32, 64),
    "t5gemma-2b": partial(_t5gemma, 1, 2304, 9216, 26, 8, 4, 256),
    "t5gemma-9b": partial(_t5gemma, 1, 3584, 14336, 42, 16, 8, 256),
    "t5gemma2-270m": partial(_t5gemma, 2, 640, 2048, 18, 4, 1, 256),
    "t5gemma2-1b": partial(_t5gemma, 2, 1152, 6912, 26, 4, 1, 256),
    "t5gemma2-4b": partial(_t5gemma, 2, 2560, 10240, 34, 8, 4, 256),
}


def config_of_shape(shape: str) -> ModelConfig:
    """Return the configuration of a shape; refuse a name that is none."""
    make = SHAPES.get(shape)
    if make is None:
        raise ValueError(f"there is no shape {shape!r}: choose from {', '.join(SHAPES)}")
    return make()


def check_pair_of_shapes(target: str, draft: str) -> None:
    """Refuse names of shapes that do not exist, or whose vocabularies differ."""
    ours, theirs = _vocabulary_of(target), _vocabulary_of(draft)
    if ours != theirs:
        raise ValueError(
            f"{target} has the vocabulary of {ours}, {draft} that of {theirs}: "
            "choose two shapes of one family"
        )


def _vocabulary_of(shape: str) -> str:
    config = config_of_shape(shape)
    return "t5" if isinstance(config, T5Config) else f"T5Gemma {config.generation}"
