"""The programs that compare.py compares: how each is loaded, run and measured.

Each runs in a process of its own (`workers` starts it, `serving` is what it runs), on one
checkpoint that all of them can read (`checkpoints`); `measuring` asks them in turn and reports.
"""

PLAIN, SPECULATIVE, ASSISTED = "ours plain", "ours speculative", "transformers assisted"
# Modules that each program needs in addition to this package's dependencies.
PROGRAMS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    SPECULATIVE: (),
    "naive": (),
    "transformers": ("torch",),
    ASSISTED: ("torch",),
    "ctranslate2 float32": ("ctranslate2", "torch"),
    "ctranslate2 int8": ("ctranslate2", "torch"),
}
INEXACT = ("ctranslate2 int8",)
