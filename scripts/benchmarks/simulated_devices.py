"""Let num_draft "auto" choose on devices that are not at hand: a cost model in place of the clock.

    python scripts/benchmarks/simulated_devices.py            # the table of docs/gpu-predictions.md
    python scripts/benchmarks/simulated_devices.py --seeds 20 --rounds 2000 --drawn 100
    PYTHONPATH=CHECKOUT python scripts/benchmarks/simulated_devices.py    # of another version

Costs are in passes of the target over one token. Efficiency is the speed reached, by that of the
best fixed length in hindsight, drafted by the model alone where a lookup may follow it: over all
rounds ("whole"), over the last half, and from the 5th output to the 28th of a new process
("first"). Both speeds are what such choices give on average, so that a lucky draft counts for
nothing. Every simulation begins as a new machine does, with nothing learned; in each process the
first round of each length takes one pass longer, as a shape is compiled, a draft's first round in
each output two, as it reads the prompt, and each round takes a few percent longer or shorter by
chance. The last devices and drafters are drawn at random, by a seed that is printed.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Annotated

from speculative_t5.decoding import SHARES, AdaptiveSchedule
from speculative_t5.decoding.outcomes import LENGTHS, Outcome

import typer

Curve = Callable[[int], float]
OUTPUT = 40  # tokens of each output
COMPILED = 1.0  # cost of compiling a pass of a length that is new
WARM_UP, FIRST = 4, 24  # outputs before those of "first", and of these
NOTES_RUNS = "num_right" in {each.name for each in fields(Outcome)}  # other versions may not
THINKS = hasattr(AdaptiveSchedule, "think")  # in its waits, likewise
BY_MODEL = (1.0,)  # shares where there is no lookup
# Kernels of ours share a read of the weights among 8 rows. On an M1 Pro such products took
# 2.4 / 1.90 passes over one for 4 rows of 16 bits, and 2.4 / 1.49 for 8 (mlx#3967; MLX's take 2.4).
# On an M4 Pro 8 rows of 4 bits took .314 / .580 of MLX's time (mlx-dspark); its curve is in
# mlx#3839.
SHARED_ROWS, A_ROW_MORE = 8, 0.08
Choice = tuple[int, float]  # a length, and the model's share


def mac_of_two_kernels(length: int) -> float:
    """M1 and M2: any pass over 2 to 64 tokens takes as long as 2.4 passes over one."""
    return 1.0 if length == 1 else 2.4 if length <= 64 else 4.8


def few_rows(length: int) -> float:
    """Kernels of ours read the weights once for each group of at most 8 rows."""
    reads = math.ceil(length / SHARED_ROWS)
    return reads * (1 + A_ROW_MORE * (math.ceil(length / reads) - 1))


def mac_of_ours(length: int) -> float:
    """M1 and M2 with kernels of ours, where these are ahead: up to 8 rows."""
    return few_rows(length) if length <= SHARED_ROWS else mac_of_two_kernels(length)


def mac_in_steps(length: int) -> float:
    """M3 and later: one more read of the weights for each 5 tokens, and a little for each."""
    return 1 + 0.35 * ((length - 1) // 5) + 0.02 * (length - 1)


def two_cores(length: int) -> float:
    return 1 + 0.11 * (length - 1)


def launches(length: int) -> float:
    """A GPU whose passes cost nearly the same, whatever their length up to 16."""
    return 1 + 0.01 * (length - 1) + 0.1 * max(0, length - 16)


def busy(round_: int) -> float:
    return 2.0 if round_ // 100 % 2 else 1.0


@dataclass(frozen=True)
class Lookup:
    """What follows a model's tokens."""

    finds: float  # share of rounds in which it finds something
    rate: float  # chance of its tokens to be accepted
    wait: float  # cost of reading the model's tokens
    right: float = 1.0  # chance that it has found the right place; else none is accepted


