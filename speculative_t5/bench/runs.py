"""Ways to decode, and outputs recorded round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..decoding import LanguageModel, Outcome, Plan, Schedule, Waits, count_waits, decode
from ..generation import GenerationOptions, SpeculativeDecoder

PLAIN = "plain"  # the variant without a draft, with which the others are compared


@dataclass(frozen=True)
class Variant:
    """One way to decode."""

    name: str  # in the report
    plan: Callable[[list[int]], Plan]  # makes a fresh plan for a prompt's source ids
    drafts: bool = False  # whether a model drafts, whose time theory has to include


@dataclass
class Run:
    """One output of a variant; all lists but the last have an item for each round."""

    seconds: float = 0.0  # from the source ids to the last token
    rounds: list[float] = field(default_factory=list)  # seconds
    emitted: list[int] = field(default_factory=list)  # tokens
    outcomes: list[Outcome] = field(default_factory=list)  # as the schedule observed them
    waits: list[int] = field(default_factory=list)  # for the device
    tokens: list[int] = field(default_factory=list)  # the output's ids, without EOS


def variants_of(
    decoders: Mapping[str, SpeculativeDecoder], max_tokens: int, *, drafts: bool
) -> list[Variant]:
    """Return plain decoding and then a greedy variant for each decoder, by its name.

    The name "lookup" is for one that drafts without a model; `drafts` is for the others.
    """
    options = GenerationOptions(max_tokens=max_tokens)

    def variant(name: str, decoder: SpeculativeDecoder) -> Variant:
        return Variant(
            name, lambda prompt: decoder.plan(options, [(0, prompt)]), drafts and name != "lookup"
        )

    plain = plain_variant(next(iter(decoders.values())), max_tokens)
    return [plain, *(variant(*entry) for entry in decoders.items())]


def plain_variant(decoder: SpeculativeDecoder, max_tokens: int) -> Variant:
    """Return greedy decoding by the target alone."""
    options = GenerationOptions(max_tokens=max_tokens, speculative=False)
    return Variant(PLAIN, lambda prompt: decoder.plan(options))


def record(model: LanguageModel, prompt: list[int], plan: Plan) -> Run:
    """Decode one prompt, and record what each round took."""
    run = Run()
    with count_waits() as waits:
        recorder = _Recorder(plan.schedule, run, waits)
        began = time.perf_counter()
        for done in decode(model, [(0, prompt)], replace(plan, schedule=recorder), batch_size=1):
            run.emitted.append(done.stats.emitted - sum(run.emitted))
            run.tokens += done.tokens
        ended = time.perf_counter()
    run.seconds = ended - began
    run.rounds = np.diff([*recorder.began, ended]).tolist()
    return run


class _Recorder:
    """A schedule that records when rounds begin and how often they wait."""

    def __init__(self, schedule: Schedule, run: Run, waits: Waits) -> None:
        self.began: list[float] = []
        self._schedule = schedule
        self._run = run
        self._waits = waits
        self._waits_before = 0

    def next(self, remaining: int) -> int:
        self.began.append(time.perf_counter())
        self._waits_before = self._waits.count
        return self._schedule.next(remaining)

    def observe(self, outcome: Outcome) -> None:
        self._run.waits.append(self._waits.count - self._waits_before)
        self._run.outcomes.append(outcome)
        self._schedule.observe(outcome)
