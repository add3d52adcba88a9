"""The rule of lookups as a plain function, which searches the whole text at each call."""

from __future__ import annotations

from collections.abc import Iterator


def look_up(
    source: list[int], output: list[int], num_draft: int, min_ngram: int, max_ngram: int
) -> list[int]:
    """Return the proposal of `speculative_t5.decoding.lookup.Lookup`."""
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
    """Return where the best earlier copy of the text's last tokens ends, if there is one."""
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
    """Yield the earlier places of the text's last token."""
    at, end = -1, len(text) - 1
    for _ in range(text.count(text[-1]) - 1):
        at = text.index(text[-1], at + 1, end)
        yield at
