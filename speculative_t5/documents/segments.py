"""Where sentences end, by sentencex's rules, in time that grows with the length of the text."""

from itertools import accumulate

# Characters that sentencex, whose steps grow with their square, sees at a time. Paragraphs that are
# no longer are split as a whole; in longer ones what follows the last end is seen once more.
SEEN_AT_ONCE = 8192


def segments(language: str, text: str) -> list[str]:
    """Split a text into sentences, with the blanks behind each; joined they are the text."""
    from sentencex import segment  # only where text is split

    if len(text) <= SEEN_AT_ONCE:
        found = segment(language, text)
        return found if sum(map(len, found)) == len(text) else [text]
    ends, start = [0], 0
    while start < len(text):
        stop = _blank_before(text, start + SEEN_AT_ONCE, start + SEEN_AT_ONCE // 2)
        sizes = [*map(len, segment(language, text[start:stop]))]
        some = [start + size for size in accumulate(sizes)]
        if not some or some[-1] != stop:  # it has lost something
            some = [stop]
        if stop < len(text):
            some.pop()  # the end of what was seen
        ends += some
        middle = start + SEEN_AT_ONCE // 2
        if stop == len(text) or ends[-1] > middle:
            start = ends[-1]
        else:  # a sentence longer than what was seen
            start = max(ends[-1], _blank_before(text, middle, start + SEEN_AT_ONCE // 4))
    return [text[i:j] for i, j in zip(ends, ends[1:], strict=False)]


def _blank_before(text: str, most: int, least: int) -> int:
    """Return a place behind a blank, the last up to `most`; there if none is after `least`."""
    if most >= len(text):
        return len(text)
    found = text.rfind(" ", least, most)
    return found + 1 if found >= 0 else most
