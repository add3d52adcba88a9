"""Run our kernels for Metal on the CPU: errors and bits, for all types, rows and many shapes.

    python scripts/checks/metal_kernels.py           # the table
    python scripts/checks/metal_kernels.py sources   # compile what MLX would give to Metal

The source that MLX makes of each kernel is compiled as C++ (tests/metal/interpreter.h) and run in
three orders of threads, with buffers against pages that cannot be touched. An error is the largest
difference from float64 over the largest number, in units of the type's rounding (2^-24, 2^-11,
2^-8). The bits of each row are compared with those that it has alone. `sources` compiles with
clang++, all warnings on, also with Metal's address spaces (tests/metal/address_spaces.h).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product as every
from pathlib import Path
from typing import Annotated, NamedTuple

from speculative_t5.kernels.metal.attention import cross_attention, self_attention
from speculative_t5.kernels.metal.products import Matrix, Norm, product

import mlx.core as mx
import mlx.nn as nn
import typer

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from metal import interpreter

ROUNDING = {mx.float32: 2**-24, mx.float16: 2**-11, mx.bfloat16: 2**-8}
SHAPES = (1, 8), (7, 33), (13, 128), (8, 261), (20, 512)  # outputs, inputs
MOST_ROWS = 16
NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unknown-attributes")
FREE_STANDING = ("--target=aarch64-none-elf", "-ffreestanding", "-nostdlibinc", "-Wshadow")
METAL = Path(interpreter.__file__).parent


class Case(NamedTuple):
    """A kernel's result, and what it has to be."""

    kind: str
    dtype: mx.Dtype
    error: float  # in units of rounding
    same_bits: bool


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def wide(x: mx.array) -> mx.array:
    return x.astype(mx.float64)


def case(kind: str, found: mx.array, wanted: mx.array, alone: mx.array) -> Case:
    apart = mx.abs(wide(found) - wanted).max() / mx.abs(wanted).max()
    error = float(apart) / ROUNDING[found.dtype]
    return Case(kind, found.dtype, error, bool(mx.array_equal(found, alone)))


def products(dtype: mx.Dtype) -> Iterator[Case]:
    """Multiply by matrices that are not quantized, with every number of rows."""
    for (outputs, inputs), rows in every(SHAPES, range(1, MOST_ROWS + 1)):
        x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
        matrix = Matrix(weight)
        alone = mx.concatenate([product(x[i : i + 1], matrix) for i in range(rows)])
        yield case("product", product(x, matrix), wide(x) @ wide(weight).T, alone)


def quantized(dtype: mx.Dtype) -> Iterator[Case]:
    for bits, group, rows in every((4, 8), (32, 64, 128), (1, 2, 5, 9, MOST_ROWS)):
        for inputs in (group, 3 * group, 640):
            x, weight = random(rows, inputs, dtype=dtype), random(9, inputs, dtype=dtype, seed=1)
            words, scales, biases = mx.quantize(weight, group, bits)
            matrix = Matrix(words, scales, biases, bits, group)
            alone = mx.concatenate([product(x[i : i + 1], matrix) for i in range(rows)])
            plain = mx.dequantize(words, wide(scales), wide(biases), group, bits)
            yield case(f"{bits} bits", product(x, matrix), wide(x) @ plain.T, alone)


