"""Kernels of Metal, run on the CPU: MLX writes their source, a C++ compiler reads it as C++.

`interpreter.h` is Metal's language in C++. What MLX would give Metal's compiler is taken from MLX
itself, which exports functions with such kernels where there is no Metal, too.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-w", "-shared", "-fPIC")
AS_NUMBERED, BACKWARDS, BY_CHANCE = 0, 1, 7  # orders of threads
ORDERS = (AS_NUMBERED, BACKWARDS, BY_CHANCE)
# What MLX may give beside an array, by the end of its name.
BESIDE = ("shape", "strides", "ndim")
GLUE = """
static void call(char *const *buffers, const interpreter::Position &at)
{{
    {instance}({arguments});
}}
extern "C" const char *run(void *const *given, const size_t *sizes, int count, const uint *grid,
                           const uint *group, int order, int at_end)
{{
    return interpreter::run(call, given, sizes, count, grid, group, order, at_end);
}}
"""
metal_kernel = mx.fast.metal_kernel  # MLX's own, also while a test has put another in its place


class Kernel:
    """A kernel as `mx.fast.metal_kernel` makes it, which the CPU runs.

    Every call runs in some orders of threads, with buffers that end or begin at a page that cannot
    be touched, and has to give the same bits in each.
    """

    orders: Sequence[int] = ORDERS

    def __init__(self, **described: Any) -> None:
        self._described = described
        self.name: str = described["name"]
        self.calls = 0

    def __call__(self, *, inputs: Sequence[mx.array], **options: Any) -> list[mx.array]:
        self.calls += 1
        source = self.source(inputs, **options)
        contiguous = self._described.get("ensure_row_contiguous", True)
        kinds = [*zip(options["output_shapes"], options["output_dtypes"], strict=True)]
        results = []
        for order in self.orders:
            outputs = [np.full(int(np.prod(s)) * kind.size, 0xFF, np.uint8) for s, kind in kinds]
            compiled(source)(inputs, outputs, options, order, contiguous=contiguous)
            results.append(outputs)
        for others in results[1:]:
            same = map(np.array_equal, results[0], others)
            assert all(same), "the result depends on the order of threads"
        return [
            mx.array(found).view(kind).reshape(shape)
            for found, (shape, kind) in zip(results[0], kinds, strict=True)
        ]

    def source(self, inputs: Sequence[mx.array], **options: Any) -> str:
        """Return what MLX would give to Metal's compiler."""
        kernel = metal_kernel(**self._described)

        def call(*arrays: mx.array) -> mx.array:
            found: mx.array = kernel(inputs=[*arrays], **options)[0]
            return found

        with tempfile.TemporaryDirectory() as folder:
            mx.export_function(f"{folder}/kernel.mlxfn", call, *inputs)
            stored = Path(folder, "kernel.mlxfn").read_bytes()
        first = stored.rindex(self._described["header"].encode())
        last = stored.index(b";\n", stored.index(b"[[host_name(", first)) + 2
        text = stored[first:last].decode()
        assert self._described["source"] in text
        return text


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="metal-kernels-")  # removed at the end


def folder() -> Path:
    """Return the folder of what this process has compiled."""
    return Path(_temporary().name)


@cache
def compiled(source: str) -> Callable[..., None]:
    """Compile a kernel; return what runs it, given its inputs, outputs, options and an order."""
    instance, names, arguments = signature(source)
    # C++ has no place for attributes where MLX says which instance is wanted.
    plain = re.sub(r"template \[\[host_name.*?decltype", "template decltype", source)
    text = '#include "interpreter.h"\n' + plain
    text += GLUE.format(instance=instance, arguments=", ".join(arguments))
    stem = folder() / hashlib.sha256(text.encode()).hexdigest()[:24]
    code, made = stem.with_suffix(".cpp"), stem.with_suffix(".so")
    code.write_text(text)
    command = [str(COMPILER), *FLAGS, f"-I{Path(__file__).parent}", "-o", str(made), str(code)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(made))
    os.unlink(made)
    library.run.restype = ctypes.c_char_p

    def run(
        inputs: Sequence[mx.array],
        outputs: Sequence[np.ndarray],
        options: Mapping[str, Any],
        order: int,
        *,
        contiguous: bool,
    ) -> None:
        own = names[: len(names) - len(outputs)]
        given = [*buffers(inputs, own, contiguous=contiguous), *outputs]
        addresses = (ctypes.c_void_p * len(given))(*(each.ctypes.data for each in given))
        sizes = (ctypes.c_size_t * len(given))(*(each.nbytes for each in given))
        grid = options["grid"]
        group = map(min, options["threadgroup"], grid)
        uints = [(ctypes.c_uint * 3)(*each) for each in (grid, group)]
        at_end = order != BACKWARDS
        fault = library.run(addresses, sizes, len(given), *uints, order, at_end)
        assert not fault, fault.decode()

    return run


def signature(source: str) -> tuple[str, list[str], list[str]]:
    """Return a kernel's name with template arguments, its buffers' names, and C++ arguments."""
    instance = re.search(r"decltype\((\w+<[^>]*>)\)", source)
    parts = re.search(
        r"template <([^>]*)>\n\[\[kernel\]\] void \w+\(\n(.*?)\) \{", source, re.DOTALL
    )
    assert instance and parts
    values = instance[1].partition("<")[2].rstrip(">").split(", ")
    types = dict(zip((each.split()[1] for each in parts[1].split(", ")), values, strict=True))
    names, arguments = [], []
    for parameter in parts[2].split(",\n"):
        found = re.fullmatch(r"\s*(.*?)([*&]?) (\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", parameter)
        assert found
        kind, reference, name, attribute, place = found.groups()
        if attribute != "buffer":
            arguments.append(f"at.{name}")
            continue
        kind = re.sub(r"\b(?:const|device|constant)\b", "", kind).strip()
        names.append(name)
        pointer = f"({types.get(kind, kind)} *)buffers[{place}]"
        arguments.append(f"*{pointer}" if reference == "&" else pointer)
    return instance[1], names, arguments


def buffers(
    inputs: Sequence[mx.array], names: Sequence[str], *, contiguous: bool
) -> list[np.ndarray]:
    """Return the bytes of inputs, as they lie in memory or copied, and what is wanted beside them.

    `contiguous` is MLX's `ensure_row_contiguous`.
    """
    found: list[np.ndarray] = []
    left, last, beside = iter(inputs), "", dict[str, np.ndarray]()
    for name in names:
        stem, _, end = name.rpartition("_")
        if stem == last and end in BESIDE:
            found.append(beside[end])
            continue
        x, last = next(left), name
        data, strides = memory(x, contiguous=contiguous)
        beside = {
            "shape": np.array(x.shape, np.int32),
            "strides": np.array(strides, np.int64),
            "ndim": np.array([x.ndim], np.int32),
        }
        found.append(data)
    return found


def memory(x: mx.array, *, contiguous: bool) -> tuple[np.ndarray, list[int]]:
    """Return the bytes of an array from its first number to its last one, and its strides."""
    x = mx.contiguous(x) if contiguous or x.ndim == 0 else x
    same_size = {2: mx.uint16, 4: mx.uint32}[x.dtype.size]
    seen = np.array(x.view(same_size), copy=False)
    strides = [stride // x.dtype.size for stride in seen.strides]
    last = sum(stride * (size - 1) for stride, size in zip(seen.strides, x.shape, strict=True))
    flat = np.lib.stride_tricks.as_strided(seen, [last // x.dtype.size + 1], [x.dtype.size])
    return flat.copy().view(np.uint8), strides
