"""Word: the words of a document, and the same document with other words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from .formats import PlainFile, say_estimated, say_refused
from .marks import MarkedLine, Part, is_other, line_of_parts
from .splitting import Breaks, ends_as_sentence
from .word_changes import XML_SPACE, ChangeTracker
from .word_package import WordPackage, WordPart

_UNSHOWN_BREAK = re.compile(r"[\t\r\n]")  # shown as a space in a text that keeps no spaces
# What stands in a sentence without ending it.
_WITHIN_SENTENCES = (
    "w:drawing w:pict w:object w:sym w:ruby w:softHyphen w:footnoteReference w:endnoteReference "
    "w:commentReference w:annotationRef w:rPr w:lastRenderedPageBreak"
).split()
_ALTERNATIVES = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
# Content controls whose text comes from data, or from a list.
_FILLED_CONTROLS = {"dataBinding", "dropDownList", "date", "checkbox"}
_STAYING_PARTS = {  # kinds of parts that are not read, as a reader knows them
    "comments": "comments",
    "chart": "charts",
    "diagramData": "diagrams",
    "aFChunk": "files that are put in",
    "glossaryDocument": "building blocks",
}


@dataclass(frozen=True)
class _Text:
    """An element of Word with text, which may have to stay."""

    element: Any
    is_fixed: bool = False

    @property
    def text(self) -> str:
        text = self.element.text or "" if self.is_written else "-"
        if _keeps_spaces(self.element):
            return text
        return _UNSHOWN_BREAK.sub(" ", text.strip(" \t\r\n"))

    @property
    def is_written(self) -> bool:
        """Whether the element holds its text, as all do but a hyphen that does not break."""
        return str(self.element.tag).endswith("}t")


def _keeps_spaces(text: Any) -> bool:
    """Whether spaces at the ends of a text are shown; otherwise they only set its file out."""
    if text.get(XML_SPACE) is None:
        text = next((each for each in text.iterancestors() if each.get(XML_SPACE)), text)
    return bool(text.get(XML_SPACE) == "preserve")


class _Fields:
    """The fields of Word around a place: what a program puts there, such as a page number."""

    def __init__(self) -> None:
        self._instructions: list[str] = []  # of those that have not ended
        self._shown: list[bool] = []  # whether what each shows has begun

    def take(self, child: Any) -> bool:
        """Take the next child of a run; return whether it is a mark of a field."""
        from docx.oxml.ns import qn

        if child.tag == qn("w:fldChar"):
            kind = child.get(qn("w:fldCharType"))
            if kind == "begin":
                self._instructions.append("")
                self._shown.append(False)
            elif kind == "separate" and self._shown:
                self._shown[-1] = True
            elif kind == "end" and self._instructions:
                self._instructions.pop()
                self._shown.pop()
        elif child.tag in (qn("w:instrText"), qn("w:delInstrText")):
            if self._instructions:
                self._instructions[-1] += child.text or ""
        else:
            return False
        return True

    @property
    def fills(self) -> bool:
        """Whether a program has put the text here; that of a link is its author's."""
        return not all(self._shown) or not all(map(_is_link, self._instructions))


def _is_link(instruction: str) -> bool:
    return instruction.upper().split()[:1] == ["HYPERLINK"]


@dataclass(frozen=True)
class _WordStretch:
    """Texts that are read as one line, and where they are."""

    part: WordPart
    number: int  # of their paragraph in the document
    own_number: int  # of it in the part
    texts: list[_Text]
    line: MarkedLine

    @property
    def place(self) -> str:
        return f"{self.own_number} of {self.part.title}" if self.part.title else f"{self.number}"


class WordFile(PlainFile):
    """A document of Word: runs and styles stay, and characters that do not change stay in theirs.

    Words are text in runs, wherever they stand: in tables, headers, links and text boxes as well.
    Pictures and marks of notes stay where they are within a sentence, and a tab or a break ends
    one. What fields show stays.
    """

    breaks: Breaks = "none"
    unit = "paragraph"

    def __init__(self, data: bytes, name: str, *, track_changes: str | None = None) -> None:
        self._package = WordPackage(data, name)
        self._author = track_changes
        self._unended: list[str] = []
        self._stretches = [*self._found()]
        self._estimated: list[str] = []
        self._refused: list[str] = []
        self.text = "\n".join(each.line.text for each in self._stretches)

    def number(self, line: int) -> int:
        return self._stretches[line - 1].number

    def place(self, line: int) -> str:
        return f"paragraph {self._stretches[line - 1].place}"

    def _found(self) -> Iterator[_WordStretch]:
        """Yield the stretches of words in all parts."""
        from docx.oxml.ns import qn

        number = lines = 0
        inner, items = set[int](), set[int]()
        for part in self._package.parts:
            fields: dict[Any, _Fields] = {}  # by text boxes and notes, which have their own
            for own_number, paragraph in enumerate(part.root.iter(qn("w:p")), 1):
                number += 1
                if next(paragraph.iterancestors(qn("w:del"), qn("w:moveFrom")), None) is not None:
                    continue  # it is in a text box that is deleted
                apart = map(qn, ("w:txbxContent", "w:footnote", "w:endnote"))
                around = next(paragraph.iterancestors(*apart), None)
                goes_on, begins_item = False, _is_item(paragraph)  # goes on from the line above
                for texts in _texts_in(paragraph, fields.setdefault(around, _Fields())):
                    if all(each.is_fixed or not each.text.strip() for each in texts):
                        goes_on = False
                        continue
                    line = _line_of(texts)
                    inner |= {lines} if goes_on else set()
                    lines += 1
                    items |= {lines} if begins_item else set()
                    begins_item = False
                    goes_on = not ends_as_sentence(line.text.rstrip())
                    yield _WordStretch(part, number, own_number, texts, line)
            if any(each.fills for each in fields.values()):
                self._unended.append(part.title or "the document")
        self.inner_breaks, self.items = inner, items

    def rewritten(self, text: str) -> bytes:
        roots = [part.root for part in self._package.parts]
        tracker = None if self._author is None else ChangeTracker(self._author, roots)
        changed_parts = dict[str, WordPart]()
        lines = text.split("\n") if self._stretches else []
        for stretch, new in zip(self._stretches, lines, strict=True):
            line = stretch.line
            if new == line.text:
                continue
            changed, is_whole = line.changed(new), is_other(line.text, new)
            for each, part in zip(stretch.texts, changed.parts, strict=True):
                if part == each.text:
                    continue
                changed_parts[stretch.part.name] = stretch.part
                if tracker:
                    tracker.change(each.element, each.text, part, is_whole=is_whole)
                else:
                    each.element.text = part
                    each.element.set(XML_SPACE, "preserve")
            if changed.is_estimate:
                self._estimated.append(stretch.place)
            if changed.has_refused:
                self._refused.append(stretch.place)
        return self._package.saved(changed_parts.values())

    def not_kept(self) -> list[str]:
        said = say_estimated("paragraph", self._estimated, "bold words, links and the like")
        said += say_refused("paragraph", self._refused, "what a field shows")
        said += [f"what follows a field without an end stays, in {part}" for part in self._unended]
        kinds = self._package.relations
        staying = [name for kind, name in _STAYING_PARTS.items() if kind in kinds]
        return said + [f"{name} stay as they were" for name in staying]


