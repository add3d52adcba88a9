"""Reads folders of decoder-only models, Hugging Face's own or converted by mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..decoding import Vocabulary
from ..device import default_dtype
from ..errors import first_line, shown
from ..models import CausalModel, build
from ..tokenizers import DecoderOnlyTokenizer
from .causal_config import check_ends, max_context, read_causal_config
from .folder import check_shapes, read_tensors, weight_files
from .tensors import Shape, as_mlx, dtype_name


def load_causal(folder: Path, dtype: mx.Dtype | None) -> tuple[CausalModel, DecoderOnlyTokenizer]:
    """Load a decoder-only model and its tokenizer.

    Args:
        folder: Holds config.json, weights in safetensors or `.bin`, and a tokenizer's files.
        dtype: Type to compute in; None for the device's default. If that has 16 bits and mlx-lm
            has quantized the matrices, None keeps the stored type.

    Raises:
        ValueError: If it is not a whole model of a known kind.
    """
    config = read_causal_config(folder)
    with _about(folder):
        module = build(config)
    weights = _parameters(folder, config, module)
    if config.get("quantization"):
        _quantize(folder, module, config["quantization"], weights)
    expected = dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))
    check_shapes(folder, _shapes(expected), _shapes(weights), str(config["model_type"]))
    tokenizer = DecoderOnlyTokenizer(folder)
    ends = _ends(folder, config, tokenizer)
    cast_one = _caster(module, dtype, quantized=bool(config.get("quantization")))
    module.load_weights([(name, cast_one(name, weight)) for name, weight in weights.items()])
    module.eval()
    del weights, expected
    for _, weight in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        mx.eval(weight)  # one at a time, as this reads it and may cast it
    with _about(folder):
        model = CausalModel(
            module, eos_token_id=ends[0], extra_eos_ids=ends[1:], max_context=max_context(config),
            vocabulary=tokenizer.vocabulary,
        )  # fmt: skip
    check_fit(folder, model, tokenizer)
    return model, tokenizer


def _ends(folder: Path, config: Mapping[str, Any], tokenizer: DecoderOnlyTokenizer) -> list[int]:
    """Return the ids that end an output: the config's, or else the tokenizer's."""
    ends = check_ends(config["eos_token_id"], f"{folder}: eos_token_id")
    if not ends and tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    if not ends:
        raise ValueError(
            f"{folder} does not say what ends an output: put eos_token_id into its config.json"
        )
    return ends


def inspect_causal(folder: Path) -> tuple[str, int, tuple[str, ...], Vocabulary]:
    """Inspect the folder of a decoder-only model without reading its weights.

    Returns:
        Its model_type; how many parameters it has, each counted once; the types of its tensors, or
        their bits if they are quantized; and its tokenizer's vocabulary.
    """
    config = read_causal_config(folder)
    with _about(folder):
        module = build(config)
    weights = cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))
    stored = tuple(sorted(map(dtype_name, _dtypes(folder))))
    if settings := config.get("quantization"):
        stored = (f"{settings['bits']} bits",)
    count = sum(weight.size for _, weight in weights)
    return config["model_type"], count, stored, DecoderOnlyTokenizer(folder).vocabulary


def _dtypes(folder: Path) -> set[mx.Dtype]:
    """Return the types of the stored tensors."""
    if _pickled(folder):
        return {tensor.dtype for tensor in read_tensors(folder).values()}
    return {tensor.dtype for path in weight_files(folder) for tensor in _load_lazily(path).values()}


def _pickled(folder: Path) -> bool:
    return any(path.suffix == ".bin" for path in weight_files(folder))


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Put the folder's name before errors about its config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _parameters(folder: Path, config: Mapping[str, Any], module: nn.Module) -> dict[str, mx.array]:
    """Return the stored tensors by the module's names; those of safetensors are not read yet."""
    stored: dict[str, mx.array] = {}
    if _pickled(folder):
        tensors = read_tensors(folder)
        stored = {name: as_mlx(each.read(), each.dtype) for name, each in tensors.items()}
    else:
        for path in weight_files(folder):
            stored |= _load_lazily(path)
    if config.get("model_type") == "gpt2":
        stored = _gpt2_names(stored)
    try:
        sanitize = getattr(module, "sanitize", dict)
        return cast(dict[str, mx.array], sanitize(stored))
    except Exception as error:  # a missing tensor raises anything
        raise ValueError(
            f"{folder}: the weights are not those of a {config['model_type']} "
            f"({type(error).__name__}: {first_line(error)}): download or convert the model again"
        ) from error


def _load_lazily(path: Path) -> dict[str, mx.array]:
    """Return the tensors of a safetensors file; each is read when it is evaluated."""
    try:
        return cast(dict[str, mx.array], mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated or damaged: {first_line(error)}; download it again"
        ) from error


def _gpt2_names(stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rename tensors as in the first checkpoints, without `transformer.`, and drop masks."""
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
    """Quantize the module's matrices that are stored quantized, as config.json says."""

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
            f"{folder}: quantization in config.json is {shown(settings)} ({first_line(error)}): "
            "convert the model again"
        ) from error


def _shapes(arrays: Mapping[str, mx.array]) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _caster(
    module: nn.Module, dtype: mx.Dtype | None, *, quantized: bool
) -> Callable[[str, mx.array], mx.array]:
    """Return the function that casts a parameter, by its name, to the type to compute in."""
    wanted = dtype or default_dtype()
    if quantized and dtype is None and wanted != mx.float32:
        return lambda name, weight: weight  # casting float16 scales to bfloat16 would lose bits
    # Some models have parameters that must keep their type, such as those that choose experts.
    may_cast: Callable[[str], bool] = getattr(module, "cast_predicate", lambda name: True)

    def cast_one(name: str, weight: mx.array) -> mx.array:
        floats = mx.issubdtype(weight.dtype, mx.floating)
        return weight.astype(wanted) if floats and may_cast(name) else weight

    return cast_one


def check_fit(folder: Path, model: CausalModel, tokenizer: DecoderOnlyTokenizer) -> None:
    """Refuse a tokenizer or an EOS with ids that the model has no row for."""
    size, rows = tokenizer.vocabulary.size, model.vocab_size
    if size - len(tokenizer.vocabulary.special) > rows:
        raise ValueError(
            f"the tokenizer in {folder} has {size} pieces, the model {rows} rows for them: "
            "copy the tokenizer that belongs to the model there"
        )
    beyond = [end for end in model.eos_token_ids if end >= rows]
    if beyond:
        raise ValueError(
            f"{folder}: eos_token_id in config.json is {beyond[0]}, expected an id below {rows}"
        )
