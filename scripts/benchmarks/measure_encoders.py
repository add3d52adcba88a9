"""Measure memory and time of the encoders that image and video models read prompts with.

    python scripts/benchmarks/measure_encoders.py t5-v1_1-xxl
    python scripts/benchmarks/measure_encoders.py umt5-xxl --bits 4 --tokens 512

Weights are random, so that nothing is downloaded; what they are changes neither. Each type runs in
a process of its own, which says the most memory that it held, and the median time of three passes
over one text.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Annotated

from speculative_t5.kernels import accelerate
from speculative_t5.models import Quantization, T5Config, TextEncoder

import mlx.core as mx
import typer
from mlx.utils import tree_map_with_path

XXL = T5Config(
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_heads=64,
    num_layers=24,
    num_decoder_layers=24,
    vocab_size=32128,
    activation="gelu_new",
    gated=True,
    encoder_only=True,
)
SHAPES = {
    "t5-v1_1-xxl": XXL,
    "umt5-xxl": replace(XXL, vocab_size=256384, bias_per_layer=True),
    "tiny": replace(XXL, d_model=128, d_ff=256, num_heads=2, num_layers=2),  # to try this script
}
BITS = (16, 8, 4)
PASSES = 3
BLOCK = 2**20  # random numbers that all weights repeat


def main(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    bits: Annotated[list[int] | None, typer.Option(help="16, 8 or 4; repeatable.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Of the text; repeatable.")] = None,
    worker: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print a line for each type."""
    kinds, lengths = bits or list(BITS), tokens or [128, 512]
    if shape not in SHAPES or not {*kinds} <= {*BITS} or min(lengths) < 1:
        sys.exit(f"error: choose a shape of {', '.join(SHAPES)}, and bits of 16, 8 or 4")
    if worker:
        print(json.dumps(measure(shape, kinds[0], lengths)))
        return
    for kind in kinds:
        command = [sys.executable, __file__, shape, "--bits", str(kind), "--worker"]
        asked = [part for length in lengths for part in ("--tokens", str(length))]
        done = subprocess.run([*command, *asked], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        times = ", ".join(f"{n} tokens {s:.2f} s" for n, s in found["seconds"].items())
        print(f"{shape}, {kind} bits: {found['peak'] / 1e9:.2f} GB at most; {times}", flush=True)


def measure(shape: str, bits: int, lengths: list[int]) -> dict[str, object]:
    """Return the peak of memory in bytes, and the seconds of a pass by the tokens of a text."""
    model = random_encoder(SHAPES[shape], bits)
    seconds = {}
    for length in lengths:
        tokens = mx.arange(length, dtype=mx.int32)[None] % 100 + 2
        times = []
        for _ in range(PASSES + 1):  # the first one warms up
            began = time.perf_counter()
            mx.eval(model.encode(tokens))
            times.append(time.perf_counter() - began)
        seconds[str(length)] = statistics.median(times[1:])
    scale = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return {"peak": peak, "seconds": seconds}


def random_encoder(config: T5Config, bits: int) -> TextEncoder:
    """Make an encoder whose matrices are bfloat16, or of fewer bits, one matrix at a time."""
    if bits < 16:
        config = replace(config, quantization=Quantization(bits))
    model = TextEncoder(config)
    numbers = 0.02 * mx.random.normal((BLOCK,))
    packed = mx.random.randint(0, 2**31 - 1, (BLOCK,)).astype(mx.uint32)
    mx.eval(numbers, packed)

    def weight(path: str, old: mx.array) -> mx.array:
        is_whole = old.ndim == 1 or "position" in path
        kind = mx.float32 if is_whole else mx.bfloat16
        if path.endswith((".scales", ".biases")):
            value = 0.04 / 2**bits if path.endswith("scales") else -0.02
            new = mx.full(old.shape, value, mx.bfloat16)
        else:
            block = packed if old.dtype == mx.uint32 else numbers.astype(kind)
            new = mx.tile(block, -(-old.size // BLOCK))[: old.size].reshape(old.shape)
        new = mx.contiguous(new)
        mx.eval(new)
        return new

    model.update(tree_map_with_path(weight, model.parameters()))
    accelerate(model)
    return model


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
