"""What rounds cost: benchmarks, and random models of known shapes to run them on.

Imports `generation` and the packages below it.
"""

from . import synthetic
from .comparison import (
    PLAIN,
    Report,
    Run,
    Turn,
    Variant,
    gain,
    measure,
    sweep,
    tokens_per_pass,
    tokens_per_second,
    typical,
    variants_of,
)
