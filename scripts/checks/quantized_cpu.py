"""Speed of a quantized folder on a CPU, of t5-base's shape with random numbers, beside float32.

    python scripts/checks/quantized_cpu.py [--bits 8] [--shape t5-base] [--tokens 32]

Makes the shape's folder in float32, converts it, and decodes the same prompts with both, in turn.
Prints tokens per second (the median of rounds), the memory of the weights, and by how much logits
change. Exit code 1 if the quantized one is slower. Takes a minute and 4 GB.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.model_folder import write_folder
from speculative_t5.checkpoints.tensors import NewTensor, as_numpy, parameters_of
from speculative_t5.measure import config_of_shape, random_weights
from speculative_t5.models import EncoderDecoder, T5Config

import mlx.core as mx

PROMPTS, LENGTH = 2, 100  # and ids of each
ROUNDS = 5


def write(folder: Path, model: EncoderDecoder) -> None:
    """Save a model with a tokenizer of bytes, which needs no file of pieces."""
    assert isinstance(model.config, T5Config)
    tensors = [
        NewTensor(name, weight.shape, weight.dtype, [as_numpy(weight)])
        for name, weight in parameters_of(model).items()
    ]
    config = model.config.to_dict() | {"tokenizer_class": "ByT5Tokenizer"}
    write_folder(folder, config, tensors, [])
    settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def made(shape: str, folder: Path) -> Path:
    """Save a random model of a shape."""
    config = config_of_shape(shape)
    assert isinstance(config, T5Config)
    model = random_weights(replace(config, own_head=True, scale_decoder_outputs=False))
    write(folder, model)
    return folder


def opened(folder: Path) -> SpeculativeDecoder:
    """Load a folder for plain decoding."""
    decoder = SpeculativeDecoder(load(folder)[0])
    decoder.generate([5, 1], max_tokens=2)  # compiles
    return decoder


def timed(decoder: SpeculativeDecoder, prompts: list[list[int]], tokens: int) -> float:
    """Return tokens per second."""
    began = time.perf_counter()
    for each in prompts:
        decoder.generate(each, max_tokens=tokens, min_tokens=tokens)
    return tokens * len(prompts) / (time.perf_counter() - began)


def show(name: str, decoder: SpeculativeDecoder, speed: float) -> None:
    model = decoder.model
    assert isinstance(model, EncoderDecoder)
    size = sum(weight.nbytes for weight in parameters_of(model).values())
    print(f"{name:10} {speed:6.1f} tokens/s, {size / 1e9:.2f} GB of weights")


def change_of_logits(decoders: list[SpeculativeDecoder], prompt: list[int]) -> tuple[float, float]:
    """Return the largest and the typical change (its root mean square), over those of logits."""
    whole, quantized = (
        as_numpy(each.model(mx.array([prompt]), mx.array([prompt]))) for each in decoders
    )
    change = quantized - whole
    return abs(change).max() / abs(whole).max(), change.std() / whole.std()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=8, choices=(4, 8))
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--shape", default="t5-base")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    rng = random.Random(0)
    prompts = [[*rng.choices(range(3, 259), k=LENGTH), 1] for _ in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as work:
        whole = made(given.shape, Path(work, "whole"))
        stored = convert(
            str(whole), Path(work, "stored"), quantize=given.bits, group_size=given.group_size
        )
        decoders = {"float32": opened(whole), f"{given.bits} bits": opened(stored)}
        found = [
            [timed(d, prompts, given.tokens) for d in decoders.values()] for _ in range(ROUNDS)
        ]
        largest, typical = change_of_logits([*decoders.values()], prompts[0])
    speeds = [median(column) for column in zip(*found, strict=True)]
    for (name, decoder), speed in zip(decoders.items(), speeds, strict=True):
        show(name, decoder, speed)
    print(f"logits change by {largest:.1%} of the largest at most, by {typical:.1%} typically")
    sys.exit(speeds[1] < speeds[0])


if __name__ == "__main__":
    main()