def with_more(dtype: mx.Dtype) -> Iterator[Case]:
    """Multiply with a norm before, and an activation, a gate or a sum after."""
    acts = {"": lambda x: x, "relu": nn.relu, "silu": nn.silu, "gelu_new": nn.gelu_approx}
    for act, gated, rows in every(acts, (False, True), (1, 3, 9)):
        x, weight = random(rows, 96, dtype=dtype), random(10, 96, dtype=dtype, seed=1) * 0.1
        scale, added = random(96, dtype=dtype, seed=2), random(rows, 10, dtype=dtype, seed=3)
        added = added[:, : 10 // (1 + gated)]
        norm, options = Norm(scale, 1e-6), {"activation": act or None, "gated": gated}
        found = product(x, Matrix(weight), norm=norm, added=added, **options)
        parts = [
            product(x[i : i + 1], Matrix(weight), norm=norm, added=added[i : i + 1], **options)
            for i in range(rows)
        ]
        made = wide(mx.fast.rms_norm(x, scale, 1e-6)) @ wide(weight).T
        made = acts[act](made[:, :5]) * made[:, 5:] if gated else acts[act](made)
        kind = "norm, " + ", ".join(filter(None, (act, "gate" if gated else "", "sum")))
        yield case(kind, found, made + wide(added), mx.concatenate(parts))


def attentions(dtype: mx.Dtype) -> Iterator[Case]:
    reach = 8
    for size, rows, length, room in every((32, 48, 64, 128), (1, 3), (1, 4), (5, 40)):
        x = random(rows, length, 3 * 2 * size, dtype=dtype)
        cache = random(2, rows, 2, room, size, dtype=dtype, seed=1) * size**-0.5
        ahead = mx.arange(-reach, reach + 1) > 0
        table = mx.where(ahead, -mx.inf, random(2, 2 * reach + 1, seed=2)).astype(dtype)
        offsets = mx.array([0, room // 2, room - length][:rows], dtype=mx.int32)
        places = mx.arange(room) - (offsets[:, None, None] + mx.arange(length)[:, None])
        index = mx.clip(places, -reach, reach) + reach
        bias = mx.take(wide(table), index, axis=1).swapaxes(0, 1)
        alone = [self_attention(x[:, i : i + 1], cache, table, offsets + i) for i in range(length)]
        found = self_attention(x, cache, table, offsets)
        yield case("self-attention", found, attended(x, cache, bias), mx.concatenate(alone, axis=1))
        mask = mx.where(mx.arange(room) % 3 == 1, -mx.inf, 0.0) * mx.ones((rows, 1, 1, 1))
        mask = mask.astype(dtype)
        alone = [cross_attention(x[:, i : i + 1], cache, mask) for i in range(length)]
        found, wanted = cross_attention(x, cache, mask), attended(x, cache, wide(mask))
        yield case("cross-attention", found, wanted, mx.concatenate(alone, axis=1))


def attended(x: mx.array, cache: mx.array, bias: mx.array) -> mx.array:
    _, rows, heads, _, size = cache.shape
    queries = wide(x[..., : heads * size]).reshape(rows, -1, heads, size).swapaxes(1, 2)
    shares = mx.softmax(queries @ wide(cache[0]).swapaxes(2, 3) + bias, axis=-1)
    return (shares @ wide(cache[1])).swapaxes(1, 2).reshape(rows, x.shape[1], -1)


def table() -> int:
    """Print the worst of each kind of kernel; return how many are wrong."""
    wrong = 0
    print("| kernel | type | cases | worst error, roundings | rows with the bits they have alone |")
    print("|---|---|---|---|---|")
    for dtype, kinds in every(ROUNDING, (products, quantized, with_more, attentions)):
        found: dict[str, list[Case]] = {}
        for each in kinds(dtype):
            found.setdefault(each.kind, []).append(each)
        for kind, cases in found.items():
            worst, same = max(each.error for each in cases), sum(each.same_bits for each in cases)
            most = 12 if dtype == mx.float32 else 3
            wrong += worst > most or same < len(cases)
            row = kind, NAMES[dtype], len(cases), f"{worst:.2f}", f"{same} of {len(cases)}"
            print("|", " | ".join(map(str, row)), "|", flush=True)
    return wrong


def sources() -> int:
    """Compile every source that the table's kernels have; return how many have a warning.

    Once as it is run, and once in C++14, which Metal is made of, with its address spaces.
    """
    wrong, codes = 0, sorted(interpreter.folder().glob("*.cpp"))
    for code in codes:
        plain = code.with_suffix(".typed")
        plain.write_text(with_address_spaces(code.read_text()))
        told = ""
        for options in (["-std=c++17", code], ["-std=c++14", "-x", "c++", *FREE_STANDING, plain]):
            command = ["clang++", "-fsyntax-only", *WARNINGS, f"-I{METAL}", *options]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            told += done.stderr or f"status {done.returncode}" * bool(done.returncode)
        print(told, end="")
        wrong += bool(told)
    print(f"{len(codes)} sources, {wrong} with warnings")
    return wrong


def with_address_spaces(code: str) -> str:
    """Return a source without attributes, of which C++ knows none, and without what runs it."""
    kernel = code.partition("\nstatic void call(")[0].replace("interpreter.h", "address_spaces.h")
    return re.sub(r" ?\[\[\w+(?:\(\d+\))?\]\]", "", kernel)


def main(what: Annotated[str, typer.Argument(help="table, or sources.")] = "table") -> None:
    mx.fast.metal_kernel = interpreter.Kernel
    wrong = table()
    if what == "sources":
        wrong = sources()
    raise typer.Exit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
