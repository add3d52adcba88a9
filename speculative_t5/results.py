"""Frozen values that leave the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "length"]


@dataclass(frozen=True)
class Stats:
    """What one generation cost.

    Attributes:
        rounds: Forward passes of the target's decoder.
        drafted: Tokens proposed.
        accepted: Drafted tokens that were accepted and emitted (a cut at EOS or max_tokens counts).
        emitted: Tokens emitted, EOS included.
        seconds: Wall-clock time from the prompt's ids to the last token, the encoder's included.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    seconds: float = 0.0

    def after_round(self, drafted: int, accepted: int, emitted: int, seconds: float) -> Stats:
        """The totals after one more round, `seconds` since the start."""
        return Stats(
            rounds=self.rounds + 1,
            drafted=self.drafted + drafted,
            accepted=self.accepted + accepted,
            emitted=self.emitted + emitted,
            seconds=seconds,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Block efficiency: emitted / rounds."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Round:
    """What one pass of the target gave one row.

    Attributes:
        row: Index of the prompt in its batch.
        tokens: Emitted ids, EOS not among them.
        num_accepted: How many of the emitted tokens, EOS included, came from the draft.
        stats: The row's totals so far, this round included.
        finish_reason: "eos" or "length" in the row's last round, else None.
    """

    row: int
    tokens: list[int]
    num_accepted: int
    stats: Stats
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Chunk:
    """A round as a stream shows it: `text` continues the text of the chunks before it."""

    text: str
    tokens: list[int]
    num_accepted: int
    stats: Stats
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """A finished output; `tokens` are ids without EOS."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
