"""The package of files that a document of Word is: parts with words, and what is wrong with it.

Imports `errors` alone; python-docx is imported where there is such a document.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from ..errors import first_line

MAX_XML_BYTES = 100 * 10**6  # of text, unpacked
MAX_PACKAGE_BYTES = 512 * 10**6  # of all that it holds
# How files begin that are encrypted, or of old Words.
OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
RELATIONS_FILE, STRICT_NAMES = "_rels/.rels", b"http://purl.oclc.org/ooxml/officeDocument/"
MAX_RELATIONS = 10**5  # bytes of that file that are looked at
ENCRYPTED_FLAG = 1  # the bit of a member's flags
MAX_DECLARATION = 300  # bytes in which the declaration of a file of XML is looked for
_DECLARATION = re.compile(r"(?:\xef\xbb\xbf)?<\?xml[^>]{1,200}\?>\s*+")


@dataclass(frozen=True)
class WordPart:
    """A part of a package that has words: the body, a header or footer, or all notes of a kind."""

    name: str  # of its file in the package
    title: str  # as a reader knows it, such as "the footnotes"; "" of the body
    root: Any
    declaration: bytes  # that its file begins with, if it has one and is in UTF-8

    def xml(self) -> bytes:
        """Return its file as it is now."""
        from lxml import etree

        tree = self.root.getroottree()
        if not self.declaration:
            return bytes(etree.tostring(tree, encoding="UTF-8", standalone=True))
        return self.declaration + bytes(etree.tostring(tree, encoding="UTF-8"))


class WordPackage:
    """The files of a document of Word; those that have words are parsed.

    Raises:
        ValueError: If python-docx is not installed, or the bytes are no whole document of Word.
    """

    def __init__(self, data: bytes, name: str) -> None:
        try:
            from docx import Document
            from docx.oxml.ns import qn
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{name} needs a package that is not installed (python-docx): run "
                "pip install 'speculative-t5[word]'"
            ) from error
        _check_package(data, name)
        self._data = data
        stream, is_strict = io.BytesIO(data), False
        try:
            with ZipFile(stream) as package:
                is_strict = _is_strict(package)
                self._document = Document(stream)
                damaged = package.testzip()
                self.parts = [*_parts(self._document, package)]
        except MemoryError:
            raise
        except Exception as error:  # python-docx, lxml and zipfile promise none for damaged files
            if is_strict:
                raise ValueError(
                    f"{name} is in the strict form of Open XML, which is not read: save it as a "
                    "Word document (.docx) that is not strict"
                ) from error
            why = first_line(error).replace(repr(stream), name)
            raise ValueError(
                f"{name} is no whole document of Word ({why}): save it again as .docx"
            ) from error
        missing = f"{damaged} is damaged" if damaged else None
        if self.parts[0].root.find(qn("w:body")) is None:
            missing = "no body"
        if missing:
            raise ValueError(
                f"{name} is no whole document of Word ({missing}): save it again as .docx"
            )
        if any(part.root.getroottree().docinfo.internalDTD is not None for part in self.parts):
            raise ValueError(
                f"{name} declares a document type, which documents of Word have not: save it again "
                "as .docx"
            )

    @property
    def relations(self) -> set[str]:
        """The kinds of parts that its parts refer to, such as "comments"."""
        relations = self._document.part.package.iter_rels()
        return {each.reltype.rpartition("/")[2] for each in relations}

    def saved(self, changed: Iterable[WordPart]) -> bytes:
        """Return the package with some parts as they are now; other files keep their bytes."""
        made = {part.name: part.xml() for part in changed}
        if not made:
            return self._data
        file = io.BytesIO()
        with ZipFile(io.BytesIO(self._data)) as before, ZipFile(file, "w") as after:
            for member in {each.filename: each for each in before.infolist()}.values():
                copy = ZipInfo(member.filename, member.date_time)
                copy.compress_type, copy.external_attr = member.compress_type, member.external_attr
                data = made.get(member.filename)
                after.writestr(copy, before.read(member) if data is None else data)
        return file.getvalue()


def _parts(document: Any, package: ZipFile) -> Iterator[WordPart]:
    """Yield the body, headers and footers, and notes."""
    from docx.oxml.parser import element_class_lookup
    from lxml import etree

    # That of python-docx leaves white space out, and promises nothing of notes.
    parser = etree.XMLParser(resolve_entities=False)
    parser.set_element_class_lookup(element_class_lookup)
    found = {document.part.partname.membername: ""}
    relations = [each for each in document.part.rels.values() if not each.is_external]
    for kinds in (("header", "footer"), ("footnotes", "endnotes")):
        for relation in relations:
            kind = relation.reltype.rpartition("/")[2]
            if kind in kinds:
                found.setdefault(relation.target_part.partname.membername, kind)
    kinds_found = [*found.values()]
    for number, (name, kind) in enumerate(found.items()):
        title = f"the {kind}" if kind else ""
        if kinds_found.count(kind) > 1:
            title = f"{kind} {kinds_found[: number + 1].count(kind)}"
        data = package.read(name)
        root = etree.fromstring(data, parser)
        is_utf8 = (root.getroottree().docinfo.encoding or "UTF-8").upper() == "UTF-8"
        declaration = _DECLARATION.match(data[:MAX_DECLARATION].decode("latin-1"))
        yield WordPart(
            name, title, root, declaration[0].encode("latin-1") if declaration and is_utf8 else b""
        )


def _is_strict(package: ZipFile) -> bool:
    """Whether a package says that it is in the form whose names begin with purl.oclc.org."""
    if RELATIONS_FILE not in package.namelist():
        return False
    with package.open(RELATIONS_FILE) as relations:
        return STRICT_NAMES in relations.read(MAX_RELATIONS)


def _check_package(data: bytes, name: str) -> None:
    """Refuse bytes that are no package, are encrypted, or unpack to more than can be read."""
    if data.startswith(OLE_MAGIC):
        raise ValueError(
            f"{name} has a password, or is of Word before 2007: save it as .docx without a password"
        )
    try:
        with ZipFile(io.BytesIO(data)) as package:
            members = package.infolist()
    except (BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{name} is not a document of Word: save it as .docx") from error
    if any(member.flag_bits & ENCRYPTED_FLAG for member in members):
        raise ValueError(f"{name} has a password: save it as .docx without a password")
    sizes = {member.filename: member.file_size for member in members}
    xml = sum(size for inner, size in sizes.items() if inner.endswith((".xml", ".rels")))
    for size, most, what in (
        (xml, MAX_XML_BYTES, "text"),
        (sum(sizes.values()), MAX_PACKAGE_BYTES, "all"),
    ):
        if size > most:
            raise ValueError(
                f"{name} unpacks to {math.ceil(size / 1e6):,} MB of {what}, and at most "
                f"{most / 1e6:,.0f} are read: split it into several"
            )
