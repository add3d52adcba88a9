"""The attributes of HTML tags, and which of them hold words that people read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape, unescape
from html.entities import html5

_START = re.compile(r"<[a-z][\w-]*+", re.IGNORECASE)
# A quoted text without a name is no attribute, whatever it holds.
_ATTRIBUTE = re.compile(
    r"""
    "[^"]*"
    | '[^']*'
    | ([^\s"'<>/=]++) (?: \s*+ = \s*+ (?: "([^"]*)" | '([^']*)' | ([^\s"'=<>`]++) (?![^\s>]) ) )?
    """,
    re.VERBOSE,
)
_ANYWHERE = frozenset(("title", "aria-label"))
_READ_OF = {"alt": ("img", "area", "input"), "placeholder": ("input", "textarea")}
_NOT_SHOWN = frozenset(("link", "style", "script", "template"))  # a title names their style sheet
_DESCRIPTIONS = frozenset(
    "description og:description og:title twitter:description twitter:title".split()
)
_NEEDS_QUOTES = re.compile(r"""[\s"'=<>`]|\A\Z""")


@dataclass(frozen=True)
class Attribute:
    """An attribute of a tag that has a value, and where that is in the tag."""

    name: str
    value: str  # as it is written
    start: int
    end: int
    quote: str  # around it, or ""


def attributes_of(tag: str) -> Iterator[Attribute]:
    """Yield the attributes of a tag in order; one without a value has an empty one."""
    begun = _START.match(tag)
    for found in _ATTRIBUTE.finditer(tag, begun.end()) if begun else ():
        if found[1] is None:
            continue
        group = next((i for i in (2, 3, 4) if found[i] is not None), 1)
        start, end = found.span(group) if group > 1 else (found.end(), found.end())
        quote = {2: '"', 3: "'"}.get(group, "")
        yield Attribute(found[1].casefold(), tag[start:end], start, end, quote)


def says_to_stay(tag: str) -> bool | None:
    """Return whether a tag says that its words are to stay, or are not; None if neither."""
    if "ranslate" not in tag and "RANSLATE" not in tag:
        return None
    said: dict[str, str] = {}
    for each in attributes_of(tag):
        said.setdefault(each.name, each.value.casefold())  # the first of a name counts
    if "notranslate" in said.get("class", "").split():
        return True
    return {"no": True, "yes": False, "": False}.get(said.get("translate", "?").strip())


def read_attributes(name: str, tag: str) -> list[Attribute]:
    """Return the attributes of an element's first tag whose values people read."""
    found = [*attributes_of(tag)]
    if name == "meta":
        kinds = {each.value.casefold() for each in found if each.name in ("name", "property")}
        return [each for each in found if each.name == "content" and kinds & _DESCRIPTIONS]
    if name in _NOT_SHOWN:
        return []
    return [each for each in found if each.name in _ANYWHERE or name in _READ_OF.get(each.name, ())]


def read_value_entity(entity: str, behind: str) -> str:
    """Return what the name or number of a character stands for in the value of an attribute.

    Names without a semicolon are only read if they are whole: values may be addresses, in which
    `&copy=1` is a parameter.
    """
    if entity.endswith(";") or entity.startswith("&#"):
        return unescape(entity)
    return html5[entity[1:]] if entity[1:] in html5 and behind != "=" else entity


def spelled_value(text: str, quote: str) -> str:
    """Write words as the value of an attribute would, between such quotes."""
    found = escape(text, quote=False)
    return found.replace("'", "&#39;") if quote == "'" else found.replace('"', "&quot;")


def quoted_value(value: str) -> str:
    """Return a value that had no quotes with those that it needs."""
    return f'"{value}"' if _NEEDS_QUOTES.search(value) else value
