"""Tracked changes of Word: what was deleted and what was put in, each under an author's name.

Whoever reads the document accepts or rejects each change. All accepted, it has the new text; all
rejected, the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from datetime import UTC, datetime
from itertools import count
from typing import Any

from .marks import least_edits, trimmed

XML_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


class ChangeTracker:
    """Writes changes of texts of Word as tracked ones of an author."""

    def __init__(self, author: str, roots: Iterable[Any]) -> None:
        from docx.oxml.ns import qn

        self._author = author
        self._date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        taken = {each.get(qn("w:id")) for root in roots for each in root.iter("*")}
        self._ids = (number for each in count(1) if (number := str(each)) not in taken)

    def change(self, element: Any, text: str, new: str, *, is_whole: bool) -> None:
        """Write what changes in the text of an element in a run, which is divided around it.

        With `is_whole` the change is one; otherwise words are changed one by one. Of several texts
        in a run, the first has to be changed first.
        """
        run = element.getparent()
        before = [child for child in run[: run.index(element)] if child is not run.rPr]
        if before:
            run.addprevious(self._run_like(run, before))
        for kind, piece in _kept_and_changed(text, new, is_whole=is_whole):
            self._write(run, kind, piece)
        run.remove(element)
        if not any(child is not run.rPr for child in run):
            _remove(run)

    def _write(self, run: Any, kind: str, piece: str) -> None:
        """Write a piece of a text before what is left of its run."""
        from docx.oxml import OxmlElement
        from docx.oxml.ns import qn

        text = OxmlElement("w:delText" if kind == "w:del" else "w:t")
        text.text = piece
        text.set(XML_SPACE, "preserve")
        made = self._run_like(run, [text])
        if kind == "w:ins":
            made.attrib.clear()
            for change in made.findall(f"{qn('w:rPr')}/{qn('w:rPrChange')}"):
                change.getparent().remove(change)  # new words had no other looks before
            self._outside(run).addprevious(self._marked(kind, made))
        else:
            run.addprevious(self._marked(kind, made) if kind else made)

    def _marked(self, kind: str, run: Any) -> Any:
        """Return a change with a run in it."""
        from docx.oxml import OxmlElement
        from docx.oxml.ns import qn

        change = OxmlElement(kind)
        change.set(qn("w:id"), next(self._ids))
        change.set(qn("w:author"), self._author)
        change.set(qn("w:date"), self._date)
        change.append(run)
        return change

    def _outside(self, run: Any) -> Any:
        """Return what to put new words before: another's insertion is divided, not added to."""
        from docx.oxml.ns import qn

        around = run.getparent()
        if around.tag not in (qn("w:ins"), qn("w:moveTo")):
            return run
        if before := around[: around.index(run)]:
            first = around.makeelement(around.tag, dict(around.attrib), around.nsmap)
            first.set(qn("w:id"), next(self._ids))
            first.extend(before)
            around.addprevious(first)
        return around

    def _run_like(self, run: Any, children: Iterable[Any]) -> Any:
        """Return another run with the same properties."""
        from docx.oxml.ns import qn

        made = run.makeelement(run.tag, dict(run.attrib), run.nsmap)
        if run.rPr is not None:
            made.append(deepcopy(run.rPr))
            for change in made.rPr.findall(qn("w:rPrChange")):
                change.set(qn("w:id"), next(self._ids))
        made.extend(children)
        return made


def _kept_and_changed(before: str, after: str, *, is_whole: bool) -> Iterator[tuple[str, str]]:
    """Yield what is kept, under "", and what is deleted and put in, by the names of Word."""
    at = 0
    for start, end, new in [trimmed(before, after)] if is_whole else least_edits(before, after):
        for kind, piece in (
            ("", before[at:start]),
            ("w:del", before[start:end]),
            ("w:ins", new),
        ):
            if piece:
                yield kind, piece
        at = end
    if before[at:] or not before:
        yield "", before[at:]


def _remove(run: Any) -> None:
    """Remove a run without text, and another's insertion that has become empty."""
    from docx.oxml.ns import qn

    around = run.getparent()
    around.remove(run)
    if around.tag in (qn("w:ins"), qn("w:moveTo")) and not len(around):
        around.getparent().remove(around)
