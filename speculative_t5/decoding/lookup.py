"""Prompt lookup: find n-grams of the output in the text at hand, and propose what follows them."""

from collections.abc import Iterable, Sequence

MAX_NGRAM = 16  # longer n-grams would hardly choose otherwise


class Lookup:
    """Proposes what may follow one output, copied from its source or from the output itself.

    It proposes the tokens after the longest match of the output's last min_ngram to max_ngram
    tokens. Among equally long matches it prefers one in the source, the nearest to the position
    that matches the output's length (tasks that copy do it in order), then the latest in the
    output. Without any match, it assumes that the last token replaced one of the source: it
    matches the tokens before that, and skips one token of the source.

    A text that the output is expected to resemble goes before the source: among equally long
    matches one in that text is preferred, and its first tokens are the first to be proposed.

    Source and output are one string with a character for each token, which Python searches fast.

    Example:
        With source "I has a red car" and output "I" the longest match is "I": "has a red car". With
        output "I have", "have" matches nothing and is taken to replace "has": "a red car".
    """

    def __init__(
        self, source: Sequence[int], min_ngram: int, max_ngram: int, given: int = 1
    ) -> None:
        """Take the source, and how many tokens of each output are `given` before it begins."""
        self._text = _as_string(source)
        self._num_source = len(source)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._given = given
        self._num_expected = 0  # tokens that the output is expected to have

    def expect(self, prediction: Sequence[int]) -> None:
        """Take what the output is expected to be, before it has begun."""
        self._text = _as_string(prediction) + self._text
        self._num_source += len(prediction)
        self._num_expected = len(prediction)

    def propose(
        self, output: Sequence[int], num_draft: int, assumed: Sequence[int] = ()
    ) -> list[int]:
        """Return up to `num_draft` tokens that may follow an output of at least one token.

        It continues the output of the last call, unless it is shorter. Assumed tokens are appended
        to it for this call only.
        """
        num_source = self._num_source
        if len(output) < len(self._text) - num_source:
            self._text = self._text[:num_source]
        self._text += _as_string(output[len(self._text) - num_source :])
        if self._num_expected and len(output) + len(assumed) <= self._given:
            return [*map(ord, self._text[: min(num_draft, self._num_expected)])]
        text = self._text + _as_string(assumed)
        match = self._match(text)
        if match is None and len(text) > num_source + 1:
            before = self._match(text[:-1])
            if before is not None and before + 1 < num_source:
                match = before + 1
        if match is None:
            return []
        stop = next(end for end in (self._num_expected, num_source, len(text)) if match < end)
        return [*map(ord, text[match + 1 : min(match + 1 + num_draft, stop)])]

    def _match(self, text: str) -> int | None:
        """Return where the best earlier copy of a text's last tokens ends, if there is any."""
        size, latest = 0, 0
        while size < self._max_ngram:
            found = text.rfind(text[-size - 1 :], 0, -1)
            if found < 0:
                break
            size, latest = size + 1, found
        if size < self._min_ngram:
            return None
        ngram = text[-size:]
        wanted = len(text) - self._num_source - (self._given - 1)  # where it should end
        for start, stop in ((0, self._num_expected), (self._num_expected, self._num_source)):
            place = start + wanted
            before = text.rfind(ngram, start, min(place + 1, stop))
            after = text.find(ngram, max(start, place + 2 - size), stop)
            inside = [found + size - 1 for found in (before, after) if found >= 0]
            if inside:
                return min(inside, key=lambda end: abs(end - place))
        return latest + size - 1


def _as_string(tokens: Iterable[int]) -> str:
    return "".join(map(chr, tokens))
