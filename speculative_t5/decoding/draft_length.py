"""How many tokens to draft next: what a schedule is, and one that always drafts the same number.

`adaptive.py` has the one that chooses what pays best on this machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .outcomes import Outcome


class Schedule(Protocol):
    """Chooses the draft length of each round from the outcomes of earlier rounds.

    It observes counts and times, never tokens: by the rules that sample a draft first, a length
    that depended on a token's value could decide whether that token is accepted, and the output
    would no longer follow the target's distribution.
    """

    # Chooses for later rounds, given how many rows there are, while the device computes the round
    # that `next` was for; None if that takes no time.
    think: Callable[[int], None] | None = None

    def next(self, remaining: int, rows: int = 1) -> int:
        """Return how many tokens to draft when at most `remaining` more may be emitted.

        A round emits one token more than it drafts, so drafting `remaining` would waste one. The
        batch has `rows` rows.
        """

    def split(self, num_draft: int) -> tuple[int, int]:
        """Return how many tokens a model drafts in this round, and a lookup adds at most.

        It is asked where there are both.
        """
        return num_draft, num_draft

    def kept(self, found: int) -> int:
        """Return how many tokens to keep of a draft that is shorter or longer than asked for."""
        return found

    def observe(self, outcome: Outcome) -> None:
        """Learn from the round that the last `next` was for."""
        return


@dataclass(frozen=True)
class FixedSchedule(Schedule):
    """Always drafts the same number of tokens, unless the output is about to end."""

    num_draft: int
    halves: bool = False  # whether a model and a lookup draft this number together

    def next(self, remaining: int, rows: int = 1) -> int:
        return min(self.num_draft, remaining - 1)

    def split(self, num_draft: int) -> tuple[int, int]:
        return ((num_draft + 1) // 2, num_draft // 2) if self.halves else super().split(num_draft)
