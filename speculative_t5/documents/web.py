"""HTML: the words of a page, and the same page with other words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from html import escape, unescape
from html.entities import html5
from itertools import accumulate

from .attributes import (
    Attribute,
    quoted_value,
    read_attributes,
    read_value_entity,
    says_to_stay,
    spelled_value,
)
from .formats import PlainFile, say_estimated, say_refused
from .marks import MarkedLine, Part, read_line
from .splitting import Breaks, ends_as_sentence

# What is not text (comments, programs, templates, elements that are not read), and tags. What may
# have no end is bounded, or ends with the page.
_TAG = re.compile(
    r"""
    \A\ufeff
    | <!-- .*? (?:-->|\Z)
    | <\? .*? (?:\?>|\Z)
    | <!\[CDATA\[ .*? (?:\]\]>|\Z)
    | <% .{0,1000}? %>
    | \{% [^\n]{0,1000}? %\}
    | \{\# [^\n]{0,1000}? \#\}
    | <(script|style|pre|textarea|svg|math|template|iframe|object|audio|video|canvas)(?=[\s/>])
      .*? (?:</\1\s*>|\Z)
    | </?([a-z][\w-]*+) (?:"[^"]*"|'[^']*'|[^<>"'])*+ >
    | <[!?][^<>]*>
    """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
_INLINE = frozenset(  # that are within a sentence
    "a abbr b bdi bdo button cite code data del dfn em font i img input ins kbd label map mark q s "
    "samp small span strike strong sub sup time tt u var wbr".split()
)
_OPAQUE_INLINE = frozenset(("svg", "math", "canvas", "audio", "video", "iframe", "object"))
_WITHIN = ("{", "<!--", "<?", "<%")  # what begins so is within a sentence, too
_EMPTY = frozenset("area base br col embed hr img input link meta source track wbr".split())
_FIXED = frozenset(("code", "kbd", "samp", "var", "tt"))  # whose words are to stay
_OF_THEIR_OWN = frozenset(("button",))  # within a sentence, and no part of it
# Elements that the next one of a group ends.
_ENDED_BY_NEXT = {name: name for name in ("p", "li", "tr", "option")} | {
    "dt": "d",
    "dd": "d",
    "td": "cell",
    "th": "cell",
}
_ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]{0,40});?")
_LONG_NUMBER = re.compile(r"&#([0-9]{9,}+)")  # of a character
# What a template puts words in place of, and formulas of programs for mathematics.
_FILLED_LATER = re.compile(
    r"\{\{[^{}\n]{0,1000}\}\}|\\\(.{1,1000}?\\\)|\\\[.{1,1000}?\\\]|\$\$[^$]{1,1000}\$\$", re.DOTALL
)
# Parts of the value of an attribute that a template makes, and signs of one that has no end there.
_PROGRAM = re.compile(
    r"""
    \{\{ [^{}\n]{0,1000} \}\} | \{% [^\n]{0,1000}? %\} | \{\# [^\n]{0,1000}? \#\}
    | <\? .{0,1000}? \?> | <% .{0,1000}? %>
    """,
    re.DOTALL | re.VERBOSE,
)
_CUT_PROGRAM = re.compile(r"\{[{%#]|[}%#]\}|<[?%]|[?%]>")
_FIRST_TAG = re.compile(r"""<[a-z]++(?:"[^"]*"|'[^']*'|[^<>"'])*+>""", re.IGNORECASE)
_WITHOUT_ATTRIBUTES = frozenset(("script", "style", "pre", "template", "math"))
_NEW_LINE = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class _Open:
    """An element that has not ended."""

    name: str
    is_fixed: bool  # whether its words have to stay
    is_read: bool  # whether they are read at all


class _Elements:
    """The elements around a place of a page."""

    def __init__(self) -> None:
        self._open = [_Open("", False, True)]
        self._names: Counter[str] = Counter()
        self.depth = 0  # of marks
        self.has_read_attributes = False  # whether those of the last tag are read

    @property
    def part(self) -> Part:
        """What there is to know of a text here."""
        return Part(self.depth, self._open[-1].is_fixed)

    @property
    def is_read(self) -> bool:
        """Whether words here are read."""
        return self._open[-1].is_read

    def take(self, name: str, tag: str) -> None:
        """Take the next tag."""
        if tag.startswith("</"):
            self.has_read_attributes = False
            if self._names[name]:
                while self._pop() != name:
                    pass
            return
        group = _ENDED_BY_NEXT.get(name)
        if group and _ENDED_BY_NEXT.get(self._open[-1].name) == group:
            self._pop()
        last = self._open[-1]
        stays = says_to_stay(tag)
        is_fixed = name in _FIXED or last.is_fixed if stays is None else stays
        # A paragraph that is to stay is not read; words within a sentence are, for the others.
        is_as_around = stays is None or (stays and name in _INLINE)
        is_read = last.is_read if is_as_around else not stays
        self.has_read_attributes = is_read and not is_fixed
        if name in _EMPTY or tag.endswith("/>"):
            return
        self._open.append(_Open(name, is_fixed, is_read))
        self._names[name] += 1
        self.depth += name in _INLINE

    def _pop(self) -> str:
        name = self._open.pop().name
        self._names[name] -= 1
        self.depth -= name in _INLINE
        return name


class WebPage(PlainFile):
    """HTML: all but words stays as it is, bytes of words that do not change included.

    Words are read across tags of bold words and the like, pictures and other things that are no
    text. Those of code, and where the page says translate="no", stay. With `attributes`, values of
    attributes that people read (alt, title, placeholder and the like) are read as well, each by
    itself.
    """

    breaks: Breaks = "none"

    def __init__(self, data: bytes, name: str, *, attributes: bool = False) -> None:
        super().__init__(data, name)
        self._page, self._has_attributes = self.text, attributes
        self._quotes: dict[int, str] = {}  # around parts that are values of attributes
        self._parts: list[str] = []  # texts and tags in turn
        self._known: list[Part] = []  # of each
        self._stretches: list[list[int]] = []  # of texts that are read as one
        self._behind_breaks = set[int]()  # places of those that begin behind a line break
        self._at_items: dict[int, bool] = {}  # places where one begins, or (False) ends
        self._read_page()
        ends = accumulate((len(_NEW_LINE.findall(part)) for part in self._parts), initial=1)
        self._line_numbers = [*ends]  # the number of the line in which each part begins
        self._lines = [*self._found()]
        self._estimated: list[int] = []
        self._refused: list[int] = []
        self.text = "\n".join(text for _, text in self._lines)

    def _read_page(self) -> None:
        """Find texts and tags, and which texts are read as one."""
        elements, at = _Elements(), 0
        stretch = self._begun()
        around: list[list[int]] = []  # stretches that go on behind an element within them
        for tag in _TAG.finditer(self._page):
            self._add_text(self._page[at : tag.start()], elements, stretch)
            at = tag.end()
            name = (tag[2] or tag[1] or "").casefold()
            if tag[1] or not name:
                self._add_opaque(name, tag[0], elements)
                is_within = name in _OPAQUE_INLINE or tag[0].startswith(_WITHIN)
                stretch = stretch if is_within else self._begun()
                continue
            elements.take(name, tag[0])
            self._add_tag(name, tag[0], elements.has_read_attributes)
            is_end = tag[0].startswith("</")
            if name in _OF_THEIR_OWN:
                if not is_end:
                    around.append(stretch)
                    stretch = self._begun()
                elif around:
                    stretch = around.pop()
            elif name not in _INLINE:
                around.clear()
                stretch = self._begun()
                if name == "br":
                    self._behind_breaks.add(len(self._stretches) - 1)
                elif name == "li":
                    self._at_items[len(self._stretches) - 1] = not is_end
        self._add_text(self._page[at:], elements, stretch)

    def _add_opaque(self, name: str, text: str, elements: _Elements) -> None:
        """Add what is not read; the attributes of its first tag may be."""
        first = _FIRST_TAG.match(text) if self._has_attributes and name else None
        if first is None or name in _WITHOUT_ATTRIBUTES:
            self._add_fixed(text)
            return
        said = says_to_stay(first[0])
        is_read = elements.is_read and not elements.part.is_fixed if said is None else not said
        self._add_tag(name, first[0], is_read)
        self._add_fixed(text[first.end() :])

    def _add_tag(self, name: str, tag: str, is_read: bool) -> None:
        """Add a tag, whose attributes are texts of their own if they are read."""
        at = 0
        for each in read_attributes(name, tag) if self._has_attributes and is_read else ():
            if not _CUT_PROGRAM.search(_PROGRAM.sub("", each.value)):
                self._add_fixed(tag[at : each.start])
                self._add_value(each)
                at = each.end
        self._add_fixed(tag[at:])

    def _add_value(self, found: Attribute) -> None:
        stretch, at = self._begun(), 0
        for program in _PROGRAM.finditer(found.value):
            self._add_part(found.value[at : program.start()], Part(), stretch, found.quote)
            if program[0].startswith("{{"):
                self._add_part(program[0], Part(0, True), stretch, found.quote)
            else:
                self._add_fixed(program[0])
            at = program.end()
        self._add_part(found.value[at:], Part(), stretch, found.quote)

    def _add_part(self, text: str, known: Part, stretch: list[int], quote: str) -> None:
        self._quotes[len(self._parts)] = quote
        stretch.append(len(self._parts))
        self._parts.append(text)
        self._known.append(known)

    def _add_fixed(self, text: str) -> None:
        self._parts.append(text)
        self._known.append(Part())

    def _begun(self) -> list[int]:
        self._stretches.append([])
        return self._stretches[-1]

    def _add_text(self, text: str, elements: _Elements, stretch: list[int]) -> None:
        """Add a text, and what a template puts words in place of within it as texts that stay."""
        at, known = 0, elements.part
        for found in _FILLED_LATER.finditer(text):
            self._add(text[at : found.start()], known, elements, stretch)
            self._add(found[0], Part(known.depth, True), elements, stretch)
            at = found.end()
        self._add(text[at:], known, elements, stretch)

    def _add(self, text: str, known: Part, elements: _Elements, stretch: list[int]) -> None:
        if elements.is_read:
            stretch.append(len(self._parts))
        self._parts.append(text)
        self._known.append(known)

    def _found(self) -> Iterator[tuple[list[int], str]]:
        """Yield the texts that are read as one line, and how that reads; note breaks and items."""
        number, inner, above, above_text = 0, set[int](), -1, ""
        items, begins_item = set[int](), False
        for place, stretch in enumerate(self._stretches):
            begins_item = self._at_items.get(place, begins_item)
            if all(self._known[i].is_fixed or not self._parts[i].strip() for i in stretch):
                continue
            read = self._reader_of(stretch)
            pairs = (pair for i in stretch for pair in read(self._parts[i]))
            if text := " ".join("".join(found for _, found in pairs).split()):
                is_next = place in self._behind_breaks and above == place - 1
                if is_next and not ends_as_sentence(above_text):
                    inner.add(number)
                number, above, above_text = number + 1, place, text
                items |= {number} if begins_item else set()
                begins_item = False
                yield stretch, text
        self.inner_breaks, self.items = inner, items

    def _line(self, stretch: list[int]) -> MarkedLine:
        """Return a line with its characters, which only one that changes has to have."""
        texts = [self._parts[i] for i in stretch]
        read = self._reader_of(stretch)
        return MarkedLine([*read_line(texts, read)], [self._known[i] for i in stretch])

    def _reader_of(self, stretch: list[int]) -> Callable[[str], Iterator[tuple[str, str]]]:
        return _read_value if stretch and stretch[0] in self._quotes else _read_text

    def _spelling_of(self, stretch: list[int]) -> Callable[[str], str]:
        quote = self._quotes.get(stretch[0])
        return _spelled if quote is None else partial(spelled_value, quote=quote)

    def number(self, line: int) -> int:
        return self._line_numbers[self._lines[line - 1][0][0]]

    def rewritten(self, text: str) -> bytes:
        made = [*self._parts]
        pairs = zip(self._lines, text.split("\n"), strict=False)
        for number, ((stretch, old), new) in enumerate(pairs, 1):
            if new == old:
                continue
            changed = self._line(stretch).changed(new, self._spelling_of(stretch))
            for i, part in zip(stretch, changed.parts, strict=True):
                made[i] = quoted_value(part) if self._quotes.get(i) == "" else part
            if changed.is_estimate:
                self._estimated.append(self.number(number))
            if changed.has_refused:
                self._refused.append(self.number(number))
        return "".join(made).encode()

    def not_kept(self) -> list[str]:
        return [
            *say_estimated("line", self._estimated, "tags within it"),
            *say_refused("line", self._refused, "code, or of what is not to be translated"),
        ]


def _read_text(text: str) -> Iterator[tuple[str, str]]:
    """Yield how each character is written, and as what it is read: some stand for two, or none."""
    return _read_characters(text, lambda entity, _: _unescaped(entity))


def _read_value(text: str) -> Iterator[tuple[str, str]]:
    """Yield how each character of the value of an attribute is written, and as what it is read."""
    return _read_characters(text, lambda each, behind: read_value_entity(_short(each), behind))


def _read_characters(
    text: str, read_entity: Callable[[str, str], str]
) -> Iterator[tuple[str, str]]:
    at = 0
    for entity in _ENTITY.finditer(text):
        yield from ((each, each) for each in text[at : entity.start()])
        read = read_entity(entity[0], text[entity.end() : entity.end() + 1])
        if read == entity[0]:
            yield from ((each, each) for each in read)
        else:
            behind = _letters_behind(entity[0], read)
            yield entity[0][: len(entity[0]) - behind], read[: len(read) - behind]
            yield from ((each, each) for each in read[len(read) - behind :])
        at = entity.end()
    yield from ((each, each) for each in text[at:])


def _letters_behind(entity: str, read: str) -> int:
    """Return how many letters behind a name without a semicolon are none of the name."""
    if entity.startswith("&#") or entity.endswith(";"):
        return 0
    return next(i for i in range(len(entity)) if entity[1 : len(entity) - i] in html5)


def _unescaped(text: str) -> str:
    """Return a text with characters for their names and numbers."""
    return unescape(_short(text))


def _short(text: str) -> str:
    """Shorten the numbers of characters.

    Python makes no integers of some thousand digits, and larger numbers are no character anyway.
    """
    return _LONG_NUMBER.sub(lambda found: f"&#{found[1].lstrip('0')[:9] or 0}", text)


def _spelled(text: str) -> str:
    return escape(text, quote=False)
