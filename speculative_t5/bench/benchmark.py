"""Measuring variants and bare costs interleaved, so that ratios hold on a machine that drifts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ..decoding import LanguageModel
from .costs import Costs, Stepper, measure_costs
from .report import Report, Turn, emitted_later, make_report, shape_of
from .runs import PLAIN, Run, Variant, record

Runs = Mapping[str, Sequence[Run]]  # by the name of the variant


class Bench:
    """Variants, plain decoding among them, and bare costs, measured on the same source ids.

    The draft model, if there is one, proposes only the first `draft_vocab` ids; None is all.
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

    def run(self, turns: int, progress: Callable[[int], None] = lambda done: None) -> list[Report]:
        """Measure everything `turns` times, at least once, in a new order each time.

        `progress` receives 1 to `turns` + 2 as the work goes on. A variant of which all outputs end
        in their first round is refused.
        """
        order = random.Random(0)
        self._runs(order)  # the first use of everything is slower
        progress(1)
        timed = self._runs(order, timed=True)
        progress(2)
        self._check_rounds(timed)
        shapes = self._shapes(timed)
        length = max(1, round(fmean(len(run.tokens) for run in timed[PLAIN]) / 2))
        self._costs(length, shapes)
        measured = []
        for turn in range(turns):
            costs = self._costs(length, shapes)
            measured.append(Turn(self._runs(order), costs))
            progress(turn + 3)
        return [make_report(each, measured, timed[each.name]) for each in self._variants]

    def _runs(self, order: random.Random, *, timed: bool = False) -> Runs:
        runs: dict[str, list[Run]] = {variant.name: [] for variant in self._variants}
        for prompt in self._prompts:
            for variant in order.sample(self._variants, len(self._variants)):
                plan = replace(variant.plan(prompt), timed=timed)
                runs[variant.name].append(record(self._model, prompt, plan))
        return runs

    def _check_rounds(self, runs: Runs) -> None:
        for name, of_variant in runs.items():
            if not emitted_later(of_variant):
                raise ValueError(
                    f"{name}: every output ends in its first round, which leaves nothing "
                    "to measure: give longer prompts, a larger --max-tokens or a smaller "
                    "--num-draft"
                )

    def _shapes(self, runs: Runs) -> list[tuple[int, int]]:
        """Return the shapes of rounds whose bare costs theory needs."""
        found = {
            shape_of(variant, outcome)
            for variant in self._variants
            for run in runs[variant.name]
            for outcome in run.outcomes[1:]
        }
        ends = {(k, length) for k, _ in found for length in (1, k + 1)}
        return sorted(found | ends)

    def _costs(self, length: int, shapes: Sequence[tuple[int, int]]) -> Costs:
        """Measure bare costs on the first prompt, after `length` tokens of output."""
        models = [self._model, self._draft] if self._draft else [self._model]
        target, *draft = (Stepper(model, self._prompts[0], length) for model in models)
        ids = min(model.vocab_size for model in models)
        ids = min(ids, self._draft_vocab or ids)
        return measure_costs(target, draft[0] if draft else None, shapes, ids)
