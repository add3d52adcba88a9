"""Predict what chips give that nobody has measured: three tables of docs/gpu-predictions.md.

    python scripts/benchmarks/expected.py
    python scripts/benchmarks/expected.py --chip "M4 Max" --target t5-large    # works out a row

A pass over one token takes the bytes that it reads, by the chip's published bandwidth, and its
kernels, by what launching one costs; one over more takes a multiple, by a curve for the kind of
chip. From these follow plain decoding and, by equation 1 of arXiv 2211.17192, speculative decoding
with the best number of drafted tokens. It is an upper bound: no chip reaches its bandwidth, and a
Mac's host is taken to need no time.
"""

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any
from unittest.mock import patch

from speculative_t5.checkpoints.conversion import bytes_of_layout, new_layout, quantized
from speculative_t5.checkpoints.t5 import parameter_shapes
from speculative_t5.decoding import LanguageModel
from speculative_t5.kernels import metal
from speculative_t5.measure import config_of_shape
from speculative_t5.models import T5, ModelConfig, Quantization, T5Config, T5GemmaConfig, new_model

import mlx.core as mx
import typer
from simulated_devices import Curve, few_rows, mac_in_steps, mac_of_ours, mac_of_two_kernels

ITEM = 2  # bytes of a number in 16 bits
SOURCE = 256  # tokens of a prompt, whose keys and values each pass reads
FITS = 0.7  # share of memory that weights may take
TWO = ("M2 Max", "M4 Max")  # chips of T5Gemma's table
LENGTHS = (*range(17), 20, 24, 32, 40, 48, 63)  # tokens to draft
# Operations that launch nothing: they only change how an array is read.
VIEWS = set(
    "AsStrided Broadcast BroadcastAxes ExpandDims Flatten Full Reshape Slice Split Squeeze "
    "StopGradient Transpose Unflatten".split()
)
# Seconds that launching a kernel takes where it waits for the one before it. On an M3 Ultra 3,200
# such kernels took 8.8 ms (mlx#4521); what M1 and M2 take is a guess. On an H200 passes of 90 and
# of 20 kernels took 1.32 and 0.28 ms; other NVIDIA cards are taken to need as long.
LAUNCH_M3 = 2.75e-6
LAUNCH_M1 = 3.75e-6
LAUNCH_CUDA = 14.5e-6


@dataclass(frozen=True)
class Chip:
    """A chip as its maker describes it, and what launching a kernel on it costs."""

    name: str
    bandwidth: float  # GB/s, of the fastest version
    memory: int  # GB, the most that it is sold with
    launch: float  # seconds that launching a kernel takes
    curve: Curve  # cost of a pass by its tokens, in passes over one


def cuda(length: int) -> float:
    """What the shipped target took on an H200: 1.31 over 2 tokens, 1.385 over 17, the most."""
    return 1.3 + 0.005 * length if length > 1 else 1


# M1 and M2 pad products of few rows to tiles of 64, or split the sum: users saw two rows take 2.0
# times as long as one (mlx#4265). M3 and later read the weights once for every 5 rows (mlx#3888):
# both curves' heights are guesses. M1's bandwidth follows from its memory, LPDDR4X-4266 of 128
# bits; makers publish the others.
CHIPS = [
    Chip("M1", 68, 16, LAUNCH_M1, mac_of_two_kernels),
    Chip("M1 Max", 400, 64, LAUNCH_M1, mac_of_two_kernels),
    Chip("M2", 100, 24, LAUNCH_M1, mac_of_two_kernels),
    Chip("M2 Max", 400, 96, LAUNCH_M1, mac_of_two_kernels),
    Chip("M3", 100, 24, LAUNCH_M3, mac_in_steps),
    Chip("M3 Max", 400, 128, LAUNCH_M3, mac_in_steps),
    Chip("M4", 120, 32, LAUNCH_M3, mac_in_steps),
    Chip("M4 Pro", 273, 64, LAUNCH_M3, mac_in_steps),
    Chip("M4 Max", 546, 128, LAUNCH_M3, mac_in_steps),
    Chip("M3 Ultra", 819, 512, LAUNCH_M3, mac_in_steps),
    Chip("RTX 4090", 1008, 24, LAUNCH_CUDA, cuda),
    Chip("H200", 4800, 141, LAUNCH_CUDA, cuda),
]
OURS_ON = {"M1": 16, "M1 Max": 16, "M2 Max": 16, "M4 Pro": 4}  # bits; on M3 and later 16 lose
OF_MEMORY = "cross_attention.kv.weight", "memory_kv.weight"  # used once for a prompt
FLAN_SMALL = T5Config(512, 64, 1024, 6, 8, 8, vocab_size=32128, gated=True, own_head=True)
FLAN_XL = T5Config(2048, 64, 5120, 32, 24, 24, vocab_size=32128, gated=True, own_head=True)
T5_11B = T5Config(1024, 128, 65536, 128, 24, 24, vocab_size=32128)
PAIRS = {
    "t5-large": (config_of_shape("t5-large"), config_of_shape("t5-small")),
    "flan-t5-xl": (FLAN_XL, FLAN_SMALL),
    "t5-11b": (T5_11B, config_of_shape("t5-small")),
}


