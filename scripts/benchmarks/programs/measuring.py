"""Compare the outputs of programs, measure their speed in turn, and report."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from programs import INEXACT, PLAIN, SPECULATIVE
from programs.workers import Worker

TOLERATED = 1 / 20  # of the outputs: float32 programs may round near-ties differently


@dataclass
class Figures:
    """The results of one program.

    Attributes:
        about: Versions, threads and a note.
        agree: Number of outputs that equal those of ours plain.
        speeds: Tokens per second of each turn.
    """

    about: dict[str, Any]
    agree: int = 0
    speeds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def compare(
    title: str,
    workers: Mapping[str, Worker],
    prompts: Sequence[list[int]],
    max_tokens: int,
    turns: int,
    *,
    exact_length: bool = False,  # whether every output must have `max_tokens` tokens
) -> dict[str, Figures]:
    """Compare outputs, measure speeds, print a report and return the figures.

    Exits with status 1 if a program that computes in float32 gives other outputs.
    """
    figures = {name: Figures(program.about) for name, program in workers.items()}
    order = random.Random(0)
    outputs: dict[str, list[list[int]]] = {name: [] for name in workers}
    for name, output, _ in turn(workers, prompts, max_tokens, order):
        outputs[name].append(output)
    print(title)
    count_agreement(figures, outputs, max_tokens if exact_length else None)
    for _ in range(turns):
        tokens, seconds = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0.0)
        for name, output, spent in turn(workers, prompts, max_tokens, order):
            tokens[name] += len(output)
            seconds[name] += spent
        for name, program in figures.items():
            program.speeds.append(tokens[name] / seconds[name])
    print("\n".join(report(figures)))
    return figures


def turn(
    workers: Mapping[str, Worker],
    prompts: Sequence[list[int]],
    max_tokens: int,
    order: random.Random,
) -> Iterator[tuple[str, list[int], float]]:
    """Run every prompt once by every program: its name, the output and the seconds."""
    names = order.sample(list(workers), len(workers))
    for ids in prompts:
        for name in names:
            yield name, *workers[name].ask(ids, max_tokens)


def count_agreement(
    figures: dict[str, Figures], outputs: dict[str, list[list[int]]], length: int | None
) -> None:
    """Count and print the outputs that equal those of ours plain; exit if too few do."""
    wrong = []
    for name, program in figures.items():
        expected = outputs[PLAIN]
        program.agree = sum(a == b for a, b in zip(outputs[name], expected, strict=True))
        if name != PLAIN:
            print(f"{name}: {program.agree} of {len(expected)} outputs agree", flush=True)
        if name not in INEXACT and len(expected) - program.agree > TOLERATED * len(expected):
            wrong.append(name)
        if length is not None and {*map(len, outputs[name])} != {length}:
            sys.exit(f"error: {name} gave outputs of other than {length} tokens")
    if wrong:
        sys.exit(f"error: more than one output in twenty differs: {', '.join(wrong)}")


def report(figures: dict[str, Figures]) -> list[str]:
    """Return the lines of a table of speeds, then of versions, threads and notes."""
    plain, speculative = figures[PLAIN].speed, figures.get(SPECULATIVE)
    lines = [
        "",
        f"{'':22} {'tokens/s':>9} {'min-max of turns':>17} {'over plain':>13} "
        f"{'speculative over it':>20}",
    ]
    for name, found in figures.items():
        spread = f"{min(found.speeds):.1f}-{max(found.speeds):.1f}"
        over = f"{speculative.speed / found.speed:.2f}" if speculative else ""
        lines.append(
            f"{name:22} {found.speed:9.1f} {spread:>17} {found.speed / plain:13.2f} {over:>20}"
        )
    lines.append("")
    for name, found in figures.items():
        packages = " ".join(f"{package} {v}" for package, v in found.about["versions"].items())
        note = f"; {found.about['note']}" if found.about.get("note") else ""
        lines.append(f"{name}: {packages}; threads {found.about['threads']}{note}")
    return lines
