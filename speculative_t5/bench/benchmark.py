"""Ways to decode the same prompts, interleaved and recorded round by round, and bare costs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import TypeVar

import mlx.core as mx
import numpy as np

from .. import decoding
from ..decoding import LanguageModel, Outcome, Session
from ..generation import GenerationOptions, SpeculativeDecoder

PLAIN = "plain"  # the variant without a draft, with which the others are compared
REPEATS, MIN_SECONDS = 5, 0.15  # for each cost, every time it is measured
FILLER = 5  # the id that bare passes read, if the vocabulary has it


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
    # Tokens that a model drafted, and those of the target's pass.
    shapes: list[tuple[int, int]] = field(default_factory=list)
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
        by_model = plan.schedule.split(outcome.num_draft)[0] if decoder.draft else 0
        run.shapes.append((by_model, outcome.length))
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
    theory: float  # the speed-up that `tokens_per_round` and the bare costs would give
    efficiency: float  # speedup / theory
    same: int  # outputs that equal those of plain decoding
    outputs: int


def measure(
    variants: Sequence[Variant],
    prompts: Sequence[list[int]],
    turns: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Report]:
    """Measure variants, plain decoding among them, and bare costs `turns` times.

    `progress` receives 1 to `turns` + 2. Outputs of which all have one token are refused.
    """
    order = random.Random(0)
    sweep(variants, prompts, order)  # the first use is slower
    progress(1)

    def swept(*, timed: bool = False) -> Turn:
        turn = sweep(variants, prompts, order, timed=timed)
        if not first_counted(turn[PLAIN]):
            raise ValueError(
                "every output ends with its first token, which leaves nothing to measure: give "
                "longer prompts or a larger --max-tokens"
            )
        return turn

    timed = swept(timed=True)
    progress(2)
    decoders = [variant.decoder for variant in variants]
    decoder = next((each for each in decoders if each.draft), decoders[0])
    found = {shape for runs in timed.values() for shape in later(runs, lambda run: run.shapes)}
    shapes = sorted(found | {(k, length) for k, _ in found for length in (1, k + 1)})
    length = max(1, round(fmean(len(run.tokens) for run in timed[PLAIN]) / 2))
    bare_costs = partial(measure_costs, decoder, prompts[0], length, shapes)
    bare_costs()
    measured, costs = [], []
    for turn in range(turns):
        costs.append(bare_costs())
        measured.append(swept())
        progress(turn + 3)
    return [make_report(each, measured, costs, timed[each.name]) for each in variants]


def make_report(
    variant: Variant, turns: Sequence[Turn], costs: Sequence[Costs], timed: Sequence[Run]
) -> Report:
    """Sum up a variant, given bare costs by turn and its runs with a wait after each draft."""
    name, last = variant.name, turns[-1][variant.name]

    def later_per_second(runs: Sequence[Run]) -> float:
        emitted = later(runs, lambda run: run.emitted)
        return sum(emitted) / sum(later(runs, lambda run: run.rounds))

    def theory(runs: Sequence[Run], costs: Costs) -> float:
        """Return the speed-up that these rounds would have if only bare passes took time."""
        seconds = sum(costs.seconds(*shape) for shape in later(runs, lambda run: run.shapes))
        return costs.plain * sum(later(runs, lambda run: run.emitted)) / seconds

    speedups = [gain([turn], name, later_per_second) for turn in turns]
    theories = [theory(turn[name], cost) for turn, cost in zip(turns, costs, strict=True)]
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
        speedup=median(speedups),
        theory=median(theories),
        efficiency=median(s / t for s, t in zip(speedups, theories, strict=True)),
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


@dataclass(frozen=True)
class Costs:
    """What a round's passes take without the decoding loop around them, in seconds."""

    plain: float  # of a pass over one token, after another such pass
    # By (K, L): drafting K tokens one after the other, then a pass over L tokens.
    rounds: Mapping[tuple[int, int], float]

    def seconds(self, num_draft: int, length: int) -> float:
        """Return the cost of such a round, interpolated between those that were measured."""
        drafts = sorted({k for k, _ in self.rounds})
        found = []
        for k in drafts:
            lengths = sorted(length for drafted, length in self.rounds if drafted == k)
            found.append(np.interp(length, lengths, [self.rounds[k, n] for n in lengths]))
        return float(np.interp(num_draft, drafts, found))


def measure_costs(
    decoder: SpeculativeDecoder, prompt: list[int], emitted: int, shapes: Sequence[tuple[int, int]]
) -> Costs:
    """Measure what rounds (K, L) cost by themselves after `emitted` tokens.

    Each is measured for `MIN_SECONDS`, and at least `REPEATS` times.
    """
    target = Stepper(decoder.model, prompt, emitted)
    draft = Stepper(decoder.draft, prompt, emitted) if decoder.draft else None
    ids = drafted_ids(decoder)

    def seconds(num_draft: int, length: int) -> float:
        samples: list[float] = []
        first = time.perf_counter()
        while len(samples) < REPEATS or time.perf_counter() - first < MIN_SECONDS:
            began = time.perf_counter()
            drafted = draft.draft(num_draft, ids) if draft else []
            target.verify(length, drafted)
            samples.append(time.perf_counter() - began)
        # The first ones still feel the rounds of another shape before them.
        return median(samples[len(samples) // 3 :])

    return Costs(seconds(0, 1), {shape: seconds(*shape) for shape in shapes})


def drafted_ids(decoder: SpeculativeDecoder) -> int:
    """Return how many ids a decoder's draft may propose."""
    models = [decoder.model, decoder.draft] if decoder.draft else [decoder.model]
    ids = min(model.info.vocab_size for model in models)
    return min(ids, decoder.draft_vocab or ids)


class Stepper:
    """A model's session that steps from the same length of output again and again.

    Ids that the model does not have are replaced by its last.
    """

    def __init__(self, model: LanguageModel, prompt: list[int], length: int) -> None:
        last = model.info.vocab_size - 1
        self._filler = min(FILLER, last)
        self._session: Session = model.start([[min(i, last) for i in prompt]])[0]
        self._length = self._session.lengths[0] + length
        while (missing := self._length - self._session.lengths[0]) > 0:
            mx.eval(self._session.step(self._fill(min(16, missing))))

    def verify(self, length: int, drafted: Sequence[mx.array]) -> None:
        """Run a pass over `length` tokens, the drafted ones (1, 1) first; wait for its argmax."""
        given = [self._fill(1), *drafted][:length]
        tokens = mx.concatenate([*given, self._fill(length - len(given))], axis=1)
        mx.concatenate([tokens, self._session.step_argmax(tokens)], axis=1).tolist()
        self._session.truncate([self._length])

    def draft(self, num_draft: int, vocab_size: int) -> list[mx.array]:
        """Draft greedily, without a wait: a token (1, 1) int32 for each step."""
        tokens: list[mx.array] = []
        for _ in range(num_draft):
            last = tokens[-1] if tokens else self._fill(1)
            tokens.append(self._session.step_argmax(last, vocab_size))
        if tokens:
            self._session.truncate([self._length])
        return tokens

    def _fill(self, count: int) -> mx.array:
        return mx.array([[self._filler] * count], dtype=mx.int32)
