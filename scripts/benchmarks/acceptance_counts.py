"""Count what is accepted of drafts, in outputs of mlx-lm and of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculative_t5 import Generation


@dataclass(frozen=True)
class Counts:
    """What became of drafts."""

    rounds: int = 0  # passes of the target
    drafted: int = 0  # tokens
    accepted: int = 0  # drafted tokens that were emitted
    # Rounds in which a drafted token was rejected. The rest of the draft after it, or after the end
    # of an output, is not judged.
    rejected: int = 0
    emitted: int = 0  # tokens, EOS included
    opened: int = 0  # outputs whose first round accepted at least one token
    outputs: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, others = vars(self), vars(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})

    @property
    def acceptance(self) -> float:
        """Accepted / drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def judged(self) -> float:
        """Accepted / (accepted + rejected)."""
        return self.accepted / max(self.accepted + self.rejected, 1)

    @property
    def tokens_per_round(self) -> float:
        return self.emitted / max(self.rounds, 1)


def count_flags(flags: Sequence[bool], num_draft: int, max_tokens: int) -> Counts:
    """Count the rounds of mlx-lm from which of the emitted tokens came from the draft.

    A token of the target's own ends a round. Only the last round may lack it, where `max_tokens`
    or EOS cut the output.

    Example:
        With num_draft 2 and max_tokens 6, `[True, True, False, True, False, True]` are a round that
        accepts both, one that accepts the first of two, and one that was asked for a single token.
    """
    counts, start = Counts(outputs=1), 0
    while start < len(flags):
        drafted = min(num_draft, max_tokens - start)
        end = flags.index(False, start) if False in flags[start:] else len(flags)
        accepted, cut = end - start, end == len(flags)
        counts += Counts(
            rounds=1,
            drafted=drafted,
            accepted=accepted,
            rejected=int(not cut and accepted < drafted),
            emitted=accepted + (not cut),
            opened=int(start == 0 and accepted > 0),
        )
        start = end + 1
    return counts


def count_stats(output: Generation) -> Counts:
    """Count the rounds of an output of this package."""
    stats = output.stats
    has_no_own = stats.accepted + stats.rounds > stats.emitted  # the last round was cut
    rejected = [a < d for a, d in zip(stats.num_accepted, stats.num_drafted, strict=True)]
    return Counts(
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        rejected=sum(rejected) - (has_no_own and rejected[-1]),
        emitted=stats.emitted,
        opened=int(stats.num_accepted[0] > 0),
        outputs=1,
    )
