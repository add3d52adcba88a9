"""Count the sums of a T5's passes when it is split, and predict their time between two Macs.

Nothing here is measured: the counts are those of real passes of a model with few and narrow heads,
and the times follow from them and from what others have published about links and memories.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from speculative_t5.bench.synthetic import SHAPES as KNOWN
from speculative_t5.checkpoints.t5 import plan
from speculative_t5.models import T5, T5Config, split_of

import mlx.core as mx

SHAPES = KNOWN | {"t5-11b": replace(KNOWN["t5-3b"], d_ff=65536, num_heads=128)}
NARROW: dict[str, Any] = {"num_heads": 2, "d_kv": 8, "d_ff": 16, "vocab_size": 64}
SOURCE = 512  # tokens to encode


@dataclass(frozen=True)
class Link:
    """How two Macs are connected; seconds and bytes a second, in one direction.

    Attributes:
        steps: Exchanges after each other in a sum. MLX's ring (mlx/distributed/ring/ring.cpp) lets
            each of two processes send a half, and then the half that it has added up; JACCL's mesh
            (jaccl/mesh_impl.h) sends all at once. Either way a process sends as many bytes as the
            array has.
        latency: Of one exchange of few bytes, the least and the most that was found.
    """

    name: str
    steps: int
    latency: tuple[float, float]
    bandwidth: float


LINKS = (
    # Least: between programs on two tuned Linux PCs, Hurwitz and Feng, Hot Interconnects 2003.
    # Most: nothing found for Macs; an assumption, as TCP over Thunderbolt. Bandwidth: nominal.
    Link("10 Gbit/s Ethernet", 2, (20e-6, 300e-6), 1.25e9),
    # Half of the round trips of 0.38 to 0.95 ms between M3 Ultras at work, exo#2295; 300 us is also
    # what jeffgeerling.com/blog/2025/15-tb-vram-on-mac-studio-rdma-over-thunderbolt-5 says.
    # Bandwidth: 16.4 Gbit/s from a MacBook Pro M2 to a PC by USB4, jiribrejcha.net (iperf3).
    Link("Thunderbolt, TCP", 2, (190e-6, 475e-6), 2.05e9),
    # Least: ib_send_lat between two Macs, github.com/hellas-ai/thunderbolt-ibverbs/pull/28; most:
    # "< 50 us", jeffgeerling.com as above. Bandwidth: files sent through MLX, mlx#3207.
    Link("Thunderbolt 5, RDMA", 1, (4.15e-6, 50e-6), 3.8e9),
)
# A sum runs on the CPU, and the GPU waits: an all-reduce of two processes on one M3 Max took
# 16.5 us with MLX_METAL_FAST_SYNCH=1, which may hang (mlx#3830), and 150 us without (mlx#1773).
WAIT = (16.5e-6, 150e-6)
# Bandwidth of memory, bytes a second, as Apple states it, and whether there is RDMA: Thunderbolt 5.
CHIPS = {"M4 Max": (546e9, True), "M2 Pro": (200e9, False)}


@dataclass(frozen=True)
class Sums:
    """The sums of one pass: how many, and the bytes of all of them together."""

    count: int
    nbytes: int

    def seconds(self, link: Link) -> tuple[float, float]:
        """Return the least and the most time that they may take, GPUs' waiting included."""
        moving = self.nbytes / link.bandwidth
        least, most = (
            self.count * (wait + link.steps * latency) + moving
            for wait, latency in zip(WAIT, link.latency, strict=True)
        )
        return least, most


