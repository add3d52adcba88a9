"""Files of documents: the text in them, and the same file with another text.

The text has a line for each line of a plain file, for each speech of subtitles, and for each
stretch of words in Word and HTML, so that everything else works on lines. `readers` knows which
module has which format.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import decoded
from .splitting import Breaks, FileLines


@dataclass(frozen=True)
class FormatOptions:
    """What is read of a file beside its text, and how it is written, where its format has such."""

    attributes: bool = False  # values of attributes of HTML that people read
    track_changes: str | None = None  # author of changes of Word; None to change the text itself


class PlainFile:
    """Plain text, in UTF-8."""

    breaks: Breaks = "wrapped"  # which line breaks may be within a sentence
    unit = "line"  # what `number` counts
    unread: Sequence[int] = ()  # how many characters of each line of the file are not in the text
    inner_breaks: Collection[int] = ()  # numbers of lines that go on in a paragraph on the next one
    items: Collection[int] = ()  # numbers of lines that begin an item of a list, without its marker

    def __init__(self, data: bytes, name: str) -> None:
        self.text = decoded(data, name)

    @property
    def lines(self) -> FileLines:
        """What there is to know of the lines of the text."""
        inner_breaks, items = frozenset(self.inner_breaks), frozenset(self.items)
        return FileLines(self.breaks, self.unread, inner_breaks, items)

    def translate_into(self, language: str) -> None:
        """Prepare for a translation, which some formats put beside the words that they have.

        The text is then what is to be translated. To be called before it is used.
        """

    def number(self, line: int) -> int:
        """Return the number, from 1, under which a reader of the file finds a line of the text."""
        return line

    def place(self, line: int) -> str:
        """Return where a reader of the file finds a line of the text."""
        return f"{self.unit} {self.number(line)}"

    def rewritten(self, text: str) -> bytes:
        """Return the file with another text of as many lines."""
        return text.encode()

    def not_kept(self) -> list[str]:
        """Say what the file that was made last may have lost, and what it has as it was."""
        return []


def say_estimated(unit: str, numbers: Sequence[int | str], what: str) -> list[str]:
    """Say of each numbered unit, once, that the places of something in it are estimates."""
    return [
        f"{unit} {number}: the places of {what} are estimates" for number in dict.fromkeys(numbers)
    ]


def say_refused(unit: str, numbers: Sequence[int | str], what: str) -> list[str]:
    """Say of each numbered unit, once, that something in it has to stay as it is."""
    return [
        f"{unit} {number}: changes of {what}, which has to stay, were left out"
        for number in dict.fromkeys(numbers)
    ]
