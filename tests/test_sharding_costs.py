"""What a split costs: the sums of a pass, and the memory of a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from speculative_t5.checkpoints.tensors import as_mlx
from speculative_t5.models import T5, T5Config, shard

import mlx.core as mx
import numpy as np
import pytest
from ranks import Pair

WIDTH = 32
SHAPE: dict[str, Any] = {
    "d_model": WIDTH, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 3,
    "num_decoder_layers": 4, "vocab_size": 64,
}  # fmt: skip


def split_model(**options: Any) -> T5:
    """Make the first half of a model in bfloat16."""
    model = T5(T5Config(**SHAPE, **options))
    model.set_dtype(mx.bfloat16)
    shard(model, Pair())  # type: ignore[arg-type]
    return model


def sums_of(run: Callable[[], object]) -> list[int]:
    """Return the bytes that each sum of a computation sends."""
    sizes = []

    def all_sum(x: mx.array, **_: object) -> mx.array:
        sizes.append(x.nbytes)
        return x

    with patch.object(mx.distributed, "all_sum", all_sum):
        mx.eval(run())
    return sizes


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_of_the_encoder_has_two_sums_and_one_of_the_decoder_three(gated: bool) -> None:
    model = split_model(gated=gated, activation="gelu_new" if gated else "relu")
    embedded = model.shared(mx.ones((2, 7), mx.int32))
    sums = sums_of(lambda: model.decoder.read(model.encoder(embedded, None), 7))
    assert sums == [2 * 7 * WIDTH * mx.bfloat16.size] * 2 * 3


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_draft", [0, 5])
def test_a_pass_of_the_decoder_has_the_same_sums_however_many_tokens_it_checks(
    batch: int, num_draft: int
) -> None:
    model = split_model()
    tokens = mx.ones((batch, num_draft + 1), mx.int32)
    with patch.object(mx.distributed, "all_sum", lambda x, **_: x):
        session, _ = model.start([[5, 6, 1]] * batch)
    model.recompile()  # or the pass runs as it was traced with the function above
    sums = sums_of(lambda: session.step(tokens))
    assert sums == [batch * (num_draft + 1) * WIDTH * mx.bfloat16.size] * 3 * 4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_some_columns_of_a_matrix_take_the_memory_of_no_others(dtype: mx.Dtype) -> None:
    whole = np.ones((64, 1024), np.uint16 if dtype == mx.bfloat16 else np.float32)
    before = mx.get_active_memory()
    part = as_mlx(whole[:, :512], dtype)
    mx.eval(part)
    assert mx.get_active_memory() - before < 1.1 * part.nbytes
