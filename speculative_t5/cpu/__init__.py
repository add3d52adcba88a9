"""Faster layers for Linux CPUs: `accelerate` swaps a model's modules for them.

It imports `models`, whose plain MLX layers are the reference, and nothing requires it.
"""

from .accelerate import accelerate
from .blocks import BUILT_FOR
