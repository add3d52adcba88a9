"""Adapters made by PEFT: low-rank changes of some weights, merged as these are read.

LoRA (arXiv 2106.09685) adds to a weight the product of two narrow matrices, (alpha / r) B A; rsLoRA
(arXiv 2312.03732) scales it by alpha / sqrt(r), and DoRA (arXiv 2402.09353) then gives each row a
length of its own.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import printable, read_json, shown
from .model_folder import ADAPTER_CONFIG, ModelFolder
from .packed import folded
from .tensors import Shape, StoredTensor, as_mlx, as_numpy

SAVE_ADAPTER_AGAIN = "download or save the adapter again"
MOST_ALPHA = 10**6
MAX_BASE_NAME = 255  # characters of a base's name or path
# Settings by which an adapter computes something else than what is merged here.
UNMERGEABLE = (
    "alora_invocation_tokens alpha_pattern arrow_config kasa_config layer_replication lora_bias "
    "monteclora_config target_parameters trainable_token_indices use_bdlora use_qalora "
    "velora_config"
).split()
# Beginnings that moved a part of the base's weights into the adapter.
TAKEN_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
MAGNITUDES = "lora_magnitude_vector"
_PART = re.compile(rf"(.+)\.(lora_A|lora_B|{EMBEDDING_A}|{EMBEDDING_B}|{MAGNITUDES})(?:\.weight)?")


@dataclass
class WeightChange:
    """What an adapter does to one weight: puts another one in its place, adds to it, or both."""

    whole: StoredTensor | None = None
    parts: dict[str, StoredTensor] = field(default_factory=dict)  # lora_A (r, columns) and so on


@dataclass(frozen=True)
class Merged(StoredTensor):
    """A weight (rows, columns), changed in float32 some rows at a time."""

    change: WeightChange
    scale: float

    def read(self) -> np.ndarray:
        return np.concatenate([*self.blocks()])

    def blocks(self) -> Iterator[np.ndarray]:
        stored = self.change.parts.items()
        parts = {name: _array_in_float32(part.read(), part.dtype) for name, part in stored}
        if EMBEDDING_A in parts:
            up, down = parts[EMBEDDING_A].T, parts[EMBEDDING_B].T
        else:
            up, down = parts["lora_B"], parts["lora_A"]
        first = 0
        for block in super().blocks():
            rows = slice(first, first := first + len(block))
            made = _array_in_float32(block, self.dtype) + self.scale * (up[rows] @ down)
            if MAGNITUDES in parts:
                made *= (parts[MAGNITUDES][rows] / np.linalg.norm(made, axis=1))[:, None]
            yield as_numpy(mx.array(made).astype(self.dtype))


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter in a folder, and how it changes a model."""

    folder: ModelFolder

    @cached_property
    def config(self) -> dict[str, Any]:
        """The object in adapter_config.json; an adapter that cannot be merged is refused."""
        config = read_json(self.folder.path / ADAPTER_CONFIG, SAVE_ADAPTER_AGAIN)
        wrong = [name for name in UNMERGEABLE if config.get(name)]
        if config.get("peft_type") != "LORA":
            wrong = ["peft_type"]
        elif str(config.get("init_lora_weights")).lower().startswith(TAKEN_FROM_BASE):
            wrong = ["init_lora_weights"]
        if wrong:
            raise ValueError(
                f"{self.folder.path} is an adapter with {wrong[0]} {shown(config.get(wrong[0]))}, "
                "which is not offered: merge it with PEFT, and save the model"
            )
        return config

    @property
    def base(self) -> str | None:
        """The name or path of the model that it was trained on, if it says so."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and 0 < len(name) <= MAX_BASE_NAME else None

    def changes(self) -> dict[str, WeightChange]:
        """Return what the adapter changes, by the names of weights in the trained model."""
        found: dict[str, WeightChange] = {}
        stored = folded(self.folder.path, {}, self.folder.tensors())  # no integers among them
        for name, tensor in stored.items():
            # Of a module that was trained whole PEFT may also store what it was before.
            if ".original_module." in name or _trained(name) in stored:
                continue
            # An embedding is stored whole beside what is added to it.
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            name = name.replace(".modules_to_save.", ".")
            part = _PART.fullmatch(name)
            change = found.setdefault(f"{part[1]}.weight" if part else name, WeightChange())
            if part:
                change.parts[part[2]] = tensor
            else:
                change.whole = tensor
        return found

    def merge(
        self, tensors: Mapping[str, StoredTensor], changes: Mapping[str, WeightChange], head: str
    ) -> dict[str, StoredTensor]:
        """Return the tensors of a base with `changes`, whose names and shapes are checked.

        An output `head` may be new, where that of the base is its embedding.
        """
        base = printable(self.base or "the model that it was trained on")
        advice = f"give {base} as the model, or merge it with PEFT"
        if not changes:
            raise ValueError(
                f"{self.folder.path} changes nothing in a model of texts: {SAVE_ADAPTER_AGAIN}"
            )
        merged = dict(tensors)
        for name, change in changes.items():
            stored = change.whole or tensors.get(name)
            if stored is None or name not in (head, *tensors):
                raise ValueError(
                    f"{self.folder.path} changes {printable(name)}, which this model does not "
                    f"have: {advice}"
                )
            shapes = {part: tensor.shape for part, tensor in sorted(change.parts.items())}
            if shapes != (expected := _expected(stored.shape, shapes)):
                raise ValueError(
                    f"{self.folder.path} has {shown(shapes)} for {printable(name)}, expected "
                    f"{shown(expected)}: {advice}"
                )
            merged[name] = stored
            if shapes:
                rank = next(iter(shapes.values()))[0]
                scale = self._alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
                merged[name] = Merged(stored.shape, stored.dtype, stored.open, change, scale)
        return merged

    @property
    def _alpha(self) -> float:
        """The factor of what is added to each weight, before it is divided by the rank."""
        found: Any = self.config.get("lora_alpha")
        if type(found) not in (int, float) or not abs(found) <= MOST_ALPHA:
            raise ValueError(
                f"{self.folder.path / ADAPTER_CONFIG}: lora_alpha is {shown(found)}, expected a "
                f"number up to {MOST_ALPHA:,}"
            )
        return float(found)


def _trained(name: str) -> str:
    """Return the name of a module's tensor, of those that PEFT calls modules_to_save."""
    module, _, part = name.rpartition(".")
    return f"{module}.modules_to_save.{part}"


def _expected(stored: Shape, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes that parts must have to be added to a weight of a shape."""
    if not shapes:
        return {}
    rank = max((1, *shapes.get("lora_A", shapes.get(EMBEDDING_A, ()))[:1]))
    rows, columns = stored if len(stored) == 2 else (0, 0)
    if EMBEDDING_A in shapes:
        return {EMBEDDING_A: (rank, rows), EMBEDDING_B: (columns, rank)}
    lengths = {MAGNITUDES: (rows,)} if MAGNITUDES in shapes else {}
    return {"lora_A": (rank, columns), "lora_B": (rows, rank), **lengths}


def _array_in_float32(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return as_numpy(as_mlx(array, dtype).astype(mx.float32))
