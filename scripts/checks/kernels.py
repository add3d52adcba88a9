"""Products whose order of additions depends on the number of rows, as it does on GPUs."""

from typing import Any

from speculative_t5.models import T5

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


class Kernels(nn.Linear):
    """A product whose order of additions depends on the number of rows, as on GPUs."""

    def __init__(self, weight: mx.array) -> None:
        nn.Module.__init__(self)
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        return self.summed(x, 1 + sum(rows >= least for least in (2, 6, 16)))

    def summed(self, x: mx.array, parts: int) -> mx.array:
        """Multiply by parts of the columns, and add the results."""
        if not x.size:
            # MLX 0.32 frees the copy of a part of the weight that it makes for a product of no rows
            # before that copy is written: later memory is overwritten, or the process crashes.
            return mx.zeros((*x.shape[:-1], self.weight.shape[0]), x.dtype)
        edges = [x.shape[-1] * part // parts for part in range(1, parts)]
        sums = zip(mx.split(x, edges, axis=-1), mx.split(self.weight, edges, axis=1), strict=True)
        return sum((a @ b.T for a, b in sums), start=mx.zeros(1, x.dtype))


class Leftovers(Kernels):
    """A product that adds up the rows left over after blocks of eight in another order."""

    def __call__(self, x: mx.array) -> mx.array:
        whole = x.shape[1] // 8 * 8
        parts = [self.summed(x[:, :whole], 1), self.summed(x[:, whole:], 3)]
        return mx.concatenate(parts, axis=1)


class Growing(Kernels):
    """A product whose rows from the fifth on are added up in another order."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.concatenate([self.summed(x[:, :4], 1), self.summed(x[:, 4:], 3)], axis=1)


def change(model: Any, dtype: mx.Dtype, kernels: type[Kernels] | None) -> None:
    """Make ids 2 n and 2 n + 1 almost equally probable, and give the layers other kernels.

    The two differ by about one rounding error of `dtype`, to which the weights are cast. The head
    keeps MLX's kernel. With None all layers do.
    """
    module = model if isinstance(model, T5) else model.model
    output = module.lm_head if isinstance(model, T5) else module.model.embed_tokens
    even = output.weight[::2]
    output.weight[1::2] = even + even * mx.finfo(dtype).eps * mx.random.normal(even.shape)
    module.set_dtype(dtype)
    linear = [
        (path, kernels(each.weight))
        for path, each in module.named_modules()
        if kernels and isinstance(each, nn.Linear) and path != "lm_head" and "bias" not in each
    ]
    module.update_modules(tree_unflatten(linear))
    mx.eval(module.parameters())
    if isinstance(model, T5):
        model.recompile()
