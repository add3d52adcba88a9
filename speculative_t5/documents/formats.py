"""Files of documents: the text in them, and the same file with another text.

The text has a line for each line of a plain file, for each speech of subtitles, and for each
stretch of words in Word, so that everything else works on lines.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import decoded
from .layout import bare, places
from .splitting import Breaks
from .word_package import open_word, roots

# Of the files that are taken from folders.
DOCUMENT_SUFFIXES = (".md", ".markdown", ".txt", ".srt", ".vtt", ".docx", ".html", ".htm")
DOCUMENT_FORMATS = ("txt", "md", "srt", "vtt", "html", "docx")
SUBTITLE_WIDTH = 42  # characters of a line, by broadcasters' rules; half without spaces

_WHOLE_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")
_LINE_END = re.compile(r"\r\n|\r|\n")
_SPEECH = re.compile(r"(?:<(?!v)[^>]*>|\{\\[^}]*\}|\s)*(?:[-–—]\s*\S|<v[ .])")
# In HTML: what is not text, and the tags within a sentence.
_TAG = re.compile(
    r"""
    <!-- .*? (?:-->|\Z)
    | <(script|style|pre|textarea)(?=[\s/>]) .*? (?:</\1\s*>|\Z)
    | </?([a-z][\w-]*+) (?:"[^"]*"|'[^']*'|[^<>"'])*+ >
    | <[!?][^<>]*>
    """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
_INLINE = frozenset(
    "a abbr b bdi bdo cite code del dfn em font i ins kbd mark q s samp small span strong sub sup "
    "time tt u var wbr".split()
)
# What stands around the words of a speech: tags that enclose it, positions, notes of music. What is
# behind them is read backwards: forwards each blank might be the first of those at the end.
_BEFORE = re.compile(r"(?:\s|<[^>]*>|\{\\[^}]*\}|[♪♫#])*+")
_BEHIND = re.compile(r"(?:\s|>[^>]*/<|[♪♫#])*+")
_LONG_NUMBER = re.compile(r"&#([0-9]{9,}+)")  # of a character


class PlainFile:
    """Plain text or Markdown, in UTF-8."""

    breaks: Breaks = "wrapped"  # which line breaks may be within a sentence
    unit = "line"  # what `number` counts

    def __init__(self, data: bytes, name: str) -> None:
        self.text = decoded(data, name)

    def number(self, line: int) -> int:
        """Return the number, from 1, under which a reader of the file finds a line of the text."""
        return line

    def rewritten(self, text: str) -> bytes:
        """Return the file with another text of as many lines."""
        return text.encode()

    def not_kept(self) -> list[str]:
        """Say what the file that was made last may have lost, and what it has as it was."""
        return []


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


class WordFile(PlainFile):
    """A document of Word: runs and styles stay, words go into the runs that they were in.

    Words are text in runs, wherever they stand: in tables, headers, links and text boxes as well. A
    picture, a tab or a mark of a note ends a line.
    """

    breaks: Breaks = "none"
    unit = "paragraph"

    def __init__(self, data: bytes, name: str) -> None:
        self._document = open_word(data, name)
        self._stretches = [*self._found()]
        self._estimated: list[int] = []
        self.text = "\n".join(_text_of(texts) for _, texts in self._stretches)

    def number(self, line: int) -> int:
        return self._stretches[line - 1][0]

    def _found(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number of a paragraph, and elements of text that follow one another in it."""
        from docx.oxml.ns import qn

        paragraphs = (p for root in roots(self._document) for p in root.iter(qn("w:p")))
        for number, paragraph in enumerate(paragraphs, 1):
            texts: list[Any] = []
            runs = (
                run
                for run in paragraph.iter(qn("w:r"))
                if next(run.iterancestors(qn("w:p"), qn("w:moveFrom"))) is paragraph
            )  # not in a text box, nor moved
            for child in (child for run in runs for child in run):
                if child.tag == qn("w:t") and not len(child):
                    texts.append(child)
                elif texts and child.tag not in (qn("w:rPr"), qn("w:lastRenderedPageBreak")):
                    yield number, texts
                    texts = []
            if texts:
                yield number, texts

    def rewritten(self, text: str) -> bytes:
        for (number, texts), line in zip(self._stretches, text.split("\n"), strict=True):
            if line != _text_of(texts) and _fill(texts, line):
                self._estimated.append(number)
        file = io.BytesIO()
        self._document.save(file)
        return file.getvalue()

    def not_kept(self) -> list[str]:
        said = _say_estimated("paragraph", self._estimated, "bold words, links and the like")
        kinds = ("footnotes", "endnotes", "comments")
        relations = self._document.part.rels.values()
        found = {relation.reltype.rpartition("/")[2] for relation in relations}
        return said + [f"{kind} stay as they were" for kind in kinds if kind in found]


