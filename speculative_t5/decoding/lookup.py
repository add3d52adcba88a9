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

    Source and output are one string with a character for each token, which Python searches fast.

    Example:
        With source "I has a red car" and output "I" the longest match is "I": "has a red car". With
        output "I have", "have" matches nothing and is taken to replace "has": "a red car".
    """

    def __init__(self, source: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        self._text = _as_string(source)
        self._num_source = len(source)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram

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
        text = self._text + _as_string(assumed)
        match = self._match(text)
        if match is None and len(text) > num_source + 1:
            before = self._match(text[:-1])
            if before is not None and before + 1 < num_source:
                match = before + 1
        if match is None:
            return []
        stop = num_source if match < num_source else len(text)
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
        ngram, wanted = text[-size:], len(text) - self._num_source  # where it should end
        before = text.rfind(ngram, 0, min(wanted + 1, self._num_source))
        after = text.find(ngram, max(0, wanted + 2 - size), self._num_source)
        inside = [start + size - 1 for start in (before, after) if start >= 0]
        return min(inside, key=lambda end: abs(end - wanted), default=latest + size - 1)


def _as_string(tokens: Iterable[int]) -> str:
    return "".join(map(chr, tokens))
