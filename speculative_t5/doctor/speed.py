"""The check `speed`: what passes cost here, and how many tokens to draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bench import Stepper, measure_costs
from ..decoding import Stats
from ..generation import SpeculativeDecoder, steady_width
from .findings import NUM_DRAFT, Finding, Subject
from .sentences import SENTENCES

MOST = 16  # tokens to draft
STEPS = 8  # of the draft, timed together
LENGTH = 24  # tokens of output before a timed pass
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17)  # tokens in timed passes
SHOWN = (1, 2, 3, 5, 6, 9, 13, 17)  # of them, in the report
TURNS = 2
RATES = (0.6, 0.8, 0.9)
EVERY, MAX_TOKENS = 11, 32  # sentences that are decoded, and how far
WORTH = 1.05  # a smaller speed-up is none
NEARLY = 0.98  # of the best speed-up, for which fewer tokens are enough


@dataclass(frozen=True)
class Costs:
    """Seconds of bare passes.

    Attributes:
        passes: Of the target over 1 to 17 tokens, by their number.
        step: Of the draft over one token.
        steady: Of the target in steady mode, to verify NUM_DRAFT tokens.
    """

    passes: Mapping[int, float]
    step: float
    steady: float

    def speedup(self, rate: float, num_draft: int) -> float:
        """Return the speed over plain decoding's with so many tokens drafted a round."""
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
    plain, drafted = (_decoded(decoder, speculative=flag) for flag in (False, True))
    seen = acceptance(drafted)
    measured = _per_second(drafted) / _per_second(plain)
    best = costs.best(seen)
    gain = costs.speedup(seen, best)
    details = {
        "pass_seconds": {str(length): s for length, s in costs.passes.items()},
        "draft_step_seconds": costs.step, "steady_seconds": costs.steady, "acceptance": seen,
        "plain_tokens_per_second": _per_second(plain), "measured_speedup": measured,
        "best": {
            f"{rate:.2f}": {"num_draft": k, "speedup": costs.speedup(rate, k)}
            for rate in (*RATES, seen) for k in [costs.best(rate)]
        },
    }  # fmt: skip
    drafts = "this draft" if decoder.draft else "prompt lookup"
    reason = f"{drafts} does not pay here: plain decoding is as fast"
    if gain >= WORTH:
        reason = (
            f"{drafts} pays here: --num-draft {best} gives up to {gain:.1f} times the speed of "
            f"plain decoding (ten sentences at {NUM_DRAFT}: {measured:.1f} times)"
        )
    return Finding("speed", "ok", reason, tuple(_notes(costs, seen)), details)


def _costs(decoder: SpeculativeDecoder) -> Costs:
    model, draft, prompt = decoder.model, decoder.draft, decoder.encode(SENTENCES[0])
    width = steady_width(model, NUM_DRAFT + 1)
    target, steady = Stepper(model, prompt, LENGTH), Stepper(model, prompt, LENGTH, width)
    drafter = Stepper(draft, prompt, LENGTH) if draft else None
    ids = min(model.vocab_size, draft.vocab_size) if draft else model.vocab_size
    shapes, verifying = [*((0, n) for n in LENGTHS), (STEPS, STEPS + 1)], (0, NUM_DRAFT + 1)
    turns = [
        (
            measure_costs(target, drafter, shapes, ids).rounds,
            measure_costs(steady, None, [verifying], ids).rounds[verifying],
        )
        for _ in range(TURNS)
    ]
    # The shortest times count, since disturbances only make a pass longer.
    seconds = {shape: min(rounds[shape] for rounds, _ in turns) for shape in shapes}
    # So does a longer pass that took less time: a shorter one could be padded to it.
    passes = [min(seconds[0, n] for n in LENGTHS if n >= length) for length in LENGTHS]
    every = range(1, MOST + 2)
    return Costs(
        dict(zip(every, np.interp(every, LENGTHS, passes).tolist(), strict=True)),
        max(seconds[STEPS, STEPS + 1] - seconds[0, STEPS + 1], 0.0) / STEPS,
        min(seconds for _, seconds in turns),
    )


def _decoded(decoder: SpeculativeDecoder, *, speculative: bool) -> list[Stats]:
    def once() -> list[Stats]:
        return [
            decoder.generate(each, max_tokens=MAX_TOKENS, speculative=speculative).stats
            for each in SENTENCES[::EVERY]
        ]

    once()  # the first use of everything is slower
    return once()


def acceptance(outputs: Iterable[Stats]) -> float:
    """Return the chance that a drafted token which all before it let through is accepted."""
    accepted = tested = 0
    for stats in outputs:
        for drafted, kept in zip(stats.num_drafted, stats.num_accepted, strict=True):
            accepted += kept
            tested += kept + (kept < drafted)
    return accepted / tested if tested else 0.0


def _per_second(outputs: Sequence[Stats]) -> float:
    return sum(stats.emitted for stats in outputs) / sum(stats.seconds for stats in outputs)


def _notes(costs: Costs, seen: float) -> list[str]:
    """Return the tables of the report."""
    passes = [f"{1e3 * costs.passes[length]:.2f}" for length in SHOWN]
    rates: list[Any] = [*RATES, seen]
    best = [costs.best(rate) for rate in rates]
    gains = [f"{costs.speedup(rate, k):.1f}" for rate, k in zip(rates, best, strict=True)]
    return [
        _line("tokens in a pass", SHOWN),
        _line("milliseconds", passes),
        f"a step of the draft takes {1e3 * costs.step:.2f} ms",
        f"verifying {NUM_DRAFT} tokens takes {1e3 * costs.passes[NUM_DRAFT + 1]:.2f} ms, "
        f"in steady mode {1e3 * costs.steady:.2f} ms",
        _line("tokens accepted", [f"{rate:.0%}".replace("%", " %") for rate in rates]) + " (here)",
        _line("best --num-draft", best),
        _line("times plain speed", gains),
    ]


def _line(name: str, values: Sequence[object]) -> str:
    return name.ljust(17) + "".join(str(value).rjust(6) for value in values)
