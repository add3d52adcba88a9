"""The T5's sessions, position buckets and compiled functions; test_device.py steps through them."""

import gc
from typing import Any

from speculative_t5.models import encoder_decoder
from speculative_t5.models.position_bias import relative_position_bucket
from speculative_t5.models.t5 import T5, FeedForward

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_model
from families import assert_close
from mlx.utils import tree_map


@pytest.mark.parametrize(("limit", "least"), [(64, 4), (1, 12)])
def test_prompts_encoded_in_groups_give_the_logits_of_single_ones(
    pair: tuple[Any, T5], limit: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair
    rng = np.random.default_rng(0)
    prompts = [[*rng.integers(3, 300, rng.integers(1, 30)).tolist(), 1] for _ in range(12)]
    first = mx.array(rng.integers(3, 300, (12, 4)))
    alone = [model.start([p])[0].step(first[i : i + 1]) for i, p in enumerate(prompts)]
    passes: list[tuple[int, ...]] = []
    read = encoder_decoder._read_together

    def counted(model: T5, decoders: Any, prompts: list[list[int]]) -> Any:
        passes.append((len(prompts), max(map(len, prompts))))
        return read(model, decoders, prompts)

    monkeypatch.setattr(encoder_decoder, "_read_together", counted)
    for name in ("ENCODED_TOKENS", "ENCODED_TOKENS_CPU"):
        monkeypatch.setattr(encoder_decoder, name, limit)
    session, _ = model.start(prompts)
    assert len(passes) >= least
    assert all(rows * length <= limit or rows == 1 for rows, length in passes)
    assert_close(session.step(first), np.concatenate(alone))


def test_relative_position_buckets_match_transformers() -> None:
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = np.arange(-600, 601)
    for number, distance in ((32, 128), (16, 20), (32, 256)):
        for bidirectional in (True, False):
            options = {"bidirectional": bidirectional, "num_buckets": number}
            options["max_distance"] = distance
            expected = T5Attention._relative_position_bucket(torch.from_numpy(relative), **options)
            assert (relative_position_bucket(relative, **options) == expected.numpy()).all()


def test_recompiling_makes_changed_weights_and_layers_count(pair: tuple[Any, T5]) -> None:
    model, source, start = T5(pair[1].config), [[5, 9, 1]], mx.array([[0]])
    model.update(tree_map(lambda w: w + 0, pair[1].parameters()))
    layer = model.decoder.layers[0]

    def changed(before: mx.array) -> mx.array:
        after = model.start(source)[0].step(start)
        assert not mx.allclose(after, before)
        assert mx.allclose(after, model(mx.array(source), start), atol=1e-3)
        return after

    before = model(mx.array(source), start)
    layer.feed_forward.wo.weight *= 3
    before = changed(before)  # nothing was compiled yet
    assert model.compiled is model.compiled
    model.decoder.position_bias.weight[:] = 3
    assert mx.array_equal(model.start(source)[0].step(start), before), "compiled with old weights"
    # A single position is its own neighbour: a bias of all scores changes nothing there.
    layer.self_attention.qkv.weight = mx.ones(layer.self_attention.qkv.weight.shape)
    model.recompile()
    before = changed(before)
    layer.feed_forward = FeedForward(model.config)
    model.recompile()
    changed(before)


def test_the_least_recently_used_shapes_are_dropped(
    pair: tuple[Any, T5], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair[1]
    expected = [model.start([[5, 9, 1]])[0].step(mx.zeros((1, n), mx.int32)) for n in range(1, 6)]
    monkeypatch.setattr(encoder_decoder, "MAX_SHAPES", 2)
    model.recompile()
    functions = model.compiled._functions.by_shape
    for n, kept in ((1, [1]), (2, [1, 2]), (1, [2, 1]), (3, [1, 3]), (1, [3, 1]), (4, [1, 4])):
        found = model.start([[5, 9, 1]])[0].step(mx.zeros((1, n), mx.int32))
        assert mx.allclose(found, expected[n - 1], atol=1e-5)
        assert [tokens[1] for _, _, tokens, *_ in functions] == kept
    model.recompile()


def test_a_dropped_shape_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace holds the constants that were made in it, here a megabyte."""
    calls: list[mx.array] = []
    compiled = mx.compile(lambda x: (calls.append(x), x + 1)[1])  # type: ignore[func-returns-value]
    for _ in range(3):  # the first of a process is traced twice
        compiled(mx.array(0))
    if len(calls) > 2:
        pytest.skip("MLX traces nothing for a CPU without g++")
    monkeypatch.setattr(encoder_decoder, "MAX_SHAPES", 2)
    model, size = tiny_model(), 2**18

    def score(self: T5, kind: str, x: mx.array, *rest: Any) -> mx.array:
        constant = mx.array(np.ones(size, np.float32))
        return x[..., :5] + constant[0]

    monkeypatch.setattr(T5, "score", score)
    used = []
    gc.collect()  # what other tests left would be freed in between
    for n in range(1, 13):
        mx.eval(model.start([[5, 9, 1]])[0].step(mx.zeros((1, n), mx.int32)))
        mx.synchronize()  # temporaries are freed a moment later
        used.append(mx.get_active_memory())
    assert used[1] - used[0] >= 4 * size > used[-1] - used[1]
