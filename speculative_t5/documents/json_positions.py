"""JSON with the places of its values, so that strings in it can be replaced where they stand.

Python's own reader says what the values are, and not where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import shown
from .spliced import placed_lines

MOST_NESTED = 200  # values within values

_JSON_TOKEN = re.compile(
    r"""
    [ \t\r\n]*+ (?:
        (?P<sign> [{}\[\],:] )
        | (?P<string> "(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+" )
        | (?P<number> -?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)? (?![\w.]) )
        | (?P<word> (?: true | false | null | NaN | -?Infinity )\b )
        | (?P<end> \Z )
    )
    """,
    re.VERBOSE,
)
_JSON_ESCAPE = re.compile(
    r"""
    \\(?: u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | (?s:.) )
    """,
    re.VERBOSE,
)

NodeKind = Literal["object", "array", "string", "number", "word"]
_Expected = Literal[
    "a value", "a value or ]", "a name", "a name or }", ":", ", or the end", "no more"
]


@dataclass(slots=True)
class JsonNode:
    """A value, and where it stands."""

    kind: NodeKind
    start: int
    end: int = 0
    members: dict[str, tuple[JsonNode, JsonNode]] = field(default_factory=dict)  # name and value
    items: list[JsonNode] = field(default_factory=list)

    def get(self, *names: str) -> JsonNode | None:
        """Return the value of a member, of that a member, and so on."""
        found: JsonNode | None = self
        for name in names:
            _, found = found.members.get(name, (None, None)) if found else (None, None)
        return found

    def value(self, source: str) -> Any:
        """Return the value itself."""
        return json.loads(source[self.start : self.end])

    def is_string(self, source: str, *texts: str) -> bool:
        """Whether it is one of some strings."""
        return self.kind == "string" and self.value(source) in texts


def read_json_nodes(source: str, name: str) -> JsonNode:
    """Return the value in a text.

    Raises:
        ValueError: If it is no JSON, with the line and the column; or too deeply nested.
    """
    return _NodeReader(source, name).read()


class _NodeReader:
    """Reads JSON from its begin to its end, however deeply nested, and never goes back."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._open: list[JsonNode] = []
        self._member: JsonNode | None = None  # the name of the member that comes next
        self._wanted: _Expected = "a value"
        self._root: JsonNode | None = None

    def read(self) -> JsonNode:
        at = 1 if self._source.startswith("\ufeff") else 0
        while (found := _JSON_TOKEN.match(self._source, at)) and found.lastgroup != "end":
            at = found.end()
            self._take(found)
        if found is None:
            while self._source[at : at + 1] in tuple(" \t\r\n"):
                at += 1
            raise self._fault(at)
        if self._wanted != "no more" or self._root is None:
            raise self._fault(len(self._source))
        return self._root

    def _take(self, found: re.Match[str]) -> None:
        kind = found.lastgroup or ""
        start, end = found.span(kind)
        text, wanted = found[kind], self._wanted
        if wanted == ":" and text == ":":
            self._wanted = "a value"
        elif wanted in ("a name", "a name or }") and kind == "string":
            self._member, self._wanted = JsonNode("string", start, end), ":"
        elif self._closes(text):
            self._close(end)
        elif wanted == ", or the end" and text == ",":
            self._wanted = "a name" if self._open[-1].kind == "object" else "a value"
        elif wanted not in ("a value", "a value or ]") or text in tuple("}],:"):
            raise self._fault(start)
        elif text in ("{", "["):
            self._begin(JsonNode("object" if text == "{" else "array", start))
        elif kind == "string":
            self._add(JsonNode("string", start, end))
        else:
            self._add(JsonNode("number" if kind == "number" else "word", start, end))

    def _closes(self, text: str) -> bool:
        if text not in ("}", "]") or not self._open:
            return False
        is_object = self._open[-1].kind == "object"
        some = ("a name or }" if is_object else "a value or ]", ", or the end")
        return (text == "}") == is_object and self._wanted in some

    def _begin(self, node: JsonNode) -> None:
        self._add(node)
        self._open.append(node)
        if len(self._open) > MOST_NESTED:
            raise ValueError(
                f"{self._name} has more than {MOST_NESTED} values within values at "
                f"{self._place(node.start)}: split it, or leave it out"
            )
        self._wanted = "a name or }" if node.kind == "object" else "a value or ]"

    def _add(self, node: JsonNode) -> None:
        """Put a value where it belongs."""
        if not self._open:
            self._root = node
        elif self._member is not None:
            name = str(self._member.value(self._source))
            self._open[-1].members[name] = self._member, node
            self._member = None
        else:
            self._open[-1].items.append(node)
        self._wanted = ", or the end" if self._open else "no more"

    def _close(self, end: int) -> None:
        self._open.pop().end = end
        self._wanted = ", or the end" if self._open else "no more"

    def _place(self, at: int) -> str:
        line, column = placed_lines(self._source, at)
        return f"line {line}, column {column}"

    def _fault(self, at: int) -> ValueError:
        rest = self._source[at : at + 30].split("\n")[0]
        found = shown(rest) if rest else "the end"
        return ValueError(
            f"{self._name} is no JSON at {self._place(at)}, {found} instead of {self._wanted}: "
            "check it with python -m json.tool"
        )


def read_json_characters(raw: str) -> Iterator[tuple[str, str]]:
    """Yield how each character of a string is written, and as what it is read.

    Half of a pair of surrogates is no character, and is not read.
    """
    at = 0
    for escape in _JSON_ESCAPE.finditer(raw):
        yield from ((each, each) for each in raw[at : escape.start()])
        read = str(json.loads(f'"{escape[0]}"'))
        yield escape[0], "" if "\ud800" <= read <= "\udfff" else read
        at = escape.end()
    yield from ((each, each) for each in raw[at:])


def json_writer(source: str) -> Callable[[str], str]:
    r"""Return what writes characters as a text of JSON does: é or \u00e9, / or \/."""
    has_escapes = source.isascii() and re.search(r"\\u(?!00[0-7])", source) is not None
    has_slashes = "\\/" in source

    def write(text: str) -> str:
        made = json.dumps(text, ensure_ascii=has_escapes)[1:-1]
        return made.replace("/", "\\/") if has_slashes else made

    return write
