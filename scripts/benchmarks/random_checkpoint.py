"""A checkpoint of random weights of a T5's shape, in bfloat16, as Hugging Face's are stored."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from speculative_t5.checkpoints.t5 import plan
from speculative_t5.models import T5Config

import mlx.core as mx
import numpy as np

REPOSITORY = Path(__file__).parents[2]
SHARD_BYTES = 1e9
EMBEDDING = "shared.weight"

Tensors = dict[str, tuple[int, ...]]


def write_random_checkpoint(folder: Path, config: T5Config) -> None:
    """Write config, tokenizer and weights, of which one shard is in memory at a time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    shutil.copy(REPOSITORY / "weights" / "correct-base" / "spiece.model", folder)
    random = np.random.default_rng(0)
    index: dict[str, str] = {}
    for i, shard in enumerate(shards(config)):
        name = f"model-{i + 1:05}.safetensors"
        tensors = {key: numbers(random, key, shape, config) for key, shape in shard.items()}
        mx.save_safetensors(str(folder / name), tensors)
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def shards(config: T5Config) -> Iterator[Tensors]:
    """Yield the names and shapes of all tensors, those of one file at a time."""
    shard: Tensors = {}
    for parameter in plan(config):
        shard |= parameter.sources
        if sum(map(math.prod, shard.values())) * mx.bfloat16.size > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard


def numbers(
    random: np.random.Generator, name: str, shape: tuple[int, ...], config: T5Config
) -> mx.array:
    """Make one tensor, scaled so that no activation overflows, and the end is never predicted."""
    if len(shape) == 1:
        return mx.ones(shape, mx.bfloat16)
    scale = 0.02 if name == EMBEDDING else 0.7 * shape[1] ** -0.5
    sampled = random.standard_normal(shape, np.float32) * np.float32(scale)
    if name == EMBEDDING:
        sampled[config.eos_token_id] = 0
    made = mx.array(sampled).astype(mx.bfloat16)
    mx.eval(made)
    return made
