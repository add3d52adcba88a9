"""Variations of documents that came out wrong once; see the files in tests/variations."""

import io
import re
import tomllib
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from speculative_t5.documents import Document, RewriteOptions, read_file

import pytest
from docx import Document as NewWord
from docx.oxml import parse_xml
from pieces import Scripted
from random_word import NAMESPACES

FOLDER = Path(__file__).parent / "variations"
TAG = re.compile(r"<[^<>]*>|\|")
EDIT = re.compile("⟨([^→⟩]*)→([^⟩]*)⟩")


def model_of(variation: str, *, translates: bool) -> Any:
    """Return a decoder that makes the edits of a variation wherever it reads their words."""
    edits, patterns = dict[str, str](), dict[str, str]()
    for found in EDIT.finditer(TAG.sub("", variation)):
        old, new = map(unescape, found.groups())
        # Half a word is found within one.
        before, behind = found.string[: found.start()][-1:], found.string[found.end() :][:1]
        is_first = old[:1].isalnum() and not before.isalnum()
        is_last = old[-1:].isalnum() and not behind.isalnum()
        edits[old] = new
        patterns[old] = r"(?<!\w)" * is_first + re.escape(old) + r"(?!\w)" * is_last
    pattern = re.compile("|".join(patterns[old] for old in sorted(patterns, key=len, reverse=True)))
    return Scripted(
        lambda text: pattern.sub(lambda found: edits[found[0]], text),
        limit=10**6,
        languages=("en", "de") if translates else None,
    )


def rewritten(data: bytes, name: str, decoder: Any) -> bytes:
    form = read_file(data, name)
    document = Document(decoder, form.text, RewriteOptions(guard=False), form.lines)
    return form.rewritten(document.result(document.rewrite()).text)


def variations(kind: str) -> Iterator[Any]:
    for table, found in tomllib.loads((FOLDER / f"{kind}.toml").read_text("utf-8")).items():
        for name, variation in found.items():
            yield pytest.param(table, variation, id=f"{table}: {name}")


def check_variation(table: str, variation: str, name: str) -> None:
    decoder = model_of(variation, translates=table == "translated")
    found = rewritten(EDIT.sub(r"\1", variation).encode(), name, decoder)
    assert found.decode() == EDIT.sub(r"\2", variation)


@pytest.mark.parametrize(("table", "variation"), [*variations("html")])
def test_pages(table: str, variation: str) -> None:
    check_variation(table, variation, "a.html")


@pytest.mark.parametrize(("table", "variation"), [*variations("markdown")])
def test_markdown(table: str, variation: str) -> None:
    check_variation(table, variation, "a.md")


@pytest.mark.parametrize(("table", "variation"), [*variations("subtitles")])
def test_subtitles(table: str, variation: str) -> None:
    is_webvtt = variation.startswith(("WEBVTT", "\ufeffWEBVTT"))
    sign, name = (".", "a.vtt") if is_webvtt else (",", "a.srt")
    time = rf"00:00:0\1{sign}000 --> 00:00:0\1{sign}900"
    shown = re.sub(r"@(\d)", time, variation)
    if table == "refused":
        with pytest.raises(ValueError, match="no cues found in a.*: write each as its time"):
            read_file(shown.encode(), name)
    else:
        check_variation(table, shown, name)


@pytest.mark.parametrize(
    "shown",
    [
        "so then we ⟨iz→are⟩ at home",
        "<i>so</i> then we\n⟨iz→are⟩ at <b>home</b>",
        "♪ so then we ⟨iz→are⟩ at home ♪",
        "so, then we ⟨iz→are⟩ 5 or 6,",
        "So then We ⟨iz→are⟩ at Home",
    ],
)
def test_captions_without_full_stops_are_read_cue_by_cue(shown: str) -> None:
    cues = [f"{n}\n00:00:{n:02},000 --> 00:00:{n:02},900\n{shown}\n" for n in range(57)]
    variation = "\n".join(cues)
    decoder = model_of(variation, translates=False)
    decoder.limit = 60
    made = rewritten(EDIT.sub(r"\1", variation).encode(), "a.srt", decoder)
    assert made.decode() == EDIT.sub(r"\2", variation)
    assert max(len(text.split()) for text in decoder.read) <= 60


