"""K against plain: ways to decode the same prompts, recorded round by round and compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import numpy as np

from ..decoding import Outcome, Plan, Schedule, Stats, SyncCount, count_syncs, decode
from ..generation import GenerationOptions, SpeculativeDecoder
from ..tokenizers import Prompt

PLAIN = "plain"  # the variant without a draft, with which the others are compared
PASSES, SECONDS = 8, 0.3  # at most, of an estimate's plain decoding; but at least two passes


@dataclass(frozen=True)
class Variant:
    """One way to decode."""

    name: str  # in the report
    decoder: SpeculativeDecoder
    options: GenerationOptions
    plan: Plan | None = None  # instead of the decoder's own


@dataclass
class Run:
    """One output of a variant; all lists but the last have an item for each round."""

    seconds: float = 0.0  # from the source ids to the last token
    rounds: list[float] = field(default_factory=list)  # seconds
    emitted: list[int] = field(default_factory=list)  # tokens
    outcomes: list[Outcome] = field(default_factory=list)  # as the schedule observed them
    waits: list[int] = field(default_factory=list)  # for the device
    tokens: list[int] = field(default_factory=list)  # the output's ids, without EOS


Turn = Mapping[str, Sequence[Run]]  # by the name of the variant, in the order of the prompts


def variants_of(decoders: Mapping[str, SpeculativeDecoder], max_tokens: int) -> list[Variant]:
    """Return plain decoding and then a greedy variant for each decoder, by its name."""
    options = GenerationOptions(max_tokens=max_tokens)
    plain = Variant(PLAIN, next(iter(decoders.values())), replace(options, speculative=False))
    return [plain, *(Variant(name, decoder, options) for name, decoder in decoders.items())]


def sweep(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    order: random.Random,
    *,
    timed: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Turn:
    """Decode each prompt in all ways, and return one turn.

    For each prompt the ways come in a new order, so that ratios hold even if the machine's speed
    drifts. The first use of everything is slower: sweep once more before figures count. `timed`
    measures parts of rounds, with a wait after each draft. `progress` is called after each output.
    """
    turn: dict[str, list[Run]] = {variant.name: [] for variant in variants}
    for prompt in prompts:
        for variant in order.sample(variants, len(variants)):
            turn[variant.name].append(record(variant, prompt, timed=timed))
            progress()
    return turn


def typical(turns: Sequence[Turn], name: str, figure: Callable[[Sequence[Run]], float]) -> float:
    """Return the median over the turns of a figure of a variant's runs."""
    return median(figure(turn[name]) for turn in turns)


def gain(turns: Sequence[Turn], name: str, figure: Callable[[Sequence[Run]], float]) -> float:
    """Return the median over the turns of a variant's figure over that of plain decoding."""
    return median(figure(turn[name]) / figure(turn[PLAIN]) for turn in turns)


def tokens_per_second(runs: Sequence[Run]) -> float:
    """Return the tokens per second of whole outputs, EOS and the time for encoding included."""
    return sum(sum(run.emitted) for run in runs) / sum(run.seconds for run in runs)


def tokens_per_pass(runs: Sequence[Run]) -> float:
    """Return the tokens per pass of the target, EOS included."""
    return sum(sum(run.emitted) for run in runs) / sum(len(run.emitted) for run in runs)


def record(variant: Variant, prompt: list[int], *, timed: bool = False) -> Run:
    """Decode one prompt, given its source ids, and record what each round took."""
    decoder, options = variant.decoder, variant.options
    requests = [*decoder.requests([(0, prompt)], options)]
    plan = variant.plan or decoder.plan(requests, speculative=options.speculative)
    run = Run()
    with count_syncs() as waits:
        recorder = _Recorder(plan.schedule, run, waits)
        plan = replace(plan, schedule=recorder, timed=timed)
        began = time.perf_counter()
        for done in decode(decoder.model, requests, plan, batch_size=1):
            run.emitted.append(done.stats.emitted - sum(run.emitted))
            run.tokens += done.tokens
        ended = time.perf_counter()
    run.seconds = ended - began
    run.rounds = np.diff([*recorder.began, ended]).tolist()
    return run


@dataclass
class _Recorder:
    """A schedule that records when rounds begin and how often they wait."""

    schedule: Schedule
    run: Run
    waits: SyncCount
    began: list[float] = field(default_factory=list)
    waits_before: int = 0

    def next(self, remaining: int) -> int:
        self.began.append(time.perf_counter())
        self.waits_before = self.waits.count
        return self.schedule.next(remaining)

    def observe(self, outcome: Outcome) -> None:
        self.run.waits.append(self.waits.count - self.waits_before)
        self.run.outcomes.append(outcome)
        self.schedule.observe(outcome)


def speedup(
    decoder: SpeculativeDecoder, prompt: Prompt, stats: Stats, options: GenerationOptions
) -> float | None:
    """Estimate how many times as long the target alone would take for an output.

    A few tokens are decoded plainly, and the median of their times stands for the rest. Since the
    first use of everything is slower, a quick output is made once more, with the same `options`.
    None is for outputs that are too short for an estimate.
    """
    seconds = stats.seconds
    if seconds < SECONDS:
        again = decoder.generate(prompt, **asdict(options))
        seconds = min(seconds, again.stats.seconds)
    plain = replace(options, max_tokens=stats.emitted, speculative=False)
    times = _pass_ends(decoder, prompt, plain)
    if times[-1] <= SECONDS:
        times = _pass_ends(decoder, prompt, plain)
    if len(times) < 2 or not seconds:
        return None
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return (times[0] + median(steps) * (stats.emitted - 1)) / seconds


def _pass_ends(
    decoder: SpeculativeDecoder, prompt: Prompt, options: GenerationOptions
) -> list[float]:
    """Return the seconds until the end of each of the first few passes."""
    times: list[float] = []
    for chunk in decoder.stream(prompt, **asdict(options)):
        times.append(chunk.stats.seconds)
        if len(times) == PASSES or (len(times) > 1 and times[-1] > SECONDS):
            break
    return times
