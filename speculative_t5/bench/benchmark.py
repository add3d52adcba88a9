"""What rounds cost, and how near decoding comes to what these costs allow."""

from __future__ import annotations

import contextlib
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from ..decoding import LanguageModel, Outcome, Plan, Sampler, Schedule, Session, decode
from ..generation import SpeculativeDecoder

REPEATS, LEAST_SECONDS = 5, 0.15  # that each cost is measured in a turn
READERS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")
FILLER = 5  # the id that bare passes are over, where there is one
GREEDY = Sampler()


@dataclass(frozen=True)
class Variant:
    """One way to decode.

    Attributes:
        name: As the report calls it.
        plan: Makes a fresh plan for a prompt's source ids.
        drafts: Whether a model drafts, whose time theory has to count.
    """

    name: str
    plan: Callable[[list[int]], Plan]
    drafts: bool = False


@dataclass
class Run:
    """One output of an variant.

    Attributes:
        seconds: From source ids to the last token.
        rounds: Seconds of each round.
        emitted: Tokens of each round.
        outcomes: What the schedule was told of each.
        waits: Waits on the device in each.
        tokens: The output.
    """

    seconds: float = 0.0
    rounds: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """Bare costs: models stepping by turns, with nothing of the decoding loop.

    Attributes:
        regular: Seconds of a pass over one token, after another such pass.
        rounds: Seconds to draft K tokens, one after the other, and of a pass over L of them, by
            turns: by (K, L).
    """

    regular: float
    rounds: Mapping[tuple[int, int], float]

    def seconds(self, num_draft: int, length: int) -> float:
        """Of such a round; of those not measured, on lines between those that were."""
        drafts = sorted({k for k, _ in self.rounds})
        found = []
        for k in drafts:
            lengths = sorted(n for of, n in self.rounds if of == k)
            found.append(np.interp(length, lengths, [self.rounds[k, n] for n in lengths]))
        return float(np.interp(num_draft, drafts, found))


@dataclass(frozen=True)
class Report:
    """One variant, over all prompts; medians over the turns.

    Attributes:
        name: The variant's.
        tokens_per_second: Of all that a user waits for, encoding included.
        round_ms: A round, the first ones of outputs left out.
        draft_ms: Of a round, drafting; measured apart, with a wait after each draft.
        verify_ms: Of it, the target's pass and the verdict.
        other_ms: Of it, all else on the host.
        waits: Waits on the device, a round, the first ones left out.
        acceptance: Accepted of drafted tokens.
        tokens_per_round: Emitted tokens, a round.
        forwards: How many times fewer forward passes of the target a token takes than the regular
            variant's, first rounds included.
        speedup: Of rounds, per token, over the regular variant's.
        theory: What `tokens_per_round` and the bare costs would give.
        efficiency: `speedup` over `theory`.
        same: Outputs that are the regular variant's.
        outputs: Outputs.
    """

    name: str
    tokens_per_second: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    other_ms: float
    waits: float
    acceptance: float
    tokens_per_round: float
    forwards: float
    speedup: float
    theory: float
    efficiency: float
    same: int
    outputs: int


