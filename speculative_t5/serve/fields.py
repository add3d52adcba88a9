"""The fields of requests for whole texts: those of an address, of a form, or of a JSON object."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from ..errors import first_line
from .requests import MOST_FIELDS, Refused, parse_body, refuse


def parse_fields(body: bytes, kind: str, query: str = "") -> dict[str, Any]:
    """Return the fields of a body, by its content type, and of an address, which prevail.

    Raises:
        Refused: If they cannot be read; if a field of a form or an address comes twice, with two
            values, of which other servers take one; or if a form's q is a list.
    """
    name, body = kind.partition(";")[0].strip().casefold(), body.strip()
    if name == "application/json" or body.startswith(b"{"):
        fields = parse_body(body)
    else:
        is_multipart = name == "multipart/form-data"
        fields = _once(_multipart(body, kind) if is_multipart else _parsed_pairs(body.decode))
        if _is_list_of_texts(fields.get("q")):
            raise Refused(
                400,
                "q is a list, and the q of a form is one text: send the fields as JSON",
                param="q",
            )
    return fields | _once(_parsed_pairs(lambda: query))


def _parsed_pairs(read: Callable[[], str]) -> list[tuple[str, str]]:
    """Return the names and values of what `read` returns, which is written as in an address."""
    try:
        return parse_qsl(
            read(), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS
        )
    except ValueError as error:
        raise _unreadable(first_line(error)) from error


def _multipart(body: bytes, kind: str) -> list[tuple[str, str]]:
    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        Headers({"content-type": kind}),
        whole(),
        max_files=0,
        max_fields=MOST_FIELDS,
        max_part_size=len(body),
    )
    try:
        found = asyncio.run(parser.parse()).multi_items()
    except (MultiPartException, UnicodeError) as error:
        raise _unreadable(str(error)) from error
    return [(name, str(value)) for name, value in found]


def _unreadable(why: str) -> Refused:
    return Refused(
        400,
        f"the form cannot be read ({why.rstrip('.')}): send at most {MOST_FIELDS} fields, in UTF-8 "
        "and escaped, and no files",
    )


def _once(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return fields, each of which has one value."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise Refused(
                400,
                f"{name[:60]} comes more than once, and a form has it once: send several texts as "
                "a list, in JSON",
                param=name,
            )
    return found


def _is_list_of_texts(found: object) -> bool:
    if not (isinstance(found, str) and found.startswith("[") and found.rstrip().endswith("]")):
        return False
    try:
        texts = json.loads(found)
    except (ValueError, RecursionError):
        return False
    return bool(texts) and all(isinstance(text, str) for text in texts)


def text_field(fields: dict[str, Any], name: str) -> str:
    """Return a field that has to be there, as text."""
    found = fields.get(name)
    if not isinstance(found, str):
        refuse(name, "text", found)
    return found
