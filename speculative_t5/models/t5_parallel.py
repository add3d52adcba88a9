"""Tensor parallelism: a T5 whose layers are split among the processes of a group.

As in Megatron-LM (arXiv 1909.08053), every process has some heads of each attention, with their
part of the position bias, and some units of each feed-forward; the output matrices add up what the
processes have found: two sums of (B, L, d_model) for an encoder's layer, three for a decoder's.
Embedding, norms and head are whole in each process.
"""

from functools import partial
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten, tree_unflatten

from .. import distributed
from .config import T5Config
from .position_bias import PositionBias
from .t5 import T5, CrossAttention, SelfAttention
from .t5gemma_config import ModelConfig


class Split(NamedTuple):
    """How a matrix is split: along an axis, each of several equal segments separately."""

    axis: int
    segments: int = 1


def split_of(name: str, config: ModelConfig) -> Split | None:
    """Return how a parameter is split; None if it is whole in each process."""
    splits = {
        "position_bias.": Split(1),
        "self_attention.qkv.": Split(0, 3),
        "cross_attention.q.": Split(0),
        "cross_attention.kv.": Split(0, 2),
        "feed_forward.wi.": Split(0, 2 if config.gated else 1),
        "attention.out.": Split(1),
        "feed_forward.wo.": Split(1),
    }
    return next((split for part, split in splits.items() if part in name), None)


def parts_of(
    stored: np.ndarray, split: Split, rank: int, size: int, *, tensors: int = 1
) -> list[np.ndarray]:
    """Return one process's pieces, to be stacked by rows, of one of a parameter's `tensors`."""
    segments = split.segments // tensors if split.axis == 0 else 1
    pieces = np.split(stored, segments, axis=0)
    return [np.split(piece, size, axis=split.axis)[rank] for piece in pieces]


def check_divisible(config: T5Config, size: int) -> None:
    """Refuse to split a model of this shape among `size` processes if something does not divide."""
    for name in ("num_heads", "d_ff"):
        if getattr(config, name) % size:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which {size} processes cannot share evenly: "
                "use a number of processes that divides it"
            )
    how = config.quantization
    group = max(size for _, size in how.packings) if how else 1
    widths = {"d_ff": config.d_ff, "num_heads * d_kv": config.num_heads * config.d_kv}
    for name, width in widths.items():
        if width % group == 0 and width // size % group:
            raise ValueError(
                f"{name} is {width}, quantized in groups of {group}, which {size} "
                "processes cannot share evenly: use fewer processes, or quantize in smaller groups"
            )


def shard(model: T5, group: mx.distributed.Group) -> None:
    """Split a model's layers among the processes of a group, or refuse sizes that do not divide.

    From then on every process has to run the same passes. `T5.broadcast` makes their choices those
    of the first: what each computes by itself, after the last sum, has the same bits on equal
    machines only. Weights that are loaded later have to be parts, as `checkpoints.load` reads them.
    """
    if model.num_processes > 1:
        raise ValueError(
            f"the model is split among {model.num_processes} processes: load it again to "
            "split it in another way"
        )
    config, size = model.config, group.size()
    check_divisible(config, size)
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    layers = []
    for name, module in cast(list[tuple[str, nn.Module]], leaves):
        split = split_of(f"{name}.weight", config)
        if isinstance(module, PositionBias):
            shard_inplace(module, lambda *_: 1, group=group)
        elif split is not None:
            kind = "sharded-to-all" if split.axis else "all-to-sharded"
            layers.append((name, shard_linear(module, kind, segments=split.segments, group=group)))
    model.update_modules(tree_unflatten(layers))
    for module in model.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.num_heads //= size
    model.num_processes, model.broadcast = size, partial(distributed.broadcast, group=group)
    model.recompile()
