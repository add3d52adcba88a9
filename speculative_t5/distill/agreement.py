"""How often a draft agrees with its target's greedy outputs, and what that gives in decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Agreement:
    """Agreement of greedy drafting with the target's greedy outputs.

    One pass of the draft over each output is enough to know the rounds of greedy decoding for any
    number of drafted tokens: up to its first wrong token a draft follows the true tokens, which are
    those that the pass has read.

    Args:
        rows: For each output, whether the draft has each token right, given the true tokens before
            it; EOS included.

    Attributes:
        num_outputs: Outputs, those of no tokens left out.
        num_tokens: Tokens of all outputs.
        rate: The share of them that the draft has right; 0.0 if there are none.
    """

    def __init__(self, rows: Sequence[Sequence[bool]]) -> None:
        self._runs = [_runs(row) for row in rows]
        self.num_outputs = sum(len(row) > 0 for row in rows)
        self.num_tokens = sum(len(row) for row in rows)
        right = sum(run > 0 for runs in self._runs for run in runs)
        self.rate = right / self.num_tokens if self.num_tokens else 0.0

    def tokens_per_pass(self, num_draft: int) -> float:
        """Return the tokens per pass of the target if `num_draft` are drafted in each round.

        It is 0.0 if there are no tokens.
        """
        rounds = sum(1 for _ in self._rounds(num_draft))
        return self.num_tokens / rounds if rounds else 0.0

    def by_place(self, num_draft: int) -> list[float]:
        """Return the chance that each token of a draft is right, given that those before it are.

        The list has an item for each place from 1 to `num_draft`, and ends where no draft came so
        far. Places after the end of an output do not count.
        """
        reached, passed = [0] * num_draft, [0] * num_draft
        for run, left in self._rounds(num_draft):
            for place in range(min(run + 1, left, num_draft)):
                reached[place] += 1
                passed[place] += place < run
        return [p / r for p, r in zip(passed, reached, strict=True) if r]

    def _rounds(self, num_draft: int) -> Iterator[tuple[int, int]]:
        """Yield, for each round, the drafted tokens that are right and the tokens still to come."""
        for runs in self._runs:
            pos = 0
            while pos < len(runs):
                run = min(runs[pos], num_draft)
                yield run, len(runs) - pos
                pos += run + 1


def _runs(row: Sequence[bool]) -> list[int]:
    """Return how many tokens in a row are right from each place on.

    For example, right, right, wrong, right gives 2, 1, 0, 1.
    """
    runs: list[int] = []
    for right in reversed(row):
        runs.append(runs[-1] + 1 if right and runs else int(right))
    return runs[::-1]
