"""Folders of decoder-only models: Hugging Face's own, and those that mlx-lm has converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..decoding import Vocabulary
from ..device import default_dtype
from ..errors import first_line, shown
from ..models import CausalModel, build
from ..tokenizers import CausalTokenizer
from .causal_config import check_ends, max_context, read_causal_config
from .folder import check_shapes, read_tensors, weight_files
from .tensors import Shape, as_mlx


def load_causal(folder: Path, dtype: mx.Dtype | None) -> tuple[CausalModel, CausalTokenizer]:
    """Load a decoder-only model and its tokenizer.

    Args:
        folder: With config.json, weights in safetensors or `.bin`, and a tokenizer's files.
        dtype: Type to compute in; None for the device's own, or where that is of 16 bits and mlx-lm
            has quantized the matrices, for what is stored.

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
    ends = check_ends(config["eos_token_id"], f"{folder}: eos_token_id")
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if not ends:
        raise ValueError(
            f"{folder} does not say what ends an output: put eos_token_id into its config.json"
        )
    wanted = _cast_to(module, dtype, quantized=bool(config.get("quantization")))
    module.load_weights([(name, wanted(name, weight)) for name, weight in weights.items()])
    module.eval()
    del weights, expected
    for _, weight in cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())):
        mx.eval(weight)  # one at a time: it is read, and perhaps cast, only now
    with _about(folder):
        model = CausalModel(
            module, eos_token_id=ends[0], extra_eos_ids=ends[1:], max_context=max_context(config),
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
    if _pickled(folder):
        return {tensor.dtype for tensor in read_tensors(folder).values()}
    return {tensor.dtype for path in weight_files(folder) for tensor in _lazily(path).values()}


def _pickled(folder: Path) -> bool:
    return any(path.suffix == ".bin" for path in weight_files(folder))


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Put the folder before what is raised about its config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _parameters(folder: Path, config: Mapping[str, Any], module: nn.Module) -> dict[str, mx.array]:
    """The stored tensors by the module's names; those of safetensors are not read yet."""
    stored: dict[str, mx.array] = {}
    if _pickled(folder):
        tensors = read_tensors(folder)
        stored = {name: as_mlx(each.read(), each.dtype) for name, each in tensors.items()}
    else:
        for path in weight_files(folder):
            stored |= _lazily(path)
    if config.get("model_type") == "gpt2":
        stored = _gpt2_names(stored)
    try:
        sanitize = getattr(module, "sanitize", dict)
        return cast(dict[str, mx.array], sanitize(stored))
    except Exception as error:  # it lacks what is looked for there
        raise ValueError(
            f"{folder}: the weights are not those of a {config['model_type']} "
            f"({type(error).__name__}: {first_line(error)}): download or convert the model again"
        ) from error


def _lazily(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, each read when it is evaluated."""
    try:
        return cast(dict[str, mx.array], mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{path} is truncated or damaged: {first_line(error)}; download it again"
        ) from error


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
            f"{folder}: quantization in config.json is {shown(settings)} ({first_line(error)}): "
            "convert the model again"
        ) from error


def _shapes(arrays: Mapping[str, mx.array]) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _cast_to(
    module: nn.Module, dtype: mx.Dtype | None, *, quantized: bool
) -> Callable[[str, mx.array], mx.array]:
    """What gives a parameter its type to compute in."""
    wanted = dtype or default_dtype()
    if quantized and dtype is None and wanted != mx.float32:
        return lambda name, weight: weight  # half of the scales' bits would be lost
    # Some models have numbers that must stay as they are, such as what chooses experts.
    may_cast: Callable[[str], bool] = getattr(module, "cast_predicate", lambda name: True)

    def cast_one(name: str, weight: mx.array) -> mx.array:
        floats = mx.issubdtype(weight.dtype, mx.floating)
        return weight.astype(wanted) if floats and may_cast(name) else weight

    return cast_one


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
    beyond = [end for end in model.eos_token_ids if end >= rows]
    if beyond:
        raise ValueError(
            f"{folder}: eos_token_id in config.json is {beyond[0]}, expected an id below {rows}"
        )
