"""The texts that benchmarks decode; the scripts that trained the models define them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))

from corruption import PREFIX, Corruptor, held_out_examples, read_sentences
from documents import HELD_OUT_FILE, read_documents

__all__ = [
    "HELD_OUT_FILE", "PREFIX", "Corruptor", "held_out_examples", "read_documents",
    "read_sentences",
]  # fmt: skip
