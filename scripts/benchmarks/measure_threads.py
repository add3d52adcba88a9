"""Measure threads that share one decoder against a single thread, and compare their outputs.

    python scripts/benchmarks/measure_threads.py

Each thread generates for the same sentences, each time in another order. Serial and threaded turns
alternate; the first of each warms up and does not count. Exits with status 1 if an output differs.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from texts import PREFIX, Corruptor, engine

SENTENCES = Path(__file__).parents[2] / "tests" / "sentences.txt"
MAX_TOKENS = 64


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads that share a decoder.")] = 8,
    generations: Annotated[int, typer.Option(min=1, help="Generations of each thread.")] = 50,
    turns: Annotated[int, typer.Option(min=2, help="How often everything is measured.")] = 4,
) -> None:
    """Measure on the shipped pair, greedily and in float32."""
    texts, rng = SENTENCES.read_text(encoding="utf-8").splitlines(), random.Random(0)
    corruptor = Corruptor(texts)
    prompts = [PREFIX + corruptor.sentence(rng.choice(texts), rng) for _ in range(generations)]
    decoder = engine()
    expected = {p: decoder.generate(p, max_tokens=MAX_TOKENS).tokens for p in prompts}

    def work(order: Sequence[str]) -> int:
        """Return how many outputs differ."""
        return sum(decoder.generate(p, max_tokens=MAX_TOKENS).tokens != expected[p] for p in order)

    orders = [rng.sample(prompts, len(prompts)) for _ in range(threads)]
    serial, threaded, different = [], [], 0
    for _ in range(turns):
        began = time.perf_counter()
        different += sum(map(work, orders))
        serial.append(time.perf_counter() - began)
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            different += sum(pool.map(work, orders))
        threaded.append(time.perf_counter() - began)
    ratio = median(s / t for s, t in zip(serial[1:], threaded[1:], strict=True))
    print(f"{threads} threads, {generations} generations each, {turns - 1} turns")
    print(f"outputs that differ from serial ones: {different}")
    times = f"serial {median(serial[1:]):.2f} s, threads {median(threaded[1:]):.2f} s"
    print(f"{times}: {ratio:.2f} times as fast")
    sys.exit(bool(different))


if __name__ == "__main__":
    typer.run(main)
