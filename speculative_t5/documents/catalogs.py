"""Catalogs of gettext: texts of programs in .po and .pot files.

A correction changes what `msgstr` says; a translation writes it where it is empty.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from gettext import c2py
from itertools import accumulate, pairwise

from ..errors import not_utf8, shown
from .placeholders import PLACEHOLDER_PATTERN, TAG_PATTERN
from .spliced import FileString, Spelling, Splice, SplicedFile, StringToken, read_tokens, say_left

CATALOG_WIDTH = 79  # columns of a line, as gettext's tools write them

_TOKEN = re.compile(
    r"""
    \s++
    | (?P<comment> \#[^\r\n]*+ )
    | (?P<keyword> msgctxt | msgid_plural | msgid | msgstr (?:\[[ \t]*\d{1,3}[ \t]*\])? | domain )
      (?![\w\[])
    | (?P<literal> "(?:[^"\\\r\n]|\\[^\r\n])*+" )
    """,
    re.VERBOSE,
)
_STRING_PART = re.compile(
    rf"""
    (?P<tag> {TAG_PATTERN} )
    | (?P<fixed> {PLACEHOLDER_PATTERN} | &\#?\w+; )
    | (?P<break> (?:\\r)?\\n )
    | (?P<mark> \\[abfvr] | \\x[0-9a-fA-F]{{1,8}} | \\[0-7]{{1,3}} )
    | \\["\\t]
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r'\\(?:([abfnrtv"\\])|[0-7]{1,3}|x[0-9a-fA-F])')
_BACKSLASH = re.compile(r"\\(?s:.)")
_SPELLED = {'"': '\\"', "\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_READ = {'\\"': '"', "\\\\": "\\", "\\t": "\t", "\\n": "\n"}
_CHARSET = re.compile(r'Content-Type:[^"\r\n]{0,200}?charset=([\w.:+-]{1,40})')
_NUMBER_OF_FORMS = re.compile(r"nplurals\s{0,9}=\s{0,9}(\d{1,2})\s{0,9};")
_PLURAL_RULE = re.compile(r"plural\s{0,9}=([^;\\]{1,500})")
_LINE_OF_STRING = re.compile(r"(?:[^\\]|\\[^n])*+(?:\\n)?")

LiteralPlace = tuple[int, int]


def _characters_of_catalog(raw: str) -> Iterator[tuple[str, str]]:
    """Yield how each character of a literal is written, and as what it is read."""
    at = 0
    for escape in _BACKSLASH.finditer(raw):
        yield from ((each, each) for each in raw[at : escape.start()])
        yield escape[0], _READ.get(escape[0], "")
        at = escape.end()
    yield from ((each, each) for each in raw[at:])


def _written(text: str) -> str:
    return "".join(_SPELLED.get(each, each) for each in text)


@dataclass
class _Entry:
    """An entry of a catalog: its comments, and where each of its strings has its literals."""

    start: int  # of its first keyword
    comments: list[LiteralPlace]
    strings: dict[str, list[LiteralPlace]] = field(default_factory=dict)  # by keyword

    @property
    def is_done(self) -> bool:
        return any(name.startswith("msgstr") for name in self.strings)

    @property
    def forms(self) -> dict[int, list[LiteralPlace]]:
        """Its translations, by the numbers of plural forms; one without has number 0."""
        return {
            int(name[7:-1] or 0): spans
            for name, spans in self.strings.items()
            if name.startswith("msgstr")
        }


class _EntryReader:
    """Reads the entries of a catalog."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self.entries: list[_Entry] = []
        self._comments: list[LiteralPlace] = []
        self._open: _Entry | None = None
        self._field: list[LiteralPlace] | None = None  # that literals are added to

    def read(self) -> list[_Entry]:
        """Return the entries; refuse what gettext cannot read."""
        source = self._source
        at = 1 if source.startswith("\ufeff") else 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                raise self._fault(at, self._excerpt(at))
            at = found.end()
            if found["comment"]:
                self._take_comment(found)
            elif found["keyword"]:
                self._take_keyword(found)
            elif found["literal"]:
                self._take_literal(found)
        self._close(len(source))
        return self.entries

    def _take_comment(self, found: re.Match[str]) -> None:
        if self._open and self._open.is_done:
            self._close(found.start())
        if found[0].startswith("#~"):  # an entry that is out of use, with its own comments
            self._comments = []
        elif self._open is None:
            self._comments.append(found.span())

    def _take_keyword(self, found: re.Match[str]) -> None:
        start, name = found.start(), re.sub(r"\s", "", found[0])
        self._check_filled(start)
        if name == "domain":
            self._close(start)
            self._field = []
            return
        if name in ("msgctxt", "msgid") and (self._open is None or self._open.is_done):
            self._close(start)
            self._open = _Entry(start, self._comments)
            self._comments = []
        entry = self._open
        if entry is None or not self._may_follow(entry, name):
            raise self._fault(start, found[0])
        self._field = entry.strings[name] = []

    def _may_follow(self, entry: _Entry, name: str) -> bool:
        have = entry.strings
        if name in have:
            return False
        if name.startswith("msgstr["):
            return "msgid_plural" in have and int(name[7:-1]) == len(entry.forms)
        if name == "msgstr":
            return "msgid" in have and "msgid_plural" not in have
        if name == "msgid_plural":
            return "msgid" in have and not entry.is_done
        return not have or [*have] == ["msgctxt"]

    def _take_literal(self, found: re.Match[str]) -> None:
        if self._field is None:
            raise self._fault(found.start(), found[0])
        for escape in _BACKSLASH.finditer(found[0]):
            if not _ESCAPE.match(found[0], escape.start()):
                raise self._fault(found.start() + escape.start(), escape[0])
        self._field.append(found.span())

    def _check_filled(self, at: int) -> None:
        if self._field == [] and self._open:
            raise self._fault(at, self._excerpt(at))

    def _close(self, at: int) -> None:
        if self._open:
            self._check_filled(at)
            if not self._open.is_done:
                raise self._fault(at, self._excerpt(at))
            self.entries.append(self._open)
        self._open, self._field = None, None

    def _excerpt(self, at: int) -> str:
        return self._source[at : at + 40].split("\n")[0]

    def _fault(self, at: int, found: str) -> ValueError:
        line = len(re.findall(r"\r\n|\r|\n", self._source[:at])) + 1
        what = shown(found) if found else "the end"
        return ValueError(
            f"line {line} of {self._name} is not as gettext has it, {what} cannot stand there: "
            "check the file with msgfmt"
        )


class Catalog(SplicedFile):
    """A catalog of gettext.

    Correcting changes `msgstr` where it has a text. Translating writes it where it is empty, and
    marks the entry `fuzzy`, as is usual for what no translator has seen. All else keeps its bytes.
    """

    spelling = Spelling(_characters_of_catalog, _written)

    def __init__(self, data: bytes, name: str) -> None:
        source, encoding = _decoded_catalog(data, name)
        self._entries = _EntryReader(source, name).read()
        self._left: dict[str, list[int]] = {}
        found = re.search(r"\r\n|\n|\r", source)
        self._line_end = found[0] if found else "\n"
        self._read_header(source)
        self._begin(source, encoding)

    def _read_header(self, source: str) -> None:
        """Find how many plural forms there are, and which one is for the number 1."""
        self._header = next(
            (
                entry
                for entry in self._entries
                if "msgctxt" not in entry.strings
                and _literal_text(source, entry.strings["msgid"]) == ""
            ),
            None,
        )
        self._count, self._singular = 0, 0
        if self._header is None:
            return
        text = "".join(_literal_text(source, spans) for spans in self._header.forms.values())
        if found := _NUMBER_OF_FORMS.search(text):
            self._count = int(found[1])
        if rule := _PLURAL_RULE.search(text, found.end() if found else 0):
            try:
                self._singular = int(c2py(rule[1].strip())(1))
            except (ValueError, ArithmeticError, RecursionError):  # msgfmt says what is wrong
                self._singular = 0

    def _found(self) -> Iterator[FileString]:
        self._owners: list[tuple[_Entry, str]] = []  # of each string: its entry and keyword
        self._left = {"fuzzy": [], "empty": [], "same": []}
        self._asked: list[_Entry] = []
        for entry in self._entries:
            if entry is self._header:
                continue
            for name in self._names_read(entry):
                spans = entry.strings[name]
                raw = _literal_text(self._source, spans)
                if self._has_choices(raw, spans[0][0]):
                    continue
                self._owners.append((entry, name))
                tokens = [*_tokens_of(self._source, spans)]
                yield FileString(tokens, spans[0][0] + 1, self.spelling)

    def _names_read(self, entry: _Entry) -> list[str]:
        """Return which strings of an entry are read."""
        filled = {
            number: bool(_literal_text(self._source, spans))
            for number, spans in entry.forms.items()
        }
        line = self._line_of(entry.start)
        if self.language is None:
            if not any(filled.values()):
                self._left["empty"].append(line)
            names = [name for name in entry.strings if name.startswith("msgstr")]
            return [name for name in names if _literal_text(self._source, entry.strings[name])]
        if not self._missing(entry):
            if self._is_fuzzy(entry):
                self._left["fuzzy"].append(line)
            return []
        self._asked.append(entry)
        return [name for name in ("msgid", "msgid_plural") if name in entry.strings]

    def _missing(self, entry: _Entry) -> list[int]:
        """Return the numbers of the forms that an entry lacks."""
        forms = entry.forms
        count = max(self._count, len(forms)) if "msgid_plural" in entry.strings else 1
        if self._count:
            count = min(count, max(self._count, 1))
        return [
            i for i in range(count) if i not in forms or not _literal_text(self._source, forms[i])
        ]

    def _is_fuzzy(self, entry: _Entry) -> bool:
        return any("fuzzy" in flags for _, flags in self._flags(entry))

    def _flags(self, entry: _Entry) -> Iterator[tuple[LiteralPlace, list[str]]]:
        for start, end in entry.comments:
            if self._source.startswith("#,", start):
                flags = self._source[start + 2 : end].split(",")
                yield (start, end), [flag.strip() for flag in flags]

    def _edits(self, made: Mapping[int, str]) -> Iterator[Splice]:
        if self.language is None:
            yield from super()._edits(made)
            return
        texts: dict[int, dict[str, str]] = {}  # by entry and keyword
        for number, raw in made.items():
            entry, name = self._owners[number]
            texts.setdefault(entry.start, {})[name] = raw
        self._left["same"] = []
        for entry in self._asked:
            if entry.start in texts:
                yield from self._filled(entry, texts[entry.start])
            else:
                self._left["same"].append(self._line_of(entry.start))

    def _filled(self, entry: _Entry, texts: Mapping[str, str]) -> Iterator[Splice]:
        """Yield the edits that write what an entry lacks."""
        forms, added, last = entry.forms, [], 0
        for number in self._missing(entry):
            raw = texts.get(self._name_for(entry, number))
            literal = '""' if raw is None else self._literal(entry, raw)
            if number in forms:
                last = max(last, forms[number][-1][1])
                if raw is not None:
                    yield forms[number][0][0], forms[number][-1][1], literal
            else:
                added.append(f"{self._line_end}msgstr[{number}] {literal}")
        if added:
            end = max(spans[-1][1] for spans in forms.values())
            yield end, end, "".join(added)
        if not self._is_fuzzy(entry):
            yield self._flagged(entry)

    def _name_for(self, entry: _Entry, number: int) -> str:
        """Return which text stands for a plural form: the singular is that of the number 1."""
        if "msgid_plural" not in entry.strings:
            return "msgid"
        is_singular = number == self._singular and max(self._count, len(entry.forms)) > 1
        return "msgid" if is_singular else "msgid_plural"

    def _flagged(self, entry: _Entry) -> Splice:
        """Return the edit that marks an entry as one that a translator has to look at."""
        for (start, _), _ in self._flags(entry):
            return start + 2, start + 2, " fuzzy,"
        before = [start for start, _ in entry.comments if self._source.startswith("#|", start)]
        place = min([entry.start, *before])
        line_start = self._line_starts[self._line_of(place) - 1]
        is_alone = not self._source[line_start:place].strip(" \t\ufeff")
        before_it = "" if is_alone else self._line_end
        return place, place, f"{before_it}#, fuzzy{self._line_end}"

    def _literal(self, entry: _Entry, raw: str) -> str:
        """Return a string as one literal, or as several lines if `msgid` is so."""
        lines = [line for line in _LINE_OF_STRING.findall(raw) if line]
        if len(entry.strings["msgid"]) == 1 and len(lines) == 1:
            return f'"{raw}"'
        wrapped = [piece for line in lines for piece in _wrapped_line(line)]
        return self._line_end.join(f'"{piece}"' for piece in ["", *wrapped])

    def not_kept(self) -> list[str]:
        said = {
            "fuzzy": "a translator has to look at these entries, which are fuzzy",
            "empty": "there is no translation to correct; what programs look up has to stay",
            "same": "these entries stay empty, as no other words were found for them",
        }
        left = (line for name, why in said.items() for line in say_left(self._left[name], why))
        return [*super().not_kept(), *left]


def _literal_text(source: str, spans: list[LiteralPlace]) -> str:
    """Return what stands in the literals of a string."""
    return "".join(source[start + 1 : end - 1] for start, end in spans)


def _tokens_of(source: str, spans: list[LiteralPlace]) -> Iterator[StringToken]:
    """Yield the tokens of a string, from behind its first quotation mark to before its last.

    A tag or the like may go on in the next literal.
    """
    ends = accumulate(end - start - 2 for start, end in spans)
    between = (source[end - 1 : start + 1] for (_, end), (start, _) in pairwise(spans))
    joins = deque(zip(ends, between, strict=False))
    at = 0
    for token in read_tokens(_literal_text(source, spans), _STRING_PART):
        yield from _divided(token, at, joins)
        at += len(token.raw)
    yield from (StringToken(raw, "join") for _, raw in joins)


def _divided(token: StringToken, at: int, joins: deque[tuple[int, str]]) -> Iterator[StringToken]:
    """Yield a token, which begins at a place, with what is between literals before and in it."""
    end = at + len(token.raw)
    while joins and joins[0][0] < end:
        place, raw = joins.popleft()
        if place > at:
            kind = "mark" if token.kind == "break" else token.kind  # its last part ends the line
            yield replace(token, raw=token.raw[: place - at], kind=kind)
            token, at = replace(token, raw=token.raw[place - at :], opens=0), place
        yield StringToken(raw, "join")
    yield token


def _wrapped_line(line: str) -> Iterator[str]:
    """Yield the literals of a line, each no longer than a line of the file is to be."""
    made, most = "", CATALOG_WIDTH - 2
    for word in re.findall(r"[^ ]*+ *+", line):
        if made and len(made) + len(word.rstrip(" ")) > most:
            yield made
            made = ""
        made += word
    if made:
        yield made


def _decoded_catalog(data: bytes, name: str) -> tuple[str, str]:
    """Return the text of a catalog, and the encoding that its header names.

    Raises:
        ValueError: If it has another one, or one that is not a text's.
    """
    found = _CHARSET.search(data.decode("latin-1"))
    encoding = found[1] if found else "utf-8"
    if encoding == "CHARSET":  # of a template
        encoding = "utf-8"
    plain = bytes(range(128))
    try:
        is_known = plain.decode(encoding) == plain.decode("ascii")
    except (LookupError, ValueError):
        is_known = False
    if not is_known:
        raise ValueError(
            f"{name} has the charset {encoding}, which is not read: convert it to UTF-8 with "
            "msgconv"
        )
    try:
        source = data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding.casefold() in ("utf-8", "utf8"):
            raise ValueError(f"{name} is {not_utf8(error)}") from error
        raise ValueError(
            f"{name} is not in {encoding}, which its header names, at offset {error.start}: "
            "write its charset there"
        ) from error
    if source.encode(encoding, "replace") != data:
        raise ValueError(
            f"{name} is in {encoding}, in which a text can be written in several ways: convert it "
            "to UTF-8 with msgconv"
        )
    return source, encoding
