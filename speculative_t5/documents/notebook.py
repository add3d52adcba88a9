r"""Notebooks (.ipynb): the Markdown in their cells, and the same notebook with other words.

Code, outputs and all else keeps its bytes, and so do characters that do not change: what is written
as é stays so, and so does what is written as \u00e9.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import decoded
from .formats import PlainFile
from .json_positions import JsonNode, json_writer, read_json_characters, read_json_nodes
from .markdown import MarkdownFile
from .marks import Character, MarkedLine, Part
from .spliced import Splice, spliced
from .splitting import FRONT_MATTER_RULES

_LINE_OF_CELL = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_FENCE_LINE = re.compile(r"[ \t>]{0,20}(?:[-*+][ \t]{1,4}|\d{1,3}[.)][ \t]{1,4})?(`{3,}|~{3,})(.*)")


@dataclass(frozen=True)
class _Cell:
    """A cell of Markdown."""

    number: int  # from 1, cells of code counted as well
    strings: list[JsonNode]  # that its text is written in, mostly one for each line
    text: str
    document: MarkdownFile

    @property
    def shown(self) -> list[str]:
        """The lines that are read of it, and one that ends code which has no end."""
        text = self.document.text
        return [*_lines_of(text), *([fence] if (fence := _open_fence(text)) else []), ""]


class Notebook(PlainFile):
    """A notebook of Jupyter, of format 4: the cells of Markdown are read as such files are."""

    unit = "cell"

    def __init__(self, data: bytes, name: str) -> None:
        self._source = decoded(data, name)
        self._cells: list[_Cell] = []
        if self._source.strip("\ufeff \t\r\n"):
            root = read_json_nodes(self._source, name)
            self._cells = [*self._found(root, name)]
        self._write = json_writer(self._source)
        shown = [cell.shown for cell in self._cells]
        # What a rule begins in a cell is front matter only where that is the first one of all, and
        # another rule ends it there.
        first = [line.strip() for line in shown[0]] if shown else [""]
        rules = first.count(first[0]) if first[0] in FRONT_MATTER_RULES else 0
        head = [""] if rules and (rules == 1 or self._cells[0].number > 1) else []
        ends = accumulate(map(len, shown), initial=len(head))
        self._ends = [*ends][1:]  # the number of the last line of each cell
        self.text = "\n".join([*head, *(line for lines in shown for line in lines)])
        self.unread = [0] * len(head) + [
            count
            for cell, lines in zip(self._cells, shown, strict=True)
            for count in _filled_up(cell.document.unread, len(lines))
        ]

    def _found(self, root: JsonNode, name: str) -> Iterator[_Cell]:
        cells = root.get("cells")
        if root.get("worksheets"):
            raise ValueError(
                f"{name} is a notebook of format 3, and 4 is read: convert it with jupyter "
                "nbconvert --to notebook"
            )
        if cells is None or cells.kind != "array":
            raise ValueError(f"{name} has no cells, as a notebook has: give a notebook of Jupyter")
        for number, cell in enumerate(cells.items, 1):
            kind, source = cell.get("cell_type"), cell.get("source")
            if not (kind and kind.is_string(self._source, "markdown")):
                continue
            strings = source.items if source and source.kind == "array" else [source]
            known = [each for each in strings if each and each.kind == "string"]
            if len(known) < len(strings):
                raise ValueError(
                    f"cell {number} of {name} has a source that is no text: write it as a string, "
                    "or as a list of strings"
                )
            text = "".join(read for each in known for _, read in self._characters(each))
            made = MarkdownFile(text.encode(), name, has_front_matter=number == 1)
            yield _Cell(number, known, text, made)

    def _characters(self, string: JsonNode) -> Iterator[tuple[str, str]]:
        return read_json_characters(self._source[string.start + 1 : string.end - 1])

    def number(self, line: int) -> int:
        return self._cells[bisect_right(self._ends, line - 1)].number

    def rewritten(self, text: str) -> bytes:
        lines = text.split("\n")
        edits: list[Splice] = []
        for cell, end in zip(self._cells, self._ends, strict=True):
            start = end - len(cell.shown)
            some = lines[start : start + len(_lines_of(cell.document.text))]
            new = "".join(_joined_lines(cell.document.text, some))
            made = cell.document.rewritten(new).decode()
            if made != cell.text:
                edits += self._changed(cell, made)
        return spliced(self._source, iter(edits)).encode()

    def _changed(self, cell: _Cell, text: str) -> Iterator[Splice]:
        """Yield the edits that give a cell another text, of as many lines."""
        made: list[list[str]] = [[] for _ in cell.strings]
        characters = [
            Character(read, number, raw)
            for number, string in enumerate(cell.strings)
            for raw, read in self._characters(string)
        ]
        at = 0
        for old, new in zip(
            _LINE_OF_CELL.findall(cell.text), _LINE_OF_CELL.findall(text), strict=True
        ):
            first, room = at, len(old)
            while at < len(characters) and (room or not characters[at].text):
                room -= len(characters[at].text)
                at += 1
            for number, part in self._line(characters[first:at], old, new):
                made[number].append(part)
        for string, parts in zip(cell.strings, made, strict=True):
            yield string.start + 1, string.end - 1, "".join(parts)

    def _line(self, characters: list[Character], old: str, new: str) -> Iterator[tuple[int, str]]:
        """Yield the parts of a line, each with the number of its string."""
        if old == new:
            yield from ((each.part, each.raw) for each in characters)
            return
        numbers = [*dict.fromkeys(each.part for each in characters)]
        local = {number: i for i, number in enumerate(numbers)}
        own = [Character(each.text, local[each.part], each.raw) for each in characters]
        changed = MarkedLine(own, [Part() for _ in numbers]).changed(new, self._write)
        yield from zip(numbers, changed.parts, strict=True)

    def not_kept(self) -> list[str]:
        return [
            f"cell {cell.number}, {said}"
            for cell in self._cells
            for said in cell.document.not_kept()
        ]


def _lines_of(text: str) -> list[str]:
    """Return the lines of a text without their ends."""
    return re.split(r"\r\n|\r|\n", text)


def _joined_lines(text: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield lines, each with the end that the same line of a text has."""
    for old, new in zip(_LINE_OF_CELL.finditer(text), lines, strict=False):
        yield new + old[0][len(old[0].rstrip("\r\n")) :]


def _filled_up(counts: Sequence[int], length: int) -> list[int]:
    return [*counts, *[0] * (length - len(counts))]


def _open_fence(text: str) -> str:
    """Return the fence that would end the code which a text ends in; "" if there is none."""
    fence = ""
    for line in _lines_of(text):
        found = _FENCE_LINE.match(line)
        if found is None:
            continue
        if not fence:
            fence = found[1] if "`" not in found[2] or found[1][0] == "~" else ""
        elif found[1][0] == fence[0] and len(found[1]) >= len(fence) and not found[2].strip():
            fence = ""
    return fence
