"""How many tokens to draft next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FixedSchedule:
    """Always the same number of tokens, less where the output is about to end."""

    num_draft: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_draft, int) or self.num_draft < 1:
            raise ValueError(f"num_draft must be an integer of at least 1, got {self.num_draft!r}")

    def next(self, remaining: int) -> int:
        """Tokens to draft when at most `remaining` more may be emitted.

        A round emits one token more than it drafts, so drafting `remaining` would waste one.
        """
        return min(self.num_draft, remaining - 1)
