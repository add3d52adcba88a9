"""The shipped pair, and the texts that benchmarks decode; weights/training defines the texts."""

import sys
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import SpeculativeDecoder

import mlx.core as mx
import typer

sys.path.append(str(Path(__file__).parents[2] / "weights" / "training"))

from corruption import PREFIX, Corruptor, DataOption, held_out_examples, read_sentences
from documents import HELD_OUT_FILE

__all__ = [
    "HELD_OUT_FILE",
    "PREFIX",
    "Corruptor",
    "DataOption",
    "DraftOption",
    "engine",
    "held_out_examples",
    "read_sentences",
]


DraftOption = Annotated[str, typer.Option(help="The draft's folder or name.")]


def engine(draft: Any = "correct-small", **options: Any) -> SpeculativeDecoder:
    """Load correct-base in float32."""
    return SpeculativeDecoder.from_pretrained("correct-base", draft, dtype=mx.float32, **options)
