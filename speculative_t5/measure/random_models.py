"""Random models, whose passes cost as much as those of trained ones, and prompts for them."""

import random
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from ..kernels import accelerate, kept_types, takes_stored
from ..models import T5, EncoderDecoder, ModelConfig, new_model
from .shapes import config_of_shape

# Standard deviation of embeddings: so large that each token of an output follows itself, however a
# pass is rounded.
EMBEDDINGS_SCALE = 20.0
EMBEDDING_LAYERS = ("shared", "encoder_shared")


def random_model(
    shape: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0, embeddings: float = EMBEDDINGS_SCALE
) -> EncoderDecoder:
    """Make a model of a shape with random weights, whose outputs do not end, as if it were loaded.

    With small `embeddings` (their standard deviation) outputs vary, and may end.
    """
    model = random_weights(config_of_shape(shape), dtype=dtype, seed=seed, embeddings=embeddings)
    if takes_stored():
        weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        types = kept_types(model, {name: weight.dtype for name, weight in weights})
        model.load_weights([(name, weight.astype(types[name])) for name, weight in weights])
    accelerate(model)
    return model


def random_weights(
    config: ModelConfig, *, dtype: mx.Dtype = mx.float32, seed: int = 0, embeddings: float = 1.0
) -> EncoderDecoder:
    """Make a model with random weights with which outputs depend on all that came before them.

    They are made one at a time: all in float32 might not fit in memory. It is not accelerated.
    """
    model = new_model(config)
    assert isinstance(model, EncoderDecoder)
    mx.random.seed(seed)

    def random_weight(path: str, weight: mx.array) -> mx.array:
        *_, layer, name = path.split(".")
        new = mx.random.normal(weight.shape)
        if weight.ndim == 1:  # of a norm, about 1, or a bias, about 0
            new = 0.2 * new + (name != "bias")
        elif layer in EMBEDDING_LAYERS:
            new = embeddings * new
        elif "position" not in layer:
            new = 0.7 * weight.shape[1] ** -0.5 * new
        new = new.astype(dtype)
        mx.eval(new)
        return new

    model.update(tree_map_with_path(random_weight, model.parameters()))
    return model


def random_prompts(model: EncoderDecoder, length: int, count: int) -> list[list[int]]:
    """Make `count` prompts of `length` ids, the same in every run; EOS ends those of a T5 only."""
    size, eos = model.info.vocab_size, model.info.eos_token_id
    ids = [i for i in range(min(100, size // 2), min(30_000, size)) if i != eos]
    last = [eos] if isinstance(model, T5) else []
    rng = random.Random(0)
    return [[*rng.choices(ids, k=length - len(last)), *last] for _ in range(count)]
