"""Predict what chips give that nobody has measured: the table "What to expect" of docs/gpu.md.

    python scripts/benchmarks/expected.py

A pass over one token takes the bytes that it reads, by the chip's published bandwidth, and its
kernels, by what launching one costs; one over more takes a multiple, by a curve for the kind of
chip. From these follow plain decoding and, by equation 1 of arXiv 2211.17192, speculative decoding
with the best number of drafted tokens. It is an upper bound: no chip reaches its bandwidth, and the
host takes no time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from speculative_t5.bench.synthetic import SHAPES
from speculative_t5.doctor.speed import kernels, tokens_per_round
from speculative_t5.models import T5, T5Config

from simulated_devices import Curve, launches, mac_in_steps, mac_of_two_kernels

ITEM = 2  # bytes of a number in 16 bits
SOURCE = 256  # tokens of a prompt, whose keys and values each pass reads
FITS = 0.7  # share of memory that weights may take
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


def layer_weights(config: T5Config) -> int:
    """Count a decoder layer's weights that a pass reads; cross-attention's K and V are cached."""
    attention = 6 * config.d_model * config.num_heads * config.d_kv
    return attention + (2 + config.gated) * config.d_model * config.d_ff


def step_bytes(config: T5Config) -> int:
    """Return the bytes that a pass over one token reads: layers, head, keys and values."""
    cached = 2 * SOURCE * config.num_heads * config.d_kv
    layers = config.num_decoder_layers * (layer_weights(config) + cached)
    return ITEM * (layers + config.d_model * config.vocab_size)


def model_bytes(config: T5Config) -> int:
    """Return about as many bytes as all weights take."""
    inner = config.d_model * config.num_heads * config.d_kv
    decoder = config.num_decoder_layers * (layer_weights(config) + 2 * inner)
    encoder = config.num_layers * (layer_weights(config) - 2 * inner)
    return ITEM * (decoder + encoder + (1 + config.own_head) * config.d_model * config.vocab_size)


def seconds(chip: Chip, config: T5Config) -> float:
    """Return what a pass over one token takes."""
    launched = kernels(T5(replace(config, d_model=64, d_ff=64)))
    return step_bytes(config) / (1e9 * chip.bandwidth) + launched * 1e-6 * chip.launch


def best(chip: Chip, plain: float, step: float, rate: float) -> tuple[float, int]:
    """Return the speed over plain decoding's, and the tokens to draft for it; 0 if none pays."""
    return max(
        (tokens_per_round(rate, k) * plain / (k * step + chip.curve(k + 1) * plain), k)
        for k in LENGTHS
    )


def rows() -> Iterator[tuple[str, ...]]:
    for chip in CHIPS:
        for name, (target, draft) in PAIRS.items():
            if model_bytes(target) + model_bytes(draft) > FITS * 1e9 * chip.memory:
                continue
            plain, small = seconds(chip, target), seconds(chip, draft)
            sharing = seconds(chip, replace(target, num_decoder_layers=1))
            found = (
                best(chip, plain, step, rate)
                for step, rate in ((small, 0.75), (small, 0.9), (sharing, 0.75), (0.0, 0.9))
            )
            gains = [f"{gain:.1f} ({k})" if k else "no draft" for gain, k in found]
            yield (
                chip.name, f"{chip.bandwidth:g}", f"{chip.launch:g}", name, f"{1e3 * plain:.1f}",
                f"{1 / plain:.0f}", f"{1e3 * small:.2f}", *gains,
            )  # fmt: skip


def main() -> None:
    """Print the table."""
    print(
        "| chip | GB/s | µs a launch | target | ms a pass | plain, tokens/s | small draft: ms "
        "a step | accepted 0.75 | accepted 0.9 | sharing draft, 0.75 | lookup, 0.9 |"
    )
    print("|---" * 11 + "|")
    for row in rows():
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
