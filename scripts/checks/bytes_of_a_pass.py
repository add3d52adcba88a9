"""Memory that passes of a decoder touch, beside the weights that they need, by types of weights.

    python scripts/checks/bytes_of_a_pass.py [--shape t5-base]

Linux marks the pages that a process has used since the marks were last removed. So what a few
passes touch is counted in pages: had a layer made floats of a whole matrix, that memory would be
among them. Exit code 1 if it is more than the weights and a tenth, and `SLACK`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from speculative_t5 import SpeculativeDecoder
from speculative_t5.kernels import accelerate
from speculative_t5.measure import random_model, random_prompts
from speculative_t5.models import EncoderDecoder, Quantization
from speculative_t5.models.quantization import quantize

import mlx.core as mx
from mlx.utils import tree_flatten

MARKS, MAPS = Path("/proc/self/clear_refs"), Path("/proc/self/smaps_rollup")
SLACK = 24e6  # bytes: the interpreter, keys and values, activations
SOURCE, PASSES = 64, 4


def quantized(bits: int) -> Callable[[str], EncoderDecoder]:
    def made(shape: str) -> EncoderDecoder:
        model = random_model(shape)
        quantize(model, Quantization(bits, 64, keep_wo=False))
        mx.eval(model.parameters())
        accelerate(model)
        return model

    return made


KINDS: dict[str, Callable[[str], EncoderDecoder]] = {
    "float32": random_model,
    "bfloat16": lambda shape: random_model(shape, dtype=mx.bfloat16),
    "8 bits": quantized(8),
    "4 bits": quantized(4),
}


def weights_of_a_pass(model: EncoderDecoder) -> int:
    """Return the bytes of the decoder's layers and the head, without keys and values of sources."""
    parts = tree_flatten(model.parameters())
    is_tied = not any(name.startswith("lm_head.") for name, _ in parts)
    head = "shared." if is_tied else "lm_head."
    return sum(
        weight.nbytes
        for name, weight in parts
        if name.startswith(head)
        or (name.startswith("decoder.") and ".cross_attention.kv" not in name)
    )


def touched(model: EncoderDecoder) -> int:
    """Return the bytes of the pages that some passes touch."""
    decoder = SpeculativeDecoder(model)
    (prompt,) = random_prompts(model, SOURCE, 1)
    steps = decoder.stream(prompt, max_tokens=64, min_tokens=64)
    for _ in range(PASSES):
        next(steps)
    MARKS.write_text("1")
    for _ in range(PASSES):
        next(steps)
    (line,) = [line for line in MAPS.read_text().splitlines() if line.startswith("Referenced:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="t5-base")
    shape = parser.parse_args().shape
    is_wrong = False
    for kind, made in KINDS.items():
        model = made(shape)
        needed, found = weights_of_a_pass(model), touched(model)
        print(f"{kind:10} weights {needed / 1e6:7.1f} MB, touched {found / 1e6:7.1f} MB")
        is_wrong |= found > 1.1 * needed + SLACK or found < 0.9 * needed
        del model
        mx.clear_cache()
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
