"""Subtitles: what is spoken in cues, and the same file with other words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .formats import PlainFile
from .marks import MarkedLine, Part, is_other, read_line
from .splitting import Breaks

SUBTITLE_WIDTH = 42  # characters of a line, by broadcasters' rules; half without spaces

_WHOLE_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")
_LINE_END = re.compile(r"\r\n|\r|\n")
_SPEECH = re.compile(r"(?:<(?!v)[^>]*>|\{\\[^}]*\}|\s)*(?:[-–—]\s*\S|<v[ .])")
# What stands around the words of a speech: tags that enclose it, positions, notes of music. What is
# behind them is read backwards: forwards each blank might be the first of those at the end.
_BEFORE = re.compile(r"(?:\s|<[^>]*>|\{\\[^}]*\}|[♪♫#])*+")
_BEHIND = re.compile(r"(?:\s|>[^>]*/<|[♪♫#])*+")
_TAG_WITHIN = re.compile(
    r"(<(?!br\s*/?>)/?\w[^<>]*>|\{\\[^{}]*\})", re.IGNORECASE
)  # within a sentence
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)


class _Speech:
    """What one speaker says in a cue, on one line or several: words between tags."""

    def __init__(self, text: str) -> None:
        self._before, words, self._behind = _parted(text)
        self._pieces = _TAG_WITHIN.split(words)  # texts and tags in turn
        depth, parts = 0, []
        for tag in ["", *self._pieces[1::2]]:
            depth = max(0, depth + (tag[:1] == "<") - 2 * (tag[:2] == "</"))
            parts.append(Part(depth))
        self.line = MarkedLine([*read_line(self._pieces[::2], _read_words)], parts)

    def shown(self, words: str, line_end: str, *, wraps: bool) -> str:
        """Return the text of the file with other words; their lines stay if most words do.

        Otherwise they are on one line, or on two if that is long and `wraps`.
        """
        pieces = [*self._pieces]
        pieces[::2] = self.line.changed(words).parts
        made = "".join(pieces)
        if is_other(self.line.text, words):
            made = _LINE_END.sub(" ", made)
            made = _wrapped(made, line_end) if wraps and _is_wide(words) else made
        return self._before + made + self._behind


@dataclass
class _Cue:
    number: int  # from 1
    lines: list[str]  # as they are in the file
    speeches: list[_Speech] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # of their last lines

    def find_speeches(self) -> None:
        """Find what is spoken in its lines, by one or several."""
        speeches: list[list[str]] = []  # each in lines
        for line in self.lines:
            if speeches and not _SPEECH.match(line.strip()):
                speeches[-1].append(line)
            else:
                speeches.append([line])
        for lines in speeches:
            text = "".join(lines)
            words = text.rstrip("\r\n")
            self.speeches.append(_Speech(words))
            self.ends.append(text[len(words) :])

    def shown(self, words: Sequence[str]) -> str:
        """Return its text with other words for each speech."""
        first = self.lines[0] if self.lines else ""
        line_end = first[len(first.rstrip("\r\n")) :] or "\n"
        wraps = len(self.speeches) == 1
        made = [
            speech.shown(each, line_end, wraps=wraps)
            for speech, each in zip(self.speeches, words, strict=True)
        ]
        return "".join(text + end for text, end in zip(made, self.ends, strict=True))


class Subtitles(PlainFile):
    """SubRip or WebVTT: times, tags and all that is not spoken stay, and lines of few changes."""

    breaks: Breaks = "cues"
    unit = "cue"

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data, name)
        self._parts = _with_cues(self.text)
        self._cues = [part for part in self._parts if isinstance(part, _Cue)]
        if not self._cues and self.text.strip():
            raise ValueError(
                f"no cues found in {name}: write each as its time, such as "
                "00:00:01,000 --> 00:00:02,500, and its text on the lines behind it"
            )
        for cue in self._cues:
            cue.find_speeches()
        self._numbers = [cue.number for cue in self._cues for _ in cue.speeches]
        self.text = "\n".join(each.line.text for cue in self._cues for each in cue.speeches)

    def number(self, line: int) -> int:
        return self._numbers[line - 1]

    def rewritten(self, text: str) -> bytes:
        lines = iter(text.split("\n"))
        parts = []
        for part in self._parts:
            if isinstance(part, str):
                parts.append(part)
            else:
                parts.append(part.shown([next(lines) for _ in part.speeches]))
        return "".join(parts).encode()


def _with_cues(text: str) -> list[str | _Cue]:
    """Return the lines of a file, and behind each with times a cue of the lines that follow it.

    Lines behind a blank one that have no times belong to the cue above, as one more of its number.
    """
    parts: list[str | _Cue] = []
    count = 0
    lines = _WHOLE_LINE.findall(text)
    for is_blank, found in groupby(lines, key=lambda line: not line.strip()):
        block = [*found]
        times = next((i for i, line in enumerate(block) if "-->" in line), None)
        if is_blank or (times is None and not (count and _is_spoken(block))):
            parts += block
        elif times is None:
            parts.append(_Cue(count, block))
        else:
            above = block[: max(0, times - 1)]  # before the number of the first cue in it
            if above and count:
                parts.append(_Cue(count, above))
            else:
                parts += above
            for each in _with_times(block[len(above) :], count):
                count += isinstance(each, _Cue)
                parts.append(each)
    return parts


def _is_spoken(block: Sequence[str]) -> bool:
    """Whether lines without times can be words of a cue: no number, nor a note of WebVTT."""
    first = block[0].strip()
    return not first.isdigit() and not first.startswith(("NOTE", "STYLE", "REGION", "WEBVTT"))


def _with_times(block: Sequence[str], count: int) -> Iterator[str | _Cue]:
    """Yield lines without a blank one between them, and behind each with times its cue."""
    cue: _Cue | None = None
    for line in block:
        if "-->" in line:
            if cue and cue.lines and cue.lines[-1].strip().isdigit():
                number = cue.lines.pop()  # no blank line is before it
                yield cue
                yield number
            elif cue:
                yield cue
            yield line
            count += 1
            cue = _Cue(count, [])
        elif cue:
            cue.lines.append(line)
        else:
            yield line
    if cue:
        yield cue


def _parted(speech: str) -> tuple[str, str, str]:
    """Return what stands before the words of a speech, the words, and what stands behind them."""
    before = _BEFORE.match(speech)
    start = before.end() if before else 0
    behind = _BEHIND.match(speech[start:][::-1])
    end = len(speech) - (behind.end() if behind else 0)
    return speech[:start], speech[start:end], speech[end:]


def _read_words(text: str) -> Iterator[tuple[str, str]]:
    """Yield how each character is written, and as what it is read: a break as a blank."""
    at = 0
    for found in _BREAK.finditer(text):
        yield from ((each, each) for each in text[at : found.start()])
        yield found[0], " "
        at = found.end()
    yield from ((each, each) for each in text[at:])


def _is_wide(words: str) -> bool:
    return len(words) > (SUBTITLE_WIDTH if " " in words else SUBTITLE_WIDTH // 2)


def _wrapped(text: str, line_end: str) -> str:
    """Return a text on two lines: parted at the blank outside of tags that is nearest its middle.

    One without blanks is parted in its middle, if that is outside of tags.
    """
    gaps = [
        gap.start()
        for gap in re.finditer(" ", _TAG_WITHIN.sub(lambda tag: "x" * len(tag[0]), text))
    ]
    middle = len(text) // 2
    if not gaps and _TAG_WITHIN.search(text):
        return text
    at = min(gaps, key=lambda gap: abs(gap - middle), default=middle)
    return text[:at] + line_end + text[at:].lstrip(" ")
