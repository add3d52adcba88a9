"""Faster layers for Linux CPUs, in C. Everything works without them."""

from . import blocks
from .blocks import BUILT_FOR

__all__ = [
    "BUILT_FOR",
    "blocks",
]