def _texts_in(paragraph: Any, fields: _Fields) -> Iterator[list[_Text]]:
    """Yield texts of a paragraph that are read as one."""
    from docx.oxml.ns import qn

    within = {*map(qn, _WITHIN_SENTENCES), f"{_ALTERNATIVES}AlternateContent"}
    # What of a paragraph is not read: what is moved or deleted, how a word is pronounced, formulas,
    # and what programs show that cannot show something else.
    unread = *map(qn, ("w:moveFrom", "w:del", "w:rt", "m:oMath")), f"{_ALTERNATIVES}Fallback"
    texts: list[_Text] = []
    for run in paragraph.iter(qn("w:r")):
        if next(run.iterancestors(qn("w:p"))) is not paragraph:
            continue  # it is in a text box
        is_read = next(run.iterancestors(qn("w:p"), *unread)) is paragraph
        is_filled = is_read and _is_filled(run, paragraph)
        for child in run:
            if fields.take(child) or not is_read:
                continue
            is_fixed = is_filled or fields.fills
            if child.tag == qn("w:t") and not len(child):
                texts.append(_Text(child, is_fixed))
            elif child.tag == qn("w:noBreakHyphen"):
                texts.append(_Text(child, True))
            elif child.tag in within and not _ends_sentence(texts):
                continue
            elif texts and child.tag not in (qn("w:rPr"), qn("w:lastRenderedPageBreak")):
                yield texts
                texts = []
    if texts:
        yield texts


def _is_item(paragraph: Any) -> bool:
    """Whether a paragraph has a number or a bullet, by itself or by a style for lists."""
    from docx.oxml.ns import qn

    numbered = paragraph.find(f"{qn('w:pPr')}/{qn('w:numPr')}/{qn('w:numId')}")
    style = paragraph.find(f"{qn('w:pPr')}/{qn('w:pStyle')}")
    if numbered is not None:
        return str(numbered.get(qn("w:val"))) != "0"
    return style is not None and str(style.get(qn("w:val"))).startswith("List")


def _is_filled(run: Any, paragraph: Any) -> bool:
    """Whether a program puts in what a run shows: it is in a field, or a control with data."""
    from docx.oxml.ns import qn

    around = run.iterancestors(qn("w:p"), qn("w:fldSimple"))
    fields = takewhile(lambda each: each is not paragraph, around)
    return any(not _is_link(each.get(qn("w:instr")) or "") for each in fields) or any(
        str(each.tag).rpartition("}")[2] in _FILLED_CONTROLS
        for control in run.iterancestors(qn("w:sdt"))
        for properties in control.iterchildren(qn("w:sdtPr"))
        for each in properties
    )


def _ends_sentence(texts: Sequence[_Text]) -> bool:
    """Whether a sentence ends with texts, so that what follows needs no space before it."""
    return bool(texts) and texts[-1].text.endswith((".", "!", "?", ":"))


def _line_of(texts: Sequence[_Text]) -> MarkedLine:
    """Return the line that texts make, each a part of it."""
    depths = [_depth_of(each.element.getparent()) for each in texts]
    parts = [Part(depth, each.is_fixed) for depth, each in zip(depths, texts, strict=True)]
    read = [[(char, " " if char in "\r\n" else char) for char in each.text] for each in texts]
    return line_of_parts(read, parts)


def _depth_of(run: Any) -> int:
    """Return how much there is to a run: its looks, and whether it is in a link."""
    from docx.oxml.ns import qn

    looks = 0 if run.rPr is None else len(run.rPr)
    is_linked = next(run.iterancestors(qn("w:p"), qn("w:hyperlink"))).tag != qn("w:p")
    return looks + int(is_linked)
