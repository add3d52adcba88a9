"""What each named number of num_draft "auto" is worth: halved and doubled, on simulated devices.

    python scripts/benchmarks/vary_schedule.py          # the table of docs/schedule.md
    python scripts/benchmarks/vary_schedule.py --only RATE_DOUBT,BORROWED_TOKENS --seeds 10

Efficiency is that of simulated_devices.py: the geometric mean over all its cases and some drawn at
random, from the 5th output to the 28th of a new process ("first") and over all rounds ("whole").
"Most lost" is the case that loses most over all rounds, and how much.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Annotated

from speculative_t5.decoding import adaptive, outcomes

import typer
from simulated_devices import CASES, Case, drawn, simulate

MODULES = adaptive, outcomes
# Numbers that bound what can be chosen, name a kind of round, or say when the file is written.
FIXED = {"MAX_DRAFT", "LONGEST_RUN", "PLAIN_KIND", "SAVED_FIRST"}
SHARES_OF_ONE = {"TYPICAL_RATE", "COUNT_MEMORY", "SHARES_ALIKE", "BY_CHANCE"}  # varied by 1 - x


@dataclass(frozen=True)
class Efficiency:
    """What the schedule reached: geometric means over all cases, and each case by itself."""

    first: float
    whole: float
    by_case: Mapping[str, float]  # over all rounds


def named_numbers() -> dict[str, float]:
    """Return the numbers of the schedule by name."""
    return {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, (int, float)) and name not in FIXED
    }


def variants(name: str, value: float) -> list[float]:
    """Return a number halved and doubled; of a part of one, what it lacks is doubled and halved."""
    if name in SHARES_OF_ONE:
        return [1 - 2 * (1 - value), 1 - (1 - value) / 2]
    if isinstance(value, int):
        return [max(value // 2, 1), 2 * value]
    return [value / 2, 2 * value]


def all_cases(draws: int, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield all cases with their names, then `draws` random ones of each of three sorts."""
    yield from ((case.name, case) for case in CASES)
    for sort, lookup, noise in (
        ("", False, 0.04),
        (", noisy", False, 0.15),
        (", both", True, 0.04),
    ):
        for each in range(seed, seed + draws):
            yield f"drawn{sort}, by {each}", drawn(each, lookup=lookup, noise=noise)


def efficiency(changed: Mapping[str, float], seeds: int, draws: int, seed: int) -> Efficiency:
    """Simulate all cases with some numbers changed, in a process of its own."""
    for name, value in changed.items():
        for module in MODULES:
            if hasattr(module, name):
                setattr(module, name, value)
    found = {
        name: simulate(case, seeds=range(seeds) if case in CASES else [0])
        for name, case in all_cases(draws, seed)
    }
    return Efficiency(
        math.exp(fmean(math.log(each.first) for each in found.values())),
        math.exp(fmean(math.log(each.whole) for each in found.values())),
        {name: each.whole for name, each in found.items()},
    )


def rows(
    names: Sequence[str], measure: Callable[[dict[str, float]], Efficiency], processes: int
) -> Iterator[list[str]]:
    """Measure each number, and yield the rows of the table."""
    numbers = named_numbers()
    tried = [(name, value) for name in names for value in variants(name, numbers[name])]
    changes: list[dict[str, float]] = [{}, *({name: value} for name, value in tried)]
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        usual, *varied = pool.map(measure, changes)
    yield ["as they are", "", f"{usual.first:.3f}", f"{usual.whole:.3f}", ""]
    for (name, value), found in zip(tried, varied, strict=True):
        worst = min(found.by_case, key=lambda case: found.by_case[case] / usual.by_case[case])
        ratio = found.by_case[worst] / usual.by_case[worst]
        yield [
            f"`{name}` {numbers[name]:g}",
            f"{value:g}",
            f"{found.first - usual.first:+.3f}",
            f"{found.whole - usual.whole:+.3f}",
            f"{worst}: {ratio:.2f}" if ratio < 0.99 else "",
        ]


def main(
    only: Annotated[str, typer.Option(help="Names, with commas between them.")] = "",
    seeds: Annotated[int, typer.Option(help="Simulations of each case.")] = 6,
    draws: Annotated[int, typer.Option("--drawn", help="Cases to draw, of each sort.")] = 20,
    seed: Annotated[int, typer.Option(help="To draw by.")] = 0,
    processes: Annotated[int, typer.Option(help="Simulations at a time.")] = 2,
) -> None:
    """Print the table."""
    names = only.split(",") if only else [*named_numbers()]
    print("| number | varied | first | whole | most lost |\n|---|---|---|---|---|")
    measure = partial(efficiency, seeds=seeds, draws=draws, seed=seed)
    for row in rows(names, measure, processes):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
