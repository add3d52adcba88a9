"""Ways to decode many prompts, compared by the rows of a batch: tokens per second of all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, product
from statistics import median

from .. import decoding
from .comparison import PLAIN_DECODING, Variant

BATCHES = 3  # of the largest size, that there are prompts for


@dataclass(frozen=True)
class BatchRun:
    """What a variant gave in one run over all prompts."""

    outputs: list[list[int]]  # ids, without those of EOS
    tokens_per_second: float  # encoding included
    drafted: float  # tokens, for each row of a pass


@dataclass(frozen=True)
class BatchReport:
    """A variant in batches of one size; medians over the turns."""

    name: str
    batch_size: int
    tokens_per_second: float
    speedup: float  # over plain decoding in batches of that size
    drafted: float  # tokens, for each row of a pass, in the last turn
    same: int  # outputs that equal those of plain decoding one at a time
    outputs: int


def report_on_batches(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    turns: int,
    progress: Callable[[], None] = lambda: None,
) -> list[BatchReport]:
    """Decode prompts by each variant, plain decoding among them, in batches of each size.

    Prompts are repeated until they fill `BATCHES` of the largest. All runs are made once before
    turns count, as a schedule learns in the first; then they take turns in a random order.
    `progress` is called after each turn, of which there are `turns` + 1.
    """
    count = max(len(prompts), BATCHES * max(sizes))
    filled = [*islice(cycle(prompts), count)]
    (plain,) = (each for each in variants if each.name == PLAIN_DECODING)
    expected = [*islice(cycle(decode_all(plain, prompts, 1).outputs), count)]
    runs, order = [*product(variants, sizes)], random.Random(0)
    found: dict[tuple[str, int], list[BatchRun]] = {}
    for turn in range(turns + 1):
        for variant, size in order.sample(runs, len(runs)):
            run = decode_all(variant, filled, size)
            if turn:
                found.setdefault((variant.name, size), []).append(run)
        progress()

    def speeds(name: str, size: int) -> list[float]:
        return [run.tokens_per_second for run in found[name, size]]

    def report(name: str, size: int) -> BatchReport:
        pairs = zip(speeds(name, size), speeds(PLAIN_DECODING, size), strict=True)
        last = found[name, size][-1]
        same = sum(a == b for a, b in zip(last.outputs, expected, strict=True))
        speed, gain = median(speeds(name, size)), median(a / b for a, b in pairs)
        return BatchReport(name, size, speed, gain, last.drafted, same, len(filled))

    return [report(variant.name, size) for variant, size in runs]


def decode_all(variant: Variant, prompts: Sequence[list[int]], batch_size: int) -> BatchRun:
    """Decode prompts, given as source ids, side by side."""
    decoder, options = variant.decoder, variant.options
    sources = decoding.in_order_of_length(enumerate(prompts), len(prompts))
    requests = [*decoder.engine.requests(sources, options)]
    sampler = requests[0].options.sampler
    plan = variant.plan or decoder.engine.plan(sampler, speculative=options.speculative)
    rounds: list[list[decoding.Round]] = [[] for _ in prompts]
    began = time.perf_counter()
    for done in decoding.decode(decoder.model, requests, plan, batch_size=batch_size):
        rounds[done.index].append(done)
    seconds = time.perf_counter() - began
    stats = decoding.total([each[-1].stats for each in rounds])
    outputs = [[*chain.from_iterable(done.tokens for done in each)] for each in rounds]
    return BatchRun(outputs, stats.emitted / seconds, stats.drafted / stats.rounds)