class Bench:
    """Arms and bare costs, measured by turns on the same prompts.

    A round's figures leave out the first of each output, in which the draft reads the prompt.

    Args:
        model: The target.
        draft: A draft model, or None.
        variants: The first is regular decoding, which the others are compared with.
        prompts: Their ids.
        draft_vocab: Ids that the draft model proposes of, the first ones; None is all.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel | None,
        variants: Sequence[Variant],
        prompts: Sequence[list[int]],
        draft_vocab: int | None = None,
    ) -> None:
        self._model = model
        self._draft = draft
        self._variants = variants
        self._prompts = prompts
        self._draft_vocab = draft_vocab

    def run(self, turns: int, progress: Callable[[int, int], None] | None = None) -> list[Report]:
        """Measure everything `turns` times, in a new order each time."""
        order, runs = random.Random(0), []
        shown = progress or (lambda done, total: None)
        total = turns + 2
        self._turn(order, timed=False)  # the first use of everything is slower
        shown(1, total)
        timed = self._turn(order, timed=True)
        shown(2, total)
        mean = round(np.mean([len(run.tokens) for run in timed[self._variants[0].name]]) / 2)
        for variant in self._variants:
            if not _emitted(timed[variant.name]):
                raise ValueError(
                    f"{variant.name}: every output ends in its first round, which leaves nothing "
                    "to measure: give longer prompts, a larger --max-tokens or a smaller "
                    "--num-draft"
                )
        shapes = self._shapes(timed)
        self._costs(max(1, mean), shapes)
        costs = []
        for turn in range(turns):
            costs.append(self._costs(max(1, mean), shapes))
            runs.append(self._turn(order, timed=False))
            shown(turn + 3, total)
        return [self._report(variant, runs, timed, costs) for variant in self._variants]

    def _turn(self, order: random.Random, *, timed: bool) -> dict[str, list[Run]]:
        runs: dict[str, list[Run]] = {variant.name: [] for variant in self._variants}
        for prompt in self._prompts:
            for variant in order.sample(self._variants, len(self._variants)):
                plan = replace(variant.plan(prompt), timed=timed)
                runs[variant.name].append(observed(self._model, prompt, plan))
        return runs

    def _shapes(self, runs: Mapping[str, Sequence[Run]]) -> list[tuple[int, int]]:
        """The kinds of rounds that theory has to know the cost of."""
        found = {
            _shape(variant, outcome)
            for variant in self._variants
            for run in runs[variant.name]
            for outcome in run.outcomes[1:]
        }
        drafts = {num_draft for num_draft, _ in found}
        ends = {(k, length) for k in drafts for length in (1, k + 1)}
        return sorted(found | ends)

    def _costs(self, length: int, shapes: Sequence[tuple[int, int]]) -> Costs:
        """Bare costs where an output has `length` tokens, on the first prompt.

        Args:
            length: See above.
            shapes: Rounds, as drafted tokens and tokens of the target's pass.
        """
        target = _Stepper(self._model, self._prompts[0], length)
        small = _Stepper(self._draft, self._prompts[0], length) if self._draft else None
        ids = min(m.vocab_size for m in (self._model, self._draft) if m)
        ids = min(ids, self._draft_vocab or ids)

        def seconds(num_draft: int, num_tokens: int) -> float:
            samples: list[float] = []
            first = time.perf_counter()
            while len(samples) < REPEATS or time.perf_counter() - first < LEAST_SECONDS:
                began = time.perf_counter()
                drafted = small.chain(num_draft, ids) if small else []
                target.verify(num_tokens, drafted)
                samples.append(time.perf_counter() - began)
            # The first ones are what they are after another kind of round.
            return median(samples[len(samples) // 3 :])

        return Costs(seconds(0, 1), {shape: seconds(*shape) for shape in shapes})

    def _report(
        self,
        variant: Variant,
        turns: Sequence[Mapping[str, Sequence[Run]]],
        timed: Mapping[str, Sequence[Run]],
        costs: Sequence[Costs],
    ) -> Report:
        regular = self._variants[0].name
        speedups, theories, efficiencies, forwards = [], [], [], []
        for turn, cost in zip(turns, costs, strict=True):
            alone, runs = turn[regular], turn[variant.name]
            speedup = _per_token(alone) / _per_token(runs)
            theory = cost.regular * _emitted(runs) / _bare(variant, runs, cost)
            speedups.append(speedup)
            theories.append(theory)
            efficiencies.append(speedup / theory)
            forwards.append(_per_pass(runs) / _per_pass(alone))
        last, apart = turns[-1][variant.name], timed[variant.name]
        rounds = [o for run in apart for o in run.outcomes[1:]]
        draft = _mean_ms(o.draft_seconds for o in rounds)
        verify = _mean_ms(o.verify_seconds for o in rounds)
        whole = _mean_ms(s for run in apart for s in run.rounds[1:])
        outcomes = [o for run in last for o in run.outcomes]
        drafted = sum(sum(o.num_drafted) for o in outcomes)
        accepted = sum(sum(o.num_accepted) for o in outcomes)
        every = [run for turn in turns for run in turn[variant.name]]
        expected = [run.tokens for run in turns[-1][regular]]
        return Report(
            name=variant.name,
            tokens_per_second=median(
                sum(sum(run.emitted) for run in turn[variant.name])
                / sum(run.seconds for run in turn[variant.name])
                for turn in turns
            ),
            round_ms=median(
                _mean_ms(s for run in turn[variant.name] for s in run.rounds[1:]) for turn in turns
            ),
            draft_ms=draft,
            verify_ms=verify,
            other_ms=whole - draft - verify,
            waits=float(np.mean([n for run in every for n in run.waits[1:]])),
            acceptance=accepted / drafted if drafted else 0.0,
            tokens_per_round=float(np.mean([n for run in last for n in run.emitted])),
            forwards=median(forwards),
            speedup=median(speedups),
            theory=median(theories),
            efficiency=median(efficiencies),
            same=sum(run.tokens == e for run, e in zip(last, expected, strict=True)),
            outputs=len(last),
        )


def variants_of(
    decoders: Mapping[str, SpeculativeDecoder], max_tokens: int, *, drafts: bool
) -> list[Variant]:
    """An variant for each decoder, regular decoding first; `drafts`: whether a model does."""
    first = next(iter(decoders.values()))

    def regular(prompt: list[int]) -> Plan:
        return first.plan([(0, prompt)], GREEDY, max_tokens, speculative=False)

    def variant(name: str, decoder: SpeculativeDecoder) -> Variant:
        def plan(prompt: list[int]) -> Plan:
            return decoder.plan([(0, prompt)], GREEDY, max_tokens)

        return Variant(name, plan, drafts and name != "lookup")

    return [Variant("regular", regular), *(variant(*entry) for entry in decoders.items())]


def observed(model: LanguageModel, prompt: list[int], plan: Plan) -> Run:
    """Decode one prompt, and note what each round took."""
    run = Run()
    watch = _Watch(plan.schedule, run)
    began = time.perf_counter()
    with _counted(watch):
        for done in decode(model, [(0, prompt)], replace(plan, schedule=watch), batch_size=1):
            run.emitted.append(done.stats.emitted - sum(run.emitted))
            run.tokens += done.tokens
    ended = time.perf_counter()
    run.seconds = ended - began
    run.rounds = np.diff([*watch.began, ended]).tolist()
    return run


class _Watch:
    """A schedule that notes when rounds begin, and what waits there are in them."""

    def __init__(self, schedule: Schedule, run: Run) -> None:
        self._schedule = schedule
        self._run = run
        self.began: list[float] = []
        self.waits = 0

    def next(self, remaining: int) -> int:
        self.began.append(time.perf_counter())
        self.waits = 0
        return self._schedule.next(remaining)

    def observe(self, outcome: Outcome) -> None:
        self._run.waits.append(self.waits)
        self._run.outcomes.append(outcome)
        self._schedule.observe(outcome)


@contextlib.contextmanager
def _counted(watch: _Watch) -> Iterator[None]:
    """Count every call by which Python waits for arrays."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            watch.waits += 1
            return function(*arguments, **options)

        return call

    places = [(mx, "eval"), (mx, "synchronize"), *((mx.array, name) for name in READERS)]
    found = [(place, name, getattr(place, name)) for place, name in places if hasattr(place, name)]
    for place, name, function in found:
        setattr(place, name, counting(function))
    try:
        yield
    finally:
        for place, name, function in found:
            setattr(place, name, function)


