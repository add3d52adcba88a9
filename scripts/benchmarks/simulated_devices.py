"""Let num_draft "auto" choose on devices that are not at hand: a cost model in place of the clock.

    python scripts/benchmarks/simulated_devices.py            # a table of docs/gpu-predictions.md
    python scripts/benchmarks/simulated_devices.py --seeds 20 --rounds 2000

Costs are in passes of the target over one token. Efficiency is the speed reached, by that of the
best fixed length in hindsight, over all rounds and over the last half; and over the last half where
each output has a process of its own. Every simulation begins as a new machine does, with nothing
learned; in each process the first round of each length takes one pass longer, as a shape is
compiled, a draft's first round in each output two, as it reads the prompt, and each round takes a
few percent longer or shorter by chance.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated

from speculative_t5.decoding.draft_length import LENGTHS, AdaptiveSchedule
from speculative_t5.decoding.outcomes import Outcome

import typer

Curve = Callable[[int], float]
OUTPUT = 40  # tokens of each output
COMPILED = 1.0  # cost of compiling a pass of a length that is new


def mac_of_two_kernels(length: int) -> float:
    """M1 and M2: any pass over 2 to 64 tokens takes as long as 2.4 passes over one."""
    return 1.0 if length == 1 else 2.4 if length <= 64 else 4.8


def mac_in_steps(length: int) -> float:
    """M3 and later: one more read of the weights for each 5 tokens, and a little for each."""
    return 1 + 0.35 * ((length - 1) // 5) + 0.02 * (length - 1)


def two_cores(length: int) -> float:
    return 1 + 0.11 * (length - 1)


def launches(length: int) -> float:
    """A GPU whose passes cost nearly the same, whatever their length up to 16."""
    return 1 + 0.01 * (length - 1) + 0.1 * max(0, length - 16)


@dataclass(frozen=True)
class Case:
    """A device and a drafter."""

    name: str
    verify: Curve  # cost of a pass, by its tokens
    step: float  # cost of a draft's step
    rate: float  # chance of a drafted token to be accepted
    finds: float = 1.0  # share of rounds in which a lookup finds something
    asks: float = 0.0  # cost of asking for a draft, found or not
    reads: float = 2.0  # cost of a model's first draft in an output, which reads the prompt
    drift: Callable[[int], float] = lambda round_: 1.0  # how much slower the machine is
    hiccups: float = 0.0  # share of rounds that take 1 to 6 times as long

    def cost(self, num_draft: int, found: int) -> float:
        asking = self.asks if num_draft else 0.0
        return self.verify(1 + found) + asking + self.step * num_draft

    def speed(self, num_draft: int) -> float:
        """Return the tokens for each unit of cost of a fixed length."""
        emitted = 1 + self.finds * sum(self.rate**i for i in range(1, num_draft + 1))
        mean = self.finds * self.cost(num_draft, num_draft)
        mean += (1 - self.finds) * self.cost(num_draft, 0)
        reading = self.reads / OUTPUT if num_draft and self.step else 0.0
        return 1 / (mean / emitted + reading)


@dataclass(frozen=True)
class Result:
    """What a schedule reached."""

    efficiency: float
    later: float  # of the last half
    over_plain: float  # speed over that of plain decoding
    usual: int  # the length chosen most often in the last half


def busy(round_: int) -> float:
    return 2.0 if round_ // 100 % 2 else 1.0


CASES = [
    Case("M1, M2: a draft model", mac_of_two_kernels, 0.15, 0.9),
    Case("M1, M2: one that gains nothing", mac_of_two_kernels, 0.15, 0.5),
    Case("M1, M2: a lookup", mac_of_two_kernels, 0.0, 0.97),
    Case("M1, M2: a lookup that seldom finds", mac_of_two_kernels, 0.0, 0.3, 0.2),
    Case("M3 and later: a draft model", mac_in_steps, 0.12, 0.75),
    Case("M3 and later: a good one", mac_in_steps, 0.12, 0.95),
    Case("M3 and later: a lookup", mac_in_steps, 0.0, 0.95, 0.9),
    Case("launch-bound draft", launches, 0.4, 0.8),
    Case("launch-bound, a hopeless draft", launches, 0.4, 0.02),
    Case("two cores", two_cores, 0.1, 0.85),
    Case("two cores, a hopeless draft", two_cores, 0.1, 0.02),
    Case("two cores, a slow lookup that finds little", two_cores, 0.0, 0.1, 0.2, asks=0.15),
    Case("two cores, restless", two_cores, 0.1, 0.85, hiccups=0.15),
    Case("two cores, restless, a lookup", two_cores, 0.0, 0.9, 0.7, hiccups=0.15),
    Case("two cores, restless, it seldom finds", two_cores, 0.0, 0.5, 0.1, hiccups=0.15),
    Case("two cores, busy half of the time", two_cores, 0.1, 0.85, drift=busy),
    Case("M3 and later, busy half of the time", mac_in_steps, 0.12, 0.75, drift=busy),
]


def simulate(case: Case, rounds: int, seed: int = 0, store: Path | None = None) -> Result:
    """Let a schedule that has learned nothing yet choose the lengths of `rounds` rounds.

    With `store`, each output has a process of its own, which begins with what the one before kept.
    """
    rng, schedule = random.Random(seed), AdaptiveSchedule(store)
    best = max(case.speed(length) for length in LENGTHS)
    seen: set[int] = set()
    chosen: list[int] = []
    spent: list[float] = []
    ideal: list[float] = []  # the same with the best fixed length, for as many tokens
    emitted, ends_at, has_read = 0, OUTPUT, False
    for round_ in range(rounds):
        if emitted >= ends_at:
            ends_at, has_read = ends_at + OUTPUT, False
            if store:
                schedule.keep()
                schedule, seen = AdaptiveSchedule(store), set()
        begins = not seen
        num_draft = schedule.next(1000)
        found = num_draft if rng.random() < case.finds else 0
        accepted = 0
        while accepted < found and rng.random() < case.rate:
            accepted += 1
        is_new = 1 + found not in seen
        seen.add(1 + found)
        reads = num_draft > 0 and case.step > 0 and not has_read
        has_read |= reads
        cost = case.cost(num_draft, found) + COMPILED * is_new + case.reads * reads
        cost *= case.drift(round_)
        hiccup = rng.uniform(1, 6) if rng.random() < case.hiccups else 1.0
        seconds = 0.01 * cost * hiccup * math.exp(rng.gauss(0, 0.04))
        typical = not (is_new or reads)
        outcome = Outcome(num_draft, [found], [accepted], 0, seconds, 1, 1 + found, typical)
        schedule.observe(outcome)
        chosen.append(num_draft)
        spent.append(cost)
        ideal.append(((1 + accepted) / best + COMPILED * begins) * case.drift(round_))
        emitted += 1 + accepted
    half = rounds // 2
    plain = sum(x * best for x in ideal)  # one unit for each token
    (usual, _), *_ = Counter(chosen[half:]).most_common(1)
    return Result(
        sum(ideal) / sum(spent), sum(ideal[half:]) / sum(spent[half:]), plain / sum(spent), usual
    )


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each simulation.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Simulations of each case.")] = 10,
) -> None:
    """Print the table."""
    print("| device and drafter | best fixed | `auto` mostly ", end="")
    print("| efficiency | later | over plain | a process each |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        done = [simulate(case, rounds, seed) for seed in range(seeds)]
        short: list[float] = []
        for seed in range(seeds):
            with TemporaryDirectory() as folder:
                short.append(simulate(case, rounds, seed, Path(folder, "learned")).later)
        best = max(LENGTHS, key=case.speed)
        (usual, _), *_ = Counter(each.usual for each in done).most_common(1)
        mean = [
            fmean(values)
            for values in zip(*((e.efficiency, e.later, e.over_plain) for e in done), strict=True)
        ]
        figures = " | ".join(f"{value:.2f}" for value in (*mean, fmean(short)))
        print(f"| {case.name} | {best} | {usual} | {figures} |")


if __name__ == "__main__":
    typer.run(main)
