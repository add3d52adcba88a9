r"""Texts of apps: Android's string resources (strings.xml), and Apple's .strings.

Both have a file for each language, so a translation replaces words where they stand. Android writes
\' and \u00e9 in XML, Apple \" and \U00e9 between quotation marks.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import accumulate, groupby, pairwise
from xml.parsers import expat
from xml.sax.saxutils import escape

from ..errors import decoded, shown
from .placeholders import PLACEHOLDER_PATTERN, TAG_PATTERN
from .spliced import (
    LONGEST_WHOLE,
    FileString,
    Spelling,
    Splice,
    SplicedFile,
    StringToken,
    opens,
    placed_lines,
    read_tokens,
    say_left,
)

# --- Android

_ANDROID_PART = re.compile(
    rf"""
    (?P<tag> &lt;/?[A-Za-z](?:[^<>&]|&(?!gt;|lt;))*+&gt; | {TAG_PATTERN} )
    | (?P<fixed> {PLACEHOLDER_PATTERN} )
    | (?P<break> \\n )
    | (?P<mark> " | \\(?=\r?\n) )
    | \\u[0-9a-fA-F]{{4}} | \\[^\r\n]
    """,
    re.VERBOSE,
)
_ANDROID_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\(.)|&\#?\w{1,32};")
_REFERENCE = re.compile(r"\s*+[@?](?:[\w.]+:)?[a-z]+/\w")  # to another resource
_DECLARED = re.compile(r"""<\?xml[^>]{0,200}?encoding\s{0,9}=\s{0,9}["']([\w.-]{1,40})""")
_XML_ATTRIBUTE = re.compile(
    r"""(?<![\w:.-])([\w:.-]++)\s{0,99}=\s{0,99}(?:"([^"]*+)"|'([^']*+)')"""
)
_ELEMENT = re.compile(r"</?([^\s/>]+)")
_GROUPS = ("plurals", "string-array")


def _read_android(raw: str) -> Iterator[tuple[str, str]]:
    """Yield how each character of a resource is written, and as what it is read."""
    at = 0
    for found in _ANDROID_ESCAPE.finditer(raw):
        yield from ((each, each) for each in raw[at : found.start()])
        yield found[0], _android_read(found)
        at = found.end()
    yield from ((each, each) for each in raw[at:])


def _android_read(found: re.Match[str]) -> str:
    if found[1]:
        read = chr(int(found[1], 16))
        return "" if "\ud800" <= read <= "\udfff" else read
    if found[2]:
        return {"n": " ", "t": "\t"}.get(found[2], found[2])
    return unescape(found[0])


def _write_android(text: str) -> str:
    made = escape(text.replace("\\", "\\\\"))
    return made.replace("'", "\\'").replace('"', '\\"')


@dataclass
class _Element:
    """An element that has not ended."""

    name: str
    is_read: bool  # whether it is a string, or may have some
    stays: bool = False  # whether it says that it is not to be translated


@dataclass
class _Resource:
    """A string of a file of resources, in tokens of XML."""

    start: int
    depth: int  # how many elements are around it
    tokens: list[StringToken] = field(default_factory=list)
    has_cdata: bool = False  # whether its text stands in CDATA just now
    whole: list[str] = field(default_factory=list)  # of what is to stay as a whole
    whole_depth: int = 0


class AndroidStrings(SplicedFile):
    """String resources of Android: `string`, and the items of `plurals` and `string-array`.

    Comments, names, attributes, what has translatable="false" and all other resources stay. Tags
    stay on their words, and what is in <xliff:g> stays as a whole.
    """

    spelling = Spelling(_read_android, _write_android)

    def __init__(self, data: bytes, name: str) -> None:
        self._name = name
        declared = _DECLARED.search(data[:300].decode("latin-1"))
        if declared and declared[1].lower() not in ("utf-8", "us-ascii"):
            raise ValueError(f"{name} is in {declared[1]}, which is not read: convert it to UTF-8")
        source = decoded(data, name)
        self._tokens = [*_xml_tokens(data, name)]
        self._begin(source)

    def _found(self) -> Iterator[FileString]:
        self._stack: list[_Element] = []
        self._resource: _Resource | None = None
        starts = accumulate((len(token) for token in self._tokens), initial=0)
        for token, start in zip(self._tokens, starts, strict=False):
            ended = self._take(token, start)
            if ended is not None:
                tokens = [*_parted_texts(ended.tokens)]
                raw = "".join(each.raw for each in tokens)
                if not _REFERENCE.match(raw) and not self._has_choices(raw, ended.start):
                    yield FileString(tokens, ended.start, self.spelling)

    def _edits(self, made: Mapping[int, str]) -> Iterator[Splice]:
        for start, end, raw in super()._edits(made):
            words = raw.lstrip()
            if words[:1] in ("@", "?"):  # else it would be a reference to another resource
                raw = f"{raw[: len(raw) - len(words)]}\\{words}"
            yield start, end, raw

    def _take(self, token: str, start: int) -> _Resource | None:
        """Take the next token of the file, and return the string that ends with it."""
        resource = self._resource
        is_text = resource is not None and resource.has_cdata and token != "]]>"
        is_tag = token.startswith("<") and token[1:2] not in ("!", "?") and not is_text
        if is_tag and token.startswith("</"):
            self._stack.pop()
            if resource and len(self._stack) < resource.depth:
                self._resource = None
                return resource
        elif is_tag and not token.endswith("/>"):
            self._stack.append(self._element(token))
        if resource:
            self._add(resource, token, is_tag=is_tag, is_text=is_text)
        elif is_tag and self._stack and self._stack[-1].is_read and self._is_string(token):
            self._resource = _Resource(start + len(token), len(self._stack))
        return None

    def _is_string(self, token: str) -> bool:
        is_string = not token.startswith("</") and not token.endswith("/>")
        return is_string and self._stack[-1].name in ("string", "item")

    def _element(self, token: str) -> _Element:
        """Return an element by its tag."""
        name = _element_name(token)
        attributes = {each[1]: each[2] or each[3] for each in _XML_ATTRIBUTE.finditer(token)}
        above = self._stack[-1] if self._stack else None
        if above is None:
            if name != "resources":
                raise ValueError(
                    f"{self._name} has the element {shown(name)} around all, expected 'resources' "
                    "of string resources of Android"
                )
            return _Element(name, is_read=True)
        stays = above.stays or attributes.get("translatable") == "false"
        is_top = above.name == "resources" and len(self._stack) == 1
        is_string = is_top and (name == "string" or attributes.get("type") == "string")
        is_item = name == "item" and above.name in _GROUPS
        is_read = above.is_read and (is_string or is_item or (is_top and name in _GROUPS))
        return _Element(name, is_read and not stays, stays)

    def _add(self, resource: _Resource, token: str, *, is_tag: bool, is_text: bool) -> None:
        """Add a token to a string."""
        if resource.whole:
            self._add_to_whole(resource, token)
        elif is_tag and _element_name(token).endswith(":g"):
            if token.endswith("/>"):
                resource.tokens.append(StringToken(token, "mark"))
            else:
                resource.whole, resource.whole_depth = [token], len(self._stack)
        elif is_tag:
            resource.tokens.append(StringToken(token, "mark", opens=opens(token)))
        elif is_text:
            resource.tokens.append(StringToken(token))
        elif token.startswith("<!"):
            resource.has_cdata = token == "<![CDATA["
            resource.tokens.append(StringToken(token, "mark"))
        elif token == "]]>" or token.startswith("<?"):
            resource.has_cdata = False
            resource.tokens.append(StringToken(token, "mark"))
        elif token.startswith("&") and token[1:2] != "#" and unescape(token) == token:
            resource.tokens.append(StringToken(token, "fixed"))  # that the file itself defines
        else:
            resource.tokens.append(StringToken(token))

    def _add_to_whole(self, resource: _Resource, token: str) -> None:
        resource.whole.append(token)
        if len(self._stack) >= resource.whole_depth:
            return
        raw = "".join(resource.whole)
        texts = (each for each in resource.whole if not each.startswith("<"))
        read = "".join(each for text in texts for _, each in _read_android(text))
        shown_as = " ".join(read.split())
        is_read = 0 < len(shown_as) <= LONGEST_WHOLE
        whole = StringToken(raw, "fixed", shown_as) if is_read else StringToken(raw, "mark")
        resource.tokens.append(whole)
        resource.whole = []


def _element_name(tag: str) -> str:
    found = _ELEMENT.match(tag)
    return found[1] if found else ""


def _parted_texts(tokens: Sequence[StringToken]) -> Iterator[StringToken]:
    """Yield tokens, with those of texts parted into what is text and what is not."""
    for is_text, some in groupby(tokens, key=lambda token: token.kind == "text"):
        if is_text:
            yield from read_tokens("".join(token.raw for token in some), _ANDROID_PART)
        else:
            yield from some


def _xml_tokens(data: bytes, name: str) -> Iterator[str]:
    """Yield the tags, texts, comments and the like of a file, which together are the file.

    The parser is expat, which refuses what is no XML.
    """
    starts: list[int] = [0]
    parser = expat.ParserCreate("utf-8")
    # With this handler and no other, the parser puts in no entities that the file defines.
    parser.DefaultHandler = lambda _: starts.append(parser.CurrentByteIndex)
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        if not data.strip():
            return
        raise ValueError(
            f"{name} is no XML at line {error.lineno}, column {error.offset + 1}, "
            f"{expat.ErrorString(error.code)}: check it with an XML parser"
        ) from error
    for start, end in pairwise([*dict.fromkeys(starts), len(data)]):
        yield data[start:end].decode()


# --- Apple

_APPLE_TOKEN = re.compile(
    r"""
    \s++
    | (?P<comment> //[^\r\n]*+ | /\*(?:[^*]|\*(?!/))*+\*/ )
    | (?P<string> "(?:[^"\\]|\\(?s:.))*+" )
    | (?P<word> '(?:[^'\\]|\\(?s:.))*+' | [\w.$:/-]++ )
    | (?P<sign> [=;] )
    """,
    re.VERBOSE,
)
_APPLE_PART = re.compile(
    rf"""
    (?P<tag> {TAG_PATTERN} )
    | (?P<fixed> {PLACEHOLDER_PATTERN} | &\#?\w+; )
    | (?P<break> (?:\\r)?\\n | \r?\n )
    | (?P<mark> \\[0-7]{{1,3}} )
    | \\[uU][0-9a-fA-F]{{4}} | \\(?s:.)
    """,
    re.VERBOSE,
)
_APPLE_ESCAPE = re.compile(
    r"\\[uU]([dD][89abAB][0-9a-fA-F]{2})\\[uU]([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\[uU]([0-9a-fA-F]{4})|\\([0-7]{1,3})|\\((?s:.))"
)
_APPLE_CODES = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def _read_apple(raw: str) -> Iterator[tuple[str, str]]:
    """Yield how each character of a string is written, and as what it is read."""
    at = 0
    for found in _APPLE_ESCAPE.finditer(raw):
        yield from ((each, each) for each in raw[at : found.start()])
        yield found[0], _apple_read(found)
        at = found.end()
    yield from ((each, each) for each in raw[at:])


def _apple_read(found: re.Match[str]) -> str:
    if found[1]:
        return bytes.fromhex(found[1] + found[2]).decode("utf-16-be")
    if found[3]:
        read = chr(int(found[3], 16))
        return "" if "\ud800" <= read <= "\udfff" else read
    if found[4]:  # a number in the encoding of NeXTSTEP
        return ""
    return {"n": "\n", "t": "\t", "r": "\r"}.get(found[5], found[5])


def _write_apple(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


class AppleStrings(SplicedFile):
    """Apple's .strings: what stands behind = is read, in UTF-8 or in UTF-16 with its mark."""

    spelling = Spelling(_read_apple, _write_apple)

    def __init__(self, data: bytes, name: str) -> None:
        self._name = name
        if data.startswith((b"bplist", b"<?xml")):
            raise ValueError(
                f"{name} is a property list, and no text of keys and values: "
                "convert it with plutil, or give the file that it was made from"
            )
        encoding = next((each for mark, each in _APPLE_CODES if data.startswith(mark)), "utf-8")
        try:
            source = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name} is not {encoding.upper()} at offset {error.start}: convert it to UTF-8"
            ) from error
        if "\0" in source:
            raise ValueError(f"{name} is UTF-16 without its mark (BOM): save it in UTF-8")
        self._begin(source, encoding)

    def _found(self) -> Iterator[FileString]:
        self._unread: list[int] = []
        source, at = self._source, 1 if self._source.startswith("\ufeff") else 0
        pair: list[re.Match[str]] = []  # a key, its sign, a value
        while at < len(source):
            found = _APPLE_TOKEN.match(source, at)
            if found is None:
                raise self._fault(at)
            at = found.end()
            if found.lastgroup in (None, "comment"):
                continue
            if not _may_follow(pair, found):
                raise self._fault(found.start())
            pair.append(found)
            if found[0] == ";":
                yield from self._value(pair)
                pair = []
        if pair:
            raise self._fault(len(source))

    def _value(self, pair: Sequence[re.Match[str]]) -> Iterator[FileString]:
        if len(pair) < 4:  # a key that is its own value
            return
        value = pair[2]
        if value.lastgroup == "word":
            self._unread.append(self._line_of(value.start()))
        elif not self._has_choices(value[0], value.start()):
            tokens = [*read_tokens(value[0][1:-1], _APPLE_PART)]
            yield FileString(tokens, value.start() + 1, self.spelling)

    def _fault(self, at: int) -> ValueError:
        line, column = placed_lines(self._source, at)
        rest = self._source[at : at + 30].split("\n")[0]
        found = shown(rest) if rest else "the end"
        return ValueError(
            f"line {line} of {self._name}, column {column}, is not as Apple has it, {found} cannot "
            "stand there: check the file with plutil -lint"
        )

    def not_kept(self) -> list[str]:
        why = "its value has no quotation marks around it"
        return [*super().not_kept(), *say_left(self._unread, why)]


def _may_follow(pair: Sequence[re.Match[str]], found: re.Match[str]) -> bool:
    """Whether a token may come next in a key, its sign and its value."""
    if len(pair) in (0, 2):
        return found.lastgroup != "sign"
    return found[0] == ";" or (len(pair) == 1 and found[0] == "=")
