"""Kernels for Metal, whose source is run on the CPU; see metal/interpreter.h."""

from collections.abc import Iterator

from speculative_t5.kernels.metal import attention, products
from speculative_t5.kernels.metal.attention import cross_attention, self_attention
from speculative_t5.kernels.metal.products import Matrix, Norm, product

import mlx.core as mx
import mlx.nn as nn
import pytest
from metal import interpreter

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(interpreter.COMPILER is None, reason="there is no C++ compiler"),
]
ROUNDING = {mx.float32: 2e-6, mx.float16: 1.5e-3, mx.bfloat16: 1.2e-2}  # of the largest number
ACTIVATIONS = {"relu": nn.relu, "silu": nn.silu, "gelu_new": nn.gelu_approx}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels be run on the CPU."""
    monkeypatch.setattr(mx.fast, "metal_kernel", interpreter.Kernel)
    caches = attention._attention_kernel, products._product_kernel
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def wide(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def check(found: mx.array, wanted: mx.array) -> None:
    assert found.shape == wanted.shape
    most = ROUNDING[found.dtype] * mx.abs(wanted).max().item()
    assert mx.abs(wide(found) - wanted).max().item() <= most


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (1, 1, 8, mx.float32),
        (1, 7, 33, mx.float16),
        (3, 8, 128, mx.bfloat16),
        (9, 13, 261, mx.float32),
        (16, 5, 512, mx.float16),
    ],
)
def test_products_are_right_and_rows_have_the_bits_they_have_alone(
    rows: int, outputs: int, inputs: int, dtype: mx.Dtype
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    found = product(x, Matrix(weight))
    check(found, wide(x) @ wide(weight).T)
    alone = [product(x[i : i + 1], Matrix(weight)) for i in range(rows)]
    assert mx.array_equal(found, mx.concatenate(alone))


@pytest.mark.parametrize(
    ("bits", "group", "inputs", "dtype"),
    [(4, 32, 96, mx.float16), (4, 128, 384, mx.float32), (8, 64, 320, mx.bfloat16)],
)
def test_quantized_products_are_right(bits: int, group: int, inputs: int, dtype: mx.Dtype) -> None:
    x, weight = random(5, inputs, dtype=dtype), random(6, inputs, dtype=dtype, seed=1)
    packed = mx.quantize(weight, group, bits)
    matrix = Matrix(*packed, bits, group)
    assert matrix.shape == (6, inputs) and matrix.dtype == dtype
    found = product(x, matrix)
    (words, scales, biases) = packed
    unpacked = mx.dequantize(words, wide(scales), wide(biases), group, bits)
    check(found, wide(x) @ unpacked.T)
    alone = [product(x[i : i + 1], matrix) for i in range(len(x))]
    assert mx.array_equal(found, mx.concatenate(alone))


@pytest.mark.parametrize(
    ("activation", "gated", "dtype"),
    [(None, False, mx.float16), ("relu", False, mx.bfloat16), ("silu", True, mx.float16),
     ("gelu_new", True, mx.float32)],
)  # fmt: skip
def test_what_is_before_and_behind_a_product_is_in_its_kernel(
    activation: str | None, gated: bool, dtype: mx.Dtype
) -> None:
    x, weight = random(6, 96, dtype=dtype), random(10, 96, dtype=dtype, seed=1) * 0.1
    scale, added = random(96, dtype=dtype, seed=2), random(6, 10 // (1 + gated), dtype=dtype)
    norm = Norm(scale, 1e-6)
    found = product(x, Matrix(weight), norm=norm, added=added, activation=activation, gated=gated)
    made = wide(mx.fast.rms_norm(x, scale, 1e-6)) @ wide(weight).T
    act = ACTIVATIONS[activation] if activation else lambda x: x
    made = act(made[:, :5]) * made[:, 5:] if gated else act(made)
    check(found, made + wide(added))


@pytest.mark.parametrize(("size", "dtype"), [(32, mx.float16), (64, mx.bfloat16), (48, mx.float32)])
def test_attention_is_right_and_queries_have_the_bits_they_have_alone(
    size: int, dtype: mx.Dtype
) -> None:
    rows, length, heads, room, reach = 2, 3, 2, 40, 8
    x = random(rows, length, 3 * heads * size, dtype=dtype)
    cache = random(2, rows, heads, room, size, dtype=dtype, seed=1) * size**-0.5
    ahead = mx.arange(-reach, reach + 1) > 0
    table = mx.where(ahead, -mx.inf, random(heads, 2 * reach + 1, seed=2)).astype(dtype)
    offsets = mx.array([4, 30], dtype=mx.int32)
    queries = wide(x[..., : heads * size]).reshape(rows, length, heads, size).swapaxes(1, 2)

    def wanted(bias: mx.array) -> mx.array:
        shares = mx.softmax(queries @ wide(cache[0]).swapaxes(2, 3) + bias, axis=-1)
        return (shares @ wide(cache[1])).swapaxes(1, 2).reshape(rows, length, -1)

    places = mx.arange(room) - (offsets[:, None, None] + mx.arange(length)[:, None])
    bias = mx.take(wide(table), mx.clip(places, -reach, reach) + reach, axis=1).swapaxes(0, 1)
    found = self_attention(x, cache, table, offsets)
    check(found, wanted(bias))
    roomier = mx.pad(cache, [(0, 0)] * 3 + [(0, 24), (0, 0)], constant_values=mx.nan)
    alone = [self_attention(x[:, i : i + 1], roomier, table, offsets + i) for i in range(length)]
    assert mx.array_equal(found, mx.concatenate(alone, axis=1))
    hidden = mx.random.bernoulli(0.4, (rows, 1, 1, room), key=mx.random.key(3))
    mask = mx.where(hidden, -mx.inf, 0.0).astype(dtype)
    check(cross_attention(x, cache, mask), wanted(wide(mask)))
    check(cross_attention(x, cache, None), wanted(mx.array(0.0)))
    # Parts of larger arrays, with NaN around them, are read where they are.
    part = roomier[:, :, :, :room]
    several = mx.pad(x, [(0, 0), (2, 1), (0, 0)], constant_values=mx.nan)[:, 2:-1]
    assert mx.array_equal(self_attention(several, part, table, offsets), found)
    masked = cross_attention(x, cache, mask)
    wider = mx.repeat(mask, 2, axis=-1)[..., ::2]
    assert mx.array_equal(cross_attention(several, part, wider), masked)


def test_sources_are_plain_text() -> None:
    """MLX gives them to Metal as ASCII."""
    for source in (products.PRODUCTS, attention.ATTENTION):
        assert source.isascii() and "\t" not in source