@dataclass(frozen=True)
class Case:
    """A device and a drafter."""

    name: str
    verify: Curve  # cost of a pass, by its tokens
    step: float  # cost of a draft's step
    rate: float | Sequence[float]  # chance of a drafted token to be accepted, or by its position
    finds: float = 1.0  # share of rounds in which a lookup finds something
    asks: float = 0.0  # cost of asking for a draft, found or not
    lookup: Lookup | None = None  # that may follow a model's tokens
    reads: float = 2.0  # cost of a model's first draft in an output, which reads the prompt
    drift: Callable[[int], float] = lambda round_: 1.0  # how much slower the machine is
    hiccups: float = 0.0  # share of rounds that take 1 to 6 times as long
    noise: float = 0.04  # by which each round takes longer or shorter
    output: int = OUTPUT
    hard: "Case | None" = None  # what half of the outputs are, drawn by chance

    @property
    def shares(self) -> Sequence[float]:
        return SHARES if self.lookup else BY_MODEL

    def chance(self, place: int, by_model: int) -> float:
        """Return the chance that a token is accepted if those before it are."""
        if self.lookup and place >= by_model:
            return self.lookup.rate * (self.lookup.right if place == by_model else 1)
        return self.rate if isinstance(self.rate, float) else self.rate[place]

    def found(self, choice: Choice) -> list[tuple[float, int]]:
        """Return how many tokens are drafted, each with its chance."""
        length, by_model = choice[0], model_part(choice)
        if self.lookup is None:
            return [(self.finds, length), (1 - self.finds, 0)]
        if length == by_model:
            return [(1.0, length)]
        return [(self.lookup.finds, length), (1 - self.lookup.finds, by_model)]

    def cost(self, choice: Choice, found: int) -> float:
        length, by_model = choice[0], model_part(choice)
        asking = self.asks if length else 0.0
        waiting = self.lookup.wait if self.lookup and 0 < by_model < length else 0.0
        return self.verify(1 + found) + asking + self.step * by_model + waiting

    def expected(self, choice: Choice) -> tuple[float, float]:
        """Return the tokens and the cost of a round, on average."""
        tokens = cost = 0.0
        for chance, found in self.found(choice):
            stands = 1.0
            tokens += chance
            for place in range(found):
                stands *= self.chance(place, model_part(choice))
                tokens += chance * stands
            cost += chance * self.cost(choice, found)
        return tokens, cost

    def speed(self, length: int) -> float:
        """Return the tokens for each unit of cost of a fixed length, drafted by the model."""
        tokens, cost = self.expected((length, 1.0))
        reading = self.reads / self.output if length and self.step else 0.0
        easy = cost / tokens + reading
        return 1 / easy if self.hard is None else 2 / (easy + 1 / self.hard.speed(length))

    @cached_property
    def best(self) -> int:
        """The best fixed length."""
        return max(LENGTHS, key=self.speed)


def model_part(choice: Choice) -> int:
    """Return how many tokens the model drafts."""
    length, share = choice
    return math.ceil(share * length)


CASES = [
    Case("M1, M2: a draft model", mac_of_two_kernels, 0.15, 0.9),
    Case("M1, M2: one that gains nothing", mac_of_two_kernels, 0.15, 0.5),
    Case("M1, M2: a lookup", mac_of_two_kernels, 0.0, 0.97),
    Case("M1, M2: a lookup that seldom finds", mac_of_two_kernels, 0.0, 0.3, 0.2),
    Case("M1, M2 with kernels of ours: a draft model", mac_of_ours, 0.15, 0.9),
    Case("M1, M2 with kernels of ours: one that gained nothing", mac_of_ours, 0.15, 0.5),
    Case("M1, M2 with kernels of ours: a lookup", mac_of_ours, 0.0, 0.97),
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
    Case("two cores, a draft and a lookup", two_cores, 0.1, 0.85, lookup=Lookup(0.5, 0.8, 0.15)),
    Case("launch-bound, a draft and a lookup", launches, 0.4, 0.8, lookup=Lookup(0.7, 0.9, 0.1)),
]

