"""Prompt lookup: find n-grams of the output in the text at hand, and propose what follows them."""

from bisect import bisect_left
from collections.abc import Sequence

MAX_NGRAM = 16  # longer n-grams would only make the index larger


class Lookup:
    """Proposes what may follow one output, copied from its source or from the output itself.

    It proposes the tokens after the longest match of the output's last min_ngram to max_ngram
    tokens. Among equally long matches it prefers one in the source, the nearest to the position
    that matches the output's length (tasks that copy do it in order), then the latest in the
    output. Without any match, it assumes that the last token replaced one of the source: it
    matches the tokens before that, and skips one token of the source.

    Source and output are one text, which only grows. An index maps n-grams to the positions where
    they end, so that a proposal late in a text costs no more than an early one. It holds single
    tokens, and a longer n-gram only where its end without the first token occurs more than once.

    Example:
        With source "I has a red car" and output "I" the longest match is "I": "has a red car". With
        output "I have", "have" matches nothing and is taken to replace "has": "a red car".
    """

    def __init__(self, source: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        self._text = list(source)
        self._num_source = len(self._text)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._ends: dict[tuple[int, ...], list[int]] = {}  # positions where n-grams end, ascending
        self._num_indexed = 0

    def propose(
        self, output: Sequence[int], num_draft: int, assumed: Sequence[int] = ()
    ) -> list[int]:
        """Return up to `num_draft` tokens that may follow an output of at least one token.

        It continues the output of the last call; if it is shorter, the index is rebuilt. Assumed
        tokens are appended to it for this call only.
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
        match = self._match()
        stop = self._num_source if match < self._num_source else len(text)
        copied = text[match + 1 : min(match + 1 + num_draft, stop)]
        del text[self._num_indexed :]
        return copied

    def _match(self) -> int:
        """Return the position before the proposal: a match's end, or else the text's."""
        end = len(self._text) - 1
        position = self._position(end)
        if position is None and end > self._num_source:
            before = self._position(end - 1)
            if before is not None and before + 1 < self._num_source:
                position = before + 1
        return end if position is None else position

    def _index(self, end: int) -> None:
        """Add the n-grams that end at `end`."""
        for size in range(1, min(self._max_ngram, end + 1) + 1):
            ends = self._ends.setdefault(self._ngram(end, size), [])
            ends.append(end)
            if len(ends) == 1:
                return
            if len(ends) == 2 and size < self._max_ngram and size <= ends[0]:
                self._ends[self._ngram(ends[0], size + 1)] = ends[:1]

    def _ngram(self, end: int, size: int) -> tuple[int, ...]:
        return tuple(self._text[end + 1 - size : end + 1])

    def _position(self, end: int) -> int | None:
        """Return where the best earlier copy of the tokens up to `end` ends, if any."""
        # Assumed tokens are few, and not in the index.
        candidates = [*self._candidates(end), *range(self._num_indexed, end)]
        ranks = [self._rank(position, end) for position in candidates]
        best = max(ranks, default=(0, False, 0))
        return candidates[ranks.index(best)] if best[0] >= self._min_ngram else None

    def _candidates(self, end: int) -> list[int]:
        """Return a few indexed positions before `end`, ascending; the best one is among them."""
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

    def _rank(self, position: int, end: int) -> tuple[int, bool, int]:
        """Rank a match by its length, then whether it is in the source, then its position."""
        text, size = self._text, 0
        while (
            size < self._max_ngram
            and size <= position
            and text[position - size] == text[end - size]
        ):
            size += 1
        inside = position < self._num_source
        return size, inside, -abs(end + 1 - self._num_source - position) if inside else position
