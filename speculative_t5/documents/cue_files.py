"""Files of subtitles: SubRip and WebVTT, SubStation Alpha, and lyrics with times.

What is no text of a cue keeps its bytes: other words are put in its place.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from ..errors import count
from .formats import PlainFile, say_estimated
from .splitting import Breaks
from .subtitles import (
    REST,
    TAG,
    Cue,
    Speech,
    Tags,
    Times,
    ends_sentence,
    is_retold,
)

READ_EACH_SECOND = 20  # characters that most people can read
LONGEST_GAP = 5.0  # seconds between two cues of one sentence
ROLLED_WITHIN = 0.05  # seconds between two cues of captions that roll up
LISTED_ALONE = 5  # cues of which the same is said
SHOWN_EXAMPLE = 40  # characters

_WHOLE_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")
_TIMES = re.compile(r"\ufeff?[ \t]*(-?\d[\d:., \t]*+)-->[ \t]*(?:(-?\d[\d:.,]*+)|$)")
_TIME = re.compile(r"(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})(?:[.,:](\d{1,9}))?")
_NO_CUE = re.compile(r"(?:NOTE|STYLE|REGION)(?:[ \t].*)?$")
_WORD_TIME = re.compile(r"<\d{1,9}:\d{1,9}(?:[.:]\d{1,9})?>")
_LINE_TIMES = re.compile(r"\ufeff?(?:[ \t]*\[\d{1,9}:\d{1,9}(?:[.:]\d{1,9})?\])++")
_LYRICS_TAG = re.compile(r"\ufeff?[ \t]*\[[a-zA-Z#]\w{0,40}+:")
_FIELD = re.compile(r"(Format|Dialogue)[ \t]*:[ \t]*", re.IGNORECASE)
_DRAWING = re.compile(r"\\p(\d{1,9})")
_OVERRIDE = re.compile(r"\\([1-4]?[a-z]+)([^\\]*+)")
_ASS_SIGN = re.compile(r"(\\[Nn])|\\h|\\[{}]")
_ALL_FIELDS = "layer start end style name marginl marginr marginv effect text".split()
# Overrides that are on the whole line, or that begin at a place, and are no marks of words.
_NO_MARKS = frozenset("an a pos move org fad fade clip iclip q k kf ko kt be p pbo t r".split())


class CueFile(PlainFile):
    """Cues between what stays. What continues a sentence is on the next line, else a blank is."""

    breaks: Breaks = "cues"
    unit = "cue"
    example = ""  # how to write a cue

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data, name)
        self._unread: list[str] = []  # what is to be said of the file, whatever is made of it
        self._said: list[str] = []
        self._parts = [*self._read(self.text)]
        self._cues = [part for part in self._parts if isinstance(part, Cue)]
        if not self._cues and self.text.strip():
            raise ValueError(f"no cues found in {name}: write each as {self.example}")
        self._find_repeated()
        self._lines = [*_in_lines(self._cues)]
        self.text = "\n".join(speech.text if speech else "" for speech in self._lines)

    @abstractmethod
    def _read(self, text: str) -> Iterator[str | Cue]:
        """Yield the cues of a file, and what is between them."""

    def _find_repeated(self) -> None:
        """Find lines of captions that roll up, which the next cue shows once more.

        They get the words that the line gets where it is new.
        """
        shown = [cue for cue in self._cues if cue.speeches]
        pairs = [pair for pair in pairwise(shown) if _rolls_up(*pair)]
        for above, cue in pairs:
            above.begin_at(above.line(last=True)[1])
            cue.begin_at(cue.line(last=False)[1])
        for above, cue in pairs:
            old, new = above.speeches[-1], cue.speeches[0]
            if old.text == new.text:
                new.repeated = old.repeated or old

    def number(self, line: int) -> int:
        speech = self._lines[line - 1] or self._lines[line - 2]
        return speech.cue.number if speech else 0

    def rewritten(self, text: str) -> bytes:
        lines = text.split("\n") if self._lines else []
        words = {speech: line for speech, line in zip(self._lines, lines, strict=True) if speech}
        repeated = [each for cue in self._cues for each in cue.speeches if each.repeated]
        words |= {each: words[each.repeated] for each in repeated if each.repeated}
        made: list[str] = []
        estimated: list[int] = []
        shown: list[tuple[Cue, str]] = []
        for part in self._parts:
            if isinstance(part, str):
                made.append(part)
                continue
            new, is_estimate = part.shown([words[each] for each in part.speeches])
            made.append(new)
            shown.append((part, new))
            estimated += [part.number] * is_estimate
        self._said = _say_estimated([*dict.fromkeys(estimated)])
        for _, group in groupby(shown, key=lambda pair: pair[0].number):
            self._said += _too_fast([*group], words)
        return "".join(made).encode()

    def not_kept(self) -> list[str]:
        return [*self._unread, *self._say_kept(), *self._said]

    def _say_kept(self) -> Iterator[str]:
        """Say what stays within sentences, and which names."""
        found = [(cue, kept) for cue in self._cues for each in cue.speeches for kept in each.kept]
        if found:
            (cue, kept), more = found[0], len({cue.number for cue, _ in found}) - 1
            others = f" and {count(more, 'other cue')}" if more else ""
            yield f"cue {cue.number}{others}: {_example(kept)} stays within its sentence"
        names = [name for cue in self._cues for name in cue.names]
        if names:
            yield f"names of speakers stay as they were, such as {_example(names[0])}"


def _in_lines(cues: Sequence[Cue]) -> Iterator[Speech | None]:
    """Yield what is spoken, with None where a sentence has no end and cannot go on.

    Descriptions within a sentence come behind it.
    """
    spoken: list[Speech] = []  # without descriptions
    waiting: list[Speech] = []
    last = ""
    for speech in (each for cue in cues for each in cue.speeches if not each.repeated):
        goes_on = bool(spoken) and not speech.is_description and _goes_on(spoken[-1], speech)
        if speech.is_description and spoken and not ends_sentence(spoken[-1].text):
            waiting.append(speech)
            continue
        if not goes_on:
            for each in waiting:
                yield from (None, each)
                last = each.text
            waiting = []
            yield from [None] * (not ends_sentence(last))
        yield speech
        last = speech.text
        spoken = [] if speech.is_description else [speech]
    for each in waiting:
        yield from (None, each)


def _say_estimated(numbers: Sequence[int]) -> list[str]:
    """Say of cues that the places of their tags are estimates, of many in one line."""
    if len(numbers) <= LISTED_ALONE:
        return say_estimated("cue", numbers, "tags within it")
    others = count(len(numbers) - 1, "other cue")
    return [f"cue {numbers[0]} and {others}: the places of tags within them are estimates"]


def _goes_on(last: Speech, speech: Speech) -> bool:
    """Whether a speech may continue the sentence of the one before."""
    if speech.begins or (speech.voice and speech.voice != last.voice):
        return False
    if _is_loud(last.text) != _is_loud(speech.text):  # a title, or what is written on a sign
        return False
    before, times = last.cue.times, speech.cue.times
    if not _has_letters(last.text) and speech.text[:1].isupper():
        return False
    if before is times and speech.cue is not last.cue and not _has_letters(speech.text):
        return False  # a number behind a blank line
    if before is None or times is None or before is times:
        return True
    return before.start < times.start <= before.end + LONGEST_GAP


def _rolls_up(above: Cue, cue: Cue) -> bool:
    """Whether a cue begins with the last line of the cue above, without a pause between them."""
    if above.times is None or cue.times is None or above.times is cue.times:
        return False
    is_next = abs(cue.times.start - above.times.end) <= ROLLED_WITHIN
    words, _ = cue.line(last=False)
    return is_next and " " in words and words == above.line(last=True)[0]


def _is_loud(text: str) -> bool:
    return text.isupper() and len(text.split()) > 1


def _too_fast(shown: Sequence[tuple[Cue, str]], words: Mapping[Speech, str]) -> Iterator[str]:
    """Say whether a cue, with all that stands behind blank lines in it, is too fast to read."""
    speeches = [each for cue, _ in shown for each in cue.speeches]
    before = " ".join(each.text for each in speeches)
    after = " ".join(words[each] for each in speeches)
    times = shown[0][0].times
    if times is None or before == after or not is_retold(before, after):
        return
    was = times.rate(sum(cue.size(cue.text) for cue, _ in shown))
    now = times.rate(sum(cue.size(new) for cue, new in shown))
    if now > max(was, READ_EACH_SECOND):
        yield (
            f"cue {shown[0][0].number}: {math.ceil(now):,} characters a second, more than the "
            f"{READ_EACH_SECOND} that can be read"
        )


def _example(text: str) -> str:
    """Return words of a file as a message shows them."""
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= SHOWN_EXAMPLE else f"{flat[: SHOWN_EXAMPLE - 3]}...")


class Subtitles(CueFile):
    """SubRip or WebVTT: times, tags and all that is not spoken stay, and lines of few changes.

    Lines behind a blank one that have no times belong to the cue above, as one more of its number.
    """

    example = "its time, such as 00:00:01,000 --> 00:00:02,500, and its text on the lines behind it"

    def _read(self, text: str) -> Iterator[str | Cue]:
        self._is_webvtt = text.removeprefix("\ufeff").startswith("WEBVTT")
        self._markup = Tags(has_names=self._is_webvtt)
        self._count = 0
        self._times: Times | None = None  # of the last cue
        lines = _WHOLE_LINE.findall(text)
        line = next((each for each in lines if each.strip()), "")
        self._line_end = line[len(line.rstrip("\r\n")) :] or "\n"
        blocks = [[*block] for _, block in groupby(lines, key=lambda line: not line.strip())]
        place = 1
        for number, block in enumerate(blocks):
            if not block[0].strip():
                yield "".join(block)
            else:
                behind = blocks[number + 2] if number + 2 < len(blocks) else []
                yield from self._read_block(block, behind, place)
            place += len(block)

    def _read_block(
        self, block: Sequence[str], behind: Sequence[str], place: int
    ) -> Iterator[str | Cue]:
        """Yield what is in lines without a blank one between them."""
        times = next((i for i, line in enumerate(block) if _TIMES.match(line)), len(block))
        if not self._count or self._is_note(block, times):
            before = 0
            unread = block[: self._spoken_before(block, times)]
            if not self._is_note(block, times) and any(map(_has_letters, unread)):
                said = _example("".join(unread))
                self._unread.append(f"line {place}: {said} is in no cue, and is not read")
        else:
            before = self._spoken_before(block, times)
            number = block[0].strip()
            if before and number.isdigit() and self._is_number(number, before, block, behind):
                yield block[0]
                self._unread += [f"line {place}: {_example(number)} is read as the number of a cue"]
                block, times, before = block[1:], times - 1, before - 1
            if before:
                yield self._cue("".join(block[:before]))
        yield "".join(block[before:times])
        yield from self._with_times(block[times:])

    def _is_note(self, block: Sequence[str], times: int) -> bool:
        """Whether lines are no cue of WebVTT, or its beginning."""
        if not self._is_webvtt or times < len(block):
            return False
        return bool(_NO_CUE.match(block[0].rstrip())) or (not self._count and "WEBVTT" in block[0])

    def _spoken_before(self, block: Sequence[str], times: int) -> int:
        """Return how many of the lines before times are neither the number nor the name of one."""
        if times == len(block) or not times:
            return times
        is_name = self._is_webvtt and times == 1  # which a cue may have
        return times - (is_name or block[times - 1].strip().isdigit())

    def _is_number(
        self, number: str, before: int, block: Sequence[str], behind: Sequence[str]
    ) -> bool:
        """Whether a number in the first line, behind a blank one, is that of a cue."""
        if before > 1 or not behind:
            return number == str(self._count + 1)
        return bool(_TIMES.match(behind[0])) or behind[0].strip() == number

    def _with_times(self, block: Sequence[str]) -> Iterator[str | Cue]:
        """Yield cues without blank lines between them, each behind its times."""
        starts = [i for i, line in enumerate(block) if _TIMES.match(line)]
        for start, end in pairwise([*starts, len(block)]):
            self._count += 1
            self._times = _times_of(block[start])
            yield block[start]
            is_number = start + 1 < end < len(block) and block[end - 1].strip().isdigit()
            yield self._cue("".join(block[start + 1 : end - is_number]))
            yield from block[end - is_number : end]

    def _cue(self, text: str) -> Cue:
        return Cue(self._count, text, self._markup, self._times, line_end=self._line_end)


def _has_letters(line: str) -> bool:
    return any(map(str.isalpha, line))


def _times_of(line: str) -> Times | None:
    """Return the times of a cue, if both can be read."""
    found = _TIMES.match(line)
    return _times_between(found[1], found[2] or "") if found else None


def _times_between(start: str, end: str) -> Times | None:
    found = [_TIME.fullmatch(each.strip()) for each in (start, end)]
    first, last = (_seconds(each) if each else None for each in found)
    return None if first is None or last is None else Times(first, last)


def _seconds(found: re.Match[str]) -> float:
    hours, minutes, seconds, parts = found.groups("0")
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{parts}")


class SubStation(CueFile):
    """SubStation Alpha, also the advanced one: what Dialogue lines of [Events] show.

    Overrides in braces and drawings stay. Comments are not read.
    """

    example = (
        "a line of [Events], such as Dialogue: 0,0:00:01.00,0:00:02.50,Default,,0,0,0,,and its text"
    )

    def _read(self, text: str) -> Iterator[str | Cue]:
        fields, is_within, cues = _ALL_FIELDS, False, 0
        for place, line in enumerate(_WHOLE_LINE.findall(text), 1):
            if line.lstrip("\ufeff \t").startswith("["):
                is_within = line.strip("\ufeff \t\r\n").casefold() == "[events]"
            found = _FIELD.match(line) if is_within else None
            if not found:
                yield line
                continue
            values = line[found.end() :].rstrip("\r\n")
            if found[1].casefold() == "format":
                fields = [name.strip().casefold() for name in values.split(",")]
                yield line
                continue
            several = values.split(",", len(fields) - 1)
            if len(several) < len(fields):
                said = f"{len(several)} of {count(len(fields), 'field')}"
                self._unread.append(f"line {place}: a Dialogue with {said} is not read")
                yield line
                continue
            cues += 1
            start = found.end() + len(values) - len(several[-1])
            yield line[:start]
            yield _dialogue(cues, several[-1], dict(zip(fields, several, strict=True)))
            yield line[start + len(several[-1]) :]


def _dialogue(number: int, text: str, known: Mapping[str, str]) -> Cue:
    """Return a cue with what else its line says."""
    times = _times_between(known.get("start", ""), known.get("end", ""))
    voice = f"{known.get('style', '')},{known.get('name', known.get('actor', ''))}"
    more = {"voice": voice, "line_end": r"\N"}
    return Cue(number, text, _OVERRIDES, times, adds_breaks=False, **more)


class Overrides:
    """Marks of SubStation Alpha: overrides in braces, breaks, and drawings."""

    def mask(self, text: str) -> str:
        made, at, is_drawing = [], 0, False
        for start, end in _in_braces(text):
            made.append(self._plain(text[at:start], is_drawing))
            made.append(TAG * (end - start))
            modes = _DRAWING.findall(text, start, end)
            is_drawing = int(modes[-1]) > 0 if modes else is_drawing
            at = end
        return "".join([*made, self._plain(text[at:], is_drawing)])

    def _plain(self, text: str, is_drawing: bool) -> str:
        return TAG * len(text) if is_drawing else _ASS_SIGN.sub(_masked_sign, text)

    def depths(self, text: str) -> list[tuple[int, int]]:
        found, marks = [], set[str]()
        for start, end in _in_braces(text):
            for name, value in _OVERRIDE.findall(text, start, end - 1):
                if name == "r":
                    marks.clear()
                if value.strip() in ("", "0"):
                    marks.discard(name)
                elif name not in _NO_MARKS:
                    marks.add(name)
            found.append((start, len(marks)))
        return found

    def spelled(self, text: str) -> str:
        # A word joiner parts a backslash from a letter that would make a break of it.
        return re.sub(r"\\(?=[NnHh])", "\\\\\u2060", text).replace("{", r"\{").replace("}", r"\}")


def _masked_sign(found: re.Match[str]) -> str:
    sign = found[0]
    return ("\n" if found[1] else " " if sign == r"\h" else sign[1]) + REST


def _in_braces(text: str) -> Iterator[tuple[int, int]]:
    """Yield where overrides are; a brace behind a backslash is a character."""
    at = 0
    while (start := text.find("{", at)) >= 0:
        at = start + 1
        if text[start - 1 : start] == "\\" and start:
            continue
        at = text.find("}", start) + 1
        if not at:
            return
        yield start, at


_OVERRIDES = Overrides()


class Lyrics(CueFile):
    """Lyrics with times: words behind [mm:ss.xx] are read; tags such as [ar:...] stay."""

    example = "its time, such as [00:12.50], and its text behind it on the same line"

    def _read(self, text: str) -> Iterator[str | Cue]:
        cues, markup = 0, WordTimes()
        for place, line in enumerate(_WHOLE_LINE.findall(text), 1):
            found = _LINE_TIMES.match(line)
            if found:
                cues += 1
                yield line[: found.end()]
                yield Cue(cues, line[found.end() :], markup, adds_breaks=False)
            else:
                if _has_letters(line) and not _LYRICS_TAG.match(line):
                    said = _example(line)
                    self._unread.append(f"line {place}: {said} has no time, and is not read")
                yield line


class WordTimes:
    """Marks of lyrics: the times of words."""

    def mask(self, text: str) -> str:
        times = _WORD_TIME.sub(lambda found: TAG * len(found[0]), text)
        return times.replace("\r", " ")

    def depths(self, text: str) -> list[tuple[int, int]]:
        return []

    def spelled(self, text: str) -> str:
        return text
