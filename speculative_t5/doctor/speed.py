"""The check `speed`: what passes cost here, and what a draft gains."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from .. import measure
from ..checkpoints import dtype_name
from ..decoding import LanguageModel, Plan, Session
from ..generation import SpeculativeDecoder
from .checks import NUM_DRAFT, Finding, Subject, dtype_of
from .outputs import SENTENCES

STEPS = 16  # of the draft, timed together
LENGTH = 36  # tokens of output before a timed pass, in the middle of a capacity of the cache
FILLER = 5  # the id that timed passes read, if the vocabulary has it
LENGTHS = (*range(1, 18), 33, 64)  # tokens in timed passes
SHOWN = (1, 2, 3, 5, 6, 9, 13, 17)  # of them, in the usual report
WINDOW, BUDGET = 0.03, 5.0  # seconds, for each cost at a time and for all of them
EVERY, MAX_TOKENS = 11, 32  # sentences that are decoded, and how far
TURNS, DECODING = 9, 15.0  # how often, at most; no turn begins after so many seconds
WORTH = 1.05  # a smaller speed-up is none


def speed(subject: Subject) -> Finding:
    """Time passes and a few sentences; it never fails."""
    decoder = subject.decoder()
    prompts = [decoder.encode(sentence) for sentence in SENTENCES[::EVERY]]
    passes, step = costs = _costs(decoder, prompts[0])
    adaptive = SpeculativeDecoder(decoder.model, decoder.draft or "lookup", decoder.tokenizer)
    plans = {"drafted": decoder.plan(), "auto": adaptive.plan()}
    details = _measured(decoder, plans, prompts, MAX_TOKENS, costs)
    auto, gain = details["auto"], details["measured_speedup"]
    drafts = "this draft" if decoder.draft else "prompt lookup"
    reason = f"{drafts} does not pay here: plain decoding is as fast"
    if max(gain, auto["speedup"]) >= WORTH:
        reason = (
            f"{drafts} gives {gain:.1f} times the speed of plain decoding here with {NUM_DRAFT} "
            f"tokens drafted, {auto['speedup']:.1f} times with auto"
        )
    notes = [
        _line("tokens in a pass", SHOWN),
        _line("milliseconds", [as_ms(passes[length]) for length in SHOWN]),
        f"a step of the draft takes {as_ms(step)} ms",
        f"{details['acceptance']:.0%} of the tokens that are reached are accepted",
        f"auto drafts {usual(auto)} tokens most often",
    ]
    return Finding("speed", "ok", reason, notes, details)


class Stepper:
    """A model's session that steps from the same length of output again and again.

    Ids that the model does not have are replaced by its last.
    """

    def __init__(self, model: LanguageModel, prompt: list[int]) -> None:
        last = model.info.vocab_size - 1
        self._filler = min(FILLER, last)
        self._session: Session = model.start([[min(i, last) for i in prompt]])[0]
        self._length = self._session.lengths[0] + LENGTH
        while (missing := self._length - self._session.lengths[0]) > 0:
            mx.eval(self._session.step(self._fill(min(16, missing))))

    def step(self, length: int) -> None:
        """Run a pass over `length` tokens, and wait for its argmax."""
        mx.eval(self._session.step_argmax(self._fill(length)))
        self._session.truncate([self._length])

    def draft(self, vocab_size: int) -> None:
        """Draft STEPS tokens greedily, and wait for the last."""
        token = self._fill(1)
        for _ in range(STEPS):
            token = self._session.step_argmax(token, vocab_size)
        mx.eval(token)
        self._session.truncate([self._length])

    def _fill(self, count: int) -> mx.array:
        return mx.array([[self._filler] * count], dtype=mx.int32)


def _costs(decoder: SpeculativeDecoder, prompt: list[int]) -> tuple[dict[int, float], float]:
    """Return the least seconds of the target's passes, by their tokens, and of a draft's step."""
    target = Stepper(decoder.model, prompt)
    runs: dict[object, Callable[[], object]] = {
        length: partial(target.step, length) for length in LENGTHS
    }
    if decoder.draft:
        ids = min(each.info.vocab_size for each in (decoder.model, decoder.draft))
        drafter = Stepper(decoder.draft, prompt)
        runs["steps"] = partial(drafter.draft, min(ids, decoder.draft_vocab or ids))
    turns: list[dict[object, float]] = []
    began = time.perf_counter()
    while len(turns) < 2 or time.perf_counter() - began < BUDGET:
        turns.append({key: _least(run, WINDOW) for key, run in runs.items()})
    least = {key: min(turn[key] for turn in turns) for key in runs}
    # A longer pass that took less time counts as well: a shorter one could be padded to it.
    passes = {n: min(least[longer] for longer in LENGTHS if longer >= n) for n in LENGTHS}
    return passes, least.get("steps", 0.0) / STEPS


def _least(run: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of at least two runs: the first follows one of another shape."""
    found: list[float] = []
    first = time.perf_counter()
    while len(found) < 2 or time.perf_counter() - first < seconds:
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def _measured(
    decoder: SpeculativeDecoder,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    max_tokens: int,
    costs: tuple[dict[int, float], float],
) -> dict[str, Any]:
    """Decode prompts plainly, and by plans: "drafted", and "auto", whose lengths adapt."""
    variants = [
        replace(each, plan=plans.get(each.name))
        for each in measure.variants_of(dict.fromkeys(plans, decoder), max_tokens)
    ]
    order, began = random.Random(0), time.perf_counter()
    measure.sweep(variants, prompts, order)  # the first use is slower, and "auto" learns
    turns: list[measure.Turn] = []
    while not turns or (len(turns) < TURNS and time.perf_counter() - began < DECODING):
        turns.append(measure.sweep(variants, prompts, order))
    # An output's last round may be shorter than was chosen.
    rounds = [run.outcomes[:-1] or run.outcomes for run in turns[-1]["auto"]]
    chosen = Counter(each.num_draft for outcomes in rounds for each in outcomes)
    speeds = {
        name: measure.typical(turns, name, measure.tokens_per_second)
        for name in (measure.PLAIN, *plans)
    }
    return {
        "dtype": dtype_name(dtype_of(decoder.model)),
        "pass_seconds": {str(length): seconds for length, seconds in costs[0].items()},
        "draft_step_seconds": costs[1],
        "acceptance": acceptance(turns[-1]["drafted"]),
        "plain_tokens_per_second": speeds[measure.PLAIN],
        "tokens_per_second": speeds["drafted"],
        "measured_speedup": measure.gain(turns, "drafted", measure.tokens_per_second),
        "auto": {
            "tokens_per_second": speeds["auto"],
            "speedup": measure.gain(turns, "auto", measure.tokens_per_second),
            "rounds": {str(length): rounds for length, rounds in chosen.most_common()},
        },
    }


def acceptance(runs: Iterable[measure.Run]) -> float:
    """Return the chance that a drafted token which all before it let through is accepted."""
    accepted = tested = 0
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        for drafted, kept in zip(outcome.num_drafted, outcome.num_accepted, strict=True):
            accepted += kept
            tested += kept + (kept < drafted)
    return accepted / tested if tested else 0.0


def usual(auto: Mapping[str, Any], most: int = 1) -> str:
    """Return the lengths that were drafted most often."""
    return ", ".join([*auto["rounds"]][:most])


def as_ms(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def _line(name: str, values: Sequence[object]) -> str:
    return name.ljust(17) + "".join(str(value).rjust(6) for value in values)
