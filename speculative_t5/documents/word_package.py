"""Opens the package of files that a document of Word is, and says in a line what is wrong with it.

Imports `errors` alone; python-docx is imported where there is such a document.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any
from zipfile import BadZipFile, ZipFile

from ..errors import first_line

MAX_XML_BYTES = 100 * 10**6  # of text, unpacked
MAX_PACKAGE_BYTES = 512 * 10**6  # of all that it holds
# How files begin that are encrypted, or of old Words.
OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
RELATIONS_FILE, STRICT_NAMES = "_rels/.rels", b"http://purl.oclc.org/ooxml/officeDocument/"
MAX_RELATIONS = 10**5  # bytes of that file that are looked at
ENCRYPTED_FLAG = 1  # the bit of a member's flags


def open_word(data: bytes, name: str) -> Any:
    """Return python-docx's document.

    Raises:
        ValueError: If python-docx is not installed, or the bytes are no whole document of Word.
    """
    try:
        from docx import Document
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name} needs a package that is not installed (python-docx): run "
            "pip install 'speculative-t5[word]'"
        ) from error
    _check_package(data, name)
    stream, is_strict = io.BytesIO(data), False
    try:
        is_strict = _is_strict(data)
        document = Document(stream)
        damaged = _damaged_file(data)
        roots(document)
        notes(document)
    except MemoryError:
        raise
    except Exception as error:  # python-docx, lxml and zipfile promise none for damaged files
        if is_strict:
            raise ValueError(
                f"{name} is in the strict form of Open XML, which is not read: save it as a Word "
                "document (.docx) that is not strict"
            ) from error
        why = first_line(error).replace(repr(stream), name)
        raise ValueError(
            f"{name} is no whole document of Word ({why}): save it again as .docx"
        ) from error
    missing = f"{damaged} is damaged" if damaged else None
    if document.element.body is None:
        missing = "no body"
    if missing:
        raise ValueError(f"{name} is no whole document of Word ({missing}): save it again as .docx")
    found = [*roots(document), *notes(document)]
    if any(root.getroottree().docinfo.internalDTD is not None for _, root in found):
        raise ValueError(
            f"{name} declares a document type, which documents of Word have not: save it again as "
            ".docx"
        )
    return document


def notes(document: Any) -> list[tuple[str, Any]]:
    """Return footnotes and endnotes, which python-docx leaves as bytes, parsed.

    Before each is the name of the file that it is in.
    """
    from docx.opc.part import XmlPart
    from docx.oxml import parse_xml

    return [
        (relation.target_part.partname.membername, parse_xml(relation.target_part.blob))
        for relation in document.part.rels.values()
        if relation.reltype.endswith(("/footnotes", "/endnotes"))
        and not relation.is_external
        and not isinstance(relation.target_part, XmlPart)
    ]


def roots(document: Any) -> list[tuple[str, Any]]:
    """Return the elements that have text: the body, and headers and footers.

    Before each is the name of the file that it is in.
    """
    from docx.opc.part import XmlPart

    body = document.element.body
    found = [] if body is None else [(document.part.partname.membername, body)]
    for relation in document.part.rels.values():
        if relation.reltype.endswith(("/header", "/footer")) and not relation.is_external:
            part = relation.target_part
            if isinstance(part, XmlPart):
                found.append((part.partname.membername, part.element))
    return found


def with_parts(data: bytes, made: Mapping[str, bytes]) -> bytes:
    """Return a package with other bytes of some of its files; all others stay as they are."""
    file = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as package, ZipFile(file, "w") as written:
        for member in {each.filename: each for each in package.infolist()}.values():
            name = member.filename
            written.writestr(member, made[name] if name in made else package.read(name))
    return file.getvalue()


def _is_strict(data: bytes) -> bool:
    """Whether a package says that it is in the form whose names begin with purl.oclc.org."""
    with ZipFile(io.BytesIO(data)) as package:
        if RELATIONS_FILE not in package.namelist():
            return False
        with package.open(RELATIONS_FILE) as relations:
            return STRICT_NAMES in relations.read(MAX_RELATIONS)


def _damaged_file(data: bytes) -> str | None:
    """Return the first file in a package that cannot be read, also if no other refers to it."""
    with ZipFile(io.BytesIO(data)) as package:
        return package.testzip()


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
