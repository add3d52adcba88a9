"""Reads config.json of decoder-only models, and checks what mlx-lm does not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import shown
from ..models import MAX_LAYERS, MAX_SIZE
from .folder import read_json

# Names in config.json of the most tokens that a model reads, and of its depth.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length",
            "max_seq_len", "seq_length")  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZES = (
    *CONTEXTS, "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "n_embd", "n_head", "n_inner",
)  # fmt: skip
ROPES = ("rope_scaling", "rope_parameters")  # objects, which may hold one for each kind of layer
# Names of numbers that must be above 0, and the largest sensible value; mlx-lm takes any.
BOUNDS = (
    (re.compile(r"\w*norm\w*_eps(ilon)?"), 1.0),
    (re.compile(r"partial_rotary_factor|rotary_pct|rope_pct"), 1.0),
    (re.compile(r"\w*(rope_theta|rotary_emb_base|base_freq)|beta_fast|beta_slow"), 1e15),
    (re.compile(r"\w*(factor|multiplier|scalar|softcapping)|logits_scaling"), 1e15),
    (re.compile("original_max_position_embeddings"), float(MAX_SIZE)),
)
# The first must be a multiple of the second.
MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("n_embd", "n_head"))
# Settings of GPT-2 that mlx-lm assumes without reading them.
GPT2 = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def read_causal_config(folder: Path) -> dict[str, Any]:
    """Read and check config.json; generation_config.json's `eos_token_id`, if any, replaces its."""
    config = read_json(folder / "config.json")
    _check_quantization(folder, config)
    for part in _parts(config):
        _check_sizes(folder, part)
        for group in _groups(part):
            _check_numbers(folder, group)
    if config.get("model_type") == "gpt2":
        config.setdefault("n_ctx", config.get("n_positions"))  # mlx-lm reads the older name
        _check_gpt2(folder, config)
    generation = folder / "generation_config.json"
    # Checked here, as a tokenizer would raise an obscure error for them.
    ends = check_ends(config.get("eos_token_id"), f"eos_token_id in {folder / 'config.json'}")
    if generation.is_file():
        named = read_json(generation).get("eos_token_id")
        ends = check_ends(named, f"eos_token_id in {generation}") or ends
    config["eos_token_id"] = ends
    return config


def check_ends(named: Any, where: str) -> list[int]:
    """Return an id, a list of ids or None as a list; `where` says in an error what it was."""
    ends: list[Any] = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise ValueError(f"{where} is {shown(named)}, expected an id or several")
    return ends


def max_context(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of prompt and output that a model reads; None if it does not say."""
    for part in _parts(config):
        limits = [int(part[name]) for name in CONTEXTS if type(part.get(name)) is int]
        if limits:
            return max(limits[0], _stretched(part))
    return None


def _stretched(part: Mapping[str, Any]) -> int:
    """Return the context that YaRN stretches a shorter one to; 0 without YaRN."""
    rope = part.get("rope_scaling") or part.get("rope_parameters")
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return 0
    return int(factor * original)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the config, and the one of its text model if there is one."""
    yield config
    if isinstance(nested := config.get("text_config"), Mapping):
        yield nested


def _check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    ours, other = config.get("quantization"), config.get("quantization_config")
    if ours:
        sizes = [ours.get(n) for n in ("bits", "group_size")] if isinstance(ours, dict) else [None]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"{folder}: quantization in config.json is {shown(ours)}, "
                "expected an object with bits and group_size"
            )
    elif other:  # mlx-lm writes its own under both names
        method = other.get("quant_method") if isinstance(other, dict) else None
        raise ValueError(
            f"the weights in {folder} are quantized by {method or 'another program'} "
            "(quantization_config in config.json): use the original, or one that mlx-lm has "
            "converted"
        )


def _check_sizes(folder: Path, part: Mapping[str, Any]) -> None:
    """Check sizes that are one integer; some models have a list of them, one for each layer."""
    for name in (*SIZES, *DEPTHS):
        size, limit = part.get(name), MAX_LAYERS if name in DEPTHS else MAX_SIZE
        if size is None or isinstance(size, list):
            continue
        if type(size) is not int or not 0 < size <= limit:
            raise ValueError(
                f"{folder}: {name} in config.json is {shown(size)}, "
                f"expected an integer from 1 to {limit}"
            )
    for name, divisor in MULTIPLES:
        whole, parts = part.get(name), part.get(divisor)
        if isinstance(whole, int) and isinstance(parts, int) and whole % parts:
            raise ValueError(
                f"{folder}: {name} in config.json is {whole}, "
                f"expected a multiple of {divisor}, {parts}"
            )


def _groups(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config, and the settings of rotary positions in it."""
    yield part
    for name in ROPES:
        if isinstance(rope := part.get(name), Mapping):
            yield rope
            yield from (each for each in rope.values() if isinstance(each, Mapping))


def _check_numbers(folder: Path, group: Mapping[str, Any]) -> None:
    for name, value in group.items():
        limits = [limit for pattern, limit in BOUNDS if pattern.fullmatch(name)]
        for number in value if isinstance(value, list) and limits else [value]:
            if limits and number is not None and not _is_between(number, limits[0]):
                raise ValueError(
                    f"{folder}: {name} in config.json is {shown(value)}, "
                    f"expected a number above 0 and at most {limits[0]:g}"
                )
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(
                    f"{folder}: {name} in config.json is {shown(value)}, expected a finite number"
                )


def _is_between(number: Any, limit: float) -> bool:
    """Whether it is a finite number above 0 and at most the limit."""
    return type(number) in (int, float) and 0 < number <= limit


def _check_gpt2(folder: Path, config: Mapping[str, Any]) -> None:
    for name, expected in GPT2.items():
        if config.get(name, expected) != expected:
            raise ValueError(
                f"{folder}: {name} in config.json is {shown(config[name])}, "
                f"expected {expected!r}, as all published GPT-2 have"
            )
