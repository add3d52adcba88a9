"""Predict what chips give that nobody has measured: two tables of docs/gpu.md and families.md.

    python scripts/benchmarks/expected.py

A pass over one token takes the bytes that it reads, by the chip's published bandwidth, and its
kernels, by what launching one costs; one over more takes a multiple, by a curve for the kind of
chip. From these follow plain decoding and, by equation 1 of arXiv 2211.17192, speculative decoding
with the best number of drafted tokens. It is an upper bound: no chip reaches its bandwidth, and the
host takes no time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from speculative_t5.bench.synthetic import SHAPES
from speculative_t5.checkpoints.inspection import ways
from speculative_t5.checkpoints.t5 import parameter_shapes
from speculative_t5.doctor.speed import kernels, tokens_per_round
from speculative_t5.models import ModelConfig, T5Config, new_model

from simulated_devices import Curve, launches, mac_in_steps, mac_of_two_kernels

ITEM = 2  # bytes of a number in 16 bits
SOURCE = 256  # tokens of a prompt, whose keys and values each pass reads
FITS = 0.7  # share of memory that weights may take
TWO = ("M2 Max", "M4 Max")  # chips of T5Gemma's table
LENGTHS = (*range(17), 20, 24, 32, 40, 48, 63)  # tokens to draft


@dataclass(frozen=True)
class Chip:
    """A chip as its maker describes it, and what launching a kernel on it costs."""

    name: str
    bandwidth: float  # GB/s
    memory: int  # GB, the most that it is sold with
    launch: float  # microseconds, see docs/gpu.md
    curve: Curve  # cost of a pass by its tokens, in passes over one


CHIPS = [
    Chip("M1", 68, 16, 3.75, mac_of_two_kernels),
    Chip("M1 Max", 400, 64, 3.75, mac_of_two_kernels),
    Chip("M2", 100, 24, 3.75, mac_of_two_kernels),
    Chip("M2 Max", 400, 96, 3.75, mac_of_two_kernels),
    Chip("M3", 100, 24, 2.75, mac_in_steps),
    Chip("M3 Max", 400, 128, 2.75, mac_in_steps),
    Chip("M4", 120, 32, 2.75, mac_in_steps),
    Chip("M4 Pro", 273, 64, 2.75, mac_in_steps),
    Chip("M4 Max", 546, 128, 2.75, mac_in_steps),
    Chip("M3 Ultra", 819, 512, 2.75, mac_in_steps),
    Chip("RTX 4090", 1008, 24, 2.0, launches),
    Chip("H100 (SXM)", 3350, 80, 2.0, launches),
]
FLAN_SMALL = T5Config(512, 64, 1024, 6, 8, 8, vocab_size=32128, gated=True, own_head=True)
FLAN_XL = T5Config(2048, 64, 5120, 32, 24, 24, vocab_size=32128, gated=True, own_head=True)
T5_11B = T5Config(1024, 128, 65536, 128, 24, 24, vocab_size=32128)
PAIRS = {
    "t5-large": (SHAPES["t5-large"], SHAPES["t5-small"]),
    "flan-t5-xl": (FLAN_XL, FLAN_SMALL),
    "t5-11b": (T5_11B, SHAPES["t5-small"]),
}

_1 = {size: SHAPES[f"t5gemma-{size}"] for size in ("s", "b", "l", "xl", "2b", "9b")}
_2 = {size: SHAPES[f"t5gemma2-{size}"] for size in ("270m", "1b", "4b")}
GEMMAS = [  # with their drafts
    ("t5gemma-b-b", _1["b"], ("s-s", _1["s"])),
    ("t5gemma-l-l", _1["l"], ("s-s", _1["s"])),
    ("t5gemma-xl-xl", _1["xl"], ("s-s", _1["s"])),
    ("t5gemma-2b-2b", _1["2b"], ("s-s", _1["s"])),
    ("t5gemma-9b-2b", replace(_1["2b"], encoder=_1["9b"].encoder), ("s-s", _1["s"])),
    ("t5gemma-9b-9b", _1["9b"], ("2b-2b", _1["2b"])),
    ("t5gemma-2-1b-1b", _2["1b"], ("270m-270m", _2["270m"])),
    ("t5gemma-2-4b-4b", _2["4b"], ("270m-270m", _2["270m"])),
]


def weights(config: ModelConfig, *, in_a_pass: bool) -> int:
    """Count all weights, or those that a pass over one token reads; cross keys are cached."""
    shapes = parameter_shapes(config)
    if in_a_pass:
        output = "lm_head.weight" if config.own_head else "shared.weight"
        shapes = {
            name: shape for name, shape in shapes.items()
            if name == output or (name.startswith("decoder.") and "cross_attention.kv" not in name)
        }  # fmt: skip
    return sum(math.prod(shape) for shape in shapes.values())


def step_bytes(config: ModelConfig) -> int:
    """Return the bytes that a pass over one token reads: layers, head, keys and values."""
    cached = 2 * SOURCE * config.num_key_heads * config.d_kv * config.num_decoder_layers
    return ITEM * (weights(config, in_a_pass=True) + cached)


@cache
def launched(config: ModelConfig) -> int:
    return kernels(new_model(config))


def seconds(chip: Chip, config: ModelConfig) -> float:
    """Return what a pass over one token takes."""
    return step_bytes(config) / (1e9 * chip.bandwidth) + launched(config) * 1e-6 * chip.launch


def best(chip: Chip, plain: float, step: float, rate: float) -> tuple[float, int]:
    """Return the speed over plain decoding's, and the tokens to draft for it; 0 if none pays."""
    return max(
        (tokens_per_round(rate, k) * plain / (k * step + chip.curve(k + 1) * plain), k)
        for k in LENGTHS
    )


