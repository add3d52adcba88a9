"""Finding what may come next in the text at hand: the rule of drafts without a model."""

from __future__ import annotations

from collections.abc import Iterator


def check_ngrams(min_ngram: int, max_ngram: int) -> None:
    """Refuse sizes of lookups' matches that make no sense."""
    if not isinstance(min_ngram, int) or min_ngram < 1:
        raise ValueError(f"min_ngram must be an integer of at least 1, got {min_ngram!r}")
    if not isinstance(max_ngram, int) or max_ngram < min_ngram:
        raise ValueError(
            f"max_ngram must be an integer of at least min_ngram, {min_ngram}, got {max_ngram!r}"
        )


def look_up(
    source: list[int], output: list[int], num_draft: int, min_ngram: int, max_ngram: int
) -> list[int]:
    """What may follow `output`: up to `num_draft` tokens copied from the source or from itself.

    They are those after the longest match of the output's last tokens, min_ngram to max_ngram of
    them. Of equally long matches one in the source comes first, the nearest to as far into it as
    the output is long (tasks that copy do it in order), then the latest in the output. If there is
    none at all, the last token is taken to replace one of the source: the match is that of the
    tokens before it, and what follows begins one place further on.

    Example:
        With source "I has a red car" and output "I" the longest match is "I": "has a red car". With
        output "I have", "have" matches nothing and is taken to replace "has": "a red car".
    """
    text = source + output
    at = _longest_match(text, len(source), min_ngram, max_ngram)
    if at is None and len(output) > 1:
        at = _longest_match(source + output[:-1], len(source), min_ngram, max_ngram)
        at = at + 1 if at is not None and at + 1 < len(source) else None
    if at is None:
        return []
    copied = source[at + 1 :] if at < len(source) else text[at + 1 :]
    return copied[:num_draft]


def _longest_match(text: list[int], num_source: int, min_ngram: int, max_ngram: int) -> int | None:
    """Where the earlier copy of the text's last tokens that `look_up` prefers ends, if any."""
    best: tuple[int, bool, int] | None = None
    place = None
    for at in _places(text):
        size = 1
        while size < max_ngram and size <= at and text[at - size] == text[-1 - size]:
            size += 1
        inside = at < num_source
        nearness = -abs(at - (len(text) - num_source)) if inside else at
        if size >= min_ngram and (best is None or (size, inside, nearness) > best):
            best, place = (size, inside, nearness), at
    return place


def _places(text: list[int]) -> Iterator[int]:
    """Where the text's last token also stands before its end."""
    at, end = -1, len(text) - 1
    for _ in range(text.count(text[-1]) - 1):
        at = text.index(text[-1], at + 1, end)
        yield at
