"""Forward passes of T5 and decoder-only models, and their key/value caches.

Imports `decoding` for the protocols that a model implements, and what is below it.
"""

from .causal import CausalModel, build
from .config_json import MAX_LAYERS, MAX_SIZE, is_causal
from .t5.config import Quantization, T5Config
from .t5.model import T5

__all__ = [
    "CausalModel",
    "MAX_LAYERS",
    "MAX_SIZE",
    "Quantization",
    "T5",
    "T5Config",
    "build",
    "is_causal",
]