class Pair:
    """Stands for a group of two processes, of which this is the first."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def split_model(config: T5Config) -> T5:
    """Make half of a model that is as deep and d_model as wide as `config`, and else narrow."""
    model = T5(replace(config, **NARROW))
    model.set_dtype(mx.bfloat16)
    model.shard(Pair())  # type: ignore[arg-type]
    return model


def count_encoder(model: T5, batch: int, length: int) -> Sums:
    """Count the sums of encoding sources of some length, for cross-attention too."""
    return _counted(lambda: model.encode(mx.ones((batch, length), mx.int32), None))


def count_decoder(model: T5, batch: int, num_draft: int) -> Sums:
    """Count the sums of one pass that checks `num_draft` tokens in every row."""
    model.recompile()  # so that the pass is traced, and not run as it was traced before
    tokens = mx.ones((batch, num_draft + 1), mx.int32)
    with patch.object(mx.distributed, "all_sum", lambda x, **_: x):
        session, _ = model.start([[5, 6, 1]] * batch)
    return _counted(lambda: session.step(tokens))


def _counted(run: Callable[[], object]) -> Sums:
    sizes = []

    def all_sum(x: mx.array, **_: object) -> mx.array:
        sizes.append(x.nbytes)
        return x

    with patch.object(mx.distributed, "all_sum", all_sum):
        mx.eval(run())
    return Sums(len(sizes), sum(sizes))


def bytes_read(config: T5Config, processes: int) -> float:
    """Return the bytes of the weights that a process reads in a pass of the decoder, in bfloat16.

    Keys and values of the source have been made before; the head, which may be the embedding, and
    norms are whole in each process.
    """
    total = 0.0
    for parameter in plan(config):
        ours = parameter.name
        head = ours == ("lm_head.weight" if config.own_head else "shared.weight")
        if head or (ours.startswith("decoder.") and "cross_attention.kv" not in ours):
            size = sum(map(math.prod, parameter.sources.values())) * mx.bfloat16.size
            total += size / (1 if split_of(ours, config) is None else processes)
    return total


def print_messages(shape: str) -> None:
    """Print the counts of a shape's passes."""
    model = split_model(SHAPES[shape])
    print(f"{shape}, bfloat16: sums of a pass, and bytes that each of two processes sends")
    print(f"  encoder, {SOURCE} tokens           {_shown(count_encoder(model, 1, SOURCE))}")
    for batch in (1, 16):
        for num_draft in (0, 5):
            sums = count_decoder(model, batch, num_draft)
            print(f"  decoder, K = {num_draft}, batch of {batch:<4}    {_shown(sums)}")


def _shown(sums: Sums) -> str:
    return (
        f"{sums.count:3} x {sums.nbytes / sums.count / 1e3:6.1f} kB = {sums.nbytes / 1e6:5.2f} MB"
    )


def print_times(shape: str) -> None:
    """Print what the counts say of two Macs, as least to most."""
    config = SHAPES[shape]
    model = split_model(config)
    print("\npredicted ms of the sums alone, least to most")
    passes = {
        f"encoder, {SOURCE} tokens": count_encoder(model, 1, SOURCE),
        "K = 0": count_decoder(model, 1, 0),
        "K = 5": count_decoder(model, 1, 5),
        "K = 5, batch of 16": count_decoder(model, 16, 5),
    }
    print(f"{'':20}" + "".join(f"{name:>22}" for name in passes))
    for link in LINKS:
        cells = (_range(sums.seconds(link)) for sums in passes.values())
        print(f"{link.name:20}" + "".join(f"{cell:>22}" for cell in cells))
    print(
        "\npredicted ms of a pass of the decoder, K = 5, one prompt: reading weights, and the sums"
    )
    print(f"{'':20}" + "".join(f"{chip:>22}" for chip in CHIPS))
    for count, name in ((1, "one Mac, no sums"), (2, "two Macs, no sums")):
        cells = (f"{1e3 * bytes_read(config, count) / speed:.1f}" for speed, _ in CHIPS.values())
        print(f"{name:20}" + "".join(f"{cell:>22}" for cell in cells))
    for link in LINKS:
        print(f"{link.name:20}", end="")
        for speed, has_rdma in CHIPS.values():
            read = bytes_read(config, 2) / speed
            least, most = passes["K = 5"].seconds(link)
            possible = has_rdma or "RDMA" not in link.name
            print(f"{_range((read + least, read + most)) if possible else '-':>22}", end="")
        print()


def _range(seconds: tuple[float, float]) -> str:
    return " to ".join(f"{1e3 * each:.1f}" for each in seconds)
