"""Parity with transformers in float32, whole sequences and step by step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.models.t5.layers import FeedForward, softmax
from speculative_t5.models.t5.model import T5
from speculative_t5.models.t5.positions import relative_position_bucket

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

SOURCE = [[5, 17, 100, 3, 250, 9, 40, 1], [77, 12, 8, 1, 0, 0, 0, 0]]
TARGET = [[0, 9, 4, 33, 200, 7, 12], [0, 55, 4, 118, 5, 3, 90]]


def reference_logits(model: Any, source: list[list[int]], target: list[list[int]]) -> np.ndarray:
    import torch

    ids = torch.tensor(source)
    with torch.inference_mode():
        output = model(
            input_ids=ids, attention_mask=(ids != 0).long(), decoder_input_ids=torch.tensor(target)
        )
    return output.logits.numpy()


def assert_close(found: mx.array, expected: np.ndarray) -> None:
    largest = np.abs(np.array(found) - expected).max() / np.abs(expected).max()
    assert largest < 1e-4, largest


def test_whole_sequences_match_transformers(pair: tuple[Any, T5]) -> None:
    reference, model = pair
    logits = model(mx.array(SOURCE), mx.array(TARGET))
    assert_close(logits, reference_logits(reference, SOURCE, TARGET))


def test_padding_changes_nothing(pair: tuple[Any, T5]) -> None:
    _, model = pair
    both = model(mx.array(SOURCE), mx.array(TARGET))
    alone = model(mx.array(SOURCE[1:])[:, :4], mx.array(TARGET[1:]))
    assert_close(both[1:], np.array(alone))


def test_steps_through_the_caches_match_transformers(pair: tuple[Any, T5]) -> None:
    """Steps of several lengths, wrong tokens taken back in between, rows of two lengths."""
    reference, model = pair
    expected = reference_logits(reference, SOURCE, TARGET)
    session, contexts = model.start([[t for t in row if t] for row in SOURCE])
    assert contexts == [[0], [0]]
    target = mx.array(TARGET)
    assert_close(session.step(target[:, :1]), expected[:, :1])
    assert_close(session.step(target[:, 1:4]), expected[:, 1:4])
    session.step(mx.array([[300, 301, 302], [303, 304, 305]]))
    session.truncate([4, 2])
    # Rows now differ in length: row 0 goes on at 4, row 1 does positions 2 and 3 again.
    logits = session.step(mx.array([TARGET[0][4:6], TARGET[1][2:4]]))
    assert_close(logits, np.stack([expected[0, 4:6], expected[1, 2:4]]))
    logits = session.step(mx.array([TARGET[0][6:7], TARGET[1][4:5]]))
    assert_close(logits, np.stack([expected[0, 6:7], expected[1, 4:5]]))
    session.select([1])
    assert_close(session.step(target[1:, 5:7]), expected[1:, 5:7])


def test_prompts_encoded_in_groups_are_as_they_are_alone(
    pair: tuple[Any, T5], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are encoded by length, a few at a time; the next ones ahead of their turn."""
    _, model = pair
    rng = np.random.default_rng(0)
    prompts = [[*rng.integers(3, 300, rng.integers(1, 30)).tolist(), 1] for _ in range(12)]
    first = mx.array(rng.integers(3, 300, (12, 4)))
    alone = [model.start([p])[0].step(first[i : i + 1]) for i, p in enumerate(prompts)]
    passes: list[tuple[int, ...]] = []
    encode = T5._encoded

    def counted(self: T5, prompts: list[list[int]]) -> Any:
        passes.append((len(prompts), max(map(len, prompts))))
        return encode(self, prompts)

    monkeypatch.setattr(T5, "_encoded", counted)
    for limit, least in ((10_000, 1), (64, 4), (1, 12)):
        monkeypatch.setattr("speculative_t5.models.t5.model.ENCODED_TOKENS", limit)
        passes.clear()
        session, _ = model.start(prompts)
        assert len(passes) >= least
        assert all(rows * length <= limit or rows == 1 for rows, length in passes)
        assert_close(session.step(first), np.concatenate(alone))
        encoded = session.encode(prompts[:3])
        passes.clear()
        session.truncate([2] * 12)
        assert session.replace([3, 7], encoded[1::-1]) == [[0]] * 2
        assert session.replace([1], encoded[2:]) == [[0]]
        assert passes == [], "they are ready"
        assert session.lengths == [2, 0, 2, 0, 2, 2, 2, 0, 2, 2, 2, 2]
        rows = [first[i] for i in range(12)]
        for row, source in ((7, 0), (3, 1), (1, 2)):
            rows[row] = first[source]
        again = session.step(mx.stack(rows))
        for row, source in ((7, 0), (3, 1), (1, 2)):
            assert_close(again[row], np.array(alone[source][0]))


