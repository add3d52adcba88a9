"""Models under Hugging Face's names, as MLX's and other programs read them: what is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from ..models import ENCODER_ALONE, MODEL_TYPES, ModelConfig, Quantization, T5Config
from . import t5gemma
from .packed import PARTS, sibling
from .t5 import Checkpoint, planned
from .tensors import Layout, Sources, StoredTensor, dtype_name

ARCHITECTURES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}


def saved_sources(config: ModelConfig) -> dict[str, Sources]:
    """Return the tensors that each of our parameters is saved as, by the names of a whole model."""
    found = planned(config)
    if isinstance(config, T5Config):
        return found
    saved = partial(t5gemma.saved_name, config)
    return {
        name: {saved(each): shape for each, shape in sources.items()}
        for name, sources in found.items()
    }


def saved_layout(config: ModelConfig, layout: Layout) -> Layout:
    """Return the tensors to save for a `layout` by our names, each part of a stacked one alone."""
    found: Layout = {}
    for name, sources in saved_sources(config).items():
        for part in _parts_in(name, layout):
            shape, dtype = layout[part]
            for source, (rows, *_) in sources.items():
                found[_renamed(source, part, name)] = ((rows, *shape[1:]), dtype)
    return found


def as_saved(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose parameters have Hugging Face's names, and none is stacked."""
    tensors: dict[str, StoredTensor] = {}
    for name, sources in saved_sources(checkpoint.config).items():
        for part in _parts_in(name, checkpoint.parameters):
            stored = [checkpoint.tensors[each] for each in checkpoint.parameters[part]]
            names = [_renamed(source, part, name) for source in sources]
            if len(stored) < len(names):  # one of ours, which they are stacked in
                (whole,) = stored
                rows = [(shape[0], *whole.shape[1:]) for shape in sources.values()]
                stored = [*whole.split(rows)]
            tensors |= zip(names, stored, strict=True)
    parameters: dict[str, Sources] = {n: {n: tensor.shape} for n, tensor in tensors.items()}
    return dataclasses.replace(checkpoint, tensors=tensors, parameters=parameters)


def saved_config(config: ModelConfig, raw: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a config.json for other programs, of one that this package reads.

    A quantized model's says how twice, as MLX's programs do.
    """
    found = dict(raw)
    if isinstance(config, T5Config):
        kind = "umt5" if config.bias_per_layer else found["model_type"]
        kind = kind if kind in MODEL_TYPES else "t5"
        end = ENCODER_ALONE if config.encoder_only else "ForConditionalGeneration"
        found |= {"model_type": kind, "architectures": [ARCHITECTURES[kind] + end]}
        found["is_encoder_decoder"] = not config.encoder_only
    kinds = [dtype for _, dtype in layout.values() if dtype != mx.uint32]
    found["dtype"] = dtype_name(max(kinds, key=kinds.count))
    if config.quantization:
        entry = dict(_entries(config, config.quantization))
        found |= {"quantization": entry, "quantization_config": entry}
    return found


def _entries(config: ModelConfig, how: Quantization) -> Iterator[tuple[str, Any]]:
    """Yield how all matrices are packed, and those that differ by Hugging Face's names."""
    yield from (("group_size", how.group_size), ("bits", how.bits))
    others = dict(how.others)
    for name, sources in saved_sources(config).items():
        if packing := others.get(name.removesuffix(".weight")):
            for source in sources:
                entry = {"group_size": packing[1], "bits": packing[0]}
                yield source.removesuffix(".weight"), entry


def _parts_in(name: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of a parameter and, if it is quantized, of its scales and biases."""
    if not name.endswith(".weight"):
        return [name]
    return [part for last in PARTS if (part := sibling(name, last)) in parameters]


def _renamed(source: str, part: str, name: str) -> str:
    """Return the name of a tensor's part, as `part` is one of the parameter `name`."""
    return source if part == name else sibling(source, part.rpartition(".")[2])
