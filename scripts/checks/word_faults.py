"""What has changed in documents of Word, judged by the XML of their parts alone.

Nothing here knows how the package reads and writes them; it is for `random_documents.py`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree
from zipfile import ZipFile

from random_word import AROUND
from random_words import WORD, Skeleton

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def _files(data: bytes) -> dict[str, bytes]:
    with ZipFile(io.BytesIO(data)) as package:
        return {name: package.read(name) for name in package.namelist()}


def _parsed(data: bytes) -> ElementTree.Element:
    builder = ElementTree.TreeBuilder(insert_comments=True, insert_pis=True)
    return ElementTree.fromstring(data, ElementTree.XMLParser(target=builder))


def _texts_of_parts(data: bytes) -> Iterator[tuple[str, bytes, ElementTree.Element | None]]:
    """Yield the files of a package, those with words parsed."""
    for name, inner in _files(data).items():
        has_words = name in AROUND or not name.endswith(".xml") or not name.startswith("word/")
        yield name, inner, None if has_words else _parsed(inner)


def _shown(text: ElementTree.Element) -> str:
    """Return what is shown of the text of an element, without white space that is not kept."""
    is_kept = text.get("{http://www.w3.org/XML/1998/namespace}space") == "preserve"
    if is_kept:
        return text.text or ""
    return re.sub(r"[\t\r\n]", " ", (text.text or "").strip(" \t\r\n"))


def skeleton_of_docx(data: bytes) -> Skeleton:
    """Return all but the words of all files, and for each word the element that it is in.

    Words that are to stay belong to the former. The latter also has the text of each element.
    """
    found, marks = [], {}
    for name, inner, root in _texts_of_parts(data):
        if root is None:
            found.append(f"{name} {inner!r}")
            continue
        found.append(f"{name} {inner[: inner.find(b'<w:')]!r}")
        for number, each in enumerate(root.iter()):
            is_text, text = each.tag == W + "t" and not len(each), each.text or ""
            own = ["", [text]["q" not in text :]] if is_text else [text, each.items()]
            found.append(f"{each.tag} {own} {each.tail!r}")
            if is_text:
                place, text = f"{name} {number}", _shown(each)
                marks[place] = text
                marks.update({word: place for word in WORD.findall(text)})
    return found, marks


def faults_of_reading(data: bytes, text: str) -> list[str]:
    """Say which words of a document are not read."""
    read = " ".join(text.split())
    found = (
        each
        for _, _, root in _texts_of_parts(data)
        if root is not None
        for each in root.iter(W + "t")
    )
    return [
        f"not read: {' '.join(_shown(each).split())!r}"
        for each in found
        if not (each.text or "").lstrip().startswith("q")
        and " ".join(_shown(each).split()) not in read
    ]


@dataclass
class _Decisions:
    """The characters and elements of a part, once changes are accepted or rejected."""

    accept: bool
    authors: Sequence[str]
    found: list[tuple[object, ...]] = field(default_factory=list)

    def take(
        self, element: ElementTree.Element, *, looks: str = "", is_restored: bool = False
    ) -> None:
        """Take an element, and what is in it."""
        name = str(element.tag).removeprefix(W)
        is_change = name in ("ins", "del", "moveTo", "moveFrom")
        if is_change and element.get(W + "author") in self.authors:
            if (name in ("ins", "moveTo")) == self.accept:
                for child in element:
                    self.take(child, is_restored=is_restored or name == "del")
            return
        if name == "r":
            self._take_run(element, is_restored=is_restored)
            return
        around = (
            name,
            *sorted(
                (key, value) for key, value in element.items() if not is_change or key != W + "id"
            ),
        )
        self._add(("begin", around, looks), is_change=is_change)
        if name != "t" and name != "delText":
            self.found += [("text", each) for each in (element.text or "").strip()]
        for child in element:
            self.take(child, is_restored=is_restored)
        self._add(("end", around, looks), is_change=is_change)

    def _add(self, event: tuple[object, ...], *, is_change: bool) -> None:
        """Add where an element begins or ends; changes that are divided or empty are as if not."""
        other = "end" if event[0] == "begin" else "begin"
        if is_change and self.found and self.found[-1] == (other, *event[1:]):
            self.found.pop()
        else:
            self.found.append(event)

    def _take_run(self, run: ElementTree.Element, *, is_restored: bool) -> None:
        own = run.find(W + "rPr")
        looks = "" if own is None else " ".join(self._looks(own))
        for child in run:
            name = str(child.tag).removeprefix(W)
            if name in ("t", "delText") and not len(child):
                name = "t" if is_restored else name
                self.found += [(name, each, looks) for each in _shown(child)]
            elif child is not own:
                self.take(child, looks=looks, is_restored=is_restored)

    def _looks(self, own: ElementTree.Element) -> Iterator[str]:
        for each in own:
            if each.tag != W + "rPrChange":
                yield f"{each.tag} {sorted(each.items())}"
            elif not self.accept or each.get(W + "author") not in self.authors:
                yield f"{each.tag} {each.get(W + 'author')} {[*self._looks(each[0])]}"


def _decided(data: bytes, *, accept: bool, authors: Sequence[str]) -> list[object]:
    """Return the files of a document whose changes by some authors are accepted or rejected."""
    found: list[object] = []
    for name, inner, root in _texts_of_parts(data):
        if root is None:
            found.append((name, inner))
        else:
            decisions = _Decisions(accept, authors)
            decisions.take(root)
            found += [name, *decisions.found]
    return found


def faults_of_changes(before: bytes, tracked: bytes, direct: bytes, author: str) -> list[str]:
    """Say what is wrong with the tracked changes of an author.

    `direct` is the document in which the same words have changed without a trace.
    """
    faults = []
    for accept, other, authors in (
        (True, direct, (author, "Bob")),
        (False, before, (author, "Bob")),
        (False, before, (author,)),
    ):
        made = _decided(tracked, accept=accept, authors=authors)
        wanted = _decided(other, accept=accept, authors=authors)
        if made != wanted:
            verb = "accepted" if accept else "rejected"
            at = next(
                (i for i, pair in enumerate(zip(made, wanted, strict=False)) if pair[0] != pair[1]),
                -1,
            )
            shown = f"{made[at : at + 9]} and not {wanted[at : at + 9]}"
            faults.append(f"{verb} by {', '.join(authors)}, it is another document: {shown}")
    return faults + [*_faults_of_form(tracked, author)]


def _faults_of_form(tracked: bytes, author: str) -> Iterator[str]:
    """Say what is wrong with how changes of an author are written."""
    numbers: list[str] = []
    for _, _, root in _texts_of_parts(tracked):
        if root is None:
            continue
        parents = {child: parent for parent in root.iter() for child in parent}
        for each in root.iter():
            around = [each]
            while around[-1] in parents and around[-1].tag != W + "p":
                around.append(parents[around[-1]])
            yield from _faults_of_element(each, around[1:], author)
            if each.tag in (W + "ins", W + "del", W + "rPrChange", W + "bookmarkStart"):
                numbers.append(each.get(W + "id") or "none")
    if len({*numbers}) != len(numbers):
        yield "changes have the same number"


def _faults_of_element(
    element: ElementTree.Element, around: Sequence[ElementTree.Element], author: str
) -> Iterator[str]:
    """Say what is wrong with an element, by those that it is in."""
    name, *tags = (str(each.tag).removeprefix(W) for each in (element, *around))
    if name in ("t", "delText") and tags[0] == "r" and (name == "delText") != ("del" in tags):
        yield f"{name} is in {tags}"
    is_new = tags[2:3] == ["ins"] and around[2].get(W + "author") == author
    if name == "rPrChange" and is_new:
        yield "new words had other looks before"
    if element.get(W + "author") == author:
        date = element.get(W + "date") or ""
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", date):
            yield f"a change has the date {date!r}"
        is_apart = tags[0] not in ("ins", "moveTo") or name == "del"
        if len(element) != 1 or not is_apart or tags[0] == "del":
            yield f"{name} is in {tags} and has {len(element)} elements"
