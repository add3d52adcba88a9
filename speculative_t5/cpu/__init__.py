"""Faster layers for CPUs: `accelerate` swaps a model's modules for them.

On any CPU that is a faster attention; on Linux, where the C parts were built, all layers. Without
them everything works. Imports `device` and `models`, whose plain MLX layers are the reference.
"""

from .accelerate import accelerate
from .blocks import BUILT_FOR
