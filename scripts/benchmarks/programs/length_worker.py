"""What compare_lengths.py runs in a process for each way to draft: a pair that notes its rounds."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

Noted = list[tuple[int | float, ...]]  # by the model, wanted, drafted, accepted, ms, typical


def load_way(spec: dict[str, Any]) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
    """Load the pair; return what answers a request for the output of a prompt.

    `spec` has the `model`, its `draft` (None: the one that the model names), `num_draft`,
    `max_tokens` and `temperature`, and whether the machine is `busy`: then processor time is taken
    for time, in the loop as well.
    """
    from speculative_t5 import SpeculativeDecoder

    if spec["busy"]:
        time.perf_counter = time.process_time
    length, options = spec["num_draft"], {}
    if spec["draft"] is not None:
        options["draft"] = spec["draft"]
    decoder = SpeculativeDecoder.from_pretrained(spec["model"], num_draft=length or 1, **options)
    noted: Noted = []
    watch(decoder, noted)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        noted.clear()
        began = time.process_time()
        output = decoder.generate(
            request["prompt"],
            max_tokens=spec["max_tokens"],
            temperature=spec["temperature"],
            speculative=length != 0,
            seed=0,
        )
        return {
            "tokens": output.tokens,
            "emitted": output.stats.emitted,
            "seconds": output.stats.seconds,
            "processor": time.process_time() - began,
            "rounds": [*noted],
        }

    return answer, {}


def watch(decoder: Any, noted: Noted) -> None:
    """Let a decoder note what each round of its outputs drafted and took."""
    from speculative_t5.decoding import Outcome, Plan, Sampler, Schedule

    planner = getattr(decoder, "engine", decoder)  # an older checkout has no engine
    plan_unwatched, has_model = planner.plan, decoder.draft is not None

    class Watcher(Schedule):
        def __init__(self, schedule: Schedule) -> None:
            self._schedule = schedule
            self.think = getattr(schedule, "think", None)  # an older checkout has none

        def next(self, remaining: int, rows: int = 1) -> int:
            return self._schedule.next(remaining, rows)

        def split(self, num_draft: int) -> tuple[int, int]:
            return self._schedule.split(num_draft)

        def kept(self, found: int) -> int:
            return self._schedule.kept(found)

        def observe(self, outcome: Outcome) -> None:
            by_model = self.split(outcome.num_draft)[0] if has_model else 0
            counts = sum(outcome.num_drafted), sum(outcome.num_accepted)
            milliseconds = round(1000 * outcome.seconds, 3)
            noted.append((by_model, outcome.num_draft, *counts, milliseconds, outcome.typical))
            self._schedule.observe(outcome)

    def plan(sampler: Sampler | None = None, **options: bool) -> Plan:
        found = plan_unwatched(sampler, **options)
        return replace(found, schedule=Watcher(found.schedule))

    planner.plan = plan
