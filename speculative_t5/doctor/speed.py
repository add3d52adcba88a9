"""The check `speed`: what passes cost here, and what a draft gains; and published shapes."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import bench, device
from ..bench import synthetic
from ..checkpoints import dtype_name
from ..decoding import AdaptiveSchedule, Plan
from ..generation import SpeculativeDecoder
from ..models import new_model
from .checks import NUM_DRAFT, Finding, Subject, dtype_of
from .environment import memory
from .outputs import SENTENCES

STEPS = 16  # of the draft, timed together
LENGTH = 36  # tokens of output before a timed pass, in the middle of a capacity of the cache
LENGTHS = (*range(1, 18), 33, 64)  # tokens in timed passes
SHOWN = (1, 2, 3, 5, 6, 9, 13, 17)  # of them, in the usual report
WINDOW, BUDGET = 0.03, 5.0  # seconds, for each cost at a time and for all of them
EVERY, MAX_TOKENS = 11, 32  # sentences that are decoded, and how far
TURNS, DECODING = 9, 15.0  # how often, at most; no turn begins after so many seconds
WORTH = 1.05  # a smaller speed-up is none

PUBLISHED = {"t5_base": ("t5-base", "t5-small"), "t5_large": ("t5-large", "t5-small")}
PROMPTS, SOURCE, TOKENS, RATE = 2, 64, 64, 0.8  # of random pairs
MOST_MEMORY = 0.5  # share of the machine's memory that their weights may take
MOST_SECONDS = 0.2  # for a pass over one token: all takes a few hundred times as long


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


def t5_base(subject: Subject) -> Finding:
    """Measure random weights of the shapes of t5-base and t5-small."""
    return _published("t5_base")


def t5_large(subject: Subject) -> Finding:
    """Measure random weights of the shapes of t5-large and t5-small."""
    return _published("t5_large")


def _published(check: str) -> Finding:
    """Measure a random pair, with drafts that are accepted at RATE; the subject has no part."""
    shapes, dtype = PUBLISHED[check], device.default_type().dtype
    made = [dict(tree_flatten(new_model(synthetic.SHAPES[shape]).parameters())) for shape in shapes]
    needed = sum(weight.size for weights in made for weight in weights.values()) * dtype.size
    if needed > MOST_MEMORY * memory():
        reason = f"its weights take {needed / 2**30:.1f} GB, over half of this machine's memory"
        return Finding(check, "skipped", reason)
    device.limit_memory()  # as loading a model does
    target, draft = (synthetic.random_model(shape, dtype=dtype) for shape in shapes)
    prompts = synthetic.random_prompts(target, SOURCE, PROMPTS)
    stepper = bench.Stepper(target, prompts[0], LENGTH)
    if (pass_ := _least(lambda: stepper.verify(1, []), 0.0)) > MOST_SECONDS:
        reason = f"a pass over one token takes {pass_:.2f} s, too long to measure here"
        return Finding(check, "skipped", reason)
    decoder = SpeculativeDecoder(target, draft, num_draft=NUM_DRAFT, max_source_length=SOURCE)
    costs = _costs(decoder, prompts[0])
    outputs = {
        tuple(prompt): decoder.generate(prompt, max_tokens=TOKENS, speculative=False).tokens
        for prompt in prompts
    }
    plan = synthetic.synthetic_plan(decoder, outputs, RATE)
    plans = {"drafted": plan, "auto": replace(plan, schedule=AdaptiveSchedule())}
    details = _measured(decoder, plans, prompts, TOKENS, costs)
    plain, gain, auto = (
        details["plain_tokens_per_second"], details["measured_speedup"], details["auto"]["speedup"]
    )  # fmt: skip
    reason = (
        f"{':'.join(shapes)} in {dtype_name(dtype)}: {plain:.0f} tokens/s plain, at an acceptance "
        f"rate of {RATE} {gain:.1f} times, auto {auto:.1f} times"
    )
    return Finding(check, "ok", reason, details=details)


def _costs(decoder: SpeculativeDecoder, prompt: list[int]) -> tuple[dict[int, float], float]:
    """Return the least seconds of the target's passes, by their tokens, and of a draft's step."""
    target = bench.Stepper(decoder.model, prompt, LENGTH)
    runs: dict[object, Callable[[], object]] = {
        length: partial(target.verify, length, []) for length in LENGTHS
    }
    if decoder.draft:
        drafter, ids = bench.Stepper(decoder.draft, prompt, LENGTH), bench.drafted_ids(decoder)
        runs["steps"] = lambda: mx.eval(drafter.draft(STEPS, ids))
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
        for each in bench.variants_of(dict.fromkeys(plans, decoder), max_tokens)
    ]
    order, began = random.Random(0), time.perf_counter()
    bench.sweep(variants, prompts, order)  # the first use is slower, and "auto" learns
    turns: list[bench.Turn] = []
    while not turns or (len(turns) < TURNS and time.perf_counter() - began < DECODING):
        turns.append(bench.sweep(variants, prompts, order))
    # An output's last round may be shorter than was chosen.
    rounds = [run.outcomes[:-1] or run.outcomes for run in turns[-1]["auto"]]
    chosen = Counter(each.num_draft for outcomes in rounds for each in outcomes)
    speeds = {
        name: bench.typical(turns, name, bench.tokens_per_second) for name in (bench.PLAIN, *plans)
    }
    return {
        "dtype": dtype_name(dtype_of(decoder.model)),
        "pass_seconds": {str(length): seconds for length, seconds in costs[0].items()},
        "draft_step_seconds": costs[1],
        "acceptance": acceptance(turns[-1]["drafted"]),
        "plain_tokens_per_second": speeds[bench.PLAIN],
        "tokens_per_second": speeds["drafted"],
        "measured_speedup": bench.gain(turns, "drafted", bench.tokens_per_second),
        "auto": {
            "tokens_per_second": speeds["auto"],
            "speedup": bench.gain(turns, "auto", bench.tokens_per_second),
            "rounds": {str(length): rounds for length, rounds in chosen.most_common()},
        },
    }


def acceptance(runs: Iterable[bench.Run]) -> float:
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
