"""What rounds cost: a draft against plain decoding, passes by their length, random models.

`compare_with_plain` measures for `bench`, `doctor` and `distill` alike. Imports `generation` and
the packages below it.
"""

from .comparison import (
    PLAIN_DECODING,
    Comparison,
    Run,
    Turn,
    Variant,
    acceptance,
    compare_with_plain,
    sweep,
    tokens_per_pass,
    tokens_per_second,
    variants_of,
)
from .passes import PASS_LENGTHS, PassCosts, measure_passes
from .random_models import random_model, random_prompts, random_weights
from .replay import ReplayDrafter, replaying_plan
from .reports import VariantReport, report_on
from .shapes import SHAPES, check_pair_of_shapes, config_of_shape
from .throughput import BatchReport, report_on_batches