HELPFUL = Lookup(0.8, 0.95, 0.15, right=0.4)  # it has found the right place, or not
LUCKY = Lookup(0.8, 0.95, 0.15, right=0.15)
CASES += [
    Case(
        name,
        two_cores,
        0.1,
        0.97,
        lookup=lookup,
        reads=0.5,
        output=14,
        hard=Case("", two_cores, 0.1, 0.7, lookup=hard, reads=0.5, output=14),
    )
    for name, lookup, hard in (
        ("two cores, some outputs are hard, its lookup helps", HELPFUL, HELPFUL),
        ("two cores, some outputs are hard, it is lucky at times", LUCKY, LUCKY),
        ("two cores, some outputs are hard, it helps in the others", HELPFUL, LUCKY),
    )
]


def drawn(seed: int, *, lookup: bool = False, noise: float = 0.04) -> Case:
    """Draw a device and a drafter: a slope with steps, and rates from a first to a last one."""
    rng = random.Random(seed)
    slope, height, width = rng.uniform(0, 0.15), rng.uniform(0, 0.6), rng.choice([4, 5, 8, 16, 32])
    second = rng.choice([0.0, 0.0, rng.uniform(0, 1.5)])  # what a second token costs more
    first, last = rng.uniform(0.3, 0.97), rng.uniform(0.3, 0.97)

    def verify(length: int) -> float:
        steps = slope * (length - 1) + height * ((length - 1) // width)
        return 1 + steps + (second if length > 1 else 0)

    rates = [last + (first - last) * 0.8**place for place in range(LENGTHS[-1])]
    case = Case(
        f"drawn by {seed}",
        verify,
        rng.uniform(0.05, 0.4),
        rates,
        noise=noise,
        output=rng.randint(15, 60),
    )
    if not lookup:
        return case
    follows = Lookup(rng.uniform(0.2, 0.9), rng.uniform(0.3, 0.95), rng.uniform(0, 0.3))
    return replace(case, lookup=follows)


@dataclass
class Process:
    """What a process has compiled, and what its outputs have read."""

    compiled: set[int] = field(default_factory=set)
    has_read: bool = False  # whether the draft has read this output's prompt


@dataclass
class Simulation:
    """Rounds whose lengths a schedule chooses, which has learned nothing yet."""

    case: Case
    seed: int
    chosen: list[Choice] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)  # by round
    ideal: list[float] = field(default_factory=list)  # with the best fixed length, as many tokens
    ended: list[int] = field(default_factory=list)  # rounds after which outputs had ended

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._schedule = AdaptiveSchedule(shares=self.case.shares)
        self._process = Process()
        self._begin()
        self._emitted = self._right = 0  # of the present output

    def run(self, rounds: int = 10**9, outputs: int = 10**9) -> "Simulation":
        while len(self.spent) < rounds and len(self.ended) < outputs:
            self._round()
        return self

    @property
    def num_compiled(self) -> int:
        """How many lengths of passes were compiled for."""
        return len(self._process.compiled)

    def efficiency(self, first: int = 0, last: int | None = None) -> float:
        return sum(self.ideal[first:last]) / sum(self.spent[first:last])

    def _begin(self) -> None:
        """Begin an output."""
        hard = self.case.hard
        self._now = hard if hard and self._rng.random() < 0.5 else self.case
        alone = replace(self._now, hard=None)
        self._speed = alone.speed(self.case.best)
        self._expected: dict[Choice, tuple[float, float]] = {}

    def _round(self) -> None:
        case, rng, process = self._now, self._rng, self._process
        share, length = self._schedule.choice(1000)
        choice = length, case.shares[share]
        (chance, most), *other = case.found(choice)
        found = most if rng.random() < chance or not other else other[0][1]
        if found != length:
            found = self._schedule.kept(found)
        accepted = 0
        while accepted < found and rng.random() < case.chance(accepted, model_part(choice)):
            accepted += 1
        extra = 0.0
        begins = COMPILED if not process.compiled else 0.0
        if 1 + found not in process.compiled:
            process.compiled.add(1 + found)
            extra += COMPILED
        if model_part(choice) and case.step and not process.has_read:
            process.has_read = True
            extra += case.reads
        slower = case.drift(len(self.spent))
        hiccup = rng.uniform(1, 6) if rng.random() < case.hiccups else 1.0
        seconds = 0.01 * (case.cost(choice, found) + extra) * slower * hiccup
        seconds *= math.exp(rng.gauss(0, case.noise))
        typical = extra == 0
        if THINKS:
            self._schedule.think(1)
        counts = length, [found], [accepted]
        right = {"num_right": [self._right]} if NOTES_RUNS else {}
        self._schedule.observe(Outcome(*counts, 0, seconds, 1, 1 + found, typical, share, **right))
        self._right = self._right + accepted + 1 if 0 < accepted == length else 0
        if choice not in self._expected:
            self._expected[choice] = case.expected(choice)
        tokens, cost = self._expected[choice]
        self.spent.append((cost + extra) * slower)
        self.ideal.append((tokens / self._speed + begins) * slower)
        self.chosen.append(choice)
        self._emitted += 1 + accepted
        if self._emitted >= case.output:
            self._emitted -= case.output
            process.has_read = False
            self._begin()
            self.ended.append(len(self.spent))


