from __future__ import annotations

from speculative_t5.sampling import Sampler, draw, one_hot

import mlx.core as mx
import numpy as np
import pytest


def test_temperature_zero_is_one_hot() -> None:
    logits = mx.array([[[1.0, 3.0, 2.0], [5.0, 4.0, 4.9]]])
    assert Sampler().probs(logits).tolist() == [[[0, 1, 0], [1, 0, 0]]]


def test_temperature_divides_logits() -> None:
    logits = mx.array([1.0, 3.0, 2.0])
    expected = np.exp(np.array([1, 3, 2]) / 0.5)
    found = Sampler(0.5).probs(logits.astype(mx.bfloat16))
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), expected / expected.sum(), rtol=1e-5)


def test_a_tiny_temperature_stays_finite() -> None:
    assert Sampler(1e-5).probs(mx.array([1.0, 3.0, 2.0])).tolist() == [0, 1, 0]


def test_drawing_follows_unnormalised_weights_and_never_a_zero() -> None:
    weights = mx.broadcast_to(mx.array([0.0, 3.0, 0.0, 1.0, 0.0]), (100_000, 5))
    counts = np.bincount(np.array(draw(weights, mx.random.key(0))), minlength=5) / 100_000
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[1] == pytest.approx(0.75, abs=0.01)


def test_a_one_hot_row_gives_its_token() -> None:
    tokens = mx.arange(7)
    assert draw(one_hot(tokens, 7), mx.random.key(0)).tolist() == tokens.tolist()
