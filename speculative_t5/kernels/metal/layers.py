"""T5's decoder for few rows on Metal, with our kernels where this machine's choice is to use them.

The modules differ from the plain ones in their classes alone. Passes over more rows, and products
whose kernel was not chosen, are computed as in the plain modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from ...models import t5, write
from .attention import MAX_HEAD, cross_attention, self_attention
from .choice import MAX_ROWS
from .products import FUSED_ACTIVATIONS, GROUPS, Matrix, Norm, product

LEAST_SIZE = 8  # of arrays; MLX gives smaller ones in another address space
TYPES = (mx.float16, mx.bfloat16, mx.float32)


class TakenKernels:
    """The kernels that a model uses: up to how many rows each, by its key."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        self._rows = rows

    def __bool__(self) -> bool:
        return bool(self._rows)

    def with_others(self, rows: Mapping[str, int]) -> TakenKernels:
        return TakenKernels({**self._rows, **rows})

    def takes(self, key: str | None, rows: int) -> bool:
        """Whether the kernel of a key is used for this many rows."""
        return key is not None and rows <= self._rows.get(key, 0)

    @contextmanager
    def none(self) -> Iterator[None]:
        """Use none, for a comparison."""
        kept, self._rows = self._rows, {}
        try:
            yield
        finally:
            self._rows = kept


class FewRowsLayer(t5.DecoderLayer):
    """A layer of the decoder in eight kernels, and those that write to the cache."""

    taken = TakenKernels({})  # by the model that it belongs to

    def __call__(
        self,
        x: mx.array,
        bias: t5.Bias,
        cache: mx.array | None,
        source: mx.array,
        padding: t5.Padding | None,
    ) -> tuple[mx.array, mx.array]:
        taken, (batch, length, width) = self.taken, x.shape
        fits = taken and batch * length <= MAX_ROWS and is_plain(self)
        if cache is None or not fits:
            return super().__call__(x, bias, cache, source, padding)
        own, cross, feed = self.self_attention, self.cross_attention, self.feed_forward
        rows = x.reshape(-1, width)
        qkv = multiplied(rows, own.qkv, taken, norm=self.self_norm).reshape(batch, length, -1)
        heads = t5.split_heads(qkv, 3, own.num_heads)
        cache = write(cache, heads[1:], bias.offsets)
        if taken.takes(attention_key(qkv.dtype, cache), len(rows)):
            found = self_attention(qkv, cache, bias.table, bias.offsets)
        else:
            keys, values = cache
            found = t5.join_heads(t5.attend(heads[0], keys, values, bias.scores))
        rows = multiplied(found.reshape(len(rows), -1), own.out, taken, added=rows)

        grouped = multiplied(rows, cross.q, taken, norm=self.cross_norm)
        grouped = grouped.reshape(source.shape[1], -1, grouped.shape[1])
        if taken.takes(attention_key(grouped.dtype, source), len(rows)):
            found = cross_attention(grouped, source, None if padding is None else padding.mask)
        else:
            (queries,) = t5.split_heads(grouped, 1, cross.num_heads)
            keys, values = source
            mask = None if padding is None else padding.scores
            found = t5.join_heads(t5.attend(queries, keys, values, mask))
        rows = multiplied(found.reshape(len(rows), -1), cross.out, taken, added=rows)

        norm = self.feed_forward_norm
        fuses = feed.activation in FUSED_ACTIVATIONS and norm.weight.dtype == rows.dtype
        if fuses and kernel_matrix(rows, feed.wi, taken) is not None:
            act, gated = feed.activation, feed.gated
            hidden = multiplied(rows, feed.wi, taken, norm=norm, activation=act, gated=gated)
        else:
            hidden = feed.hidden(multiplied(rows, feed.wi, taken, norm=norm))
        return multiplied(hidden, feed.wo, taken, added=rows).reshape(x.shape), cache


class FewRowsHead(t5.Head):
    taken = TakenKernels({})

    def project(self, x: mx.array, output: nn.Module, size: int) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        matrix = kernel_matrix(rows, output, self.taken)
        if matrix is None:
            return super().project(x, output, size)
        return product(rows, matrix.first(size)).reshape(*x.shape[:-1], size)


FEW_ROWS_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    t5.DecoderLayer: FewRowsLayer,
    t5.Head: FewRowsHead,
}


def multiplied(
    rows: mx.array,
    module: nn.Module,
    taken: TakenKernels,
    *,
    norm: nn.RMSNorm | None = None,
    added: mx.array | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> mx.array:
    """Return the product of rows (M, K) with a module's matrix, by the kernel if it is used.

    An activation is for the kernel alone; see `kernel_matrix`.
    """
    matrix = kernel_matrix(rows, module, taken)
    if norm is not None and (matrix is None or norm.weight.dtype != rows.dtype):
        rows, norm = norm(rows), None
    if matrix is not None and rows.dtype == matrix.dtype:
        before = None if norm is None else Norm(norm.weight, norm.eps)
        return product(rows, matrix, norm=before, added=added, activation=activation, gated=gated)
    assert activation is None and not gated
    y: mx.array = module(rows) if added is None else t5.add_product(added, module, rows)
    return y


def kernel_matrix(rows: mx.array, module: nn.Module, taken: TakenKernels) -> Matrix | None:
    """Return a module's matrix if its kernel is used for rows like these; else None."""
    matrix = matrix_of(module)
    fits = matrix is not None and matrix.dtype == rows.dtype and rows.size >= LEAST_SIZE
    return matrix if fits and taken.takes(product_key(module), len(rows)) else None


def matrix_of(module: nn.Module) -> Matrix | None:
    """Return a module's matrix as kernels take it; None if they cannot."""
    if "bias" in module:
        return None
    if type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
        known = module.mode == "affine" and module.bits in (4, 8) and module.group_size in GROUPS
        parts = module.weight, module.scales, module.biases, module.bits, module.group_size
        known = known and module.scales.size >= LEAST_SIZE
        return Matrix(*parts) if known and module.scales.dtype in TYPES else None
    if type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype in TYPES:
        return Matrix(module.weight) if module.weight.size >= LEAST_SIZE else None
    return None


def product_key(module: nn.Module) -> str | None:
    """Return by what kernels for a module's matrix are chosen."""
    matrix = matrix_of(module)
    if matrix is None:
        return None
    outputs, inputs = matrix.shape
    packed = f", {matrix.bits} bits in groups of {matrix.group_size}" if matrix.bits else ""
    return f"product {outputs} x {inputs}, {dtype_word(matrix.dtype)}{packed}"


def attention_key(dtype: mx.Dtype, cache: mx.array) -> str | None:
    size = cache.shape[-1]
    fits = cache.dtype == dtype and size <= MAX_HEAD
    return f"attention, {cache.shape[2]} heads of {size}, {dtype_word(dtype)}" if fits else None


def dtype_word(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def is_plain(layer: t5.DecoderLayer) -> bool:
    """Whether nothing in a layer is wrapped or replaced."""
    kinds = {
        "self_attention": t5.SelfAttention,
        "cross_attention": t5.CrossAttention,
        "feed_forward": t5.FeedForward,
        "self_norm": nn.RMSNorm,
        "cross_norm": nn.RMSNorm,
        "feed_forward_norm": nn.RMSNorm,
    }
    return all(type(layer[name]) is kind for name, kind in kinds.items())
