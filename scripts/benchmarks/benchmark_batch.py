"""Measure batches with the shipped pair on held-out text: identity, throughput, memory.

    python scripts/benchmarks/benchmark_batch.py identity   --data deu.txt.xz
    python scripts/benchmarks/benchmark_batch.py throughput --data deu.txt.xz
    python scripts/benchmarks/benchmark_batch.py memory     --data deu.txt.xz

Everything is in float32. Needs the data that weights/README.md names.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import Generation
from speculative_t5.cli.progress import peak_memory

import mlx.core as mx
import typer
from texts import DataOption, engine, held_out_examples

CountOption = Annotated[int, typer.Option(help="Number of prompts.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def mixed_prompts(data: Path, count: int) -> list[str]:
    """One to four damaged sentences each."""
    return [source for source, _ in held_out_examples(data, count, single=False)]


@app.command()
def identity(data: DataOption, count: CountOption = 64) -> None:
    """Compare outputs at batch sizes 1, 3, 8 and 64: greedy and sampled, by rule and drafter."""
    prompts = mixed_prompts(data, count)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature 1": {"temperature": 1.0},
        "top-k, top-p": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    }
    wrong = 0
    for drafter in ("correct-small", "lookup", None):
        for rule in ("token", "block") if drafter else ("auto",):
            decoder = engine(drafter, verify=rule)
            for way, options in ways.items():
                alone = untimed(decoder.generate_batch(prompts, batch_size=1, **options))
                same = {}
                for size in (3, 8, 64):
                    batch = untimed(decoder.generate_batch(prompts, batch_size=size, **options))
                    same[size] = sum(a == b for a, b in zip(alone, batch, strict=True))
                    wrong += len(alone) - same[size]
                counts = ", ".join(f"{n} at {size}" for size, n in same.items())
                print(
                    f"{drafter or 'no drafter':14} {rule:6} {way:14} "
                    f"of {len(alone)} the same as at batch size 1: {counts}",
                    flush=True,
                )
    sys.exit(f"{wrong} outputs differ" if wrong else 0)


def untimed(outputs: list[Generation]) -> list[tuple[Any, ...]]:
    """Return everything about outputs that does not depend on the clock."""
    return [(o.tokens, o.finish_reason, o.stats.num_drafted, o.stats.num_accepted) for o in outputs]


@app.command()
def throughput(
    data: DataOption,
    count: CountOption = 128,
    turns: Annotated[int, typer.Option(help="How often everything is measured.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Measure tokens per second by batch size, with plain and with speculative decoding."""
    prompts = mixed_prompts(data, count)
    decoder = engine(num_draft=5)
    variants = [(speculative, size) for speculative in (False, True) for size in (1, 4, 16, 64)]
    seconds: defaultdict[tuple[bool, int], float] = defaultdict(float)
    tokens: dict[tuple[bool, int], int] = {}
    order = random.Random(0)
    for turn in range(turns + 1):
        for speculative, size in order.sample(variants, len(variants)):
            began = time.perf_counter()
            outputs = decoder.generate_batch(
                prompts[: 2 * size] if turn == 0 else prompts,
                batch_size=size, speculative=speculative, temperature=temperature,
            )  # fmt: skip
            if turn:  # the first turn warms up, and does not count
                seconds[speculative, size] += time.perf_counter() - began
                tokens[speculative, size] = sum(output.stats.emitted for output in outputs)
    print(f"{count} prompts, {turns} turns, temperature {temperature:g}, num_draft 5")
    for speculative in (False, True):
        speed = {size: turns * tokens[variant] / seconds[variant]
                 for variant in variants if variant[0] == speculative
                 for size in variant[1:]}  # fmt: skip
        row = "  ".join(f"{size}: {s:5.0f} ({s / speed[1]:.2f})" for size, s in speed.items())
        name = "speculative" if speculative else "plain"
        print(f"{name:12} tokens/s by batch size (over batch size 1): {row}")


@app.command()
def memory(
    data: DataOption,
    count: CountOption = 10_000,
    distinct: Annotated[int, typer.Option(help="Number of different prompts, repeated.")] = 100,
) -> None:
    """Print the memory used in the course of one run over many prompts."""
    few = mixed_prompts(data, distinct)
    prompts = (few[i % len(few)] for i in range(count))
    decoder = engine()
    print(f"{'prompts':>8} {'resident, MB':>14} {'peak of it':>12} {'MLX, MB':>10} {'peak':>8}")
    for done, _ in enumerate(decoder.iter_batch(enumerate(prompts), batch_size=16), 1):
        if done in (1, 100, 200, 500) or done % 1000 == 0:
            figures = (resident(), peak_memory(), mx.get_active_memory(), mx.get_peak_memory())
            now, peak, active, most = (figure / 1e6 for figure in figures)
            print(f"{done:8,} {now:14.1f} {peak:12.1f} {active:10.1f} {most:8.1f}", flush=True)


def resident() -> float:
    """Return the bytes resident now, or NaN where the system does not say (outside Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except FileNotFoundError:
        return float("nan")
    return pages * resource.getpagesize()


if __name__ == "__main__":
    app()
