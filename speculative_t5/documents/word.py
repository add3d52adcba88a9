"""Word: the words of a document, and the same document with other words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .formats import PlainFile, say_estimated, say_refused
from .marks import MarkedLine, Part, is_other, line_of_parts
from .splitting import Breaks, ends_as_sentence
from .word_changes import XML_SPACE, ChangeTracker
from .word_package import notes, open_word, roots, with_parts


@dataclass(frozen=True)
class _Text:
    """An element of Word with text, which may have to stay."""

    element: Any
    is_fixed: bool = False

    @property
    def text(self) -> str:
        return self.element.text or "" if self.is_written else "-"

    @property
    def is_written(self) -> bool:
        """Whether the element holds its text, as all do but a hyphen that does not break."""
        return str(self.element.tag).endswith("}t")


class _Fields:
    """The fields of Word around a place: what a program puts there, such as a page number."""

    def __init__(self) -> None:
        self._instructions: list[str] = []  # of those that have not ended

    def take(self, child: Any) -> bool:
        """Take the next child of a run; return whether it is a mark of a field."""
        from docx.oxml.ns import qn

        if child.tag == qn("w:fldChar"):
            kind = child.get(qn("w:fldCharType"))
            if kind == "begin":
                self._instructions.append("")
            elif kind == "end" and self._instructions:
                self._instructions.pop()
        elif child.tag == qn("w:instrText"):
            if self._instructions:
                self._instructions[-1] += child.text or ""
        else:
            return False
        return True

    @property
    def fills(self) -> bool:
        """Whether a program has put the text here; that of a link is its author's."""
        return not all(map(_is_link, self._instructions))


def _is_link(instruction: str) -> bool:
    return instruction.split()[:1] == ["HYPERLINK"]


class WordFile(PlainFile):
    """A document of Word: runs and styles stay, and characters that do not change stay in theirs.

    Words are text in runs, wherever they stand: in tables, headers, links and text boxes as well.
    Pictures and marks of notes stay where they are within a sentence, and a tab or a break ends
    one. What fields show stays.
    """

    breaks: Breaks = "none"
    unit = "paragraph"

    def __init__(self, data: bytes, name: str, *, track_changes: str | None = None) -> None:
        self._data, self._document = data, open_word(data, name)
        named = [*roots(self._document), *notes(self._document)]
        self._roots = [root for _, root in named]
        self._files = {root.getroottree().getroot(): file for file, root in named}
        self._author = track_changes
        self._stretches = [*self._found()]
        self._estimated: list[int] = []
        self._refused: list[int] = []
        self.text = "\n".join(line.text for _, _, line in self._stretches)

    def number(self, line: int) -> int:
        return self._stretches[line - 1][0]

    def _found(self) -> Iterator[tuple[int, list[_Text], MarkedLine]]:
        """Yield the number of a paragraph, texts that are read as one in it, and their line."""
        from docx.oxml.ns import qn

        number = lines = 0
        inner = set[int]()
        for root in self._roots:
            fields = _Fields()
            for paragraph in root.iter(qn("w:p")):
                number += 1
                goes_on = False  # from the line above
                for texts in _texts_in(paragraph, fields):
                    if all(each.is_fixed or not each.text.strip() for each in texts):
                        goes_on = False
                        continue
                    line = _line_of(texts)
                    inner |= {lines} if goes_on else set()
                    lines += 1
                    goes_on = not ends_as_sentence(line.text.rstrip())
                    yield number, texts, line
        self.inner_breaks = inner

    def rewritten(self, text: str) -> bytes:
        from docx.opc.oxml import serialize_part_xml

        tracker = None if self._author is None else ChangeTracker(self._author, self._roots)
        changed_roots = set[Any]()
        lines = text.split("\n") if self._stretches else []
        for (number, texts, line), new in zip(self._stretches, lines, strict=True):
            if new == line.text:
                continue
            changed = line.changed(new)
            changed_roots.add(texts[0].element.getroottree().getroot())
            for each, part in zip(texts, changed.parts, strict=True):
                if part == each.text:
                    continue
                if tracker:
                    tracker.change(each.element, part, is_whole=is_other(line.text, new))
                else:
                    each.element.text = part
                    each.element.set(XML_SPACE, "preserve")
            if changed.is_estimate:
                self._estimated.append(number)
            if changed.has_refused:
                self._refused.append(number)
        # Python-docx would leave out what it does not know, and write other files anew.
        made = {self._files[root]: serialize_part_xml(root) for root in changed_roots}
        return with_parts(self._data, made) if made else self._data

    def not_kept(self) -> list[str]:
        said = say_estimated("paragraph", self._estimated, "bold words, links and the like")
        said += say_refused("paragraph", self._refused, "what a field shows")
        kinds = {each.reltype.rpartition("/")[2] for each in self._document.part.rels.values()}
        unread = {"comments": "comments", "chart": "charts", "diagramData": "diagrams"}
        return said + [
            f"{what} stay as they were" for kind, what in unread.items() if kind in kinds
        ]


def _texts_in(paragraph: Any, fields: _Fields) -> Iterator[list[_Text]]:
    """Yield texts of a paragraph that are read as one."""
    from docx.oxml.ns import qn

    within = tuple(
        map(
            qn,
            (
                "w:drawing w:pict w:object w:softHyphen w:footnoteReference w:endnoteReference "
                "w:commentReference w:annotationRef w:rPr w:lastRenderedPageBreak"
            ).split(),
        )
    )
    texts: list[_Text] = []
    for run in paragraph.iter(qn("w:r")):
        # Neither in a text box, nor moved, nor deleted.
        if next(run.iterancestors(qn("w:p"), qn("w:moveFrom"), qn("w:del"))) is not paragraph:
            continue
        simple = next(run.iterancestors(qn("w:fldSimple"), qn("w:p")))
        is_filled = simple is not paragraph and not _is_link(simple.get(qn("w:instr")) or "")
        for child in run:
            is_fixed = is_filled or fields.fills
            if child.tag == qn("w:t") and not len(child):
                texts.append(_Text(child, is_fixed))
            elif child.tag == qn("w:noBreakHyphen"):
                texts.append(_Text(child, True))
            elif fields.take(child) or (child.tag in within and not _ends_sentence(texts)):
                continue
            elif texts and child.tag not in (qn("w:rPr"), qn("w:lastRenderedPageBreak")):
                yield texts
                texts = []
    if texts:
        yield texts


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
    is_linked = run.getparent().tag == qn("w:hyperlink")
    return looks + int(is_linked)
