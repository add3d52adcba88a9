"""What a pass of the plain decoder computes, in as few of MLX's operations as possible."""

import io
import re
from collections import Counter
from typing import Any

from speculative_t5.models.t5 import T5, CrossAttention, FeedForward, SelfAttention

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import tiny_model

PROMPTS = [[5, 9, 7, 1], [6, 1]]


def plain(**options: Any) -> T5:
    """A tiny model as it is on a GPU, without the faster layers of CPUs."""
    made = tiny_model(vocab_size=20, **options)
    model = T5(made.config)
    model.update(made.parameters())
    return model


def operations(*arrays: mx.array) -> Counter[str]:
    """Count the operations that compute some arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return Counter(re.findall(r'label ?= ?"([A-Za-z0-9]+)', graph.getvalue()))


@pytest.mark.parametrize("length", [1, 6])
def test_a_layer_writes_its_cache_once_and_adds_its_products_to_their_input(length: int) -> None:
    model = plain(layers=3)
    session, _ = model.start(PROMPTS[:1])
    tokens = mx.zeros((1, length), mx.int32)
    mx.eval(session.step(tokens))
    mx.disable_compile()
    try:
        found = operations(session.step(tokens))
    finally:
        mx.enable_compile()
    assert found["DynamicSliceUpdate"] == 3 and found["AddMM"] == 3 * 3
    # Keys and values are views: nothing is gathered but the embedding and the position bias.
    assert found["Gather"] == 2


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * self.inner(x)


@pytest.mark.parametrize("kind", [SelfAttention, CrossAttention, FeedForward])
def test_layers_that_are_not_plain_matrices_are_called(kind: type[nn.Module]) -> None:
    """Their output is added to the input, whatever they compute."""
    tokens = mx.array([[0, 3, 4]])

    def logits(change: Any) -> mx.array:
        model = plain(layers=2)
        name = "wo" if kind is FeedForward else "out"
        for module in model.decoder.modules():
            if isinstance(module, kind):
                module[name] = change(module[name])
        return model(mx.array(PROMPTS[:1]), tokens)

    def scaled(layer: nn.Linear) -> nn.Linear:
        layer.weight = 2 * layer.weight
        return layer

    def biased(layer: nn.Linear, value: float) -> nn.Linear:
        layer.bias = mx.full(len(layer.weight), value)
        return layer

    before = logits(lambda layer: layer)
    assert mx.allclose(logits(Doubled), logits(scaled), atol=1e-4)
    assert mx.allclose(logits(lambda layer: biased(layer, 0.0)), before, atol=1e-4)
    assert not mx.allclose(logits(lambda layer: biased(layer, 5.0)), before, atol=1e-2)
