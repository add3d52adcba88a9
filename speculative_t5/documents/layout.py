"""Puts the words of an output where the words of its source were."""

import re
from collections.abc import Sequence
from itertools import accumulate

from .alignment import opcodes, pairs_in_common, ratio

# Ends of lines and pages, other characters that part a text, and NUL: they are never left out.
PARTING_CHARACTERS = r"\0\n-\r\x1c-\x1f\x85\u2028\u2029"
_PARTING = re.compile(f"[{PARTING_CHARACTERS}]")
_PRONOUN_I = re.compile(r"i(?:['’]\w+)?")
_FULL_STOP = re.compile(r"[.!?…。！？؟।։]{1,9}+([\"'”’»)\]]{0,9}+\s{0,9}+)\Z")


def arranged(
    words: Sequence[str], gaps: Sequence[str], output: Sequence[str], joint: str = " "
) -> str | None:
    r"""Join the words of an output by the gaps between the words of its source.

    Words are matched by difflib, without their case and punctuation; those in between are mapped in
    proportion. Each gap with a line break, or another character that parts a text, comes before the
    word that its next line's first word became, and at least one word is left for each line. Other
    gaps than single spaces are kept where both their words have neighbours in the output; elsewhere
    is the `joint`. The result is None if the output has fewer words than the source has lines.

    Example: for the words of "He go to\n> school" and "He goes to school now." the result is "He
    goes to\n> school now."
    """
    if all(gap == " " for gap in gaps):
        return joint.join(output)
    at = places(words, output)
    joints = [joint] * (len(output) - 1)
    breaks = {i: gap for i, gap in enumerate(gaps, 1) if _PARTING.search(gap)}
    placed = _spread([at[i] for i in breaks], len(output))
    if placed is None:
        return None
    for i, gap in enumerate(gaps, 1):
        if gap != " " and i not in breaks and 1 <= at[i] == at[i - 1] + 1:
            joints[at[i] - 1] = gap
    for gap, place in zip(breaks.values(), placed, strict=True):
        joints[place - 1] = gap
    return "".join(gap + word for gap, word in zip(["", *joints], output, strict=True))


def places(words: Sequence[str], output: Sequence[str]) -> list[int]:
    """Return for each word of the source its place in the output, or that of what replaced it."""
    places = [0] * len(words)
    a, b = (list(map(bare, each)) for each in (words, output))
    for _, i1, i2, j1, j2 in opcodes(a, b):
        for i in range(i1, i2):
            places[i] = min(j1 + (i - i1) * (j2 - j1) // (i2 - i1), len(output) - 1)
    return places


def bare(word: str) -> str:
    folded = word.casefold()
    return folded if folded.isalnum() else re.sub(r"\W", "", folded) or word


def is_pronoun_i(word: str) -> bool:
    """Whether a word is the pronoun that is a capital wherever it stands, as in "I'm"."""
    return _PRONOUN_I.fullmatch(word.strip(".,;:!?\"'()[]*_“”‘’").casefold()) is not None


def as_within(source: str, output: str, begins: bool, ends: bool) -> str:
    """Return an output without what makes a sentence of its source, a part of one.

    That is the capital of a first word that is the same otherwise, if the source `begins` within a
    sentence; and a full stop or the like at the end that the source lacks, if it `ends` within one.
    """
    first, made = (text.split(maxsplit=1)[:1] for text in (source, output))
    if begins and made != first and made and first:
        old, new = first[0], made[0]
        is_same = bare(old) == bare(new) and old[:1].islower() and new[:1].isupper()
        if is_same and not is_pronoun_i(old):
            output = output.replace(new[0], old[0], 1)
    if ends and not _FULL_STOP.search(source):
        output = _FULL_STOP.sub(r"\1", output)
    return output


def _spread(wanted: Sequence[int], count: int) -> list[int] | None:
    """Move places apart, so that they increase from 1 to at most `count` - 1."""
    if len(wanted) >= max(count, 1):
        return None
    apart = accumulate(wanted, lambda last, place: max(place, last + 1), initial=0)
    return [min(place, count - 1 - len(wanted) + i) for i, place in enumerate(apart)][1:]


def similarity(source: str, output: str, enough: float = 1.0) -> float:
    """Return difflib's ratio of the letters and digits of two texts, from 0 to 1 for the same.

    Where those of the words that both have in order are `enough`, it is their share, at once.
    """
    words = source.split(), output.split()
    sizes = [[sum(map(str.isalnum, word)) for word in each] for each in words]
    both, whole = 2 * sum(sizes[0][i] for i, _ in pairs_in_common(*words)), sum(map(sum, sizes))
    if both >= enough * whole:
        return both / whole if whole else 1.0
    a, b = ([c for c in text.casefold() if c.isalnum()] for text in (source, output))
    return ratio(a, b)
