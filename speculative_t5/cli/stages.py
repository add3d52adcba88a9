"""Shows on standard error how far the stages of `distill` are."""

from __future__ import annotations

import math
import sys
import time
from collections import deque

from tqdm import tqdm

from .terminal import is_terminal, note

EVERY = 30  # seconds between lines where there is no terminal
RECENT = 20  # steps whose mean loss is shown


class Stages:
    """Watches a run of `distill`: a bar for each stage on a terminal, otherwise a line at times.

    It is to be closed at the end (`with`).

    Attributes:
        labelled_prompts: By split, how many prompts have labels.
    """

    def __init__(self) -> None:
        self.labelled_prompts = {"valid": 0, "train": 0}
        self._bars = is_terminal(sys.stderr)
        self._bar: tqdm[None] | None = None
        self._stage = ""
        self._began = self._last_line = 0.0
        self._first_tokens = 0
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._agreement = ""

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def labelled(self, split: str, done: int, total: int, tokens: int) -> None:
        self.labelled_prompts[split] = done
        stage = "labelling held-out prompts" if split == "valid" else "labelling prompts"
        if self._enter(stage, total, done, "prompt"):
            self._first_tokens = tokens
        seconds = time.perf_counter() - self._began
        rate = (tokens - self._first_tokens) / seconds if seconds else 0.0
        self._show(done, total, f"{rate:,.0f} tokens/s" if rate else "")

    def trained(self, step: int, steps: int, loss: float) -> None:
        self._enter("training", steps, step - 1, "step")
        self._losses.append(loss)
        mean = sum(self._losses) / len(self._losses)
        self._show(step, steps, f"loss {mean:.3f}{self._agreement}")

    def checked(self, step: int, tokens_per_pass: float, agreement: float) -> None:
        self._agreement = f", {tokens_per_pass:.2f} tokens per pass"
        if not self._bars:
            mean = sum(self._losses) / max(1, len(self._losses))
            note(f"training: step {step:,}, loss {mean:.3f}{self._agreement}")
            self._last_line = time.perf_counter()

    def judging(self, done: int, total: int) -> None:
        self._enter("judging", total, done, "output")
        self._show(done, total, "")

    def _enter(self, stage: str, total: int, done: int, unit: str) -> bool:
        """Begin a stage, unless it has begun; return whether it is new."""
        if stage == self._stage:
            return False
        self._close()
        self._stage, self._began, self._last_line = stage, time.perf_counter(), -math.inf
        if self._bars:
            # What an earlier run has done does not count for the rate.
            self._bar = tqdm(total=total, initial=done, desc=stage, unit=f" {unit}s", leave=True)
        return True

    def _show(self, done: int, total: int, more: str) -> None:
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(more, refresh=False)
            self._bar.update(done - self._bar.n)
        elif not self._bars and time.perf_counter() - self._last_line > EVERY:
            note(f"{self._stage}: {done:,} of {total:,}{', ' if more else ''}{more}")
            self._last_line = time.perf_counter()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
