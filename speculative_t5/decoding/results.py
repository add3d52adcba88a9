"""Frozen values that leave the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal

FinishReason = Literal["eos", "length"]
Origin = Literal["accepted", "recovered", "bonus", "regular"]


PER_ROUND = ("num_draft", "num_drafted", "num_accepted")


@dataclass(frozen=True, repr=False)
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

    # Factories, so that the class itself has no such attributes: see __getattr__.
    num_draft: tuple[int, ...] = field(default_factory=tuple)
    num_drafted: tuple[int, ...] = field(default_factory=tuple)
    num_accepted: tuple[int, ...] = field(default_factory=tuple)
    emitted: int = 0
    seconds: float = 0.0

    if not TYPE_CHECKING:  # to which any name would then be an attribute

        def __getattr__(self, name: str) -> tuple[int, ...]:
            """Make a tuple that a snapshot of a `Tally` lacks until it is asked for."""
            if name not in PER_ROUND:
                return super().__getattribute__(name)  # fails in Python's own words
            made = vars(self)[name] = tuple(getattr(self._tally, name)[: self.rounds])
            return made

    def __reduce__(self) -> tuple[type[Stats], tuple[object, ...]]:
        """Copies and pickles hold values, not the tally."""
        return Stats, tuple(getattr(self, each.name) for each in fields(self))

    def __repr__(self) -> str:
        return (
            f"Stats(rounds={self.rounds}, drafted={self.drafted}, accepted={self.accepted}, "
            f"emitted={self.emitted}, seconds={self.seconds:.3f})"
        )

    @cached_property
    def rounds(self) -> int:
        """Forward passes of the target's decoder, except one begun where the output then ended."""
        return len(self.num_draft)

    @cached_property
    def drafted(self) -> int:
        """Tokens proposed."""
        return sum(self.num_drafted)

    @cached_property
    def accepted(self) -> int:
        """Proposed tokens that were accepted and emitted."""
        return sum(self.num_accepted)

    @cached_property
    def last_round(self) -> tuple[int, int, int]:
        """The last of `num_draft`, of `num_drafted` and of `num_accepted`."""
        return self.num_draft[-1], self.num_drafted[-1], self.num_accepted[-1]

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

    def summary(self, speedup: float | None = None) -> str:
        """One line for people.

        Args:
            speedup: Over regular decoding, as estimated; None leaves it out.
        """
        tokens = f"{self.emitted} token{'s' if self.emitted != 1 else ''}"
        parts = [f"{self.tokens_per_second:.0f} tok/s", tokens]
        if self.drafted:
            parts.append(f"{self.acceptance_rate:.0%} of drafts accepted".replace("%", " %"))
            parts.append(f"{self.tokens_per_round:.1f} tokens per round")
        else:
            parts.append("no draft")
        if speedup is not None:
            parts.append(f"{speedup:.1f}x regular (estimated)")
        return " - ".join(parts)

    def origins(self) -> Iterator[tuple[int, Origin]]:
        """Round, from 1, and origin of each emitted token in turn, EOS included."""
        left = self.emitted
        counts = zip(self.num_drafted, self.num_accepted, strict=True)
        for number, (drafted, accepted) in enumerate(counts, start=1):
            # Only the last round may have been cut.
            emitted = min(accepted + 1, left)
            left -= emitted
            for origin in origins_of_round(drafted, accepted, emitted):
                yield number, origin


class Tally:
    """Counts one output's rounds.

    A snapshot shares the lists, which only grow, and keeps the totals of its moment: it takes as
    long after the last round as after the first.
    """

    def __init__(self) -> None:
        self.num_draft: list[int] = []
        self.num_drafted: list[int] = []
        self.num_accepted: list[int] = []
        self.drafted = self.accepted = self.emitted = 0

    @property
    def rounds(self) -> int:
        return len(self.num_draft)

    def add(self, num_draft: int, num_drafted: int, num_accepted: int, emitted: int) -> None:
        """Count one more round."""
        self.num_draft.append(num_draft)
        self.num_drafted.append(num_drafted)
        self.num_accepted.append(num_accepted)
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.emitted += emitted

    def stats(self, seconds: float) -> Stats:
        """The statistics of the rounds so far, of which there is at least one."""
        stats = object.__new__(Stats)
        vars(stats).update(
            emitted=self.emitted,
            seconds=seconds,
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            last_round=(self.num_draft[-1], self.num_drafted[-1], self.num_accepted[-1]),
            _tally=self,
        )
        return stats


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


def origins_of_round(num_drafted: int, num_accepted: int, emitted: int) -> list[Origin]:
    """Where each token came from that a round emitted, EOS included.

    Example: five drafted, three accepted and the target's own after them, (5, 3, 4), are
    ["accepted", "accepted", "accepted", "recovered"]. A round that ends by an accepted EOS or at
    max_tokens, as (5, 3, 3), has no token of the target's own.
    """
    origins: list[Origin] = ["accepted"] * num_accepted
    if emitted > num_accepted:
        own: Origin = "recovered" if num_accepted < num_drafted else "bonus"
        origins.append(own if num_drafted else "regular")
    return origins