def mac_in_4_bits(length: int) -> float:
    """MLX's quantized products on an M4 Pro (mlx#3839): 1.03, 1.47, 2.07, 2.69 over 2, 4, 6, 8."""
    return 1.0 if length == 1 else 1.03 + 0.277 * (length - 2)


def gemmas() -> Iterator[tuple[str, ModelConfig, str, ModelConfig | None]]:
    """Yield each published T5Gemma and its draft: a smaller one of its generation, or a lookup."""
    first = {size: config_of_shape(f"t5gemma-{size}") for size in ("s", "b", "l", "xl", "2b", "9b")}
    yield "t5gemma-s-s", first["s"], "lookup", None
    for size in ("b", "l", "xl", "2b"):
        yield f"t5gemma-{size}-{size}", first[size], "s-s", first["s"]
    unequal = replace(first["2b"], encoder=first["9b"].encoder)
    yield "t5gemma-9b-2b", unequal, "s-s", first["s"]
    yield "t5gemma-9b-9b", first["9b"], "2b-2b", first["2b"]
    second = {size: config_of_shape(f"t5gemma2-{size}") for size in ("270m", "1b", "4b")}
    yield "t5gemma-2-270m-270m", second["270m"], "lookup", None
    for size in ("1b", "4b"):
        yield f"t5gemma-2-{size}-{size}", second[size], "270m-270m", second["270m"]


def weights(config: ModelConfig, *, in_a_pass: bool) -> int:
    """Count all weights, or those that a pass over one token reads; cross keys are cached."""
    shapes = parameter_shapes(config)
    if in_a_pass:
        output = "lm_head.weight" if config.own_head else "shared.weight"
        read = {name for name in shapes if name.startswith("decoder.")} | {output}
        shapes = {name: shapes[name] for name in read if not name.endswith(OF_MEMORY)}
    return sum(math.prod(shape) for shape in shapes.values())


