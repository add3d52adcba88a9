"""Xcode's string catalogs (.xcstrings): texts of an app in all its languages, in one file of JSON.

A correction changes texts in the language that the catalog is written in; a translation adds those
of another language.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import decoded
from .json_positions import JsonNode, json_writer, read_json_characters, read_json_nodes
from .placeholders import PLACEHOLDER_PATTERN, TAG_PATTERN
from .spliced import FileString, Spelling, Splice, SplicedFile, read_tokens, say_left, spliced

MADE_STATE = '"needs_review"'  # of a text that no translator has seen
ENTRY_DEPTH = 2  # how far the names of entries are indented

_JSON_PART = re.compile(
    rf"""
    (?P<tag> {TAG_PATTERN} )
    | (?P<fixed> {PLACEHOLDER_PATTERN} | &\#?\w+; )
    | (?P<break> (?:\\r)?\\n )
    | (?P<mark> \\[bf] )
    | \\u[0-9a-fA-F]{{4}} | \\(?s:.)
    """,
    re.VERBOSE,
)


@dataclass
class _Asked:
    """An entry that a translation is asked for."""

    node: JsonNode
    source: JsonNode | None  # its texts in the language of the catalog; None where that is its name
    target: JsonNode | None  # a unit that waits for its text
    texts: dict[int, JsonNode] = field(default_factory=dict)  # that are read, by their numbers


class StringCatalog(SplicedFile):
    """A string catalog of Xcode, with its forms for numbers and devices.

    Correcting changes texts of the language that the catalog is written in. Translating adds texts
    of a language where an entry has none, as ones that need a review. All else keeps its bytes.
    """

    def __init__(self, data: bytes, name: str) -> None:
        source = decoded(data, name)
        self._entries: list[tuple[JsonNode, JsonNode]] = []  # names and values
        self._own = ""  # the language that the catalog is written in
        self.spelling = Spelling(read_json_characters, json_writer(source))
        if source.strip("\ufeff \t\r\n"):
            self._read_root(source, name)
        self._begin(source)

    def _read_root(self, source: str, name: str) -> None:
        root = read_json_nodes(source, name)
        own, strings = root.get("sourceLanguage"), root.get("strings")
        entries = [*strings.members.values()] if strings else []
        is_catalog = own and own.kind == "string" and strings and strings.kind == "object"
        if own is None or not is_catalog or any(node.kind != "object" for _, node in entries):
            raise ValueError(
                f"{name} has no sourceLanguage and strings, as a catalog of Xcode has: give one"
            )
        self._own, self._entries = str(own.value(source)), entries
        first, _ = next(iter(root.members.values()))
        gap = source[root.start + 1 : first.start]
        self._is_pretty = "\n" in gap
        self._line_end = "\r\n" if "\r\n" in gap else "\n"
        self._indent = gap.rpartition("\n")[2] if self._is_pretty else ""
        name_of_own, _ = root.members["sourceLanguage"]
        self._colon = source[name_of_own.end : own.start]

    def _found(self) -> Iterator[FileString]:
        self._asked: list[_Asked] = []
        self._names: list[int] = []  # lines of entries whose name is their text
        self._same: list[int] = []
        number = 0
        for name, entry in self._entries:
            stays = entry.get("shouldTranslate")
            is_empty = name.end - name.start == len('""')
            if is_empty or (stays and self._source[stays.start : stays.end] == "false"):
                continue
            for text in self._texts_of(name, entry):
                raw = self._source[text.start + 1 : text.end - 1]
                if self._has_choices(raw, text.start):
                    continue
                if self.language is not None:
                    self._asked[-1].texts[number] = text
                number += 1
                tokens = [*read_tokens(raw, _JSON_PART)]
                yield FileString(tokens, text.start + 1, self.spelling)

    def _texts_of(self, name: JsonNode, entry: JsonNode) -> list[JsonNode]:
        """Return the texts of an entry that are read."""
        source = entry.get("localizations", self._own)
        texts = [text for _, text in _units_of(source)] if source else [name]
        if self.language is None:
            if source is None:
                self._names.append(self._line_of(name.start))
            return texts if source else []
        target = entry.get("localizations", self.language)
        if not texts or self.language == self._own:
            return []
        if target is None:
            self._asked.append(_Asked(entry, source, None))
            return texts
        unit = target.get("stringUnit") if target else None
        if unit is None or len(texts) != 1 or not self._waits(unit):
            return []
        self._asked.append(_Asked(entry, source, unit))
        return texts

    def _waits(self, unit: JsonNode) -> bool:
        """Whether a text is still to be written."""
        state, value = unit.get("state"), unit.get("value")
        is_new = state is not None and state.is_string(self._source, "new")
        return value is not None and (is_new or value.is_string(self._source, ""))

    def _edits(self, made: Mapping[int, str]) -> Iterator[Splice]:
        if self.language is None:
            yield from super()._edits(made)
            return
        self._same = []
        for asked in self._asked:
            done = {number: made[number] for number in asked.texts if number in made}
            if not done:
                self._same.append(self._line_of(asked.node.start))
            elif asked.target:
                (raw,) = done.values()
                yield from self._unit_edits(asked.target, raw)
            else:
                yield self._added(asked, done)

    def _unit_edits(self, unit: JsonNode, raw: str | None) -> Iterator[Splice]:
        """Yield the edits that give a unit its text, and say that it needs a review."""
        value, state = unit.get("value"), unit.get("state")
        if value and raw is not None:
            yield value.start, value.end, f'"{raw}"'
        if state:
            yield state.start, state.end, MADE_STATE

    def _added(self, asked: _Asked, done: Mapping[int, str]) -> Splice:
        """Return the edit that adds a language to an entry."""
        language, source = str(self.language), asked.source
        depth = ENTRY_DEPTH + 2  # of the names of languages
        if source:
            by_place = {asked.texts[number].start: raw for number, raw in done.items()}
            edits = (
                (start - source.start, end - source.start, new)
                for unit, text in _units_of(source)
                for start, end, new in self._unit_edits(unit, by_place.get(text.start))
            )
            value = spliced(self._source[source.start : source.end], edits)
        else:
            (raw,) = done.values()
            unit = self._object([("state", MADE_STATE), ("value", f'"{raw}"')], depth + 1)
            value = self._object([("stringUnit", unit)], depth)
        languages = asked.node.get("localizations")
        if languages and languages.kind == "object":
            return self._inserted(languages, language, value, depth)
        value = self._object([(language, value)], depth - 1)
        return self._inserted(asked.node, "localizations", value, depth - 1)

    def _inserted(self, parent: JsonNode, name: str, value: str, depth: int) -> Splice:
        """Return the edit that adds a member to an object, in the order of their names."""
        member = self._member(name, value)
        if not parent.members:
            whole = self._object([(name, value)], depth - 1)
            return parent.start, parent.end, whole
        first, _ = next(iter(parent.members.values()))
        gap = self._source[parent.start + 1 : first.start]
        for other, (before, _) in parent.members.items():
            if other > name:
                return before.start, before.start, f"{member},{gap}"
        *_, (_, last) = parent.members.values()
        return last.end, last.end, f",{gap}{member}"

    def _object(self, members: Sequence[tuple[str, str]], depth: int) -> str:
        """Return an object in the style of the file; its end is indented as deep as is said."""
        gap, end = "", ""
        if self._is_pretty:
            end = self._line_end + self._indent * depth
            gap = end + self._indent
        inner = f",{gap}".join(self._member(*member) for member in members)
        return f"{{{gap}{inner}{end}}}"

    def _member(self, name: str, value: str) -> str:
        return f'"{self.spelling.write(name)}"{self._colon}{value}'

    def not_kept(self) -> list[str]:
        name = "the name of the entry is its text, and what programs look up has to stay"
        return [
            *super().not_kept(),
            *say_left(self._names, name),
            *say_left(self._same, "no other words were found for these texts"),
        ]


def _units_of(node: JsonNode) -> Iterator[tuple[JsonNode, JsonNode]]:
    """Yield the units of a language, each with its text: forms of numbers and devices as well."""
    for name, (_, member) in node.members.items():
        value = member.get("value") if name == "stringUnit" else None
        if value and value.kind == "string":
            yield member, value
        elif member.kind == "object":
            yield from _units_of(member)
