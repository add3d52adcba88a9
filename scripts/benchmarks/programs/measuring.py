"""Compare the outputs of programs, measure their speed in turn, and report."""

import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from programs import PLAIN, SPECULATIVE
from programs.workers import Lost, Workers

TOLERATED = 1 / 20  # of the outputs: float32 programs may round near-ties differently


@dataclass
class Figures:
    """The results of one program."""

    about: dict[str, Any]  # versions, device, type, threads and a note
    agree: int  # outputs that equal those of ours plain
    speeds: list[float] = field(default_factory=list)  # tokens per second of each turn

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def compare(
    title: str,
    workers: Workers,
    prompts: Sequence[list[int]],
    max_tokens: int,
    turns: int,
    *,
    exact_length: bool = False,  # whether every output must have `max_tokens` tokens
    unlike: Sequence[str] = (),  # programs that may give other outputs
    as_json: bool = False,
) -> dict[str, Figures]:
    """Compare outputs, measure speeds, print a report and return the figures.

    A program that fails is left out from then on. Exits with status 1 if a program that computes in
    float32 gives other outputs.
    """
    order = random.Random(0)
    outputs: dict[str, list[list[int]]] = {name: [] for name in workers}
    for name, output, _ in turn(workers, prompts, max_tokens, order):
        outputs[name].append(output)
    for name in [*workers] if exact_length else []:
        if {*map(len, outputs[name])} != {max_tokens}:
            workers.leave_out(name, f"it gave outputs of other than {max_tokens} tokens")
    figures = {
        name: Figures(workers[name].about, agree)
        for name, agree in check_agreement(workers, outputs, unlike).items()
    }
    for _ in range(turns):
        tokens, seconds = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0.0)
        for name, output, spent in turn(workers, prompts, max_tokens, order):
            tokens[name] += len(output)
            seconds[name] += spent
        for name in workers:
            figures[name].speeds.append(tokens[name] / seconds[name])
    figures = {name: figures[name] for name in workers}
    if as_json:
        print(as_object(title, figures, len(prompts), workers.left_out))
    else:
        print("\n".join([title, *report(figures, len(prompts))]))
    return figures


def turn(
    workers: Workers, prompts: Sequence[list[int]], max_tokens: int, order: random.Random
) -> Iterator[tuple[str, list[int], float]]:
    """Run every prompt once by every program: its name, the output and the seconds."""
    names = order.sample(list(workers), len(workers))
    for ids in prompts:
        for name in [name for name in names if name in workers]:
            try:
                answer = workers[name].ask(ids, max_tokens)
            except Lost as error:
                workers.leave_out(name, str(error))
            else:
                yield name, *answer


def check_agreement(
    workers: Workers, outputs: Mapping[str, list[list[int]]], unlike: Sequence[str] = ()
) -> dict[str, int]:
    """Return how many outputs equal those of ours plain; exit if too few do in float32."""
    expected, agree, wrong = outputs[PLAIN], {}, []
    for name, program in workers.items():
        agree[name] = sum(a == b for a, b in zip(outputs[name], expected, strict=True))
        differ = len(expected) - agree[name]
        alike = program.about["dtype"] == "float32" and name not in unlike
        if alike and differ > TOLERATED * len(expected):
            wrong.append(f"{name} ({differ} of {len(expected)})")
    if wrong:
        sys.exit(f"error: more than one output in twenty differs: {', '.join(wrong)}")
    return agree


def as_object(
    title: str, figures: Mapping[str, Figures], outputs: int, left_out: Mapping[str, str]
) -> str:
    """Return the report as a line of JSON."""
    programs = {
        name: {"tokens_per_second": found.speed, "outputs": outputs, **asdict(found)}
        for name, found in figures.items()
    }
    return json.dumps({"title": title, "programs": programs, "left_out": dict(left_out)})


def report(figures: Mapping[str, Figures], outputs: int) -> list[str]:
    """Return the lines of a table of speeds, then of versions, threads and notes."""
    plain, speculative = figures[PLAIN].speed, figures.get(SPECULATIVE)
    lines = [
        "",
        f"{'':28} {'device':>6} {'type':>13} {'tokens/s':>8} {'min-max of turns':>17} "
        f"{'over plain':>10} {'speculative over it':>19} {'same output':>11} {'peak':>8}",
    ]
    for name, found in figures.items():
        device, dtype = found.about["device"], found.about["dtype"]
        spread = f"{min(found.speeds):.1f}-{max(found.speeds):.1f}"
        over = f"{speculative.speed / found.speed:.2f}" if speculative else ""
        peak = found.about.get("peak")
        memory = f"{peak / 1e9:.2f} GB" if peak else ""
        lines.append(
            f"{name:28} {device:>6} {dtype:>13} {found.speed:8.1f} {spread:>17} "
            f"{found.speed / plain:10.2f} {over:>19} {f'{found.agree}/{outputs}':>11} {memory:>8}"
        )
    lines.append("")
    for name, found in figures.items():
        packages = " ".join(f"{package} {v}" for package, v in found.about["versions"].items())
        note = f"; {found.about['note']}" if found.about.get("note") else ""
        lines.append(f"{name}: {packages}; threads {found.about['threads']}{note}")
    return lines
