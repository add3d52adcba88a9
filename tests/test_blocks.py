"""The layers in C: the arguments that they refuse, and edge cases."""

from __future__ import annotations

import re
from typing import Any

from speculative_t5.cpu import layers

import mlx.core as mx
import numpy as np
import pytest

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(layers.library is None, reason="built without a C++ compiler"),
]

X, NORM, SQUARE, INTO = mx.ones((2, 3, 4)), mx.ones(4), mx.ones((4, 4)), mx.ones((12, 4))
KEYS, TABLE = mx.ones((2, 2, 8, 2)), mx.ones((2, 9))
START = mx.zeros(1, dtype=mx.int32)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((X.astype(mx.float16), NORM, SQUARE, SQUARE, "relu", False), "float32"),
        ((X, mx.ones(5), SQUARE, SQUARE, "relu", False), "(d,)"),
        ((X[0], NORM, SQUARE, SQUARE, "relu", False), "(B, L, d)"),
        ((X, NORM, mx.ones((7, 4)), SQUARE, "relu", False), "(d_ff, d)"),
        ((X, NORM, SQUARE, SQUARE, "relu", True), "(d_ff, d)"),
        ((X, NORM, SQUARE, SQUARE, "tanh", False), "tanh"),
    ],
)
def test_feed_forwards_of_wrong_shapes_are_refused(arguments: Any, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        layers.library.feed_forward(*arguments, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((X, NORM, SQUARE, SQUARE, TABLE, KEYS, KEYS, START), "3 H D"),
        ((X, NORM, INTO, SQUARE, mx.ones((2, 8)), KEYS, KEYS, START), "reach"),
        ((X, NORM, INTO, SQUARE, mx.ones((1, 9)), KEYS, KEYS, START), "numbers of heads"),
        ((mx.ones((2, 9, 4)), NORM, INTO, SQUARE, TABLE, KEYS, KEYS, START), "places"),
        ((X, NORM, INTO, SQUARE, TABLE, KEYS, KEYS[:, :1], START), "(B, H, T, D)"),
        ((mx.ones((5, 1, 4)), NORM, INTO, SQUARE, TABLE, KEYS, KEYS, START), "numbers of rows"),
        ((X, NORM, INTO, SQUARE, TABLE, KEYS, KEYS, mx.zeros(3, dtype=mx.int32)), "(B,)"),
    ],
)
def test_attention_of_wrong_shapes_is_refused(arguments: Any, part: str) -> None:
    layers.library.decoder_attention(X, NORM, INTO, SQUARE, TABLE, KEYS, KEYS, START, 1e-6)
    with pytest.raises(ValueError, match=re.escape(part)):
        layers.library.decoder_attention(*arguments, 1e-6)


@pytest.mark.parametrize("offset", [5, -1])
def test_positions_outside_of_the_cache_are_refused(offset: int) -> None:
    offsets, x, keys = mx.array([offset], mx.int32), mx.ones((1, 4, 4)), mx.ones((1, 2, 8, 2))
    made = layers.library.decoder_attention(x, NORM, INTO, SQUARE, TABLE, keys, keys, offsets, 1e-6)
    with pytest.raises(RuntimeError, match="not in the cache"):
        mx.eval(made)


def test_keys_and_values_of_a_source_end_in_zeros() -> None:
    memory, weight = mx.random.normal((2, 5, 12)), mx.random.normal((2 * 3 * 4, 12))
    pair = layers.library.keys_values(memory, weight, 3, 8)
    expected = np.array(memory @ weight.T).reshape(2, 5, 2, 3, 4).transpose(2, 0, 3, 1, 4)
    for found, heads in zip(pair, expected, strict=True):
        assert np.allclose(found[:, :, :5], heads, atol=1e-5)
        assert found.shape == (2, 3, 8, 4) and not np.array(found[:, :, 5:]).any()
    for arguments, part in (
        ((memory[0], weight, 3, 8), "(B, L, d)"),
        ((memory, weight, 5, 8), "2 H D"),
        ((memory, weight, 3, 4), "as many keys"),
    ):
        with pytest.raises(ValueError, match=re.escape(part)):
            layers.library.keys_values(*arguments)


def test_ids_beyond_the_embedding_give_no_numbers() -> None:
    weight = mx.random.normal((7, 5))
    ids = mx.array([[3, 0], [7, -1], [6, 6]])
    rows = np.array(layers.library.embed(ids[::-1, :1], weight))[:, 0]
    assert (rows[[0, 2]] == np.array(weight)[[6, 3]]).all() and np.isnan(rows[1]).all()
    with pytest.raises(ValueError, match=r"\(B, L\), int32"):
        layers.library.embed(ids[0], weight)
    x, norm = mx.ones((1, 2, 5)), mx.ones(5)
    for size in (0, 8):
        with pytest.raises(ValueError, match="more than the ids"):
            layers.library.logits(x, norm, weight, 1.0, 1e-6, size)
    with pytest.raises(ValueError, match=r"\(V, d\)"):
        layers.library.best(x, norm, weight[:, :4], 1.0, 1e-6, 7)


def test_nan_stays_nan() -> None:
    x, weight = mx.array([[[mx.nan, 1.0]]]), mx.eye(2)
    found = layers.library.feed_forward(x, mx.ones(2), weight, weight, "relu", False, 1e-6)
    assert np.isnan(np.array(found)).all()