RUN = '<w:r><w:{0} w:id="2"/></w:r>'
MARK = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
FIELD = MARK.format("begin") + "<w:r><w:instrText>{}</w:instrText></w:r>" + MARK.format("separate")
LOOKS = {
    **{name: f"<w:{name}/>" for name in "biu"},
    "sup": '<w:vertAlign w:val="superscript"/>',
    "sub": '<w:vertAlign w:val="subscript"/>',
}
ELEMENTS = {  # by their tags, what stands for each
    "a": ('<w:hyperlink w:anchor="x">', "</w:hyperlink>"),
    "book": ('<w:bookmarkStart w:id="1" w:name="x"/>', '<w:bookmarkEnd w:id="1"/>'),
    "box": (
        "<w:r><w:pict><w:txbxContent><w:p>",
        "</w:p></w:txbxContent></w:pict></w:r>",
    ),
    "br": "<w:r><w:br/></w:r>",
    "break": '<w:r><w:br w:type="page"/></w:r>',
    "comment": ('<w:commentRangeStart w:id="0"/>', '<w:commentRangeEnd w:id="0"/>'),
    "del": ('<w:del w:id="3" w:author="a">', "</w:del>"),
    "empty": "<w:r><w:t/></w:r><w:r/>",
    "end": RUN.format("endnoteReference"),
    "field": (FIELD.format("REF x"), MARK.format("end")),
    "from": ('<w:moveFrom w:id="5" w:author="a">', "</w:moveFrom>"),
    "img": "<w:r><w:drawing/></w:r>",
    "ins": ('<w:ins w:id="4" w:author="a">', "</w:ins>"),
    "last": "<w:r><w:lastRenderedPageBreak/></w:r>",
    "linkfield": (FIELD.format('HYPERLINK "x"'), MARK.format("end")),
    "math": "<m:oMath><m:r><m:t>Lt teh</m:t></m:r></m:oMath>",
    "nb": "<w:r><w:noBreakHyphen/></w:r>",
    "note": RUN.format("footnoteReference"),
    "proof": '<w:proofErr w:type="gramStart"/>',
    "sdt": ("<w:sdt><w:sdtContent>", "</w:sdtContent></w:sdt>"),
    "shy": "<w:r><w:softHyphen/></w:r>",
    "simple": ('<w:fldSimple w:instr="DATE">', "</w:fldSimple>"),
    "tab": "<w:r><w:tab/></w:r>",
    "to": ('<w:moveTo w:id="6" w:author="a">', "</w:moveTo>"),
}


def xml_of(paragraph: str) -> str:
    """Return what is in a paragraph of Word that is written as in word.toml."""
    made, looks, kind = [], list[str](), "t"
    for text, end, name, is_empty in re.findall(r"([^<|]+)|\||<(/?)(\w+)(/?)>", paragraph):
        if text:
            own = "".join(LOOKS[look] for look in looks)
            own = f"<w:rPr>{own}</w:rPr>" * bool(looks)
            made.append(f'<w:r>{own}<w:{kind} xml:space="preserve">{text}</w:{kind}></w:r>')
        elif name in LOOKS and end:
            looks.remove(name)
        elif name in LOOKS:
            looks.append(name)
        elif name:
            kind = "delText" if name == "del" and not end else "t"
            found = ELEMENTS[name]
            start, close = (found, "") if isinstance(found, str) else found
            made.append(close if end else start + close * bool(is_empty))
    return "".join(made)


def word(text: str) -> bytes:
    """Return a document of Word whose paragraphs are written as in word.toml."""
    document = NewWord()
    for line in text.split("\n"):
        kind, sign, words = line.partition(": ")
        if not sign or kind not in ("cell", "header", "footer"):
            looks = {"# ": "Heading 1", "* ": "List Bullet"}.get(line[:2])
            places, words = [document.add_paragraph(style=looks)], line[2:] if looks else line
        elif kind == "cell":
            cell = document.add_table(1, 1).cell(0, 0)
            places = [cell.paragraphs[0], *(cell.add_paragraph() for _ in words.split(r"\n")[1:])]
        else:
            places = [getattr(document.sections[0], kind).paragraphs[0]]
        for place, each in zip(places, words.split(r"\n"), strict=True):
            for element in parse_xml(f"<w:p {NAMESPACES}>{xml_of(each)}</w:p>"):
                place._p.append(element)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def parts_of(data: bytes) -> dict[str, list[str]]:
    """Return the XML of the parts of a document, by tags."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        parts = {name: package.read(name).decode() for name in package.namelist() if "xml" in name}
    return {name: re.split("(?=<)", text) for name, text in parts.items()}


@pytest.mark.parametrize(("table", "variation"), [*variations("word")])
def test_word(table: str, variation: str) -> None:
    decoder = model_of(variation, translates=table == "translated")
    found = rewritten(word(EDIT.sub(r"\1", variation)), "a.docx", decoder)
    wanted = read_file(word(EDIT.sub(r"\2", variation)), "a.docx")
    assert parts_of(found) == parts_of(wanted.rewritten(wanted.text))