def test_buffers_grow(pair: tuple[Any, T5]) -> None:
    reference, model = pair
    rng = np.random.default_rng(0)
    target = rng.integers(3, 300, (1, 150))
    expected = reference_logits(reference, SOURCE[:1], target.tolist())
    session, _ = model.start([SOURCE[0]])
    found = [session.step(mx.array(target[:, i : i + 10])) for i in range(0, 150, 10)]
    assert_close(mx.concatenate(found, axis=1), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 20), (32, 256)])
def test_relative_position_buckets_match_transformers(
    bidirectional: bool, num_buckets: int, max_distance: int
) -> None:
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = np.arange(-600, 601)
    expected = T5Attention._relative_position_bucket(
        torch.from_numpy(relative), bidirectional, num_buckets, max_distance
    ).numpy()
    found = relative_position_bucket(
        relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    assert (found == expected).all()


def test_model_dtype_is_kept_through_a_step(pair: tuple[Any, T5]) -> None:
    _, model = pair
    model = T5(model.config)
    model.set_dtype(mx.bfloat16)
    assert model(mx.array(SOURCE), mx.array(TARGET)).dtype == mx.bfloat16


def test_decoding_follows_replaced_weights_and_layers(pair: tuple[Any, T5]) -> None:
    """What is compiled holds weights as constants, until they are others."""
    model = T5(pair[1].config)
    model.update(pair[1].parameters())

    def logits() -> mx.array:
        return model.start([[5, 9, 1]])[0].step(mx.array([[0]]))

    def scored() -> mx.array:
        return model(mx.array([[5, 9, 1]]), mx.array([[0]]))

    first = logits()
    assert model.prepared is model.prepared
    wo = model.decoder.layers[0].feed_forward.wo
    wo.weight = mx.ones(wo.weight.shape)
    assert not mx.allclose(logits(), first) and mx.allclose(logits(), scored(), atol=1e-4)
    second = logits()
    model.decoder.layers[0].feed_forward = FeedForward(model.config)
    assert not mx.array_equal(logits(), second) and mx.allclose(logits(), scored(), atol=1e-3)


def test_weights_changed_in_place_are_seen_after_forget(pair: tuple[Any, T5]) -> None:
    model = T5(pair[1].config)
    model.update(tree_map(lambda w: w + 0, pair[1].parameters()))

    def logits() -> mx.array:
        return model.start([[5, 9, 1]])[0].step(mx.array([[0]]))

    first = logits()
    weight = model.decoder.layers[0].feed_forward.wo.weight
    weight *= 3
    model.decoder.position_bias.weight[:] = 0
    model.forget()
    assert not mx.allclose(logits(), first)
    assert mx.allclose(logits(), model(mx.array([[5, 9, 1]]), mx.array([[0]])), atol=1e-4)


def test_threads_may_use_a_model_for_the_first_time_together(pair: tuple[Any, T5]) -> None:
    for _ in range(3):
        model = T5(pair[1].config)
        model.update(pair[1].parameters())
        with ThreadPoolExecutor(3) as threads:
            outputs = list(threads.map(SpeculativeDecoder(model).generate, [[5, 9, 1]] * 3))
        assert outputs[0].tokens == outputs[1].tokens == outputs[2].tokens


def test_shapes_that_are_compiled_for_are_bounded(
    pair: tuple[Any, T5], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair[1]
    expected = [model.start([[5, 9, 1]])[0].step(mx.zeros((1, n), mx.int32)) for n in range(1, 6)]
    monkeypatch.setattr("speculative_t5.models.t5.model.MAX_SHAPES", 2)
    model.forget()
    for n in (1, 2, 3, 4, 5, 1):
        found = model.start([[5, 9, 1]])[0].step(mx.zeros((1, n), mx.int32))
        assert mx.allclose(found, expected[n - 1], atol=1e-5)
        assert len(model.prepared._compiled.shapes) <= 2


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_softmax_of_many_scores_is_that_of_numpy(scale: float) -> None:
    scores = np.random.default_rng(0).normal(size=(2, 8, 5, 300)).astype(np.float32) * scale
    scores[0, :, :, 200:] = -np.inf
    exact = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    exact /= exact.sum(axis=-1, keepdims=True)
    found = np.array(softmax(mx.array(scores), 1))
    assert np.abs(found - exact).max() < 1e-6 and (found[0, :, :, 200:] == 0).all()
    few = np.array(softmax(mx.array(scores[:, :1]), 1))
    assert np.abs(few - exact[:, :1]).max() < 1e-6
    rows = [np.array(softmax(mx.array(scores[:, :, i : i + 1]), 1)) for i in range(5)]
    assert (np.concatenate(rows, axis=2) == found).all(), "a row is the same in any company"


def test_logits_of_the_first_ids_only(pair: tuple[Any, T5]) -> None:
    model = pair[1]
    tokens = mx.array([[0, 7]])
    whole = model.start([[5, 9, 1]])[0].step(tokens)
    assert mx.allclose(model.start([[5, 9, 1]])[0].step(tokens, 40), whole[..., :40], atol=1e-5)
    chosen = model.start([[5, 9, 1]])[0].step_argmax(tokens, 40)
    assert chosen.tolist() == mx.argmax(whole[..., :40], axis=-1).tolist()
