"""Subtitles: what is spoken in cues, and the same file with other words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .formats import PlainFile, reads
from .splitting import Breaks

SUBTITLE_WIDTH = 42  # characters of a line, by broadcasters' rules; half without spaces

_WHOLE_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")
_LINE_END = re.compile(r"\r\n|\r|\n")
_SPEECH = re.compile(r"(?:<(?!v)[^>]*>|\{\\[^}]*\}|\s)*(?:[-–—]\s*\S|<v[ .])")
# What stands around the words of a speech: tags that enclose it, positions, notes of music. What is
# behind them is read backwards: forwards each blank might be the first of those at the end.
_BEFORE = re.compile(r"(?:\s|<[^>]*>|\{\\[^}]*\}|[♪♫#])*+")
_BEHIND = re.compile(r"(?:\s|>[^>]*/<|[♪♫#])*+")


@dataclass
class _Cue:
    number: int  # from 1
    lines: list[str]  # as they are in the file
    around: list[tuple[str, str]] = field(default_factory=list)  # what each speech stands between
    speeches: list[str] = field(default_factory=list)

    def find_speeches(self) -> None:
        """Find what is spoken in its lines, by one or several."""
        speeches: list[list[str]] = []  # each in lines
        for line in map(str.strip, self.lines):
            if speeches and not _SPEECH.match(line):
                speeches[-1].append(line)
            else:
                speeches.append([line])
        for lines in speeches:
            before, words, behind = _parted(" ".join(lines))
            self.around.append((before, behind))
            self.speeches.append(words)


@reads("srt", "vtt")
class Subtitles(PlainFile):
    """SubRip or WebVTT: times and all that is not spoken stay, a cue has at most two lines."""

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
        self.text = "\n".join(speech for cue in self._cues for speech in cue.speeches)

    def number(self, line: int) -> int:
        return self._numbers[line - 1]

    def rewritten(self, text: str) -> bytes:
        lines = iter(text.split("\n"))
        parts = []
        for part in self._parts:
            if isinstance(part, str):
                parts.append(part)
            else:
                parts += _shown(part, [next(lines) for _ in part.speeches])
        return "".join(parts).encode()


def _with_cues(text: str) -> list[str | _Cue]:
    """Return the lines of a file, and behind each with times a cue of the lines that follow it."""
    parts: list[str | _Cue] = []
    cue: _Cue | None = None
    count = 0
    for line in _WHOLE_LINE.findall(text):
        has_times = "-->" in line
        if has_times and cue and cue.lines and cue.lines[-1].strip().isdigit():
            parts.append(cue.lines.pop())  # no blank line is before its number
        elif cue is not None and line.strip() and not has_times:
            cue.lines.append(line)
            continue
        cue = None
        parts.append(line)
        if has_times:
            count += 1
            cue = _Cue(count, [])
            parts.append(cue)
    return parts


def _parted(speech: str) -> tuple[str, str, str]:
    """Return what stands before the words of a speech, the words, and what stands behind them."""
    before = _BEFORE.match(speech)
    start = before.end() if before else 0
    behind = _BEHIND.match(speech[start:][::-1])
    end = len(speech) - (behind.end() if behind else 0)
    return speech[:start], speech[start:end], speech[end:]


def _shown(cue: _Cue, speeches: Sequence[str]) -> list[str]:
    """Return the lines of a cue with other words."""
    if [*speeches] == cue.speeches:
        return cue.lines
    shown = []
    for (before, behind), speech in zip(cue.around, speeches, strict=True):
        middle = len(speech) // 2
        gaps = [gap.start() for gap in re.finditer(" ", speech)]
        at = min(gaps, key=lambda gap: abs(gap - middle), default=middle)
        width = SUBTITLE_WIDTH if gaps else SUBTITLE_WIDTH // 2
        lines = [speech]
        if len(speech) > width and len(speeches) == 1:
            lines = [speech[:at], speech[at:].lstrip()]
        shown.append(before + "\n".join(lines) + behind)
    end = cue.lines[-1][len(cue.lines[-1].rstrip("\r\n")) :]
    first = cue.lines[0][len(cue.lines[0].rstrip("\r\n")) :] or "\n"
    return [first.join("\n".join(shown).split("\n")) + end]