@dataclass(frozen=True)
class Result:
    """What a schedule reached, on average over simulations."""

    first: float  # efficiency from the 5th output to the 28th
    whole: float
    later: float  # of the last half
    over_plain: float  # speed over that of plain decoding
    usual: Choice  # what was chosen most often in the last half


def simulate(case: Case, rounds: int = 1000, seeds: Sequence[int] = range(10)) -> Result:
    done = [Simulation(case, seed).run(rounds) for seed in seeds]
    begun = [Simulation(case, seed).run(outputs=WARM_UP + FIRST) for seed in seeds]
    whole = fmean(each.efficiency() for each in done)
    chosen = Counter(choice for each in done for choice in each.chosen[rounds // 2 :])
    return Result(
        first=fmean(each.efficiency(each.ended[WARM_UP - 1]) for each in begun),
        whole=whole,
        later=fmean(each.efficiency(rounds // 2) for each in done),
        over_plain=whole * case.speed(case.best) / case.speed(0),
        usual=chosen.most_common(1)[0][0],
    )


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each simulation.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Simulations of each case.")] = 10,
    draws: Annotated[int, typer.Option("--drawn", help="Cases to draw, of each sort.")] = 60,
    seed: Annotated[int | None, typer.Option(help="To draw by.", show_default="chance")] = None,
) -> None:
    """Print the table."""
    print(
        "| device and drafter | best fixed | `auto` mostly | first | whole | later | over plain |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        result = simulate(case, rounds, range(seeds))
        length, share = result.usual
        mostly = f"{length}" if share == 1 else f"{length}, {model_part(result.usual)} by the model"
        print(row(case.name, case.best, mostly, [result]), flush=True)
    seed = random.randrange(10**6) if seed is None else seed
    for name, lookup, noise in (
        ("drawn", False, 0.04),
        ("drawn, noisy", False, 0.15),
        ("drawn, with a lookup", True, 0.04),
    ):
        results = [
            simulate(drawn(seed + i, lookup=lookup, noise=noise), rounds, [seed])
            for i in range(draws)
        ]
        print(row(f"{draws} {name}, by {seed}", "", "", results), flush=True)


def row(name: str, best: object, mostly: str, results: Sequence[Result]) -> str:
    columns = zip(*((r.first, r.whole, r.later, r.over_plain) for r in results), strict=True)
    figures = " | ".join(f"{fmean(column):.3f}" for column in columns)
    return f"| {name} | {best} | {mostly} | {figures} |"


if __name__ == "__main__":
    typer.run(main)