def cached_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of the keys and values of so many tokens."""
    return ITEM * 2 * tokens * config.num_key_heads * config.d_kv * config.num_decoder_layers


def step_bytes(config: ModelConfig) -> int:
    """Return the bytes that a pass over one token reads: layers, head, keys and values."""
    return ITEM * weights(config, in_a_pass=True) + cached_bytes(config, SOURCE)


@cache
def launched(config: ModelConfig) -> int:
    """Count the kernels of a pass over one token, by a narrow model with as many layers."""
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 64, "d_ff": 64, "num_heads": 1, "num_layers": 1}
    if isinstance(config, T5GemmaConfig):
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
        narrow: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, **heads}
        stacks = ("encoder", config.encoder), ("decoder", config.decoder)
        sizes = {name: replace(stack, **narrow) for name, stack in stacks}
    return kernels(new_model(replace(config, **sizes, vocab_size=8)))


@cache
def launched_with_ours(config: T5Config) -> int:
    """Count the kernels of a pass over one token where all kernels of ours are used."""
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 64, "d_ff": 64, "num_heads": 1, "num_layers": 1}
    model = new_model(replace(config, **sizes, vocab_size=8))

    def one(**options: Any) -> list[mx.array]:
        (shape,), (dtype,) = options["output_shapes"], options["output_dtypes"]
        return [mx.depends(mx.zeros(shape, dtype), options["inputs"])]

    assert isinstance(model, T5)
    metal.use_kernels(model, {key: 1 for key, _ in metal.kernel_trials(model)})
    with patch.object(mx.fast, "metal_kernel", lambda **_: one):
        return kernels(model)


def kernels(model: LanguageModel) -> int:
    """Count the kernels that a pass over one token launches on a GPU, from its graph.

    Operations that are not views launch one; a write at an offset that only the device knows also
    computes where. Attention, normalization and rotation are taken for one each, as in MLX's
    kernels for the usual sizes; the mask is left out. What mx.compile fuses is counted unfused.
    """

    def one(x: mx.array, *others: Any, **_: Any) -> Any:
        return mx.depends(x, [each for each in others if isinstance(each, mx.array)])

    names = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
    replaced: dict[str, Any] = dict.fromkeys(names, one)
    graph = io.StringIO()
    mx.disable_compile()
    try:
        with patch.multiple(mx.fast, **replaced):
            session, ((*_, last),) = model.start([[model.info.eos_token_id]])
            token = mx.array([[last]], dtype=mx.int32)
            mx.eval(session.step_argmax(token))  # now there are caches
            mx.export_to_dot(graph, session.step_argmax(token))
    finally:
        mx.enable_compile()
    found = Counter(re.findall(r'label ?= ?"([A-Za-z0-9]+)', graph.getvalue()))
    return sum(
        count * (2 if name == "DynamicSliceUpdate" else 1)
        for name, count in found.items()
        if name not in VIEWS
    )


def seconds(chip: Chip, config: ModelConfig) -> float:
    """Return what a pass over one token takes."""
    return step_bytes(config) / (1e9 * chip.bandwidth) + launched(config) * chip.launch


def sharing_seconds(chip: Chip, target: ModelConfig) -> float:
    """Return what a pass takes of the draft that `distill` makes: narrow, so one product more."""
    draft = target.of_draft(1, target.d_ff, target.d_model // 4)
    return seconds(chip, draft) + chip.launch


def tokens_per_round(rate: float, num_draft: int) -> float:
    """Return the tokens that a round emits if each is accepted at a rate (2211.17192, eq. 1)."""
    return sum(rate**place for place in range(num_draft + 1))


def best(chip: Chip, plain: float, step: float, rate: float) -> tuple[float, int]:
    """Return the speed over plain decoding's, and the tokens to draft for it; 0 if none pays."""
    return max(
        (tokens_per_round(rate, k) * plain / (k * step + chip.curve(k + 1) * plain), k)
        for k in LENGTHS
    )


def gain(chip: Chip, plain: float, step: float, rate: float) -> str:
    """Return the cell of a table: the best speed over plain decoding's, and its draft length."""
    times, length = best(chip, plain, step, rate)
    return f"{times:.1f} ({length})" if length else "no draft"


