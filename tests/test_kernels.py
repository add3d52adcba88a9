"""What a pass of the plain decoder computes, in as few of MLX's operations as possible."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speculative_t5 import device
from speculative_t5.models import sample_weights, t5
from speculative_t5.models.t5 import T5, CrossAttention, FeedForward, SelfAttention

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import needs_layers, tiny_model, tiny_sharing

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


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let passes be traced operation by operation."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


@pytest.mark.parametrize("length", [1, 6])
def test_a_layer_writes_its_cache_once_and_adds_its_products_to_their_input(length: int) -> None:
    model = plain(layers=3)
    session, _ = model.start(PROMPTS[:1])
    tokens = mx.zeros((1, length), mx.int32)
    mx.eval(session.step(tokens))
    with uncompiled():
        found = operations(session.step(tokens))
    assert found["DynamicSliceUpdate"] == 3 and found["AddMM"] == 3 * 3
    # Keys and values are views: nothing is gathered but the embedding and the position bias.
    assert found["Gather"] == 2


@pytest.mark.parametrize("lengths", [[3, 3], [3, 1]])
@pytest.mark.parametrize("length", [1, 4])
def test_masks_of_several_rows_are_made_once_and_in_row_major_order(
    lengths: list[int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's attention on Metal would copy them in every layer."""
    model, masks = plain(layers=3), list[mx.array]()

    def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        masks.append(mask)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)

    session, _ = model.start(PROMPTS)
    mx.eval(session.step(mx.zeros((2, 3), mx.int32)))
    session.truncate(lengths)
    monkeypatch.setattr(t5, "attend", attend)
    model.recompile()
    session._decoder = model.compiled
    with uncompiled():
        mx.eval(session.step(mx.zeros((2, length), mx.int32)))
    assert len(masks) == 3 * 2 and len({id(mask) for mask in masks}) == 2
    for mask in masks:
        assert mask.shape == (2, 2, length, mask.shape[3])
        assert memoryview(np.array(mask)).strides == memoryview(mask).strides


@pytest.mark.cpu
@needs_layers
def test_the_c_parts_do_not_make_masks_that_they_do_not_read() -> None:
    model = tiny_model(vocab_size=20, layers=2)
    session, _ = model.start(PROMPTS)
    mx.eval(session.step(mx.zeros((2, 3), mx.int32)))
    session.truncate([3, 1])
    with uncompiled():
        found = operations(session.step(mx.zeros((2, 2), mx.int32)))
    assert not found.keys() & {"Contiguous", "Gather", "Maximum"}, found


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


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("size", [16, 64])
def test_heads_without_a_kernel_are_padded_on_a_gpu(
    size: int, sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs are those of the heads as they are, and so are the weights that are kept."""
    model: Any = plain(layers=2, d_kv=size, gated=True)
    draft = tiny_sharing(model) if sharing else model
    tokens = mx.array([[0, 3, 4, 8], [0, 6, 2, 7]])

    def logits() -> list[mx.array]:
        draft.recompile()
        model.recompile()
        sessions = draft.start_both(PROMPTS)[:2] if sharing else draft.start(PROMPTS)[:1]
        return [
            session.step(tokens[:, part])
            for part in (slice(3), slice(3, 4))
            for session in sessions
        ]

    before, expected, sample = model.fingerprint, logits(), sample_weights(model)
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    found = logits()
    assert {layer.shape[-1] for layer in draft.start(PROMPTS)[0]._cache.layers} == {64}
    for ours, theirs in zip(found, expected, strict=True):
        assert mx.allclose(ours, theirs, atol=1e-4)
        assert mx.array_equal(mx.argmax(ours, axis=-1), mx.argmax(theirs, axis=-1))
    assert model.fingerprint == before and sample_weights(model) == sample
    assert model.decoder.layers[0].cross_attention.kv.weight.shape[0] == 2 * 2 * size
    assert (model.compiled.decoder is model.decoder) == (size == 64)


def test_padded_heads_follow_changed_weights_and_leave_other_layers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    model, tokens = plain(layers=2), mx.array([[0, 3, 4]])
    before = model.start(PROMPTS[:1])[0].step(tokens)
    model.decoder.layers[1].self_attention.out.weight *= 2
    model.recompile()
    after = model.start(PROMPTS[:1])[0].step(tokens)
    assert not mx.allclose(after, before, atol=1e-2)
    assert mx.allclose(after, model(mx.array(PROMPTS[:1]), tokens), atol=1e-4)
    attention = model.decoder.layers[1].cross_attention
    attention.q = Doubled(attention.q)
    model.recompile()
    assert model.compiled.decoder is model.decoder
    doubled = model.start(PROMPTS[:1])[0].step(tokens)
    assert mx.allclose(doubled, model(mx.array(PROMPTS[:1]), tokens), atol=1e-4)
