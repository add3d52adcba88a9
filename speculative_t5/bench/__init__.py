"""What rounds cost: benchmarks, and random models of known shapes to run them on."""

from .benchmark import GREEDY, Bench, Report, Variant, first_token_seconds, variants_of
from .estimate import speedup
from .synthetic import check_shapes, context_of, random_model, random_prompts, synthetic_plan

__all__ = [
    "Bench",
    "GREEDY",
    "Report",
    "Variant",
    "check_shapes",
    "context_of",
    "first_token_seconds",
    "random_model",
    "random_prompts",
    "speedup",
    "synthetic_plan",
    "variants_of",
]
