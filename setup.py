"""The part of the build that pyproject.toml cannot say: extensions for Linux alone.

Both are optional: without a compiler the package installs all the same, and is slower on CPUs.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

NATIVE = "speculative_t5/native"


def kernels() -> Extension:
    """Products and layers, in plain C: they know nothing of MLX."""
    return Extension(
        "speculative_t5._products",
        [f"{NATIVE}/products.c", f"{NATIVE}/layers.c"],
        depends=[f"{NATIVE}/{name}.h" for name in ("kernel", "rows", "products", "layers")],
        extra_compile_args=["-O3", "-std=gnu11", "-fvisibility=hidden"],
        libraries=["pthread", "m"],
        optional=True,
    )


def blocks() -> list[Extension]:
    """The layers as MLX's operations; nothing if there is no MLX or nanobind to build with."""
    if not (find_spec("mlx") and find_spec("nanobind")):
        return []
    import mlx
    import nanobind

    home = Path(next(iter(mlx.__path__)))
    source = Path(nanobind.source_dir())
    return [
        Extension(
            "speculative_t5._blocks",
            [f"{NATIVE}/blocks.cpp", f"{NATIVE}/nanobind.cpp"],
            depends=[f"{NATIVE}/layers.h"],
            include_dirs=[
                str(home / "include"),
                nanobind.include_dir(),
                str(source),
                str(source.parent / "ext" / "robin_map" / "include"),
            ],
            library_dirs=[str(home / "lib")],
            libraries=["mlx"],
            define_macros=[("NB_DOMAIN", "mlx")],  # whose arrays are to be understood
            extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden", "-g0"],
            optional=True,
        )
    ]


setup(ext_modules=[kernels(), *blocks()] if sys.platform.startswith("linux") else [])
