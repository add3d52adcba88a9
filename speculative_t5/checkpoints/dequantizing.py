"""Quantized weights as matrices of float32, where a device computes many times faster with those.

MLX's products of quantized matrices are slow on CPUs: t5-base's shape decodes 30 times slower with
8 bits than in float32. So where our own are not used (see `kernels`), a quantized model is
dequantized on a CPU as it is read, if memory allows.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from pathlib import Path

import mlx.core as mx

from .. import device
from ..errors import rounded_down, rounded_up
from ..kernels import takes_quantized
from ..models import Steps, quantization_step
from .model_folder import ModelFolder
from .packed import PARTS, PackedTensor, packed_tensor, read_in_float32, sibling
from .t5 import Checkpoint, open_checkpoint
from .tensors import Sources, StoredTensor, dtype_name

# "1" leaves a quantized model as it is on a CPU, too.
KEEP_VARIABLE = "SPECULATIVE_T5_KEEP_QUANTIZED"
SPARE_BYTES = 2**29  # bytes that a program needs besides weights


def for_this_device(
    path: Path, checkpoint: Checkpoint, dtype: mx.Dtype = mx.float32, *, processes: int = 1
) -> Checkpoint:
    """Return the checkpoint in a folder as this device is to read it; warn if that is another one.

    On a CPU a quantized one is dequantized where only MLX could compute with it, unless
    `KEEP_VARIABLE` is set, or the part of each of the `processes` that share the model would take
    more memory in `dtype` than is free.
    """
    how = checkpoint.config.quantization
    if how is None or not device.on_cpu() or os.environ.get(KEEP_VARIABLE) == "1":
        return checkpoint
    if processes == 1 and all(takes_quantized(*packing) for packing in how.packings):
        return checkpoint
    dense, free, wanted = dequantized(checkpoint), device.free_memory(), dtype_name(dtype)
    size = bytes_of_weights(dense, dtype) / processes
    begin = f"{path} is stored in {how.bits} bits, which CPUs decode many times slower"
    if free is not None and size + SPARE_BYTES > free:
        warnings.warn(
            f"{begin}; it stays so, as {wanted} would take {rounded_up(size / 1e9, 2)} GB of "
            f"memory, and {rounded_down(free / 1e9, 2)} GB are free",
            stacklevel=4,
        )
        return checkpoint
    warnings.warn(
        f"{begin}: it is read as {wanted}, which takes {size / 1e9:.2f} GB of memory instead of "
        f"{bytes_of_weights(checkpoint) / processes / 1e9:.2f} ({KEEP_VARIABLE}=1 leaves it as "
        "it is)",
        stacklevel=4,
    )
    return dense


def loaded_size(folder: ModelFolder) -> int:
    """Return about how many bytes a model takes once it is loaded: usually those of its files."""
    if folder.kind == "t5" and folder.is_quantized and device.on_cpu():
        with warnings.catch_warnings(action="ignore"):
            read = for_this_device(folder.path, open_checkpoint(folder))
        return bytes_of_weights(read, None if read.config.quantization else mx.float32)
    return sum(file.stat().st_size for file in folder.path.iterdir() if file.is_file())


def bytes_of_weights(checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> int:
    """Return the bytes of all weights, in a type or in those that they are stored in."""
    return sum(
        math.prod(tensor.shape) * (dtype or tensor.dtype).size
        for tensor in checkpoint.tensors.values()
    )


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with float32 in place of quantized matrices, made as they are read."""
    assert checkpoint.config.quantization is not None
    tensors: dict[str, StoredTensor] = {}
    parameters: dict[str, Sources] = {}
    for name, sources in checkpoint.parameters.items():
        packed = _packed_tensors(checkpoint, name)
        if packed is None:
            if name.endswith(".weight") or not _packed_tensors(checkpoint, sibling(name, "weight")):
                parameters[name] = sources
                tensors |= {source: checkpoint.tensors[source] for source in sources}
        else:
            parameters[name] = {source: tensor.shape for source, tensor in packed.items()}
            tensors |= packed
    config = dataclasses.replace(checkpoint.config, quantization=None)
    return dataclasses.replace(checkpoint, config=config, tensors=tensors, parameters=parameters)


def steps_of(checkpoint: Checkpoint) -> Steps:
    """Return how far quantization moved the numbers that identify a model, see `Steps`."""
    steps = []
    for name in checkpoint.parameters:
        if packed := _packed_tensors(checkpoint, name):
            module, tensors = name.removesuffix(".weight"), packed.values()
            scales = mx.concatenate([read_in_float32(tensor.parts[1]) for tensor in tensors])
            _, group_size = next(iter(tensors)).packing
            steps.append((module, quantization_step(module, scales, group_size)))
    return tuple(steps)


def _packed_tensors(checkpoint: Checkpoint, name: str) -> dict[str, PackedTensor] | None:
    """Return the matrices, by name, that a quantized parameter consists of; None for others."""
    how, module = checkpoint.config.quantization, name.removesuffix(".weight")
    names = [sibling(name, last) for last in PARTS]
    if how is None or name != names[0] or names[1] not in checkpoint.parameters:
        return None
    sources = zip(*(checkpoint.parameters[each] for each in names), strict=True)
    return {
        each[0]: packed_tensor((checkpoint.tensors[part] for part in each), how.of_module(module))
        for each in sources
    }
