"""Frozen values that leave the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["eos", "length"]


@dataclass(frozen=True)
class Stats:
    """What one generation cost.

    In a batch, seconds are those of all rows together from this row's first round to its last; of
    the first rows with their encoding, of later ones, which is done ahead, without.

    Attributes:
        num_draft: K of each round in turn: tokens that the drafter was asked for.
        num_drafted: Tokens it proposed in each round; a lookup may find fewer.
        num_accepted: Proposed tokens that were accepted and emitted in each round (a cut at EOS
            or max_tokens counts).
        emitted: Tokens emitted, EOS included.
        seconds: Wall-clock time from the prompt's ids to the last token, the encoder's included.
    """

    num_draft: tuple[int, ...] = ()
    num_drafted: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    emitted: int = 0
    seconds: float = 0.0

    def after_round(
        self, num_draft: int, num_drafted: int, num_accepted: int, emitted: int
    ) -> Stats:
        """These, after one more round."""
        return replace(
            self,
            num_draft=(*self.num_draft, num_draft),
            num_drafted=(*self.num_drafted, num_drafted),
            num_accepted=(*self.num_accepted, num_accepted),
            emitted=self.emitted + emitted,
        )

    @property
    def rounds(self) -> int:
        """Forward passes of the target's decoder."""
        return len(self.num_draft)

    @property
    def drafted(self) -> int:
        """Tokens proposed."""
        return sum(self.num_drafted)

    @property
    def accepted(self) -> int:
        """Proposed tokens that were accepted and emitted."""
        return sum(self.num_accepted)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of accepted tokens among those drafted first, second, and so on."""
        places = range(1, max(self.num_drafted, default=0) + 1)
        return tuple(
            sum(n >= place for n in self.num_accepted) / sum(n >= place for n in self.num_drafted)
            for place in places
        )

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
        index: The prompt's.
        tokens: Emitted ids, EOS not among them.
        num_accepted: How many of the emitted tokens, EOS included, came from the draft.
        stats: The row's totals so far, this round included.
        finish_reason: "eos" or "length" in the row's last round, else None.
        output: In that round all ids that the row emitted, EOS not among them; else none.
    """

    index: int
    tokens: list[int]
    num_accepted: int
    stats: Stats
    finish_reason: FinishReason | None = None
    output: list[int] = field(default_factory=list)


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
