"""Measures what a draft gives: whole outputs with and without it, interleaved in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, Literal

from .. import device
from ..bench import PLAIN, Run, Variant, record, variants_of
from ..checkpoints import dtype_name
from ..decoding import LanguageModel
from ..errors import count
from ..generation import NumDraft, SpeculativeDecoder
from ..models import T5
from ..tokenizers import Tokenizer
from .agreement import Agreement
from .judgement import Judgement, Speed

MOST = 8  # tokens to draft
OWN, BEFORE = "new", "before"  # drafts, in the names of variants

Turn = Mapping[str, Sequence[Run]]  # by the name of the variant, in the order of the prompts


def judge(
    target: T5,
    draft: LanguageModel,
    tokenizer: Tokenizer | None,
    prompts: Sequence[list[int]],
    agreement: Agreement,
    *,
    target_name: str,
    draft_name: str,
    max_tokens: int,
    previous: LanguageModel | Literal["lookup"] | None = None,
    previous_name: str = "",
    turns: int = 3,
    max_prompts: int = 24,
    max_seconds: float = 900.0,
    made_by: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Judgement:
    """Measure greedy decoding of held-out prompts with 1 to `MOST` drafted tokens and with "auto".

    Everything runs one prompt at a time and interleaved, so that ratios hold even if the machine's
    speed drifts. Where there is nothing to measure, the judgement says so.

    Args:
        target: The target.
        draft: The draft to judge.
        tokenizer: The target's.
        prompts: Source ids of held-out prompts in a random order; the first `max_prompts` are used.
        agreement: Of the draft with the target on all held-out prompts.
        target_name: For people.
        draft_name: For people.
        max_tokens: Upper bound on tokens of each output, EOS included.
        previous: A draft in use before, measured at its best K and at "auto".
        previous_name: For people; a lookup needs none.
        turns: How often everything is measured, at least 1; medians are reported.
        max_prompts: The most prompts to measure on.
        max_seconds: Take fewer of them, at least one, where all would need more than about that.
        made_by: Options that the draft was made with, to report.
        progress: Receives how many outputs are done, and how many there are in all at most.
    """
    prompts = prompts[:max_prompts]
    before = previous_name or str(previous) if previous is not None else None
    reason: str | None = "there are no held-out prompts; give more prompts"
    measured: list[Turn] = []
    if prompts:
        reason = "every output ends with its first token, which leaves nothing to speed up"
        measuring = _Measuring(target, draft, previous, tokenizer, max_tokens, turns, progress)
        rehearsed = measuring.rehearse(prompts, max_seconds)
        if any(len(run.emitted) > 1 for run in rehearsed):
            reason = None
            needed = [run.seconds * measuring.passes for run in rehearsed]
            prompts = prompts[: affordable(needed, max_seconds)]
            measured = measuring.run(prompts)
    return Judgement(
        target=target_name,
        draft=draft_name,
        held_out=agreement.num_outputs,
        held_out_tokens=agreement.num_tokens,
        agreement=agreement.rate,
        by_place=tuple(agreement.by_place(MOST)),
        tokens_per_pass=tuple(agreement.tokens_per_pass(k) for k in range(1, MOST + 1)),
        unmeasured=reason,
        prompts=len(prompts) if measured else 0,
        turns=turns,
        max_tokens=max_tokens,
        plain=median(tokens_per_second(turn[PLAIN]) for turn in measured) if measured else 0.0,
        speeds=speeds_of(measured, OWN),
        previous=before,
        previous_speeds=speeds_of(measured, BEFORE),
        machine=machine(),
        dtype=dtype_name(target.dtype),
        made_by=dict(made_by or {}),
    )


def speeds_of(turns: Sequence[Turn], drafter: str) -> tuple[Speed, ...]:
    """Return the speeds of one drafter, in the order of its variants."""
    names = [name for turn in turns[:1] for name in turn if name.startswith(f"{drafter} ")]
    return tuple(speed_of(turns, name) for name in names)


def speed_of(turns: Sequence[Turn], name: str) -> Speed:
    """Sum up one variant against plain decoding, which ran in each turn as well."""
    own = [turn[name] for turn in turns]
    plain = [turn[PLAIN] for turn in turns]
    ratios = [tokens_per_second(o) / tokens_per_second(p) for o, p in zip(own, plain, strict=True)]
    same = [all(turn[i].tokens == plain[0][i].tokens for turn in own) for i in range(len(plain[0]))]
    number = name.split()[-1]
    return Speed(
        num_draft="auto" if number == "auto" else int(number),
        tokens_per_second=median(map(tokens_per_second, own)),
        speedup=median(ratios),
        tokens_per_pass=median(
            sum(sum(run.emitted) for run in runs) / sum(len(run.emitted) for run in runs)
            for runs in own
        ),
        same=sum(same),
    )


def tokens_per_second(runs: Sequence[Run]) -> float:
    """Return the tokens per second of whole outputs, EOS and the time for encoding included."""
    return sum(sum(run.emitted) for run in runs) / sum(run.seconds for run in runs)


def machine() -> str:
    """Return what speeds depend on: the device, the processor and its threads."""
    kind = "CPU" if device.on_cpu() else "GPU"
    return f"{kind}, {device.chip()}, {count(device.num_threads(), 'thread')}"


def affordable(seconds: Sequence[float], most: float) -> int:
    """Return how many of the first prompts take at most `most` seconds together, at least 1."""
    return max(1, sum(total <= most for total in accumulate(seconds)))


class _Measuring:
    """Plain decoding and all ways to draft.

    Attributes:
        passes: How often each prompt is decoded, at most.
    """

    def __init__(
        self,
        target: T5,
        draft: LanguageModel,
        previous: LanguageModel | Literal["lookup"] | None,
        tokenizer: Tokenizer | None,
        max_tokens: int,
        turns: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._target = target
        self._turns = turns
        self._progress = progress
        self._order = random.Random(0)
        self._done = self._total = 0
        numbers: list[NumDraft] = [*range(1, MOST + 1), "auto"]

        def ways(name: str, small: LanguageModel | Literal["lookup"]) -> list[Variant]:
            decoders = {
                f"{name} {k}": SpeculativeDecoder(target, small, tokenizer, num_draft=k)
                for k in numbers
            }
            return variants_of(decoders, max_tokens, drafts=True)

        self._plain, *self._own = ways(OWN, draft)
        self._before = ways(BEFORE, previous)[1:] if previous is not None else []
        self._all = [self._plain, *self._own, *self._before]
        chosen = 2 if self._before else 0
        # The rehearsal, the trial of the draft in use before, and the turns.
        self.passes = 1 + len(self._before) + turns * (1 + len(self._own) + chosen)

    def rehearse(self, prompts: Sequence[list[int]], most: float) -> Sequence[Run]:
        """Decode prompts without a draft, as many as all passes over will take `most` seconds."""
        runs: list[Run] = []
        self._total = self._needed(len(prompts))
        for prompt in prompts:
            runs += self._turn([prompt], [self._plain])[PLAIN]
            if sum(run.seconds for run in runs) * self.passes > most:
                break
        return runs

    def run(self, prompts: Sequence[list[int]]) -> list[Turn]:
        """Measure everything in each turn, in a new order each time."""
        rehearsed = self._done
        self._total = rehearsed - len(prompts) + self._needed(len(prompts))
        # The first use of everything is slower, and "auto" calibrates.
        self._turn(prompts[:1], self._all)
        kept = [self._plain, *self._own, *self._best_before(prompts)]
        return [self._turn(prompts, kept) for _ in range(self._turns)]

    def _needed(self, prompts: int) -> int:
        """Return the number of outputs to decode in all."""
        return len(self._all) + self.passes * prompts

    def _best_before(self, prompts: Sequence[list[int]]) -> list[Variant]:
        """Return the draft in use before at its best K, which a trial finds, and at "auto"."""
        if not self._before:
            return []
        tried = self._turn(prompts, self._before)
        *fixed, auto = self._before
        return [max(fixed, key=lambda variant: tokens_per_second(tried[variant.name])), auto]

    def _turn(self, prompts: Sequence[list[int]], variants: Sequence[Variant]) -> Turn:
        runs: dict[str, list[Run]] = {variant.name: [] for variant in variants}
        for prompt in prompts:
            for variant in self._order.sample(variants, len(variants)):
                runs[variant.name].append(record(self._target, prompt, variant.plan(prompt)))
                self._done += 1
                self._progress(self._done, self._total)
        return runs
