"""The check `speed`: what passes cost here, and how many tokens to draft."""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from .. import bench
from ..generation import SpeculativeDecoder, steady_width
from .checks import NUM_DRAFT, Finding, Subject
from .outputs import SENTENCES

MOST = 16  # tokens to draft
STEPS = 16  # of the draft, timed together
LENGTH = 36  # tokens of output before a timed pass, in the middle of a capacity of the cache
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17)  # tokens in timed passes
SHOWN = (1, 2, 3, 5, 6, 9, 13, 17)  # of them, in the report
WINDOW, BUDGET = 0.03, 5.0  # seconds, for each cost at a time and for all of them
RATES = (0.6, 0.8, 0.9)
EVERY, MAX_TOKENS, TURNS = 11, 32, 2  # sentences that are decoded, how far, and how often
WORTH = 1.05  # a smaller speed-up is none
NEARLY = 0.98  # of the best speed-up, for which fewer tokens are enough


@dataclass(frozen=True)
class Costs:
    """Seconds of bare passes."""

    passes: Mapping[int, float]  # of the target over 1 to 17 tokens, by their number
    step: float  # of the draft over one token
    steady: float  # of the target in steady mode, to verify NUM_DRAFT tokens

    def speedup(self, rate: float, num_draft: int) -> float:
        """Return the speed over plain decoding's with `num_draft` tokens drafted in each round."""
        round_ = num_draft * self.step + self.passes[num_draft + 1]
        return tokens_per_round(rate, num_draft) * self.passes[1] / round_

    def best(self, rate: float) -> int:
        """Return the fewest tokens to draft that are nearly as fast as any number."""
        speedups = {k: self.speedup(rate, k) for k in range(1, MOST + 1)}
        most = max(speedups.values())
        return next(k for k, speedup in speedups.items() if speedup >= NEARLY * most)


def tokens_per_round(rate: float, num_draft: int) -> float:
    """Return the tokens that a round emits if each is accepted at a rate (2211.17192, eq. 1)."""
    return sum(rate**place for place in range(num_draft + 1))


def speed(subject: Subject) -> Finding:
    """Time passes and a few sentences, and say how many tokens to draft; it never fails."""
    decoder = subject.decoder()
    costs = _costs(decoder)
    variants = bench.variants_of({"drafted": decoder}, MAX_TOKENS)
    prompts = [decoder.encode(sentence) for sentence in SENTENCES[::EVERY]]
    order = random.Random(0)
    bench.sweep(variants, prompts[:1], order)  # the first use is slower
    turns = [bench.sweep(variants, prompts, order) for _ in range(TURNS)]
    seen = acceptance(turns[-1]["drafted"])
    measured = bench.gain(turns, "drafted", bench.tokens_per_second)
    rates = (*RATES, seen)
    best = [costs.best(rate) for rate in rates]
    gains = [costs.speedup(rate, k) for rate, k in zip(rates, best, strict=True)]
    drafts = "this draft" if decoder.draft else "prompt lookup"
    reason = f"{drafts} does not pay here: plain decoding is as fast"
    if gains[-1] >= WORTH:
        reason = (
            f"{drafts} pays here: --num-draft {best[-1]} gives up to {gains[-1]:.1f} times the "
            f"speed of plain decoding (ten sentences at {NUM_DRAFT}: {measured:.1f} times)"
        )
    notes = [
        _line("tokens in a pass", SHOWN),
        _line("milliseconds", [_ms(costs.passes[length]) for length in SHOWN]),
        f"a step of the draft takes {_ms(costs.step)} ms",
        f"verifying {NUM_DRAFT} tokens takes {_ms(costs.passes[NUM_DRAFT + 1])} ms, "
        f"in steady mode {_ms(costs.steady)} ms",
        _line("tokens accepted", [f"{100 * rate:.0f} %" for rate in rates]) + " (here)",
        _line("best --num-draft", best),
        _line("times plain speed", [f"{gain:.1f}" for gain in gains]),
    ]
    details = {
        "pass_seconds": {str(length): s for length, s in costs.passes.items()},
        "draft_step_seconds": costs.step, "steady_seconds": costs.steady, "acceptance": seen,
        "plain_tokens_per_second": bench.typical(turns, bench.PLAIN, bench.tokens_per_second),
        "measured_speedup": measured,
        "best": {
            f"{rate:.2f}": {"num_draft": k, "speedup": gain}
            for rate, k, gain in zip(rates, best, gains, strict=True)
        },
    }  # fmt: skip
    return Finding("speed", "ok", reason, notes, details)


def _costs(decoder: SpeculativeDecoder) -> Costs:
    """Time everything interleaved, and keep the shortest times, as disturbances only add."""
    model, draft, prompt = decoder.model, decoder.draft, decoder.encode(SENTENCES[0])
    width = steady_width(model, NUM_DRAFT + 1)
    target = bench.Stepper(model, prompt, LENGTH)
    steady = bench.Stepper(model, prompt, LENGTH, width)
    drafter = bench.Stepper(draft, prompt, LENGTH) if draft else None
    ids = bench.drafted_ids(decoder)
    measure = partial(bench.measure_costs, draft=None, vocab_size=ids, min_seconds=WINDOW)
    shapes, verifying = [(0, n) for n in LENGTHS], (0, NUM_DRAFT + 1)
    turns: list[dict[object, float]] = []
    began = time.perf_counter()
    while len(turns) < 2 or time.perf_counter() - began < BUDGET:
        found: dict[object, float] = dict(measure(target, shapes=shapes).rounds)
        found["steady"] = measure(steady, shapes=[verifying]).rounds[verifying]
        found["step"] = _step_seconds(drafter, ids) if drafter else 0.0
        turns.append(found)
    least = {key: min(turn[key] for turn in turns) for key in turns[0]}
    # A longer pass that took less time counts as well: a shorter one could be padded to it.
    passes = [min(least[0, n] for n in LENGTHS if n >= length) for length in LENGTHS]
    every = range(1, MOST + 2)
    passes = np.interp(every, LENGTHS, passes).tolist()
    return Costs(dict(zip(every, passes, strict=True)), least["step"], least["steady"])


def _step_seconds(drafter: bench.Stepper, ids: int) -> float:
    began = time.perf_counter()
    mx.eval(drafter.draft(STEPS, ids))
    return (time.perf_counter() - began) / STEPS


def acceptance(runs: Iterable[bench.Run]) -> float:
    """Return the chance that a drafted token which all before it let through is accepted."""
    accepted = tested = 0
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        for drafted, kept in zip(outcome.num_drafted, outcome.num_accepted, strict=True):
            accepted += kept
            tested += kept + (kept < drafted)
    return accepted / tested if tested else 0.0


def _ms(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def _line(name: str, values: Sequence[object]) -> str:
    return name.ljust(17) + "".join(str(value).rjust(6) for value in values)
