"""Matrices that MLX has quantized, in checkpoints with Hugging Face's names.

There a matrix of integers of 32 bits, `weight`, lies beside its `scales` and `biases`. Until a
checkpoint's names and shapes are known such three are one `PackedTensor`, which is what they stand
for; then each parameter that can stay packed becomes three of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import printable
from ..models import Packing, Quantization, is_embedding, is_wo, read_quantization
from .tensors import GET_MODEL_AGAIN, Sources, StoredTensor, as_mlx, as_numpy

PARTS = ("weight", "scales", "biases")


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A quantized matrix as one of float32: its shape is that of the matrix."""

    packing: Packing
    parts: tuple[StoredTensor, ...]  # by `PARTS`


def packed_tensor(parts: Iterable[StoredTensor], packing: Packing) -> PackedTensor:
    """Return the matrix that three tensors stand for; it is made when it is read."""
    weight, scales, biases = parts
    shape = (scales.shape[0], scales.shape[1] * packing[1])
    read = partial(_dequantize, packing, weight, scales, biases)
    return PackedTensor(shape, mx.float32, read, packing, (weight, scales, biases))


def _dequantize(
    packing: Packing, weight: StoredTensor, scales: StoredTensor, biases: StoredTensor
) -> np.ndarray:
    small = read_in_float32(scales), read_in_float32(biases)
    bits, group_size = packing
    return as_numpy(mx.dequantize(as_mlx(weight.read(), weight.dtype), *small, group_size, bits))


def read_in_float32(tensor: StoredTensor) -> mx.array:
    """Return what a tensor holds, in float32."""
    return as_mlx(tensor.read(), tensor.dtype).astype(mx.float32)


def sibling(name: str, last: str) -> str:
    """Return the name of another part of the same module."""
    return f"{name.rpartition('.')[0]}.{last}"


def folded(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors with one `PackedTensor` for the three of a quantized matrix.

    Raises:
        ValueError: If integers are not parts of one, or config.json does not say how it is packed.
    """
    kept = dict(tensors)
    how = read_quantization(config)
    for name in tensors:
        names = [sibling(name, last) for last in PARTS]
        if name != names[1] or names[0] not in tensors:
            continue
        kept[names[0]] = _folded(path, how, names, tensors)
        del kept[names[1]], kept[names[2]]
    for name, tensor in kept.items():
        if tensor.dtype == mx.uint32:
            raise ValueError(
                f"{path}: {printable(name)} is of integers (U32) and has no {PARTS[1]} beside it: "
                "save the model in F32, F16 or BF16, or quantize it by MLX"
            )
    return kept


def _folded(
    path: Path, how: Quantization | None, names: list[str], tensors: Mapping[str, StoredTensor]
) -> PackedTensor:
    """Return one matrix of a checkpoint; refuse parts that do not belong together."""
    name = printable(names[0])
    if how is None:
        raise ValueError(
            f"{path}: {name} is quantized, and config.json has no quantization with its bits and "
            "group_size: write them there, or convert the original with --quantize"
        )
    packing = how.of_module(names[0].removesuffix(".weight"))
    parts = [tensors[each] for each in names if each in tensors]
    bits, group_size = packing
    (rows, words), *small = (tensor.shape if len(tensor.shape) == 2 else (0, 0) for tensor in parts)
    groups = words * 32 // (bits * group_size)
    expected = rows and groups and words * 32 == groups * group_size * bits
    if not expected or small != [(rows, groups)] * 2 or parts[0].dtype != mx.uint32:
        shapes = ", ".join(str(tensor.shape) for tensor in parts)
        raise ValueError(
            f"{path}: {name} and what lies beside it have the shapes {shapes}, which are no matrix "
            f"of {bits} bits in groups of {group_size}: {GET_MODEL_AGAIN}, with its config.json"
        )
    return packed_tensor(parts, packing)


def unfolded(
    parameters: Mapping[str, Sources], tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, Sources], dict[str, StoredTensor]]:
    """Return parameters and tensors with three of each that is packed.

    One whose tensors are packed in different ways is left as float32.
    """
    sources_of: dict[str, Sources] = {}
    parts = dict(tensors)
    for name, sources in parameters.items():
        if _shared_packing(sources, tensors) is None:
            sources_of[name] = sources
            continue
        for i, last in enumerate(PARTS):
            found = {sibling(each, last): _part(tensors[each], i) for each in sources}
            parts |= found
            sources_of[sibling(name, last)] = {each: part.shape for each, part in found.items()}
    return sources_of, parts


def quantization_of(
    config: Mapping[str, Any],
    parameters: Mapping[str, Sources],
    tensors: Mapping[str, StoredTensor],
) -> Quantization | None:
    """Return how the matrices of a checkpoint are quantized, whatever its config.json says."""
    packings, columns = {}, {}
    for name, sources in parameters.items():
        shape = next(iter(sources.values()))
        if len(shape) == 2:
            module = name.removesuffix(".weight")
            packings[module], columns[module] = _shared_packing(sources, tensors), shape[1]
    packed = [module for module, packing in packings.items() if packing]
    usual = read_quantization(config)
    if usual is None or not packed:
        return None
    rule = Quantization(
        usual.bits,
        usual.group_size,
        keep_wo=not any(map(is_wo, packed)),
        embeddings=any(map(is_embedding, packed)),
    )
    others = [(m, found) for m, found in packings.items() if rule.of(m, columns[m]) != found]
    return dataclasses.replace(rule, others=tuple(others))


def _shared_packing(sources: Iterable[str], tensors: Mapping[str, StoredTensor]) -> Packing | None:
    """Return how a parameter's tensors are packed; None if they are not, or not alike."""
    found = {getattr(tensors[source], "packing", None) for source in sources}
    return found.pop() if len(found) == 1 else None


def _part(tensor: StoredTensor, i: int) -> StoredTensor:
    assert isinstance(tensor, PackedTensor)
    return tensor.parts[i]
