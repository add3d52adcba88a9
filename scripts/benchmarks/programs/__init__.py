"""The programs that compare.py compares: how each is loaded, run and measured.

Each runs in a process of its own (`workers` starts it, `serving` is what it runs), on one
checkpoint that all of them can read (`checkpoints`); `measuring` asks them in turn and reports.
"""

PLAIN, SPECULATIVE, STEADY = "ours plain", "ours speculative", "ours steady"
AUTO = "ours auto"  # with a number of drafted tokens that varies
COMBINED = "ours with lookups"  # behind the draft's tokens
ASSISTED = "transformers assisted"
PROGRAMS = (
    PLAIN,
    SPECULATIVE,
    AUTO,
    COMBINED,
    STEADY,
    "naive",
    "transformers",
    ASSISTED,
    "ctranslate2",
    "ctranslate2 int8",
)
WITH_BEAMS = (PLAIN, "transformers", "ctranslate2", "ctranslate2 int8")  # that have beam search
OURS = (PLAIN, SPECULATIVE, AUTO, COMBINED, STEADY, "naive")
# Ours with matrices kept in another type, by the programs' names.
BITS = {"8 bits": 8, "4 bits": 4}
KEPT = {
    f"{name} in {kind}": kind for kind in ("bfloat16", *BITS) for name in (PLAIN, SPECULATIVE, AUTO)
}
BY_TYPES = (
    PLAIN,
    SPECULATIVE,
    AUTO,
    *KEPT,
    "transformers",
    "transformers bfloat16",
    "ctranslate2",
    "ctranslate2 int8",
)
# Those that decode in batches.
IN_BATCHES = BY_TYPES
MLX_LM, MLX_LM_SPECULATIVE = "mlx-lm", "mlx-lm speculative"
# Those that run decoder-only pairs.
CAUSAL = PLAIN, SPECULATIVE, AUTO, MLX_LM, MLX_LM_SPECULATIVE, "transformers", ASSISTED
