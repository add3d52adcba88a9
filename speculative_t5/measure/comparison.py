"""Ways to decode the same prompts, compared with plain decoding: interleaved, round by round."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

from .. import decoding
from ..decoding import Outcome
from ..generation import GenerationOptions, SpeculativeDecoder

PLAIN_DECODING = "plain"  # the variant without a draft, with which the others are compared


@dataclass(frozen=True)
class Variant:
    """One way to decode."""

    name: str  # in the report
    decoder: SpeculativeDecoder
    options: GenerationOptions
    plan: decoding.Plan | None = None  # instead of the decoder's own


@dataclass
class Run:
    """One output of a variant; all lists but the last have an item for each round."""

    seconds: float = 0.0  # from the source ids to the last token
    rounds: list[float] = field(default_factory=list)  # seconds
    emitted: list[int] = field(default_factory=list)  # tokens
    outcomes: list[Outcome] = field(default_factory=list)  # as the schedule observed them
    waits: list[int] = field(default_factory=list)  # for the device
    tokens: list[int] = field(default_factory=list)  # the output's ids, without EOS


Item = TypeVar("Item")
Turn = Mapping[str, Sequence[Run]]  # by the name of the variant, in the order of the prompts
Figure = Callable[[Sequence[Run]], float]  # of the runs of one variant in one turn


@dataclass(frozen=True)
class Comparison:
    """What ways to decode did with the same prompts, turn after turn; plain decoding is one."""

    turns: Sequence[Turn]

    def typical(self, name: str, figure: Figure) -> float:
        """Return the median over the turns of a figure of a variant's runs."""
        return median(figure(turn[name]) for turn in self.turns)

    def gain(self, name: str, figure: Figure) -> float:
        """Return the median over the turns of a variant's figure over that of plain decoding."""
        return median(figure(turn[name]) / figure(turn[PLAIN_DECODING]) for turn in self.turns)

    def num_same(self, name: str) -> int:
        """Return how many outputs of a variant equal those of plain decoding in every turn."""
        plain = self.turns[0][PLAIN_DECODING]
        return sum(
            all(turn[name][i].tokens == run.tokens for turn in self.turns)
            for i, run in enumerate(plain)
        )


def variants_of(
    decoders: Mapping[str, SpeculativeDecoder],
    max_tokens: int,
    plans: Mapping[str, decoding.Plan] | None = None,
) -> list[Variant]:
    """Return plain decoding and then a greedy variant for each decoder, by its name.

    A variant that `plans` names has that plan instead of its decoder's own.
    """
    options, plans = GenerationOptions(max_tokens=max_tokens), plans or {}
    plain = Variant(
        PLAIN_DECODING, next(iter(decoders.values())), replace(options, speculative=False)
    )
    return [
        plain,
        *(Variant(name, each, options, plans.get(name)) for name, each in decoders.items()),
    ]


def compare_with_plain(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    *,
    turns: int,
    seconds: float = math.inf,
    warm_up: int | None = None,
    after_warm_up: Callable[[Turn], None] = lambda warm: None,
    progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Decode prompts in all ways, plain decoding among them, in so many turns.

    The first use of everything is slower, and a schedule learns in it: so the first prompts, as
    many as `warm_up` says or all of them, are decoded once before turns count. `after_warm_up`
    receives what that gave, and may raise an error. After `seconds` no further turn begins, unless
    there was none. `progress` is called after each output.
    """
    order, began = random.Random(0), time.perf_counter()
    after_warm_up(sweep(variants, prompts[:warm_up], order, progress=progress))
    found: list[Turn] = []
    while not found or (len(found) < turns and time.perf_counter() - began < seconds):
        found.append(sweep(variants, prompts, order, progress=progress))
    return Comparison(found)


def sweep(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    order: random.Random,
    *,
    timed: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Turn:
    """Decode each prompt in all ways, in a new order for each: ratios hold if the speed drifts.

    `timed` measures parts of rounds, with a wait after each draft. `progress` is called after each
    output.
    """
    turn: dict[str, list[Run]] = {variant.name: [] for variant in variants}
    for prompt in prompts:
        for variant in order.sample(variants, len(variants)):
            turn[variant.name].append(record(variant, prompt, timed=timed))
            progress()
    return turn


def record(variant: Variant, prompt: list[int], *, timed: bool = False) -> Run:
    """Decode one prompt, given its source ids, and record what each round took."""
    decoder, options = variant.decoder, variant.options
    requests = [*decoder.engine.requests([(0, prompt)], options)]
    sampler = requests[0].options.sampler
    plan = variant.plan or decoder.engine.plan(sampler, speculative=options.speculative)
    run, began = Run(), time.perf_counter()
    batch = decoding.Batch(decoder.model, replace(plan, timed=timed))
    batch.add(requests)
    while batch.rows:
        waits, started = decoding.counters.syncs, time.perf_counter()
        (done,) = batch.round()
        run.rounds.append(time.perf_counter() - started)
        run.waits.append(decoding.counters.syncs - waits)
        outcome = batch.outcome
        assert outcome is not None
        run.outcomes.append(outcome)
        run.emitted.append(done.stats.emitted - sum(run.emitted))
        run.tokens += done.tokens
        batch.drop()
    run.seconds = time.perf_counter() - began
    return run


def tokens_per_second(runs: Sequence[Run]) -> float:
    """Return the tokens per second of whole outputs, EOS and the time for encoding included."""
    return sum(sum(run.emitted) for run in runs) / sum(run.seconds for run in runs)


def tokens_per_pass(runs: Sequence[Run]) -> float:
    """Return the tokens per pass of the target, EOS included."""
    return sum(sum(run.emitted) for run in runs) / sum(len(run.emitted) for run in runs)


def acceptance(runs: Sequence[Run]) -> float:
    """Return the chance that a drafted token which all before it let through is accepted."""
    accepted = tested = 0
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        for drafted, kept in zip(outcome.num_drafted, outcome.num_accepted, strict=True):
            accepted += kept
            tested += kept + (kept < drafted)
    return accepted / tested if tested else 0.0
