"""What rounds cost: benchmarks, and random models of known shapes to run them on.

Imports `generation` and the packages below it and, for plots only, matplotlib.
"""

from .benchmark import Report, measure
from .costs import Costs, Stepper, drafted_ids, measure_costs
from .estimate import speedup
from .plot import check_plot, draw, draw_history, pyplot
from .sweep import (
    PLAIN,
    Run,
    Turn,
    Variant,
    gain,
    sweep,
    tokens_per_pass,
    tokens_per_second,
    typical,
    variants_of,
)
from .synthetic import (
    check_shapes,
    context_of,
    random_model,
    random_prompts,
    settled_outputs,
    synthetic_plan,
)
