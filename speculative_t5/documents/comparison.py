"""Two texts of equally many lines side by side: HTML without scripts, nothing loaded."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from html import escape
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from ..errors import count
from .alignment import opcodes

if TYPE_CHECKING:
    from .rewriting import Rewritten

# Half-transparent for light and dark pages; strokes and lines tell changes apart without colour.
TABLE_STYLE = (
    ".st5-changes{border-collapse:collapse;width:100%;table-layout:fixed;line-height:1.5}"
    ".st5-changes td,.st5-changes th{vertical-align:top;text-align:left;padding:1px 8px;"
    "white-space:pre-wrap;overflow-wrap:anywhere}"
    ".st5-changes .n{width:4em;text-align:right;opacity:.6;user-select:none}"
    ".st5-changes tr.changed td{background:rgba(128,128,128,.10)}"
    ".st5-changes tr.kept td{background:rgba(219,109,40,.14)}"
    ".st5-changes del{background:rgba(248,81,73,.32)}"
    ".st5-changes ins{background:rgba(46,160,67,.32);text-decoration:underline}"
    ".st5-changes .why{font-size:.85em;font-style:italic;opacity:.85}"
    ".st5-changes .far td{text-align:center;opacity:.6}"
)
PAGE_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font-family:system-ui,sans-serif;max-width:90em;margin:1.5em auto;padding:0 1em}"
    "h1{font-size:1.2em}"
)
CONTEXT_LINES = 2  # lines shown before and after those with changes
_WORD_OR_SIGN = re.compile(r"\s+|[^\W_]+|\W|_")
EMOJI_JOINER = "\u200d"  # of emoji

Edit = tuple[int, int, int, int]  # where words before, and words after, begin and end
Stretches = tuple[str, str]  # of a line: a stretch of the text before and of that after


def changes(before: str, after: str) -> Iterator[Stretches]:
    """Yield the stretches of two lines in order; equal ones are equal, others are the changes."""
    a, b = words_and_signs(before), words_and_signs(after)
    for _, i1, i2, j1, j2 in opcodes(a, b):
        yield "".join(a[i1:i2]), "".join(b[j1:j2])


def edits(before: str, after: str) -> list[tuple[int, int, str]]:
    """Return the shortest changes of words that make one text of another, in order.

    Each is where a stretch of the text before begins and ends, and what replaces it. What is added
    or left out has a word next to it, so that neither side is empty where there is one.
    """
    if before == after:
        return []
    a, b = words_and_signs(before), words_and_signs(after)
    found: list[Edit] = []
    for tag, i1, i2, j1, j2 in opcodes(a, b):
        if tag == "equal":
            continue
        last = found[-1][1] if found else 0
        if i1 == i2 or j1 == j2:
            i1, i2, j1, j2 = _with_a_word(a, last, (i1, i2, j1, j2))
        if i2 - i1 > 1 and j2 - j1 > 1 and a[i2 - 1] == b[j2 - 1]:  # a space behind
            i2, j2 = i2 - 1, j2 - 1
        if found and i1 <= last:  # it has taken all that was between them
            i1, _, j1, _ = found.pop()
        found.append((i1, i2, j1, j2))
    ends = [0, *accumulate(map(len, a))]
    return [(ends[i1], ends[i2], "".join(b[j1:j2])) for i1, i2, j1, j2 in found]


def _with_a_word(words: list[str], last: int, edit: Edit) -> Edit:
    """Return an edit with a word next to it: before it if that is behind `last`, else after it."""
    i1, i2, j1, j2 = edit
    if i1 > last:
        back = 1
        while words[i1 - back].isspace() and i1 - back > last:
            back += 1
        return i1 - back, i2, j1 - back, j2
    if i2 < len(words):
        return i1, i2 + 1, j1, j2 + 1
    return edit


def words_and_signs(text: str) -> list[str]:
    """Split a text into words, spaces and signs; marks and joined emoji stay with their base."""
    words: list[list[str]] = []  # each in parts
    for word in _WORD_OR_SIGN.findall(text):
        last, first = words[-1][-1][-1] if words else "", word[0]
        follows_mark = last and unicodedata.category(last)[0] == "M" and first.isalnum()
        if last and (
            follows_mark or EMOJI_JOINER in (last, first) or unicodedata.category(first)[0] == "M"
        ):
            words[-1].append(word)
        else:
            words.append([word])
    return ["".join(parts) for parts in words]


def lines(text: str) -> list[str]:
    """Return the lines of a text, without their ends."""
    return re.split(r"\r\n|\r|\n", text)


def as_page(done: Rewritten, title: str) -> str:
    """Return a whole page of HTML."""
    name = escape(title)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{PAGE_STYLE}</style></head>"
        f"<body><h1>{name}</h1>{as_table(done)}</body></html>\n"
    )


def as_table(done: Rewritten) -> str:
    """Return a table of the lines that changed or were kept for a reason, and those around."""
    pairs = list(zip(lines(done.source), lines(done.text), strict=True))
    reasons: dict[int, list[str]] = {}
    for piece in done.kept:
        why = ": ".join(filter(None, (piece.reason, piece.refused)))
        reasons.setdefault(piece.line, []).append(why)
    marked = [i for i, (old, new) in enumerate(pairs, 1) if old != new or i in reasons]
    near = {i + away for i in marked for away in range(-CONTEXT_LINES, CONTEXT_LINES + 1)}
    rows = []
    for shown, numbers in groupby(range(1, len(pairs) + 1), key=near.__contains__):
        if shown:
            rows += [_table_row(i, *pairs[i - 1], reasons.get(i, [])) for i in numbers]
        else:
            same = f"{count(len(list(numbers)), 'line')} without changes"
            rows.append(f'<tr class="far"><td colspan="4">{same}</td></tr>')
    return (
        f"<style>{TABLE_STYLE}</style><p>{escape(done.summary())}</p>"
        '<table class="st5-changes"><thead><tr><th class="n"></th><th>before</th>'
        f'<th class="n"></th><th>after</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _table_row(number: int, before: str, after: str, reasons: list[str]) -> str:
    left, right = [], []
    for old, new in changes(before, after):
        same = old == new
        left.append(escape(old) if same or not old else f"<del>{escape(old)}</del>")
        right.append(escape(new) if same or not new else f"<ins>{escape(new)}</ins>")
    kind = ' class="kept"' if reasons else ' class="changed"' if before != after else ""
    why = "".join(f'<div class="why">kept: {escape(reason)}</div>' for reason in reasons)
    cell = f'<td class="n">{number}</td>'
    return f"<tr{kind}>{cell}<td>{''.join(left)}</td>{cell}<td>{''.join(right)}{why}</td></tr>"