def fits(chip: Chip, target: ModelConfig, draft: ModelConfig) -> bool:
    """Say whether a pair's weights leave enough of the chip's memory."""
    size = ITEM * sum(weights(each, in_a_pass=False) for each in (target, draft))
    return size <= FITS * 1e9 * chip.memory


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each chip and each target that fits into its memory."""
    for chip in CHIPS:
        for name, (target, draft) in PAIRS.items():
            if not fits(chip, target, draft):
                continue
            plain, small = seconds(chip, target), seconds(chip, draft)
            sharing = sharing_seconds(chip, target)
            about_chip = chip.name, f"{chip.bandwidth:g}", f"{1e6 * chip.launch:g}"
            about_pass = name, f"{1e3 * plain:.1f}", f"{1 / plain:.0f}", f"{1e3 * small:.2f}"
            drafts = (small, 0.75), (small, 0.9), (sharing, 0.75), (0.0, 0.9)
            gains = [gain(chip, plain, step, rate) for step, rate in drafts]
            yield (*about_chip, *about_pass, *gains)


def worked(chip: Chip, name: str, rate: float = 0.75) -> Iterator[tuple[str, str]]:
    """Yield how a row comes about, in labels and values: its pass, then a round of its draft."""
    target, draft = PAIRS[name]
    plain, step, launches = seconds(chip, target), seconds(chip, draft), launched(target)
    cached, read = cached_bytes(target, SOURCE), step_bytes(target)
    yield f"weights of {name}'s decoder layers and head", f"{(read - cached) / 1e9:.2f} GB"
    yield f"keys and values of {SOURCE} source tokens", f"{cached / 1e9:.2f} GB"
    yield f"reading both at {chip.bandwidth:g} GB/s", f"{read / chip.bandwidth / 1e6:.2f} ms"
    yield (
        f"{launches} kernels of {1e6 * chip.launch:g} µs",
        f"{1e3 * launches * chip.launch:.2f} ms",
    )
    yield "so a pass over one token", f"{1e3 * plain:.2f} ms"
    yield "plain decoding", f"{1 / plain:.0f} tokens/s"

    _, length = best(chip, plain, step, rate)
    emitted, verify = tokens_per_round(rate, length), chip.curve(length + 1)
    spent = length * step + verify * plain
    yield f"a round that drafts {length}, accepted at {rate:g}", f"{emitted:.2f} tokens"
    yield f"drafting: {length} times {1e3 * step:.2f} ms", f"{1e3 * length * step:.2f} ms"
    yield f"verifying: {verify:.2f} times a pass over one", f"{1e3 * verify * plain:.2f} ms"
    yield "over plain decoding", f"{emitted * plain / spent:.1f} times"


def rows_with_ours() -> Iterator[tuple[str, ...]]:
    """Yield a row for a few chips and each target that fits, with MLX's kernels and with ours."""
    for chip in (each for each in CHIPS if each.name in OURS_ON):
        bits = OURS_ON[chip.name]
        curve = chip.curve if bits == 16 else mac_in_4_bits
        size = 1.0 if bits == 16 else 4.5 / 16  # groups of 64 have a scale and a bias
        for name, (target, draft) in PAIRS.items():
            if not fits(chip, target, draft):
                continue
            sharing = target.of_draft(1, target.d_ff, target.d_model // 4)
            row = [chip.name, name, str(bits)]
            ours = mac_of_ours if bits == 16 else few_rows
            for own_curve, count in ((curve, launched), (ours, launched_with_ours)):
                here = replace(chip, curve=own_curve)
                plain, *steps = (
                    step_bytes(each) * size / (1e9 * chip.bandwidth) + count(each) * chip.launch
                    for each in (target, draft, sharing)
                )
                gains = [gain(here, plain, step, 0.75) for step in steps]
                row += [str(count(target)), f"{1e3 * plain:.1f}", *gains]
            yield tuple(row)


def memory(config: ModelConfig) -> int:
    """Return the bytes of a model, and of the keys and values of 512 source and 256 output tokens.

    All are in 16 bits, except matrices that are quantized.
    """
    return bytes_of_layout(new_layout(config, mx.bfloat16)) + cached_bytes(config, 512 + 256)


def gemma_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each published T5Gemma, and its draft: a smaller one of its generation."""
    chips = [chip for chip in CHIPS if chip.name in TWO]
    for name, target, draft_name, draft in gemmas():
        row = [name, f"{weights(target, in_a_pass=False) / 1e6:,.0f} M"]
        for config in (target, quantized(target, Quantization(4))):
            row.append(f"{memory(config) / 1e9:.1f} GB")
        row.append(draft_name)
        for chip in chips:
            plain, step = seconds(chip, target), seconds(chip, draft) if draft else 0.0
            sharing = sharing_seconds(chip, target)
            drafts = (step, 0.75), (step, 0.9), (sharing, 0.75)
            row += [f"{1 / plain:.0f}", *(gain(chip, plain, cost, rate) for cost, rate in drafts)]
        yield tuple(row)


def print_tables() -> None:
    """Print the tables in Markdown."""
    print(
        "| chip | GB/s | µs a launch | target | ms a pass | plain, tokens/s | small draft: ms "
        "a step | accepted 0.75 | accepted 0.9 | sharing draft, 0.75 | lookup, 0.9 |"
    )
    print("|---" * 11 + "|")
    for row in rows():
        print(f"| {' | '.join(row)} |")

    chips = " | ".join(f"{chip}: plain | 0.75 | 0.9 | sharing, 0.75" for chip in TWO)
    print(f"\n| model | parameters | bfloat16 | 4 bits | draft | {chips} |")
    print("|---" * 13 + "|")
    for row in gemma_rows():
        print(f"| {' | '.join(row)} |")

    kinds = " | ".join(
        f"{whose}: kernels | ms a pass | small draft, 0.75 | sharing draft, 0.75"
        for whose in ("MLX's", "ours")
    )
    print(f"\n| chip | target | bits | {kinds} |")
    print("|---" * 11 + "|")
    for row in rows_with_ours():
        print(f"| {' | '.join(row)} |")


def main(
    chip: Annotated[str, typer.Option(help="Work out a row of this chip.")] = "",
    target: Annotated[str, typer.Option(help="Its target.")] = "t5-large",
) -> None:
    """Print the tables, or how a row of the first comes about."""
    if not chip:
        return print_tables()
    chips = {each.name: each for each in CHIPS}
    if chip not in chips or target not in PAIRS:
        sys.exit(f"error: choose --chip from {', '.join(chips)}, --target from {', '.join(PAIRS)}")
    for label, value in worked(chips[chip], target):
        print(f"{label:<50} {value:>12}")


if __name__ == "__main__":
    typer.run(main)
