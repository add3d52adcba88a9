"""Measure how quantization changes quality: the shipped target, held-out sentences, greedy.

    python scripts/benchmarks/measure_quantization.py --data deu.txt.xz

Converts the target to each number of bits in a temporary folder, computes in float32, and compares
with the unquantized target: identical outputs, and chrF against the references. Needs the extra
`train` and the data that weights/README.md names.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

from speculative_t5 import SpeculativeDecoder
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.loading import locate

import mlx.core as mx
import sacrebleu
import typer
from texts import DataOption, held_out_examples


def main(
    data: DataOption,
    count: Annotated[int, typer.Option(help="Held-out sentences.")] = 200,
) -> None:
    examples = held_out_examples(data, count)
    sources = [source for source, _ in examples]
    references = [reference for _, reference in examples]
    folder = locate("correct-base")
    whole, chrf, speed = decode(folder, sources, references)
    print(f"{count} held-out sentences, greedy, batches of 32")
    print(f"  float32: {size(folder):.1f} MB stored, chrF {chrf:.2f}, {speed:.0f} tokens/s")
    for bits in (8, 4):
        with tempfile.TemporaryDirectory() as work:
            small = convert(str(folder), Path(work) / "small", quantize=bits)
            outputs, chrf, speed = decode(small, sources, references)
            same = sum(a == b for a, b in zip(outputs, whole, strict=True))
            print(
                f"  {bits} bits: {size(small):.1f} MB, {same / count:.1%} of outputs the same, "
                f"chrF {chrf:.2f}, {speed:.0f} tokens/s"
            )


def decode(
    folder: Path, sources: list[str], references: list[str]
) -> tuple[list[list[int]], float, float]:
    decoder = SpeculativeDecoder.from_pretrained(folder, None, dtype=mx.float32)
    started = time.perf_counter()
    outputs = decoder.generate_batch(sources, batch_size=32)
    seconds = time.perf_counter() - started
    chrf = sacrebleu.corpus_chrf([output.text for output in outputs], [references]).score
    emitted = sum(output.stats.emitted for output in outputs)
    return [output.tokens for output in outputs], chrf, emitted / seconds


def size(folder: Path) -> float:
    return (folder / "weights.npz").stat().st_size / 1e6


if __name__ == "__main__":
    typer.run(main)
