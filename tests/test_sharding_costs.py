"""What a split costs: the memory of a part."""

from __future__ import annotations

from speculative_t5.checkpoints.tensors import as_mlx

import mlx.core as mx
import numpy as np
import pytest


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_some_columns_of_a_matrix_take_the_memory_of_no_others(dtype: mx.Dtype) -> None:
    whole = np.ones((64, 1024), np.uint16 if dtype == mx.bfloat16 else np.float32)
    before = mx.get_active_memory()
    part = as_mlx(whole[:, :512], dtype)
    mx.eval(part)
    assert mx.get_active_memory() - before < 1.1 * part.nbytes