class WebPage(PlainFile):
    """HTML: tags stay, words go between the tags of bold words and the like that they were in."""

    breaks: Breaks = "none"

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data, name)
        self._estimated: list[int] = []
        self._parts: list[str] = []  # texts and tags in turn
        self._stretches: list[list[int]] = [[]]  # of parts that are read as one
        at = 0
        for tag in _TAG.finditer(self.text):
            self._parts += [self.text[at : tag.start()], tag[0]]
            self._stretches[-1].append(len(self._parts) - 2)
            if (tag[2] or "").casefold() not in _INLINE:
                self._stretches.append([])
            at = tag.end()
        self._stretches[-1].append(len(self._parts))
        self._parts.append(self.text[at:])
        self._stretches = [each for each in self._stretches if "".join(self._texts(each)).strip()]
        ends = accumulate((len(_LINE_END.findall(part)) for part in self._parts), initial=1)
        self._lines = [*ends]  # the number of the line in which each part begins
        self.text = "\n".join(" ".join("".join(self._texts(s)).split()) for s in self._stretches)

    def _texts(self, stretch: Sequence[int]) -> list[str]:
        return [_unescaped(self._parts[i]) for i in stretch]

    def number(self, line: int) -> int:
        return self._lines[self._stretches[line - 1][0]]

    def rewritten(self, text: str) -> bytes:
        made = dict(enumerate(self._parts))
        old_lines, new_lines = self.text.split("\n"), text.split("\n")
        for number, (stretch, old, new) in enumerate(
            zip(self._stretches, old_lines, new_lines, strict=False), 1
        ):
            if new != old:
                parts, estimated = self._filled(stretch, new)
                made |= parts
                if estimated:
                    self._estimated.append(self.number(number))
        return "".join(made.values()).encode()

    def _filled(self, stretch: Sequence[int], new: str) -> tuple[dict[int, str], bool]:
        """Return the parts of a stretch with another text; and whether that is an estimate."""
        made: dict[int, str] = {}
        found: dict[int, list[str]] = {}
        for i, each in zip(stretch, self._texts(stretch), strict=True):
            if each.strip():
                found[i] = last = [each]
            elif found:  # spaces between tags go with the word before them
                last.append(each)
                made[i] = ""
        texts = {i: "".join(several) for i, several in found.items()}
        parts, estimated = _divided([*texts.values()], new)
        whole = "".join(texts.values())
        parts[0] = whole[: len(whole) - len(whole.lstrip())] + parts[0]
        parts[-1] = parts[-1].rstrip() + whole[len(whole.rstrip()) :]
        made |= {i: escape(p, quote=False) for i, p in zip(texts, parts, strict=True)}
        return made, estimated

    def not_kept(self) -> list[str]:
        return _say_estimated("line", self._estimated, "tags within it")


def _say_estimated(unit: str, numbers: Sequence[int], what: str) -> list[str]:
    """Say of each numbered unit, once, that the places of something in it are estimates."""
    return [
        f"{unit} {number}: the places of {what} are estimates" for number in dict.fromkeys(numbers)
    ]


def _unescaped(text: str) -> str:
    """Return a text with characters for their names and numbers.

    Python makes no integers of some thousand digits, and larger numbers are no character anyway.
    """
    return unescape(_LONG_NUMBER.sub(lambda found: f"&#{found[1].lstrip('0')[:9] or 0}", text))


def _text_of(texts: Sequence[Any]) -> str:
    return re.sub(r"[\r\n]", " ", "".join(each.text or "" for each in texts))


def _fill(texts: Sequence[Any], line: str) -> bool:
    """Put a text into elements; return whether which words are in which is an estimate."""
    runs = [each.getparent() for each in texts]
    looks = {(run.getparent(), str(run.rPr.xml) if run.rPr is not None else "") for run in runs}
    parts, estimated = [line] + [""] * (len(texts) - 1), False
    if len(looks) > 1:
        parts, estimated = _divided([each.text or "" for each in texts], line)
    for each, part in zip(texts, parts, strict=True):
        each.text = part
        each.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
    return estimated


def _divided(texts: Sequence[str], line: str) -> tuple[list[str], bool]:
    """Divide a line like some texts that made one; return whether that is an estimate."""
    if len(texts) == 1:
        return [line], False
    whole = "".join(texts)
    words, old = re.findall(r"\S+\s*", line), whole.split()
    words[:1] = [line[: len(line) - len(line.lstrip())] + word for word in words[:1]]
    new = [word.strip() for word in words]
    parts: list[list[str]] = [[] for _ in texts]
    borders = [*accumulate(map(len, texts))]
    begins = [word.start() for word in re.finditer(r"\S+", whole)]
    for word, place in zip(words, places(new, old), strict=True):
        parts[bisect_right(borders, begins[place])].append(word)  # the text in which it begins
    kept = {*map(bare, new)} & {*map(bare, old)}
    return ["".join(each) for each in parts], 2 * len(kept) < len({*new})


def format_of(name: str, form: str | None = None) -> str:
    """Return the format of a file: the one given, or the one that its name says."""
    suffix = Path(name).suffix.lower()
    return (
        form
        or {".markdown": "md", ".htm": "html"}.get(suffix)
        or (suffix[1:] if suffix in DOCUMENT_SUFFIXES else "txt")
    )


def read_file(data: bytes, name: str, form: str | None = None) -> PlainFile:
    """Return the document in a file, in the format given, or that its name says."""
    kinds = {"srt": Subtitles, "vtt": Subtitles, "docx": WordFile, "html": WebPage}
    kind = kinds.get(format_of(name, form), PlainFile) if data else PlainFile
    return kind(data, name)
