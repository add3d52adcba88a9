"""Measure programs that decode many prompts in batches of several sizes, in turn, and report."""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from programs import PLAIN
from programs.measuring import check_agreement
from programs.workers import Lost, Workers


@dataclass
class Throughput:
    """The results of one program: the speeds of each turn in tokens/s, by the rows of a batch."""

    about: dict[str, Any]
    agree: int  # outputs that equal those of ours plain
    speeds: dict[int, list[float]] = field(default_factory=dict)

    def speed(self, batch_size: int) -> float:
        return statistics.median(self.speeds[batch_size])


def compare_batches(
    title: str,
    workers: Workers,
    prompts: Sequence[list[int]],
    max_tokens: int,
    sizes: Sequence[int],
    turns: int,
    *,
    as_json: bool = False,
) -> None:
    """Compare outputs, measure speeds, and print a report.

    The largest batches warm up and are compared; they are not timed. A program that fails is left
    out. Exits with status 1 if a program that computes in float32 gives other outputs.
    """
    outputs: dict[str, list[list[int]]] = {}
    for name in [*workers]:
        first = run(workers, name, prompts, max_tokens, max(sizes))
        if first:
            outputs[name], _ = first
    figures = {
        name: Throughput(workers[name].about, agree)
        for name, agree in check_agreement(workers, outputs).items()
    }
    order = random.Random(0)
    for _ in range(turns):
        runs = [*product(figures, sizes)]
        for name, size in order.sample(runs, len(runs)):
            again = run(workers, name, prompts, max_tokens, size) if name in workers else None
            if again:
                found, seconds = again
                speed = sum(map(len, found)) / seconds
                figures[name].speeds.setdefault(size, []).append(speed)
    figures = {name: figures[name] for name in workers}
    if as_json:
        programs = {name: asdict(one) for name, one in figures.items()}
        print(json.dumps({"title": title, "programs": programs, "left_out": workers.left_out}))
    else:
        print("\n".join([title, *report(figures, sizes, len(prompts))]))


def run(
    workers: Workers, name: str, prompts: Sequence[list[int]], max_tokens: int, batch_size: int
) -> tuple[list[list[int]], float] | None:
    """Return a program's outputs and the seconds that they took; None if it fails."""
    try:
        return workers[name].ask_all(prompts, max_tokens, batch_size)
    except Lost as error:
        workers.leave_out(name, str(error))
        return None


def report(figures: Mapping[str, Throughput], sizes: Sequence[int], prompts: int) -> list[str]:
    """Return the lines of a table: tokens/s by batch size, over ours plain; peak memory."""
    heads = "".join(f"{f'batch {size}':>18}" for size in sizes)
    lines = ["", f"{'tokens/s, over ours plain':32}{heads}{'same output':>14}{'peak':>10}"]
    for name, found in figures.items():
        cells = "".join(
            f"{found.speed(size):11.1f}{found.speed(size) / figures[PLAIN].speed(size):7.2f}"
            for size in sizes
        )
        peak = found.about.get("peak")
        memory = f"{peak / 1e9:7.2f} GB" if peak else ""
        lines.append(f"{name:32}{cells}{f'{found.agree}/{prompts}':>14}{memory}".rstrip())
    return lines
