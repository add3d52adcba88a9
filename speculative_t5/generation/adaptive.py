"""Adaptive draft lengths: calibrated at the first prompts, kept from one call to the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .. import device
from ..decoding import (
    AdaptiveSchedule,
    LanguageModel,
    Padded,
    Plan,
    Request,
    Round,
    Schedule,
    calibrate,
    decode,
)
from .options import DraftingOptions

REHEARSAL_TOKENS = 128  # of an output that only serves to measure costs


class Schedules:
    """The adaptive schedules of one decoder, one for each set of options.

    Several threads may use it. A copy is empty, and so is what a pickle holds: costs and
    acceptance are measured anew where the copy is used.
    """

    def __init__(self) -> None:
        self._schedules: dict[tuple[object, ...], AdaptiveSchedule] = {}
        self._lock = threading.Lock()  # held while a schedule is calibrated or looked up

    def __reduce__(self) -> tuple[type[Schedules], tuple[()]]:
        return Schedules, ()

    def __len__(self) -> int:
        return len(self._schedules)

    def calibrated(
        self,
        model: LanguageModel,
        draft: LanguageModel | None,
        options: DraftingOptions,
        plan: Plan,
        requests: Sequence[Request],
    ) -> AdaptiveSchedule:
        """Return the schedule for these options, and calibrate it if there is none yet.

        Where outputs do not depend on draft lengths (greedy and exact), the schedule goes on
        learning from one call to the next. Elsewhere each call begins with a fresh one, or the same
        seed and options would not give the same tokens twice.

        The drafter and the verifier of `plan` are measured on `requests`, side by side.
        """
        device.enter_thread()  # before the lock, which a fork may leave locked
        assert plan.options is not None
        own, verifier, sampler = plan.options, plan.verifier, plan.options.sampler
        sampling = (float(sampler.temperature), sampler.top_k, float(sampler.top_p))
        rule = (verifier.block, float(verifier.delta))
        lookups = (options.lookup, options.min_ngram, options.max_ngram)
        batch_size = 1 << (len(requests) - 1).bit_length()  # the next power of two
        # A transform takes time, and changes what is accepted.
        transform = (sampler.transform.summary,) if sampler.transform else ()
        settings = (*sampling, *rule, *lookups, options.draft_vocab, batch_size, *transform)

        def rehearse(schedule: Schedule, seed: int) -> Iterator[Round]:
            sampled = seed if sampler.temperature else None
            timed = replace(
                plan,
                drafter=Padded(plan.drafter),
                schedule=schedule,
                options=replace(own, max_tokens=REHEARSAL_TOKENS, seed=sampled),
                timed=True,
            )
            return decode(model, requests, timed, batch_size=len(requests))

        with self._lock:  # other threads wait, and would disturb what is measured
            if settings not in self._schedules:
                models = [each.fingerprint if each else None for each in (model, draft)]
                found = calibrate(rehearse, len(requests), *models, *settings)
                self._schedules[settings] = AdaptiveSchedule(found)
            schedule = self._schedules[settings]
        greedy_and_exact = sampler.temperature == 0 and verifier.delta == 0
        return schedule if greedy_and_exact else schedule.fresh()
