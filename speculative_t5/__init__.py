"""Speculative decoding on MLX, for T5s and decoder-only models: faster, with the same output."""

from . import backend as backend  # isort: skip  (first: it prepares BLAS for mlx.core)
from .config import T5Config
from .decoder import SpeculativeDecoder
from .loading import load
from .results import Chunk, Generation, Stats

__all__ = ["Chunk", "Generation", "SpeculativeDecoder", "Stats", "T5Config", "__version__", "load"]
from ._version import __version__
