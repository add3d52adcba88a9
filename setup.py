"""The part of the build that pyproject.toml cannot say: an extension for Linux alone."""

import sys

from setuptools import Extension, setup

# Optional: without a C compiler the package installs all the same, and is slower on CPUs.
PRODUCTS = Extension(
    "speculative_t5._products",
    ["speculative_t5/native/products.c"],
    depends=["speculative_t5/native/kernel.h"],
    extra_compile_args=["-O3", "-std=gnu11"],
    libraries=["pthread"],
    optional=True,
)

setup(ext_modules=[PRODUCTS] if sys.platform.startswith("linux") else [])
