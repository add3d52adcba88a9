"""The programs that compare.py compares: how each is loaded, run and measured.

Each runs in a process of its own (`workers` starts it, `serving` is what it runs), on one
checkpoint that all of them can read (`checkpoints`); `measuring` asks them in turn and reports.
"""

PLAIN, SPECULATIVE, STEADY = "ours plain", "ours speculative", "ours steady"
COMBINED = "ours with lookups"  # behind the draft's tokens
ASSISTED = "transformers assisted"
PROGRAMS = (
    PLAIN,
    SPECULATIVE,
    COMBINED,
    STEADY,
    "naive",
    "transformers",
    ASSISTED,
    "ctranslate2",
    "ctranslate2 int8",
)
WITH_BEAMS = (PLAIN, "transformers", "ctranslate2", "ctranslate2 int8")  # that have beam search
OURS = (PLAIN, SPECULATIVE, COMBINED, STEADY, "naive")
