"""What a split costs: the sums of a pass, and the memory of a part."""

from __future__ import annotations

from typing import Any

from speculative_t5.checkpoints.tensors import as_mlx
from speculative_t5.models import T5Config

import mlx.core as mx
import numpy as np
import pytest
from sharding_times import count_decoder, count_encoder, split_model

WIDTH = 32
SHAPE: dict[str, Any] = {
    "d_model": WIDTH, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 3,
    "num_decoder_layers": 4, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_of_the_encoder_has_two_sums_and_one_of_the_decoder_three(gated: bool) -> None:
    activation = "gelu_new" if gated else "relu"
    model = split_model(T5Config(**SHAPE, gated=gated, activation=activation))
    encoded = count_encoder(model, 2, 7)
    assert encoded.count == 2 * 3
    assert encoded.nbytes == encoded.count * 2 * 7 * WIDTH * mx.bfloat16.size


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("num_draft", [0, 5])
def test_a_pass_of_the_decoder_has_the_same_sums_however_many_tokens_it_checks(
    batch: int, num_draft: int
) -> None:
    model = split_model(T5Config(**SHAPE))
    for _ in range(2):  # the pass is traced anew
        sums = count_decoder(model, batch, num_draft)
        assert sums.count == 3 * 4
        assert sums.nbytes == sums.count * batch * (num_draft + 1) * WIDTH * mx.bfloat16.size


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_some_columns_of_a_matrix_take_the_memory_of_no_others(dtype: mx.Dtype) -> None:
    whole = np.ones((64, 1024), np.uint16 if dtype == mx.bfloat16 else np.float32)
    before = mx.get_active_memory()
    part = as_mlx(whole[:, :512], dtype)
    mx.eval(part)
    assert mx.get_active_memory() - before < 1.1 * part.nbytes