def rows() -> Iterator[tuple[str, ...]]:
    for chip in CHIPS:
        for name, (target, draft) in PAIRS.items():
            size = ITEM * sum(weights(each, in_a_pass=False) for each in (target, draft))
            if size > FITS * 1e9 * chip.memory:
                continue
            plain, small = seconds(chip, target), seconds(chip, draft)
            sharing = seconds(chip, target.of_draft(1, target.d_ff))
            found = (
                best(chip, plain, step, rate)
                for step, rate in ((small, 0.75), (small, 0.9), (sharing, 0.75), (0.0, 0.9))
            )
            gains = [f"{gain:.1f} ({k})" if k else "no draft" for gain, k in found]
            yield (
                chip.name, f"{chip.bandwidth:g}", f"{chip.launch:g}", name, f"{1e3 * plain:.1f}",
                f"{1 / plain:.0f}", f"{1e3 * small:.2f}", *gains,
            )  # fmt: skip


def gemma_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each published T5Gemma, and its draft: a smaller one of its generation."""
    for name, target, (draft_name, draft) in GEMMAS:
        memory = {size.options: size.memory["bfloat16"] / 1e9 for size in ways(target, {})}
        row = [name, f"{weights(target, in_a_pass=False) / 1e6:,.0f} M"]
        row += [f"{memory[way]:.1f} GB" for way in ("--dtype bfloat16", "--quantize 4")]
        row.append(draft_name)
        for chip in CHIPS:
            if chip.name not in TWO:
                continue
            plain, step = seconds(chip, target), seconds(chip, draft)
            sharing = seconds(chip, target.of_draft(1, target.d_ff))
            found = [best(chip, plain, step, rate) for rate in (0.75, 0.9)]
            found.append(best(chip, plain, sharing, 0.75))
            gains = [f"{gain:.1f} ({k})" if k else "no draft" for gain, k in found]
            row += [f"{1 / plain:.0f}", *gains]
        yield tuple(row)


def main() -> None:
    """Print both tables."""
    print(
        "| chip | GB/s | µs a launch | target | ms a pass | plain, tokens/s | small draft: ms "
        "a step | accepted 0.75 | accepted 0.9 | sharing draft, 0.75 | lookup, 0.9 |"
    )
    print("|---" * 11 + "|")
    for row in rows():
        print(f"| {' | '.join(row)} |")

    chips = " | ".join(
        f"{chip}: plain | 0.75 | 0.9 | sharing, 0.75" for chip in ("M2 Max", "M4 Max")
    )
    print(f"\n| model | parameters | bfloat16 | 4 bits | draft | {chips} |")
    print("|---" * 13 + "|")
    for row in gemma_rows():
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
