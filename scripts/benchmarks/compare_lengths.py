r"""Compare num_draft "auto" with fixed numbers, on any pair, from a process's first prompts on.

    OMP_NUM_THREADS=1 python scripts/benchmarks/compare_lengths.py --prompts prompts.txt
    OMP_NUM_THREADS=1 python scripts/benchmarks/compare_lengths.py \
        --model runs/restore-base --prompts runs/restore-prompts.txt

The file has a prompt on each line; weights/training/train_tasks.py makes pairs with such files.
Each way has a process of its own, with an empty cache folder, so that nothing has been learned
before; each turn begins with new processes. Only one computes at a time: they take turns prompt by
prompt, in a random order, so that ratios hold although the machine's speed drifts. After 4 prompts,
24 are measured; then "auto" decodes 80 more, and the 24 are measured once more.

`--also OLD=FOLDER` measures "auto" of another checkout as well, with its C parts built. With one
thread, processor time is comparable, too: what else runs on the machine disturbs it less. On a busy
machine `--busy` lets the loop itself take processor time for time, so that "auto" learns from it;
waits then seem to cost nothing.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from programs.workers import Lost, Worker

AUTO = "auto"
FIRST, LATER = "first", "later"  # the two times that prompts are measured
CLOCKS = {"seconds": "tokens/s", "processor": "tokens per second of processor time"}
SHORT_PAUSE = 0.02  # seconds between two requests
Speeds = Mapping[str, float]  # of a turn, by the name of the way


@dataclass
class Measured:
    """What a way gave at one of the two times: for each turn, the answers in order of prompts."""

    turns: list[list[dict[str, Any]]] = field(default_factory=list)

    def speeds(self, clock: str) -> list[float]:
        """Return the tokens per second of each turn."""
        return [
            sum(answer["emitted"] for answer in turn) / sum(answer[clock] for answer in turn)
            for turn in self.turns
        ]

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [answer for turn in self.turns for answer in turn]

    @property
    def rounds(self) -> int:
        return sum(len(answer["rounds"]) for answer in self.answers)

    @property
    def tokens_per_pass(self) -> float:
        return sum(answer["emitted"] for answer in self.answers) / self.rounds

    @property
    def ms_per_pass(self) -> float:
        """Return the median over the turns, encoding included."""
        return 1000 * median(
            sum(answer["seconds"] for answer in turn) / sum(len(each["rounds"]) for each in turn)
            for turn in self.turns
        )

    def drafted(self) -> list[tuple[str, float]]:
        """Return what rounds were to draft, and in which share of them, the commonest first."""
        rounds = [each for answer in self.answers for each in answer["rounds"]]
        wanted = Counter(f"{by_model} + {length - by_model}" for by_model, length, *_ in rounds)
        return [(choice, count / self.rounds) for choice, count in wanted.most_common()]


Results = dict[str, dict[str, Measured]]  # by time and by the name of the way


def compare_lengths(
    prompts: Annotated[Path, typer.Option(help="Text file with a prompt on each line.")],
    model: Annotated[str, typer.Option(help="The target's folder or name.")] = "correct-base",
    draft: Annotated[
        str | None,
        typer.Option(help="The draft's folder or name, or lookup.", show_default="the target's"),
    ] = None,
    num_draft: Annotated[
        str, typer.Option(help="Numbers and ranges to compare with.")
    ] = "0-8,10,12",
    turns: Annotated[int, typer.Option(min=2, help="How often everything is measured.")] = 5,
    count: Annotated[int, typer.Option(min=1, help="Prompts to measure.")] = 24,
    before: Annotated[int, typer.Option(min=1, help="Prompts before these.")] = 4,
    later: Annotated[int, typer.Option(help='Prompts that "auto" then goes on with.')] = 80,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    also: Annotated[
        list[str] | None, typer.Option(help='NAME=FOLDER of a checkout; its "auto", too.')
    ] = None,
    busy: Annotated[
        bool, typer.Option("--busy", help="Measure and learn from processor time alone.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with every round of auto.")
    ] = False,
) -> None:
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) < before + count:
        sys.exit(f"error: {prompts} has {len(lines)} prompts, fewer than {before + count}")
    spec = {"model": model, "draft": draft}
    spec |= {"max_tokens": max_tokens, "temperature": temperature, "busy": busy}
    ways = {f"{length}": Way(spec | {"num_draft": length}) for length in read_numbers(num_draft)}
    ways[AUTO] = Way(spec | {"num_draft": AUTO})
    for name, _, folder in (each.partition("=") for each in also or ()):
        ways[f"{AUTO} {name}"] = Way(spec | {"num_draft": AUTO}, folder)
    warming, measured = lines[:before], lines[before : before + count]
    learned = list(islice(cycle(lines[before + count :] or lines), later))
    results: Results = {FIRST: {}, LATER: {}}
    try:
        for number in range(turns):
            measure_turn(ways, (warming, measured, learned), random.Random(number), results)
    except Lost as error:
        sys.exit(f"error: {error}")
    if as_json:
        print(json.dumps(as_lengths_object(results)))
    else:
        print(f"{model}, {count} prompts after {before}, {turns} turns")
        print("\n".join(report_lengths(results, later)))


@dataclass(frozen=True)
class Way:
    """A way to decode: options for the process, and a checkout whose package it uses, if any."""

    spec: dict[str, Any]
    checkout: str = ""


def read_numbers(text: str) -> list[int]:
    """Read numbers and ranges such as 0-8,10.

    >>> read_numbers("0-2,5")
    [0, 1, 2, 5]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= {*range(int(first), int(last or first) + 1)}
    return sorted(found)


