"""The time of a run, shared out among its stages where `minutes` limits it."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from .data import Example
from .folder import RunFolder
from .labels import Label

FILE = "spent.json"


class Budget:
    """The seconds that a run has taken, in all its processes, and those it may take.

    Args:
        folder: Keeps the seconds of earlier processes.
        minutes: For the whole run; None if there is no limit.

    Attributes:
        limit: The same in seconds.
    """

    def __init__(self, folder: RunFolder, minutes: float | None) -> None:
        self.limit = None if minutes is None else 60 * minutes
        self._folder = folder
        self._before = float((folder.read(FILE, seconds=float) or {"seconds": 0.0})["seconds"])
        self._began = perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the run began, those between its processes left out."""
        return self._before + perf_counter() - self._began

    def save(self) -> None:
        """Keep the seconds for a process that resumes the run."""
        self._folder.write(FILE, {"seconds": self.spent})

    def left(self, limit: float, reserve: float = 0.0) -> float:
        """Return the seconds until `limit`, less a share of it."""
        return max(0.0, limit * (1 - reserve) - self.spent)


class Enough:
    """Says when labelling ends: with enough tokens, or when its share of the time is spent.

    Args:
        examples: What is labelled.
        chunk: The number of examples that are labelled at a time.
        tokens: Of prompts and labels; None for all examples. A limit on time goes first.
        budget: The time of the run.
        share: Of that time, counted from the run's beginning.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        chunk: int,
        tokens: int | None,
        budget: Budget,
        share: float,
    ) -> None:
        self._examples = examples
        self._chunk = chunk
        self._tokens = tokens
        self._budget = budget
        self._until = None if budget.limit is None else share * budget.limit
        self._first: tuple[int, float] | None = None  # labels and time at the first report

    def __call__(self, labels: Sequence[Label]) -> bool:
        self._budget.save()
        if self._until is not None:
            return self._budget.spent > self._until
        if self._tokens is None:
            return False
        return sum(len(each.prompt) + len(each.tokens) for each in labels) >= self._tokens

    def total(self, done: int, tokens: int) -> int:
        """Estimate the number of labels at the end, given those done and the tokens in them."""
        spent, most = self._budget.spent, len(self._examples)
        first, began = self._first = self._first or (done, spent)
        if done == first or (self._until is None and self._tokens is None):
            return most
        if self._until is not None:
            whole = done + (done - first) * max(0.0, self._until - spent) / max(spent - began, 1e-9)
        else:
            assert self._tokens is not None
            sources = sum(len(each.prompt) for each in self._examples) / most
            whole = self._tokens / (sources + tokens / done)
        chunks = -(-max(whole, done) // self._chunk)
        return min(most, round(chunks * self._chunk))


def affordable_steps(
    seconds: float, step: float, check: float, save: float, most_checks: int
) -> tuple[int, int]:
    """Return the numbers of steps and of checks, at least 1, that take `seconds`.

    Checks get at most a fifth of the time.

    Args:
        seconds: For all of them.
        step: Seconds of a step.
        check: Seconds of a check.
        save: Seconds of saving the state, as a share for each step.
        most_checks: The most checks.
    """
    checks = max(1, min(most_checks, int(0.2 * seconds / max(check, 1e-9))))
    return max(1, int((seconds - checks * check) / (step + save))), checks
