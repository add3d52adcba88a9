"""Predict what chips give that nobody has measured: two tables of docs/gpu.md and families.md.

    python scripts/benchmarks/expected.py

A pass over one token takes the bytes that it reads, by the chip's published bandwidth, and its
kernels, by what launching one costs; one over more takes a multiple, by a curve for the kind of
chip. From these follow plain decoding and, by equation 1 of arXiv 2211.17192, speculative decoding
with the best number of drafted tokens. It is an upper bound: no chip reaches its bandwidth, and a
Mac's host is taken to need no time.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from speculative_t5.checkpoints.conversion import new_layout, num_bytes, quantized
from speculative_t5.checkpoints.t5 import parameter_shapes
from speculative_t5.decoding import LanguageModel
from speculative_t5.measure.synthetic import SHAPES
from speculative_t5.models import ModelConfig, Quantization, T5Config, T5GemmaConfig, new_model

import mlx.core as mx
from simulated_devices import Curve, mac_in_steps, mac_of_two_kernels

ITEM = 2  # bytes of a number in 16 bits
SOURCE = 256  # tokens of a prompt, whose keys and values each pass reads
FITS = 0.7  # share of memory that weights may take
TWO = ("M2 Max", "M4 Max")  # chips of T5Gemma's table
LENGTHS = (*range(17), 20, 24, 32, 40, 48, 63)  # tokens to draft
# Operations that launch nothing: they only change how an array is read.
VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Full", "Reshape", "Slice",
    "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten",
}  # fmt: skip


@dataclass(frozen=True)
class Chip:
    """A chip as its maker describes it, and what launching a kernel on it costs."""

    name: str
    bandwidth: float  # GB/s
    memory: int  # GB, the most that it is sold with
    launch: float  # microseconds, see docs/gpu.md
    curve: Curve  # cost of a pass by its tokens, in passes over one


def cuda(length: int) -> float:
    """What the shipped target took on an H200, over 1 to 17 tokens."""
    return 1.3 + 0.005 * length if length > 1 else 1


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
    Chip("RTX 4090", 1008, 24, 14.5, cuda),
    Chip("H200", 4800, 141, 14.5, cuda),
]
OF_MEMORY = "cross_attention.kv.weight", "memory_kv.weight"  # used once for a prompt
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
GEMMAS: list[tuple[str, ModelConfig, tuple[str, ModelConfig | None]]] = [  # with their drafts
    ("t5gemma-s-s", _1["s"], ("lookup", None)),
    ("t5gemma-b-b", _1["b"], ("s-s", _1["s"])),
    ("t5gemma-l-l", _1["l"], ("s-s", _1["s"])),
    ("t5gemma-xl-xl", _1["xl"], ("s-s", _1["s"])),
    ("t5gemma-2b-2b", _1["2b"], ("s-s", _1["s"])),
    ("t5gemma-9b-2b", replace(_1["2b"], encoder=_1["9b"].encoder), ("s-s", _1["s"])),
    ("t5gemma-9b-9b", _1["9b"], ("2b-2b", _1["2b"])),
    ("t5gemma-2-270m-270m", _2["270m"], ("lookup", None)),
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
            if name == output or (name.startswith("decoder.") and not name.endswith(OF_MEMORY))
        }  # fmt: skip
    return sum(math.prod(shape) for shape in shapes.values())


def step_bytes(config: ModelConfig) -> int:
    """Return the bytes that a pass over one token reads: layers, head, keys and values."""
    cached = 2 * SOURCE * config.num_key_heads * config.d_kv * config.num_decoder_layers
    return ITEM * (weights(config, in_a_pass=True) + cached)


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
    return step_bytes(config) / (1e9 * chip.bandwidth) + launched(config) * 1e-6 * chip.launch


def sharing_seconds(chip: Chip, target: ModelConfig) -> float:
    """Return what a pass takes of the draft that `distill` makes: narrow, so one product more."""
    draft = target.of_draft(1, target.d_ff, target.d_model // 4)
    return seconds(chip, draft) + 1e-6 * chip.launch


def tokens_per_round(rate: float, num_draft: int) -> float:
    """Return the tokens that a round emits if each is accepted at a rate (2211.17192, eq. 1)."""
    return sum(rate**place for place in range(num_draft + 1))


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
            sharing = sharing_seconds(chip, target)
            found = (
                best(chip, plain, step, rate)
                for step, rate in ((small, 0.75), (small, 0.9), (sharing, 0.75), (0.0, 0.9))
            )
            gains = [f"{gain:.1f} ({k})" if k else "no draft" for gain, k in found]
            yield (
                chip.name, f"{chip.bandwidth:g}", f"{chip.launch:g}", name, f"{1e3 * plain:.1f}",
                f"{1 / plain:.0f}", f"{1e3 * small:.2f}", *gains,
            )  # fmt: skip


def memory(config: ModelConfig) -> int:
    """Return the bytes of a model, and of the keys and values of 512 source and 256 output tokens.

    All are in 16 bits, except matrices that are quantized.
    """
    cached = 2 * config.num_decoder_layers * config.num_key_heads * config.d_kv * (512 + 256)
    return num_bytes(new_layout(config, mx.bfloat16)) + cached * ITEM


def gemma_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each published T5Gemma, and its draft: a smaller one of its generation."""
    for name, target, (draft_name, draft) in GEMMAS:
        row = [name, f"{weights(target, in_a_pass=False) / 1e6:,.0f} M"]
        row += [
            f"{memory(config) / 1e9:.1f} GB"
            for config in (target, quantized(target, Quantization(4)))
        ]
        row.append(draft_name)
        for chip in CHIPS:
            if chip.name not in TWO:
                continue
            plain, step = seconds(chip, target), seconds(chip, draft) if draft else 0.0
            sharing = sharing_seconds(chip, target)
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
