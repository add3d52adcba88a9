"""Ways to decode the same prompts, interleaved and recorded round by round."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeVar

from .. import decoding
from ..decoding import Outcome
from ..generation import GenerationOptions, SpeculativeDecoder

PLAIN = "plain"  # the variant without a draft, with which the others are compared


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
    """Decode each prompt in all ways, in a new order for each: ratios hold if the speed drifts.

    The first use of everything is slower: sweep once more before figures count. `timed` measures
    parts of rounds, with a wait after each draft. `progress` is called after each output.
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
    sampler = requests[0].options.sampler
    plan = variant.plan or decoder.plan(sampler, speculative=options.speculative)
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


@dataclass(frozen=True)
class Report:
    """One variant over all prompts; medians over the turns.

    Figures of rounds leave out the first round of each output, in which the draft reads the prompt,
    unless no output has another.
    """

    name: str
    tokens_per_second: float  # over the whole time that a user waits, encoding included
    round_ms: float
    draft_ms: float  # drafting's part of a round, measured apart with a wait after each draft
    verify_ms: float  # the part of the target's pass and the verdict, measured there as well
    other_ms: float  # the rest, spent on the host
    waits: float  # for the device, in a round
    acceptance: float  # accepted / drafted tokens
    tokens_per_round: float  # emitted tokens / rounds, first rounds included
    forwards: float  # tokens per pass of the target over plain decoding's, first rounds included
    speedup: float  # seconds of rounds per token, plain decoding's over this variant's
    same: int  # outputs that equal those of plain decoding
    outputs: int


def measure(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    turns: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Report]:
    """Measure variants, plain decoding among them, `turns` times.

    `progress` receives 1 to `turns` + 2. Outputs of which all have one token are refused.
    """
    order = random.Random(0)
    warm = sweep(variants, prompts, order)  # the first use is slower
    if not first_counted(warm[PLAIN]):
        raise ValueError(
            "every output ends with its first token, which leaves nothing to measure: give "
            "longer prompts or a larger --max-tokens"
        )
    progress(1)
    timed = sweep(variants, prompts, order, timed=True)
    progress(2)
    measured = []
    for turn in range(turns):
        measured.append(sweep(variants, prompts, order))
        progress(turn + 3)
    return [make_report(each.name, measured, timed[each.name]) for each in variants]


def make_report(name: str, turns: Sequence[Turn], timed: Sequence[Run]) -> Report:
    """Sum up a variant, given its runs with a wait after each draft, too."""
    last = turns[-1][name]

    def later_per_second(runs: Sequence[Run]) -> float:
        emitted = later(runs, lambda run: run.emitted)
        return sum(emitted) / sum(later(runs, lambda run: run.rounds))

    drafted = sum(sum(outcome.num_drafted) for run in last for outcome in run.outcomes)
    accepted = sum(sum(outcome.num_accepted) for run in last for outcome in run.outcomes)
    outcomes = later(timed, lambda run: run.outcomes)
    draft_ms = 1e3 * fmean(outcome.draft_seconds for outcome in outcomes)
    verify_ms = 1e3 * fmean(outcome.verify_seconds for outcome in outcomes)
    return Report(
        name=name,
        tokens_per_second=typical(turns, name, tokens_per_second),
        round_ms=typical(turns, name, _round_ms),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        other_ms=_round_ms(timed) - draft_ms - verify_ms,
        waits=fmean(n for turn in turns for n in later(turn[name], lambda run: run.waits)),
        acceptance=accepted / drafted if drafted else 0.0,
        tokens_per_round=tokens_per_pass(last),
        forwards=gain(turns, name, tokens_per_pass),
        speedup=gain(turns, name, later_per_second),
        same=sum(o.tokens == p.tokens for p, o in zip(turns[-1][PLAIN], last, strict=True)),
        outputs=len(last),
    )


def first_counted(runs: Sequence[Run]) -> int:
    """Return the index of each output's first round that counts: 1, or 0 if all have one only."""
    return int(any(len(run.rounds) > 1 for run in runs))


def later(runs: Sequence[Run], of: Callable[[Run], Sequence[Item]]) -> list[Item]:
    """Return what lists of the runs have for the rounds that count."""
    return [each for run in runs for each in of(run)[first_counted(runs) :]]


def _round_ms(runs: Sequence[Run]) -> float:
    return 1e3 * fmean(later(runs, lambda run: run.rounds))