class _Stepper:
    """A model's session, to be stepped from the same length again and again.

    Args:
        model: Whose session it is.
        prompt: Ids; those that the model lacks are given to it as its last.
        length: Tokens of output, behind what the session begins with: T5's with nothing, others'
            with the prompt.
    """

    def __init__(self, model: LanguageModel, prompt: list[int], length: int) -> None:
        last = model.vocab_size - 1
        self._filler = min(FILLER, last)
        self._session: Session = model.start([[min(i, last) for i in prompt]])[0]
        self._length = self._session.lengths[0] + length
        while (missing := self._length - self._session.lengths[0]) > 0:
            mx.eval(self._session.step(self._fill(min(16, missing))))

    def verify(self, num_tokens: int, drafted: list[mx.array]) -> None:
        """A pass over so many tokens, these drafts among them, and the choices after them."""
        given = [self._fill(1), *drafted][:num_tokens]
        tokens = mx.concatenate([*given, self._fill(num_tokens - len(given))], axis=1)
        mx.concatenate([tokens, self._session.step_argmax(tokens)], axis=1).tolist()
        self._session.truncate([self._length])

    def chain(self, num_tokens: int, vocab_size: int) -> list[mx.array]:
        """So many steps, each with the choice of the one before; nothing is waited for."""
        tokens: list[mx.array] = []
        for _ in range(num_tokens):
            last = tokens[-1] if tokens else self._fill(1)
            tokens.append(self._session.step_argmax(last, vocab_size))
        self._session.truncate([self._length] if tokens else self._session.lengths)
        return tokens

    def _fill(self, count: int) -> mx.array:
        """(1, count) int32."""
        return mx.array([[self._filler] * count], dtype=mx.int32)


def first_token_seconds(arguments: Sequence[str]) -> float:
    """Seconds from a process's start to the first byte of its output.

    Args:
        arguments: Of `python -m speculative_t5`.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "speculative_t5", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.communicate()
    if not first or process.returncode:
        raise RuntimeError(f"{shlex.join(command)} gave no text (exit code {process.returncode})")
    return seconds


def _per_token(runs: Sequence[Run]) -> float:
    """Seconds of rounds, per token, without the first rounds."""
    return sum(sum(run.rounds[1:]) for run in runs) / _emitted(runs)


def _per_pass(runs: Sequence[Run]) -> float:
    """Tokens per pass of the target."""
    return sum(sum(run.emitted) for run in runs) / sum(len(run.rounds) for run in runs)


def _emitted(runs: Sequence[Run]) -> int:
    return sum(sum(run.emitted[1:]) for run in runs)


def _bare(variant: Variant, runs: Sequence[Run], costs: Costs) -> float:
    """Seconds that these rounds would take if nothing but models cost time."""
    return sum(
        costs.seconds(*_shape(variant, outcome)) for run in runs for outcome in run.outcomes[1:]
    )


def _shape(variant: Variant, outcome: Outcome) -> tuple[int, int]:
    """Tokens that a model drafted in a round, and tokens of the target's pass."""
    return outcome.num_draft if variant.drafts else 0, 1 + max(outcome.num_drafted)


def _mean_ms(seconds: Iterator[float]) -> float:
    values = list(seconds)
    return 1e3 * sum(values) / len(values) if values else 0.0
