"""Quantized matrices of a model: which they are, made, and read as plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..errors import first_line, shown

MLX_BITS = (2, 3, 4, 5, 6, 8)  # that MLX packs weights into
MLX_GROUP_SIZES = (32, 64, 128)
QUANTIZATION_CONFIG = "quantization_config"  # the entry of transformers, which MLX's programs copy
_AFFINE = "affine"  # the mode of MLX's whose groups have a scale and a bias
_EMBEDDINGS = ("shared", "encoder_shared", "lm_head")
_OWN_ENTRIES = ("bits", "group_size", "keep_wo", "embeddings")

# The bits of each weight of a matrix, and the weights that share a scale and a bias.
Packing = tuple[int, int]
# The names of matrices that were quantized and no longer are, each with the size of a step.
Steps = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Quantization:
    """MLX's affine quantization of a model's matrices whose rows are a multiple of the group."""

    bits: int  # of each weight, one of `MLX_BITS`
    group_size: int = 64  # weights that share a scale and a bias: 32, 64 or 128
    keep_wo: bool = False  # whether the feed-forward's second matrix is left alone
    embeddings: bool = True  # whether the embedding and a head of its own are quantized, too
    # Matrices that differ from all that, by the names of their modules; None for those left alone.
    others: tuple[tuple[str, Packing | None], ...] = ()

    def __post_init__(self) -> None:
        for bits, group_size in self.packings:
            if type(bits) is not int or bits not in MLX_BITS:
                listed = ", ".join(map(str, MLX_BITS[:-1]))
                raise ValueError(
                    f"quantization must be to {listed} or {MLX_BITS[-1]} bits, got {shown(bits)}"
                )
            if type(group_size) is not int or group_size not in MLX_GROUP_SIZES:
                raise ValueError(
                    f"a group must be of 32, 64 or 128 weights, got {shown(group_size)}"
                )

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"

    @property
    def packings(self) -> set[Packing]:
        """How matrices are packed: usually in one way."""
        found = {packing for _, packing in self.others if packing is not None}
        return found | {(self.bits, self.group_size)}

    def of(self, name: str, columns: int) -> Packing | None:
        """Return how a module's matrix with rows of `columns` is packed; None if it is not."""
        named = dict(self.others)
        if name in named:
            return named[name]
        is_kept = not self.embeddings if is_embedding(name) else self.keep_wo and is_wo(name)
        return None if is_kept or columns % self.group_size else (self.bits, self.group_size)

    def of_module(self, name: str) -> Packing:
        """Return how a module is packed that is known to be."""
        return dict(self.others).get(name) or (self.bits, self.group_size)

    def to_dict(self) -> dict[str, Any]:
        """The entry `quantization` of a config.json, with other matrices by name, as MLX has it."""
        others = {name: packing and _entry(packing) for name, packing in self.others}
        own: dict[str, Any] = {name: getattr(self, name) for name in _OWN_ENTRIES}
        return own | {name: entry or False for name, entry in others.items()}


def is_embedding(name: str) -> bool:
    """Whether a module is an embedding, or a head of its own."""
    return name in _EMBEDDINGS


def is_wo(name: str) -> bool:
    """Whether a module is the second matrix of a feed-forward."""
    return name.endswith(".wo")


def _entry(packing: Packing) -> dict[str, int]:
    return {"group_size": packing[1], "bits": packing[0]}


def is_of_mlx(found: object) -> bool:
    """Whether an entry `QUANTIZATION_CONFIG` is a copy of MLX's own."""
    return isinstance(found, dict) and "bits" in found and "quant_method" not in found


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Read how a config.json says that the weights are quantized, if they are."""
    name = "quantization"
    stored = raw.get(name)
    if stored is None and is_of_mlx(raw.get(QUANTIZATION_CONFIG)):
        name = QUANTIZATION_CONFIG
        stored = raw[name]
    if stored is None:
        return None
    try:
        return _read(stored)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} in config.json is {shown(stored)}: {first_line(error)}; "
            "convert the model again"
        ) from error


def _read(stored: Any) -> Quantization:
    """Read MLX's entry, whose own settings are followed by those of modules by name."""
    if not isinstance(stored, dict):
        raise TypeError("expected an object")
    own = {name: value for name, value in stored.items() if name in _OWN_ENTRIES}
    usual = own.get("bits"), own.get("group_size", Quantization.group_size)
    others = []
    for name, value in stored.items():
        if name == "mode":
            _check_affine(value)
        elif name not in own:
            others.append((name, _packing_of(name, value, usual)))
    return Quantization(**own, others=tuple(others))


def _packing_of(name: str, value: Any, usual: tuple[Any, Any]) -> Packing | None:
    """Read what is said of one module: false, true for the usual, or bits and a group size."""
    if isinstance(value, bool):
        return cast(Packing, usual) if value else None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}, expected false or its bits and group_size")
    _check_affine(value.get("mode", _AFFINE))
    return cast(Packing, (value.get("bits", usual[0]), value.get("group_size", usual[1])))


def _check_affine(mode: object) -> None:
    if mode != _AFFINE:
        raise ValueError(f"the mode is {shown(mode)}, expected {_AFFINE}")


def quantize(model: nn.Module, how: Quantization) -> None:
    """Replace the layers that `how` names by quantized ones."""

    def chosen(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        packing = how.of(path, module.weight.shape[-1])
        return _entry(packing) if packing else False

    nn.quantize(model, how.group_size, how.bits, class_predicate=chosen)


def plain_weight(
    module: nn.Module, rows: Any = slice(None), dtype: mx.Dtype = mx.float32
) -> mx.array:
    """Return a module's weight, or some rows of it, dequantized and in a type."""
    weight: mx.array = module.weight[rows]
    if "scales" in module:
        scales, biases = (part[rows].astype(dtype) for part in (module.scales, module.biases))
        return mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return weight.astype(dtype)
