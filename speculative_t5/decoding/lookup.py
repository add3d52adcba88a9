"""Finding what may come next in the text at hand: the rule of drafts without a model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ..errors import check_integer

MAX_NGRAM = 16  # longer n-grams would only make the index larger


def check_ngrams(min_ngram: int, max_ngram: int) -> None:
    """Refuse sizes of lookups' matches that make no sense."""
    check_integer("min_ngram", min_ngram, 1, MAX_NGRAM)
    check_integer("max_ngram", max_ngram, min_ngram, MAX_NGRAM)


class Lookup:
    """Copies what may follow one output from its source or from the output itself.

    A proposal is what follows the longest match of the output's last tokens, min_ngram to
    max_ngram of them. Of equally long matches one in the source comes first, the nearest to as far
    into it as the output is long (tasks that copy do it in order), then the latest in the output.
    If there is no match at all, the last token is taken to replace one of the source: the match is
    that of the tokens before it, and what follows begins one place further on.

    Source and output are one text, which only grows. An index says where its n-grams end, so that
    a proposal late in a text costs no more than an early one. It has single tokens, and a longer
    n-gram where the same without its first token occurs more than once.

    Example:
        With source "I has a red car" and output "I" the longest match is "I": "has a red car". With
        output "I have", "have" matches nothing and is taken to replace "has": "a red car".
    """

    def __init__(self, source: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        self._text = list(source)
        self._num_source = len(self._text)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where n-grams end, in order
        self._num_indexed = 0

    def propose(
        self, output: Sequence[int], num_draft: int, assumed: Sequence[int] = ()
    ) -> list[int]:
        """Up to `num_draft` tokens that may follow an output of at least one token.

        Args:
            output: Begins with that of the call before, or the index is made anew.
            num_draft: The most tokens to propose.
            assumed: Tokens to take for the output's next ones; they are forgotten afterwards.
        """
        text = self._text
        if len(output) < len(text) - self._num_source:
            del text[self._num_source :]
            self._ends, self._num_indexed = {}, 0
        text += output[len(text) - self._num_source :]
        for end in range(self._num_indexed, len(text)):
            self._index(end)
        self._num_indexed = len(text)
        text += assumed
        at = self._match()
        stop = self._num_source if at < self._num_source else len(text)
        copied = text[at + 1 : min(at + 1 + num_draft, stop)]
        del text[self._num_indexed :]
        return copied

    def _match(self) -> int:
        """Where the match ends that a proposal follows; the text's end if there is none."""
        end = len(self._text) - 1
        at = self._place(end)
        if at is None and end > self._num_source:
            at = self._place(end - 1)
            at = at + 1 if at is not None and at + 1 < self._num_source else None
        return end if at is None else at

    def _index(self, end: int) -> None:
        """Note the n-grams that end here."""
        for size in range(1, min(self._max_ngram, end + 1) + 1):
            ends = self._ends.setdefault(self._ngram(end, size), [])
            ends.append(end)
            if len(ends) == 1:
                return
            if len(ends) == 2 and size < self._max_ngram and size <= ends[0]:
                self._ends[self._ngram(ends[0], size + 1)] = ends[:1]

    def _ngram(self, end: int, size: int) -> tuple[int, ...]:
        return tuple(self._text[end + 1 - size : end + 1])

    def _place(self, end: int) -> int | None:
        """Where the best earlier copy of the tokens up to `end` ends, if there is one."""
        # Assumed tokens are not in the index, and few.
        candidates = [*self._candidates(end), *range(self._num_indexed, end)]
        ranks = [self._rank(at, end) for at in candidates]
        best = max(ranks, default=(0, False, 0))
        return candidates[ranks.index(best)] if best[0] >= self._min_ngram else None

    def _candidates(self, end: int) -> list[int]:
        """Indexed places before `end`, in order, with the best of all among them."""
        ends: list[int] = []
        size = 0
        while size < min(self._max_ngram, end + 1):
            longer = self._ends.get(self._ngram(end, size + 1))
            if longer is None or longer[0] >= end:
                break
            ends, size = longer, size + 1
        num_inside = bisect_left(ends, self._num_source)
        if not num_inside:
            return ends[: bisect_left(ends, end)][-1:]
        next_one = bisect_left(ends, end + 1 - self._num_source, 0, num_inside)
        return ends[max(next_one - 1, 0) : min(next_one + 1, num_inside)]

    def _rank(self, at: int, end: int) -> tuple[int, bool, int]:
        """What makes a match better than others: its length, whether it is in the source, where."""
        text, size = self._text, 0
        while size < self._max_ngram and size <= at and text[at - size] == text[end - size]:
            size += 1
        inside = at < self._num_source
        return size, inside, -abs(end + 1 - self._num_source - at) if inside else at
