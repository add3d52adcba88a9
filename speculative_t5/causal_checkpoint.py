"""Folders of decoder-only models: Hugging Face's own, and those that mlx-lm has converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .causal import CausalModel, build
from .causal_tokenizer import CausalTokenizer
from .config import MAX_LAYERS
from .folder import check_shapes, read_json, read_tensors, weight_files
from .session import Vocabulary
from .tensors import Shape, as_mlx

# What config.json may call the most tokens that a model reads, and its depth.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length",
            "max_seq_len", "seq_length")  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Settings of GPT-2 that mlx-lm's takes for granted, and what it takes them for.
GPT2 = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def load_causal(folder: Path, dtype: mx.Dtype) -> tuple[CausalModel, CausalTokenizer]:
    """Load a decoder-only model and its tokenizer.

    Args:
        folder: With config.json, weights in safetensors or `.bin`, and a tokenizer's files.
        dtype: Type to compute in. Matrices that mlx-lm has quantized stay so.

    Raises:
        ValueError: If it is not a whole model of a kind that is known here.
    """
    config = read_causal_config(folder)
    with _about(folder):
        module = build(config)
    weights = _parameters(folder, config, module)
    if config.get("quantization"):
        _quantize(folder, module, config["quantization"], weights)
    expected = dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))
    check_shapes(folder, _shapes(expected), _shapes(weights), str(config["model_type"]))
    tokenizer = CausalTokenizer(folder)
    ends = _ends(config.get("eos_token_id"), folder) or _ends(tokenizer.eos_token_id, folder)
    if not ends:
        raise ValueError(
            f"{folder} does not say what ends an output: put eos_token_id into its config.json"
        )
    module.load_weights([(name, _cast(weight, dtype)) for name, weight in weights.items()])
    module.eval()
    del weights, expected
    for _, weight in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        mx.eval(weight)  # one at a time: it is read, and perhaps cast, only now
    with _about(folder):
        model = CausalModel(
            module, eos_token_id=ends[0], more_ends=ends[1:], max_context=_max_context(config),
            vocabulary=tokenizer.vocabulary,
        )  # fmt: skip
    check_fit(folder, model, tokenizer)
    return model, tokenizer


@dataclass(frozen=True)
class CausalFolder:
    """What is known of a decoder-only model's folder without reading its weights.

    Attributes:
        kind: Its model_type.
        num_parameters: Each counted once.
        stored: The types of its tensors; bits, where they are quantized.
        vocabulary: Its tokenizer's.
    """

    kind: str
    num_parameters: int
    stored: tuple[str, ...]
    vocabulary: Vocabulary


def look_at(folder: Path) -> CausalFolder:
    """Look at the folder of a decoder-only model.

    Raises:
        ValueError: If it could not be loaded, as far as can be told.
    """
    config = read_causal_config(folder)
    with _about(folder):
        module = build(config)
    weights = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    stored = tuple(sorted({str(dtype).removeprefix("mlx.core.") for dtype in _dtypes(folder)}))
    if settings := config.get("quantization"):
        stored = (f"{settings['bits']} bits",)
    return CausalFolder(
        config["model_type"],
        sum(weight.size for _, weight in weights),
        stored,
        CausalTokenizer(folder).vocabulary,
    )


def _dtypes(folder: Path) -> set[mx.Dtype]:
    """The types of the stored tensors."""
    paths = weight_files(folder)
    if any(path.suffix == ".bin" for path in paths):
        return {tensor.dtype for tensor in read_tensors(folder).values()}
    return {tensor.dtype for path in paths for tensor in _lazily(path).values()}


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Put the folder before what is raised about its config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_causal_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json, with the ends that generation_config.json sets.

    Raises:
        ValueError: If it cannot be read, or asks for what is not supported.
    """
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file() and (ends := read_json(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = ends
    _ends(config.get("eos_token_id"), folder)  # before a tokenizer takes offence at it
    if (method := _foreign_quantization(config)) is not None:
        raise ValueError(
            f"the weights in {folder} are quantized by {method} (quantization_config in "
            "config.json): use the original, or one that mlx-lm has converted"
        )
    for name in DEPTHS:
        depth = config.get(name)
        if depth is not None and (type(depth) is not int or not 0 < depth <= MAX_LAYERS):
            raise ValueError(
                f"{folder}: {name} in config.json is {depth!r}, "
                f"expected an integer from 1 to {MAX_LAYERS}"
            )
    if config.get("model_type") == "gpt2":
        config.setdefault("n_ctx", config.get("n_positions"))  # its older name, which mlx-lm asks
        for name, expected in GPT2.items():
            if config.get(name, expected) != expected:
                raise ValueError(
                    f"{folder}: {name} in config.json is {config[name]!r}, "
                    f"expected {expected!r}, as all published GPT-2 have"
                )
    return config


def _foreign_quantization(config: Mapping[str, Any]) -> str | None:
    """What other program has quantized the weights; mlx-lm writes its own under two names."""
    stored = config.get("quantization_config")
    if not stored or config.get("quantization"):
        return None
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    return str(method or "another program")


def _parameters(folder: Path, config: Mapping[str, Any], module: nn.Module) -> dict[str, mx.array]:
    """The stored tensors by the module's names; those of safetensors are not read yet."""
    stored: dict[str, mx.array] = {}
    for path in weight_files(folder):
        if path.suffix == ".bin":
            tensors = read_tensors(folder)
            stored = {name: as_mlx(each.read(), each.dtype) for name, each in tensors.items()}
            break
        stored |= _lazily(path)
    if config.get("model_type") == "gpt2":
        stored = _gpt2_names(stored)
    try:
        sanitize = getattr(module, "sanitize", dict)
        return cast(dict[str, mx.array], sanitize(stored))
    except (KeyError, ValueError, IndexError) as error:  # it lacks what is looked for there
        raise ValueError(
            f"{folder}: the weights are not those of a {config['model_type']} "
            f"({type(error).__name__}: {error}): download or convert the model again"
        ) from error


def _lazily(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, each read when it is evaluated."""
    try:
        return cast(dict[str, mx.array], mx.load(str(path)))
    except RuntimeError as error:
        raise ValueError(f"{path} is truncated or damaged: {error}; download it again") from error


def _gpt2_names(stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The names of the first checkpoints; others say `transformer.` first, or hold masks, too."""
    named = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    unused = (".attn.bias", ".attn.masked_bias")
    return {
        name: tensor
        for name, tensor in named.items()
        if name != "lm_head.weight" and not name.endswith(unused)
    }


def _quantize(
    folder: Path, module: nn.Module, settings: Any, weights: Mapping[str, mx.array]
) -> None:
    """Have the matrices that are stored quantized be so, in the way that mlx-lm has noted."""

    def wanted(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        own: bool | dict[str, Any] | None = settings.get(path)
        if own is not None:
            return own
        return hasattr(layer, "to_quantized") and f"{path}.scales" in weights

    try:
        nn.quantize(
            module, group_size=settings["group_size"], bits=settings["bits"],
            mode=settings.get("mode", "affine"), class_predicate=wanted,
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}: quantization in config.json is {settings!r} ({error}): "
            "convert the model again"
        ) from error


def _shapes(arrays: Mapping[str, mx.array]) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _cast(weight: mx.array, dtype: mx.Dtype) -> mx.array:
    return weight.astype(dtype) if mx.issubdtype(weight.dtype, mx.floating) else weight


def _ends(named: Any, folder: Path) -> list[int]:
    """The ids that end an output, the first one first; none if there is no word of them."""
    if named is None:
        return []
    ends: list[Any] = named if isinstance(named, list) else [named]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise ValueError(
            f"{folder}: eos_token_id in config.json is {named!r}, expected an id or several"
        )
    return ends


def _max_context(config: Mapping[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for name in CONTEXTS:
            if type(part.get(name)) is int:
                return int(part[name])
    return None


def check_fit(folder: Path, model: CausalModel, tokenizer: CausalTokenizer) -> None:
    """Refuse a tokenizer with ids that the model has no row for.

    Raises:
        ValueError: If there are some, beyond control tokens.
    """
    size, rows = tokenizer.vocabulary.size, model.vocab_size
    if size - len(tokenizer.vocabulary.special) > rows:
        raise ValueError(
            f"the tokenizer in {folder} has {size} pieces, the model {rows} rows for them: "
            "copy there the tokenizer that belongs to the model"
        )
    beyond = [end for end in model.end_tokens if end >= rows]
    if beyond:
        raise ValueError(
            f"{folder}: eos_token_id in config.json is {beyond[0]}, expected an id below {rows}"
        )
