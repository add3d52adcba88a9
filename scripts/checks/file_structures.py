"""What of a file is no text, as parsers find it that the package does not use."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree
from zipfile import ZipFile

READ_ATTRIBUTES = ("alt", "title", "placeholder", "aria-label", "content")
WORD_SPACE = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
STRICT_SPACE = "{http://purl.oclc.org/ooxml/wordprocessingml/main}"
XML_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


class Structure(HTMLParser):
    """The tags, comments and declarations of a page in order, and values that are not read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = [(key, None if key in READ_ATTRIBUTES else value) for key, value in attrs]
        self.texts += [value or "" for key, value in attrs if key in READ_ATTRIBUTES]
        self.found.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(f"/{tag}")

    def handle_comment(self, data: str) -> None:
        self.found.append(("comment", data))

    def handle_decl(self, decl: str) -> None:
        self.found.append(("declaration", decl))

    def handle_pi(self, data: str) -> None:
        self.found.append(("instruction", data))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# What is to stay the same, in order, and texts whose letters are, each for itself.
Found = tuple[list[object], list[str]]


def page(data: bytes) -> Found:
    """Return the tags of a page."""
    found = Structure(data.decode())
    return found.found, ["".join(found.texts)]


def word(data: bytes) -> Found:
    """Return all parts of a document of Word, without texts of runs, and its paragraphs' texts."""
    found: list[object] = []
    texts: list[str] = []
    with ZipFile(io.BytesIO(data)) as package:
        for name in sorted(package.namelist()):
            inner = package.read(name)
            if not name.endswith((".xml", ".rels")):
                found.append((name, inner))
                continue
            root = ElementTree.fromstring(inner)
            elements = [_element_of_word(each) for each in root.iter()]
            if name.endswith((".rels", "[Content_Types].xml")):
                elements.sort()  # whose order says nothing
            found.append((name, elements))
            for space in (WORD_SPACE, STRICT_SPACE):
                texts += (
                    "".join(text.text or "" for text in paragraph.iter(f"{space}t"))
                    for paragraph in root.iter(f"{space}p")
                )
    return found, texts


def _element_of_word(element: ElementTree.Element) -> tuple[str, list[Any], str]:
    attributes = sorted(each for each in element.attrib.items() if each[0] != XML_SPACE)
    is_text = element.tag in (f"{WORD_SPACE}t", f"{STRICT_SPACE}t")
    return element.tag, attributes, "" if is_text else (element.text or "").strip()


_TIME_LINE = re.compile(r"^.*\d:\d\d.*-->.*$", re.MULTILINE)
_BREAK = re.compile(r"<br/?>|\\N")
_CUE_TAG = re.compile(r"<(?!br\b)[^<>\n]*>|\{\\[^{}]*\}")  # breaks may be elsewhere


def subtitles(data: bytes) -> Found:
    """Return times and tags of subtitles, and what another parser finds of them."""
    text = "\n".join(data.decode("utf-8-sig").splitlines())
    found: list[object] = [*_TIME_LINE.findall(text), *_CUE_TAG.findall(_TIME_LINE.sub("", text))]
    return found + _events(text), [_BREAK.sub(" ", _TIME_LINE.sub("", text))]


def substation(data: bytes) -> Found:
    """Return all lines of SubStation Alpha, of dialogues without their texts, and their tags."""
    found: list[object] = []
    texts: list[str] = []
    text = data.decode("utf-8-sig")
    for line in text.splitlines():
        if line.startswith("Dialogue:"):
            *fields, said = line.split(",", 9)
            found.append((fields, re.findall(r"\{[^{}]*\}", said)))
            texts.append(re.sub(r"\{[^{}]*\}|\\[Nnh]", " ", said))
        else:
            found.append(line)
    return found + _events(text), ["".join(texts)]


def _events(text: str) -> list[object]:
    """Return times and styles as pysubs2 finds them; none if it is not installed."""
    try:
        from pysubs2 import SSAFile
    except ModuleNotFoundError:
        return []
    try:
        events = SSAFile.from_string(text).events
    except Exception as error:  # it promises none for what it does not read
        return [type(error).__name__]
    return [(each.start, each.end, each.style, each.type, each.name) for each in events]


def markdown(data: bytes) -> Found:
    """Return the tokens of a text of Markdown without words."""
    text = data.decode("utf-8-sig")
    return [*_tokens_of(text)], [text.replace("\\", "")]  # that not all new words need


def _tokens_of(text: str) -> Iterator[object]:
    from markdown_it import MarkdownIt

    def shown(tokens: Sequence[Any]) -> Iterator[object]:
        for token in tokens:
            if token.type in ("text", "softbreak"):
                continue
            values = {
                key: value for key, value in token.attrs.items() if key not in ("alt", "title")
            }
            content: object = token.content
            if token.type in ("inline", "image", "code_block"):
                content = None  # sentences that are indented as code is are read
            elif token.type in ("html_block", "html_inline"):
                content = Structure(token.content).found
            yield token.type, token.markup, token.info, token.level, values, content
            yield from shown(token.children or ())

    yield from shown(MarkdownIt("commonmark").enable("table").parse(text))


def notebook(data: bytes) -> Found:
    """Return a notebook without cells of Markdown, and their tokens."""
    found = json.loads(data)
    texts: list[str] = []
    tokens: list[object] = []
    for cell in found["cells"]:
        if cell["cell_type"] == "markdown":
            source = cell.pop("source")
            text = "".join(source)
            tokens += [len(source) if isinstance(source, list) else None, *_tokens_of(text)]
            texts.append(text)
    return [found, *tokens], texts


_MSGSTR = re.compile(r'(?m)^[ \t]*(msgstr[^"\n]*)"(?:[^"\\]|\\.)*"(?:\s*^[ \t]*"(?:[^"\\]|\\.)*")*')


def catalog(data: bytes) -> Found:
    """Return all of a catalog but what `msgstr` says, and whether a machine has said it."""
    text = _MSGSTR.sub(r"\1", data.decode("latin-1"))
    return [line for line in text.splitlines() if line not in ("", "#, fuzzy")], []


def plain(data: bytes) -> Found:
    """Return how many lines a text has, and its letters by lines."""
    text = data.decode()
    return [text.count("\n")], [text]


PARSERS: dict[str, Callable[[bytes], Found]] = {
    "txt": plain,
    "md": markdown,
    "srt": subtitles,
    "vtt": subtitles,
    "lrc": subtitles,
    "ass": substation,
    "html": page,
    "docx": word,
    "po": catalog,
    "ipynb": notebook,
}