def measure_turn(
    ways: Mapping[str, Way],
    parts: tuple[Sequence[str], Sequence[str], Sequence[str]],
    order: random.Random,
    results: Results,
) -> None:
    """Measure all ways in new processes, and add what they give to the results.

    The parts are the prompts for warming up, those to measure, and those to learn more from.
    """
    warming, measured, learned = parts
    with ExitStack() as stack:
        started = {name: start_way(name, way, stack) for name, way in ways.items()}
        autos = {name: each for name, each in started.items() if name.startswith(AUTO)}
        in_turn(started, warming, order)
        for when in (FIRST, LATER):
            for name, answers in in_turn(started, measured, order).items():
                results[when].setdefault(name, Measured()).turns.append(answers)
            if when == FIRST:
                in_turn(autos, learned, order)


def start_way(name: str, way: Way, stack: ExitStack) -> Worker:
    """Start a process to which nothing is known that others have learned."""
    environment = {"XDG_CACHE_HOME": stack.enter_context(tempfile.TemporaryDirectory())}
    if way.checkout:
        paths = way.checkout, os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        worker = Worker(name, way.spec, "length-worker", **environment)
    except Lost as error:
        raise Lost(f"{name}: {error}") from None
    stack.callback(worker.close)
    return worker


def in_turn(
    started: Mapping[str, Worker], prompts: Iterable[str], order: random.Random
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of all processes, asked in a new order for each prompt."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in started}
    for prompt in prompts:
        for name in order.sample(list(started), len(started)):
            answers[name].append(started[name].request(prompt=prompt))
            time.sleep(SHORT_PAUSE)
    return answers


def report_lengths(results: Results, later: int) -> list[str]:
    """Return the lines of a table of all ways, and what "auto" reached and drafted."""
    header = "", "tokens/s", f"after {later} more", "tokens/pass", "ms/pass", "other outputs"
    lines = ["", "{:16}{:>10}{:>16}{:>13}{:>9}{:>15}".format(*header)]
    expected = [answer["tokens"] for answer in next(iter(results[FIRST].values())).answers]
    for name, first in results[FIRST].items():
        then = results[LATER][name]
        speed, speed_later = (median(each.speeds("seconds")) for each in (first, then))
        others = [answer["tokens"] for answer in first.answers]
        differ = sum(a != b for a, b in zip(others, expected, strict=True))
        lines.append(
            f"{name:16}{speed:10.0f}{speed_later:16.0f}{then.tokens_per_pass:13.2f}"
            f"{then.ms_per_pass:9.2f}{differ:15}"
        )
    for name in autos_of(results):
        lines.append("")
        for clock, unit in CLOCKS.items():
            for when in (FIRST, LATER):
                ratio = ratio_line(results[when], name, clock)
                lines.append(f"{name}, {when}: {ratio}, {unit}")
        shares = [f"{choice} in {share:.0%}" for choice, share in results[LATER][name].drafted()]
        lines.append(f"{name} drafted later, by the model + by a lookup: {', '.join(shares[:6])}")
    return lines


def autos_of(results: Results) -> list[str]:
    return [name for name in results[FIRST] if name.startswith(AUTO)]


def ratio_line(measured: Mapping[str, Measured], name: str, clock: str) -> str:
    speeds = speeds_of_turns(measured, clock)
    ratios = against_best(speeds, name)
    fixed = [each for each in speeds[0] if not each.startswith(AUTO)]
    best = max(fixed, key=lambda each: median(turn[each] for turn in speeds))
    span = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"{median(ratios):.3f} of the best fixed number, {best} ({span})"


def speeds_of_turns(measured: Mapping[str, Measured], clock: str) -> list[Speeds]:
    columns = {name: each.speeds(clock) for name, each in measured.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def against_best(turns: Sequence[Speeds], name: str = AUTO) -> list[float]:
    """Return the speed of a way in each turn, by that of the best fixed length.

    The other turns choose that length: the fastest of this turn owes some of its speed to chance.
    """
    ratios: list[float] = []
    for turn in turns:
        others = [each for each in turns if each is not turn]
        fixed = [each for each in turn if not each.startswith(AUTO)]
        chosen = max(fixed, key=lambda length: fmean(each[length] for each in others))
        ratios.append(turn[name] / turn[chosen])
    return ratios


def as_lengths_object(results: Results) -> dict[str, Any]:
    """Return the results for JSON; the rounds are those of "auto" only, in order of time."""
    found: dict[str, Any] = {}
    for when, measured in results.items():
        ways = {name: figures_of(each) for name, each in measured.items()}
        ratios: dict[str, list[float]] = {}
        for name in autos_of(results):
            turns = measured[name].turns
            ways[name]["rounds"] = [[answer["rounds"] for answer in turn] for turn in turns]
            for clock in CLOCKS:
                ratios[f"{name}, {clock}"] = against_best(speeds_of_turns(measured, clock), name)
        found[when] = {"ways": ways, "of_best_fixed": ratios}
    return found | {"round": ["by the model", "num_draft", "drafted", "accepted", "ms", "typical"]}


def figures_of(way: Measured) -> dict[str, Any]:
    return {
        "tokens_per_second": way.speeds("seconds"),
        "tokens_per_processor_second": way.speeds("processor"),
        "tokens_per_pass": way.tokens_per_pass,
        "ms_per_pass": way.ms_per_pass,
    }


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(compare_lengths)
    app()
