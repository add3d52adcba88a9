"""How the time grows that patterns, loops and libraries take for texts made to be hard for them.

    python scripts/checks/growth.py                       # all, at 50,000 and 200,000 characters
    python scripts/checks/growth.py --only formats --size 12500

Patterns are found in the source, see growth_patterns.py; loops and libraries are listed in
growth_loops.py. Of each the text is shown for which the time grew most: four times the text may
take at most six times the time. No model is needed, and limits of length are off. It takes some
minutes.
"""

import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from growth_loops import LOCAL, LOOPS
from growth_patterns import Make, Pattern, find_patterns, near_misses

REPOSITORY = Path(__file__).parents[2]
SIZE = 50_000  # characters; and four times as many
MOST = 6.0  # times as long, for four times the text
FLOOR = 0.002  # seconds: what takes less at four times the size is not compared
SHORT = 800  # characters, at which, and at four times that, the slowest texts are chosen
KEPT = 2  # by the time, and as many by its growth
REPEATS = 3  # of which the shortest counts
LONG = 0.3  # seconds, from which on once is enough
HOPELESS = 3.0  # seconds, from which on a larger size is not tried if the time grows too much

Run = Callable[[str], object]
Kind = tuple[str, Make]  # what a text is made of, and what makes it


@dataclass(frozen=True)
class Row:
    """What was measured of a pattern or a loop, for the text whose time grew most."""

    file: str
    name: str
    text: str  # its kind
    size: int
    seconds: tuple[float, ...]  # at `size`, and at four times that

    @property
    def ratio(self) -> float:
        """Return how many times as long four times the text took; 0 if both were short."""
        short, long = self.seconds
        return long / max(short, FLOOR / 4) if long > FLOOR else 0.0

    @property
    def cells(self) -> list[str]:
        short, long = (f"{1000 * each:.1f}" for each in self.seconds)
        shown = self.text if len(self.text) <= 44 else f"{self.text[:41]}..."
        return [
            self.file.removeprefix("speculative_t5/"),
            self.name,
            shown,
            short,
            long,
            f"{self.ratio:.1f}" if self.ratio else "-",
        ]


def seconds(run: Run, *texts: Any) -> tuple[float, ...]:
    """Return the processor time of a call for each text, the shortest of some.

    The texts take turns, so that a slow moment of the machine does not meet only one of them. A
    text whose time has not grown too much from the first one's is not run again: it would only seem
    to grow less.
    """
    shortest = [float("inf")] * len(texts)
    collects = gc.isenabled()
    gc.disable()  # it takes as long as there are objects of others
    try:
        for turn in range(REPEATS):
            for place, text in enumerate(texts):
                if turn and place and shortest[place] <= MOST * shortest[0]:
                    continue
                began = time.process_time()
                run(text)
                shortest[place] = min(shortest[place], time.process_time() - began)
            if max(shortest) > LONG:
                break
    finally:
        if collects:
            gc.enable()
    return tuple(shortest)


def measured(run: Run, make: Make, size: int) -> tuple[int, tuple[float, ...]]:
    """Return the times at a size and at four times that; at smaller ones if those tell already."""
    small = size
    while small > SHORT:
        small //= 4
    while True:
        times = seconds(run, make(small), make(4 * small))
        if _has_grown(times) and times[1] < LONG:  # perhaps a slow moment that lasted
            again = seconds(run, make(small), make(4 * small))
            times = tuple(map(min, times, again))
        grown = _has_grown(times)
        if small >= size or (grown and times[1] > HOPELESS):
            return small, times
        small = min(4 * small, size)


def _has_grown(times: Sequence[float]) -> bool:
    return times[1] > 1.5 * MOST * max(times[0], FLOOR / 4)


def slowest(run: Run, kinds: Sequence[Kind], kept: int) -> list[Kind]:
    """Return the texts that take longest when they are short, and those whose time grows most."""
    found = []
    for kind, make in kinds:
        (short,) = seconds(run, make(SHORT))
        (long,) = seconds(run, make(4 * SHORT)) if short < LONG / 10 else (float("inf"),)
        found.append((long, long / (short + FLOOR / 40), (kind, make)))
    chosen = [
        each[-1] for by in (0, 1) for each in sorted(found, key=lambda each: -each[by])[:kept]
    ]
    return [*dict(chosen).items()]


def worst(
    file: str, name: str, run: Run, kinds: Sequence[Kind], size: int, kept: int = KEPT
) -> Row:
    """Return the measurement of the text whose time grows most, of those that are slow."""
    run(kinds[0][1](SHORT))  # which imports what is needed
    rows = []
    for kind, make in slowest(run, kinds, kept):
        rows.append(Row(file, name, kind, *measured(run, make, size)))
        if rows[-1].ratio > MOST:
            break
    return max(rows, key=lambda row: (row.ratio, row.seconds[1]))


def runs_of(pattern: Pattern) -> Iterator[tuple[str, Run]]:
    """Yield the ways in which a pattern is used, with their names."""
    value = pattern.value if pattern.value is not None else LOCAL[pattern.key]
    if value is None:
        return
    for method in ("match", "fullmatch"):
        if method in pattern.methods:
            yield method, getattr(value, method)
    if pattern.methods - {"match", "fullmatch"}:
        yield "search", value.findall


def pattern_rows(
    patterns: Iterable[Pattern], size: int, most: int = 400, kept: int = KEPT
) -> Iterator[Row]:
    """Measure patterns, by at most so many texts each."""
    for pattern in patterns:
        for how, run in runs_of(pattern):
            kinds = near_misses(pattern.value or LOCAL[pattern.key], most=most)
            yield worst(pattern.file, f"{pattern.title} ({how})", run, kinds, size, kept)


def loop_rows(names: Iterable[str], size: int, most: int = 400, kept: int = KEPT) -> Iterator[Row]:
    """Measure loops and libraries, by at most so many texts each, other ones for each."""
    for name in names:
        file, run, kinds = LOOPS[name]
        some = random.Random(name).sample([*kinds.items()], min(most, len(kinds)))
        yield worst(file, name, run, some, size, kept)


def main(
    only: Annotated[str, typer.Option(help="Part of a file's or a loop's name.")] = "",
    size: Annotated[int, typer.Option(help="Characters; and four times as many.")] = SIZE,
) -> None:
    """Print a table; end with exit code 1 if the time of anything grows too much."""
    patterns = [each for each in find_patterns(REPOSITORY) if only in f"{each.file} {each.title}"]
    loops = [name for name, loop in LOOPS.items() if only in f"{loop[0]} {name}"]
    print(f"| file | what | text | ms at {size:,} | ms at {4 * size:,} | ratio |")
    print("|---|---|---|---|---|---|")
    failed = []
    for rows in (pattern_rows(patterns, size), loop_rows(loops, size)):
        for row in rows:
            cells = [cell.replace("|", "\\|") for cell in row.cells]
            print(f"| {' | '.join(cells)} |" + f" at {row.size:,}" * (row.size != size), flush=True)
            failed += [row.name] * (row.ratio > MOST)
    print(f"\n{len(failed)} grow too much" + f": {', '.join(failed)}" * bool(failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
