"""Random subtitles of each format for random_documents.py, and what of them is to stay.

They have what the formats allow and what people's files have beside it: speakers, descriptions,
positions, notes, lines without blank ones between them, numbers that are missing, and all line
ends. What is to stay is found by expressions of this file and not by the package.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

SPEAKERS = (
    "- ",
    "-",
    "MAN: ",
    "DR. SMITH: ",
    ">> ",
    ">> MAN #2: ",
    "– ",
    "MAN:{break}",
    "♪ ",
)
DESCRIPTIONS = ("[{}]", "({})", "[{} {}]", "[MAN]", "(♪)", "[{}]:", "（{}）")
ANCHORS = ("[laughs]", "(coughs)", "♪", "[MUSIC PLAYING]", "[x]")
ENDS = (".", "!", "?", "", "", "...", ". (laughs)", " [sighs]", " ♪", ",")
SIGNS = (", ", " ", " ", " ", "  ", ": ", "; ", "'", "\t")
OF_SRT = (
    "<i>{}</i>",
    "<b>{}</b>",
    '<font color="#fff">{}</font>',
    "<u>{}",
    r"{{\an8}}{}",
    "{{y:i}}{}",
)
OF_VTT = (
    "<i>{}</i>",
    "<c.a.b>{}</c>",
    "<v Ann B>{}</v>",
    "<v.loud Bob>{}",
    "<00:00:01.000>{}",
    "<ruby>{}<rt>a</rt></ruby>",
    "<lang en>{}</lang>",
    "{}&amp;",
    "{}&nbsp;",
    "&lt;{}&gt;",
    "{}&#38;",
)
OF_ASS = (
    r"{{\i1}}{}{{\i0}}",
    r"{{\b1\c&HFF&}}{}{{\r}}",
    r"{{\pos(1,2)}}{}",
    r"{{\k20}}{}",
    "{{a note}}{}",
    r"{}\h",
    r"{{\p1}}m 0 0 l 1 1{{\p0}}{}",
    r"\{{{}\}}",
)
OF_LRC = ("<00:01.00>{}", "{} <00:02>", "<01:01:01>{}")
SETTINGS = ("", "", " X1:40 X2:600 Y1:1 Y2:2", " align:start position:0%", " line:0", "  ")
BLOCKS = ("NOTE A note\nB", "NOTE", "STYLE\n::cue { color: red }", "REGION\nid:a\nwidth:4%")


class AnyWords(Protocol):
    """What makes words, each another one."""

    draw: random.Random

    def new(self) -> str:
        """Return the next."""


def _spoken(words: AnyWords, marks: Sequence[str], breaks: Sequence[str], depth: int = 2) -> str:
    """Return what somebody says: words, marks, breaks, and what is no part of it."""
    draw, made = words.draw, []
    for _ in range(draw.randint(1, 5)):
        kind = draw.random()
        if kind < 0.25 and depth:
            inner = _spoken(words, marks, breaks, depth - 1)
            made.append(draw.choice(marks).format(inner))
        elif kind < 0.32:
            made.append(f" {draw.choice(ANCHORS)} ")
        else:
            made.append(words.new())
        break_ = draw.choice(breaks) if breaks and draw.random() < 0.2 else ""
        made.append(break_ or draw.choice(SIGNS if draw.random() < 0.9 else ("",)))
    return "".join(made)


def _speech(words: AnyWords, marks: Sequence[str], breaks: Sequence[str]) -> str:
    """Return a speech, with its speaker and what is heard before and behind it."""
    draw = words.draw
    speaker = draw.choice(SPEAKERS) if draw.random() < 0.4 else ""
    speaker = speaker.replace("{break}", breaks[0] if breaks else " ")
    heard = ""
    if draw.random() < 0.2:
        form = draw.choice(DESCRIPTIONS)
        heard = form.format(*(words.new() for _ in range(form.count("{}")))) + draw.choice(" \t")
    said = _spoken(words, marks, breaks) if draw.random() < 0.95 else ""
    made = speaker + heard + said + draw.choice(ENDS)
    return draw.choice(marks[:2]).format(made) if draw.random() < 0.2 else made


def _cue(words: AnyWords, marks: Sequence[str], breaks: Sequence[str]) -> str:
    joint = breaks[0] if breaks else " "
    return joint.join(
        _speech(words, marks, breaks) for _ in range(words.draw.choice((1, 1, 1, 2, 3)))
    )


def _time(seconds: float, form: str) -> str:
    minutes, left = divmod(seconds, 60)
    return form.format(int(minutes), int(left), int(left * 100 % 100))


def _times(draw: random.Random, count: int, form: str) -> Iterator[tuple[str, str]]:
    """Yield when cues begin and end: mostly in order."""
    at = 0.0
    for _ in range(count):
        start = at + draw.choice((0, 0, 0.01, 1, 9)) - 2 * (draw.random() < 0.05 and at > 3)
        at = start + draw.choice((0.01, 1, 2.5, 2.5, 4))
        yield _time(start, form), _time(at, form)


def _saved(words: AnyWords, text: str) -> bytes:
    """Return a file with the line ends of a system, and perhaps a byte order mark."""
    draw = words.draw
    line_end = draw.choice(("\n", "\n", "\r\n", "\r"))
    return ("\ufeff" * (draw.random() < 0.1) + text.replace("\n", line_end)).encode()


def srt(words: AnyWords) -> bytes:
    """Return SubRip."""
    draw, parts = words.draw, []
    count = draw.randint(1, 5)
    if draw.random() < 0.05:
        parts.append("A FILM\n\n")
    form = draw.choice(("00:{:02}:{:02},{:02}0", "0:{}:{},{:02}", "00:{:02}:{:02}.{:02}0"))
    has_numbers = draw.random() < 0.9
    for number, (start, end) in enumerate(_times(draw, count, form), draw.choice((1, 1, 7))):
        if has_numbers and draw.random() < 0.95:
            parts.append(f"{number}{draw.choice(('', '', ' '))}\n")
        elif parts and not parts[-1].endswith("\n\n"):
            parts.append("\n")
        parts.append(f"{start} --> {end}{draw.choice(SETTINGS)}\n")
        parts.append(_lines_of_cue(words, OF_SRT, ("\n", "\n", "<br>", "<br/>", r"\N")))
        parts.append(draw.choice(("\n", "\n", "\n", "\n\n", " \n", "" if has_numbers else "\n")))
    return _saved(words, "".join(parts))


def _lines_of_cue(words: AnyWords, marks: Sequence[str], breaks: Sequence[str]) -> str:
    """Return what stands below the times of a cue, also behind blank lines."""
    draw = words.draw
    made = "" if draw.random() < 0.08 else _cue(words, marks, breaks) + "\n"
    while draw.random() < 0.12:
        more = f"{draw.randint(100, 999)}" if draw.random() < 0.3 else _cue(words, marks, breaks)
        made += draw.choice(("\n", " \n")) + more.lstrip("\n") + "\n"
    return re.sub(r"\n\s*\n(?=\s*\n)", "\n", made)


def vtt(words: AnyWords) -> bytes:
    """Return WebVTT."""
    draw = words.draw
    parts = [draw.choice(("WEBVTT\n", "WEBVTT - A FILM\n", "WEBVTT\nKind: captions\n")), "\n"]
    form, last = draw.choice(("00:{:02}:{:02}.{:02}0", "{:02}:{:02}.{:02}0")), ("", "")
    breaks = ("\n", "\n", "\n", "<br>")
    for start, end in _times(draw, draw.randint(1, 5), form):
        if draw.random() < 0.2:
            parts.append(f"{draw.choice(BLOCKS)}\n\n")
        if draw.random() < 0.2:
            parts.append(draw.choice(("INTRO\n", "7\n", "A - B\n")))
        parts.append(f"{start} --> {end}{draw.choice(SETTINGS)}\n")
        if last[1] == start and draw.random() < 0.5:  # captions that roll up
            parts.append(f"{last[0]}\n")
        last = ("", "")
        if draw.random() < 0.3:
            last = " ".join(words.new() for _ in range(8)), end
            parts.append(f"{last[0]}\n")
        else:
            parts.append(_lines_of_cue(words, OF_VTT, breaks))
        parts.append("\n")
    return _saved(words, "".join(parts))


FIELDS = "Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text"


def ass(words: AnyWords) -> bytes:
    """Return SubStation Alpha, of both kinds."""
    draw = words.draw
    fields = draw.choice((FIELDS, FIELDS.replace("Layer", "Marked"), "Start, End, Style, Text"))
    parts = ["[Script Info]\nTitle: A, B\n\n[V4+ Styles]\nFormat: Name\nStyle: A\n\n"]
    parts.append(draw.choice(("[Events]\n", "[events]\n")))
    parts.append(f"Format: {fields}\n" if draw.random() < 0.9 or fields != FIELDS else "")
    for start, end in _times(draw, draw.randint(1, 5), "0:{:02}:{:02}.{:02}"):
        known = {
            "Start": start,
            "End": end,
            "Style": draw.choice("AAB"),
            "Name": draw.choice(("", "C")),
        }
        names = fields.replace(" ", "").split(",")[:-1]
        begun = ",".join(known.get(name, "0") for name in names)
        said = _cue(words, OF_ASS, (r"\N", r"\N", r"\n"))
        parts.append(f"{draw.choice(('Dialogue: ', 'Dialogue:'))}{begun},{said}\n")
        parts.append(
            draw.choice(("", "", "\n", "; A\n", f"Comment: {begun},A B.\n", "Dialogue: 0\n"))
        )
    parts.append(draw.choice(("", "[Fonts]\nfontname: A\nM5F!\n")))
    return _saved(words, "".join(parts))


def lrc(words: AnyWords) -> bytes:
    """Return lyrics."""
    draw, parts = (
        words.draw,
        ["[ti:A B]\n", "[ar:A]\n", "[offset:+20]\n"][: words.draw.randint(0, 3)],
    )
    form = draw.choice(("[{:02}:{:02}.{:02}]", "[{}:{:02}:{:02}]", "[{:02}:{:02}]"))
    for start, end in _times(draw, draw.randint(1, 5), form):
        times = start + draw.choice(("", "", "", end, f" {end}"))
        said = _speech(words, OF_LRC, ()) if draw.random() < 0.9 else ""
        parts.append(f"{times}{draw.choice(('', ' '))}{said}\n")
        parts.append(draw.choice(("", "", "", "\n", "A B\n", "[al:A]\n")))
    return _saved(words, "".join(parts))


_A_WORD = re.compile(r"[a-zäßéж]*\d+x")
_FIXED = re.compile(
    r"<rt>a</rt>|<(?!br)[^<>\s][^<>]*>|(?<!\\)\{[^{}]*\}|[\[\]♪#]|--> [^\r\n]*|>>"
    r"|(?<!\\)[A-Z]{2,}:"
)
_DRAWING = re.compile(r"(\{[^{}]*\\p1\})([^{}]*)")
_MOVABLE = re.compile(r"\s|<br/?>|\\[Nnh]|&nbsp;")


def _removed(found: re.Match[str]) -> str:
    """Return what is left of a tag, which a word may go on behind, or of a bracket."""
    return "" if found[0][0] in "<{" else " "


def skeleton_of_subtitles(data: bytes) -> tuple[list[str], dict[str, str]]:
    """Return all but words and breaks, and how many tags and the like stand before each word."""
    text = data.decode().replace("&#38;", "&amp;")
    drawn = _DRAWING.sub(r"\1", text)
    places: dict[str, str] = {}
    begins = [0, *(found.end() for found in _FIXED.finditer(drawn)), len(drawn)]
    for number, (start, end) in enumerate(pairwise(begins)):
        places |= {word: str(number) for word in _A_WORD.findall(drawn[start:end])}
    rest = _A_WORD.sub("", _MOVABLE.sub(" ", _FIXED.sub(_removed, drawn)))
    return [
        *map("".join, _DRAWING.findall(text)),
        *_FIXED.findall(drawn),
        "".join(sorted(_MOVABLE.sub("", rest))),
    ], places
