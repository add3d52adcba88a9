"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FixedSchedule:
    """Always the same number of tokens, less where the output is about to end."""

    num_draft: int

    def next(self, remaining: int) -> int:
        """Tokens to draft when at most `remaining` more may be emitted.

        A round emits one token more than it drafts, so drafting `remaining` would waste one.
        """
        return min(self.num_draft, remaining - 1)
