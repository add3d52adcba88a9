"""Documents of Word that are broken: one line each, and the rest of a folder is done."""

import io
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from speculative_t5.documents import read_file, word_package

import pytest
from commands import Call
from conftest import REPOSITORY
from docx import Document as Word
from messages import check_message

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
WRONG, RIGHT = "She have a apple.", "She has an apple."
BODY, RELATIONS, TYPES = "word/document.xml", "word/_rels/document.xml.rels", "[Content_Types].xml"
ENTITIES = b"?>\n<!DOCTYPE x [<!ENTITY a 'a'><!ENTITY b SYSTEM 'file:///etc/passwd'>]>"


def whole() -> bytes:
    document = Word()
    document.add_paragraph(WRONG)
    document.sections[0].header.paragraphs[0].text = WRONG
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


WHOLE = whole()
Parts = dict[str, bytes]


def packed(change: Callable[[Parts], object]) -> bytes:
    """Return a package whose parts were changed."""
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as package:
        parts = {name: package.read(name) for name in package.namelist()}
    change(parts)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as package:
        for name, data in parts.items():
            package.writestr(name, data)
    return file.getvalue()


def replaced(name: str, *pair: bytes) -> bytes:
    return packed(lambda parts: parts.update({name: parts[name].replace(*pair, 1)}))


def as_strict(parts: Parts) -> None:
    names = b"http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    strict = b"http://purl.oclc.org/ooxml/officeDocument/relationships/officeDocument"
    parts["_rels/.rels"] = parts["_rels/.rels"].replace(names, strict)


def with_flag(offset: int, value: int) -> bytes:
    """Return the package with a byte in what its directory says of each part."""
    data, at = bytearray(WHOLE), 0
    while (at := data.find(b"PK\x01\x02", at)) >= 0:
        data[at + offset] = value
        at += 4
    return bytes(data)


def without_body(parts: Parts) -> None:
    parts[BODY] = parts[BODY].replace(b"w:body", b"w:other")


DEEP = b"<w:p>" * 5000 + b"</w:p>" * 5000
BROKEN = {
    "not a zip": (b"PK\x03\x04 and more", "is not a document of Word"),
    "a blank": (b" ", "is not a document of Word"),
    "half of it": (WHOLE[: len(WHOLE) // 2], "is not a document of Word"),
    "another package": (packed(lambda parts: parts.clear()), "is no whole document of Word"),
    "bad XML": (replaced(BODY, b"<w:body>", b"<w:body><"), "is no whole document of Word"),
    "no XML": (packed(lambda parts: parts.update({BODY: b"text"})), "is no whole document of Word"),
    "other XML": (packed(lambda parts: parts.update({BODY: b"<a/>"})), "is no whole document"),
    "no body": (packed(without_body), "is no whole document of Word (no body)"),
    "deep XML": (replaced(BODY, b"<w:body>", b"<w:body>" + DEEP), "Excessive depth in document"),
    "entities": (replaced(BODY, b"?>", ENTITIES), "declares a document type"),
    "an unknown entity": (replaced(BODY, b"She", b"&she;"), "Entity 'she' not defined"),
    "bad relations": (replaced(RELATIONS, b"<Rel", b"<<Rel"), "is no whole document of Word"),
    "no relations": (packed(lambda parts: parts.pop("_rels/.rels")), "is no whole document"),
    "a relation to nothing": (replaced(RELATIONS, b"styles.xml", b"gone.xml"), "gone.xml"),
    "bad types": (replaced(TYPES, b"<Types", b"<Type"), "is no whole document of Word"),
    "other types": (replaced(TYPES, b"document.main", b"x"), "is no whole document of Word"),
    "strict Open XML": (packed(as_strict), "is in the strict form of Open XML"),
    "no types": (packed(lambda parts: parts.pop(TYPES)), "is no whole document of Word"),
    "encrypted": (
        word_package.OLE_MAGIC + b"\0" * 600,
        "has a password, or is of Word before 2007",
    ),
    "encrypted parts": (with_flag(8, 1), "has a password"),
    "an unknown compression": (with_flag(10, 99), "is no whole document of Word"),
    "other bytes": (WHOLE.replace(WHOLE[60:70], b"0123456789"), "is no whole document of Word"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_document_of_word_is_one_line(kind: str) -> None:
    data, found = BROKEN[kind]
    with pytest.raises(ValueError) as raised:
        read_file(data, "a.docx")
    check_message(str(raised.value), "a.docx")
    assert found in str(raised.value)


def test_too_much_text_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    large = packed(lambda parts: parts.update({BODY: b" " * (word_package.MAX_XML_BYTES + 1)}))
    with pytest.raises(ValueError, match="unpacks to 101 MB of text, and at most 100 are read"):
        read_file(large, "a.docx")
    monkeypatch.setattr(word_package, "MAX_PACKAGE_BYTES", 10**6)
    picture = packed(lambda parts: parts.update({"word/media/a.png": bytes(10**6)}))
    with pytest.raises(ValueError, match=r"unpacks to \d MB of all, and at most 1 are read"):
        read_file(picture, "a.docx")


def spoiled(chance: random.Random) -> bytes:
    """Return a document with a fault somewhere."""
    name = chance.choice([BODY, RELATIONS, TYPES, "_rels/.rels", "word/styles.xml"])

    def change(parts: Parts) -> None:
        data, kind = bytearray(parts[name]), chance.randrange(4)
        at = chance.randrange(len(data))
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] = chance.choice(b'<>&"=/a\0\xff')
        elif kind == 2:
            data[at:at] = chance.choice([b"<x>", b"<!-- -->", b"&a;", b"<w:t>a</w:t>"])
        else:
            values = re.findall(rb'"([^"]*)"', data)
            data = data.replace(chance.choice(values), chance.choice([b"", b"..", *values[:3]]))
        parts[name] = bytes(data)

    if chance.random() < 0.7:
        return packed(change)
    data = bytearray(WHOLE)
    for _ in range(chance.randint(1, 9)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("seed", range(40))
def test_a_fault_anywhere_is_one_line_or_none(seed: int) -> None:
    data = spoiled(random.Random(seed))
    try:
        form = read_file(data, "a.docx")
        form.rewritten(form.text.replace("have", "has"))
        form.not_kept()
    except ValueError as error:
        check_message(str(error), "a.docx")


def test_comments_within_a_text_lose_nothing() -> None:
    """They stand between its parts, which stay; what is around them is read."""
    text = b"</w:t></w:r><w:r><w:t>One <!-- x -->two</w:t></w:r><!-- y --><w:r><w:t>He go."
    form = read_file(replaced(BODY, b"She have a apple.", b"She have." + text), "a.docx")
    assert form.text.split("\n")[:2] == ["She have.", "He go."]
    done = form.rewritten(form.text.replace("go", "goes"))
    with zipfile.ZipFile(io.BytesIO(done)) as package:
        body = package.read(BODY).decode()
    assert "One <!-- x -->two" in body and "He goes." in body


def with_notes(parts: Parts) -> None:
    for kind in ("footnote", "endnote"):
        name = f"word/{kind}s.xml"
        of = "http://schemas.openxmlformats.org"
        parts[name] = (
            f'<w:{kind}s xmlns:w="{of}/wordprocessingml/2006/main"><w:{kind} w:id="2"><w:p><w:r>'
            f"<w:t>He have a {kind}.</w:t></w:r></w:p></w:{kind}></w:{kind}s>"
        ).encode()
        kinds = f'<Override PartName="/{name}" ContentType="application/x.{kind}s+xml"/></Types>'
        parts[TYPES] = parts[TYPES].replace(b"</Types>", kinds.encode())
        relation = (
            f'<Relationship Id="x{kind}" Target="{kind}s.xml" '
            f'Type="{of}/officeDocument/2006/relationships/{kind}s"/></Relationships>'
        )
        parts[RELATIONS] = parts[RELATIONS].replace(b"</Relationships>", relation.encode())


def test_notes_are_corrected_and_others_keep_their_bytes() -> None:
    data = packed(with_notes)
    form = read_file(data, "a.docx")
    done = form.rewritten(form.text.replace("have a footnote", "has a footnote"))
    assert not form.not_kept()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as before,
        zipfile.ZipFile(io.BytesIO(done)) as package,
    ):
        assert b"He has a footnote." in package.read("word/footnotes.xml")
        name = "word/endnotes.xml"
        assert package.read(name) == before.read(name) and b"He have" in before.read(name)


def with_others(parts: Parts) -> None:
    parts |= {
        "custom/": b"",
        "custom/a.bin": b"nobody refers to it",
        "custom/b.xml": b"<b> <c/> </b>",
    }
    parts[RELATIONS] = parts[RELATIONS].replace(b"><", b">\n  <")


def test_what_has_no_words_that_change_keeps_its_bytes() -> None:
    """Also what python-docx does not know, or would write in another way."""
    data = packed(with_others)
    form = read_file(data, "a.docx")
    assert form.rewritten(form.text) == data
    done = read_file(data, "a.docx").rewritten(form.text.replace(WRONG, RIGHT, 1))
    with (
        zipfile.ZipFile(io.BytesIO(data)) as before,
        zipfile.ZipFile(io.BytesIO(done)) as package,
    ):
        assert package.namelist() == before.namelist()
        others = [name for name in package.namelist() if package.read(name) != before.read(name)]
    assert others == [BODY] and Word(io.BytesIO(done)).paragraphs[0].text == RIGHT


def with_chart(parts: Parts) -> None:
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/chart"
    chart = f'<Relationship Id="xc" Target="chart.xml" Type="{kind}"/></Relationships>'
    parts[RELATIONS] = parts[RELATIONS].replace(b"</Relationships>", chart.encode())
    parts["word/chart.xml"] = b"<c/>"


def test_charts_are_said_to_stay() -> None:
    assert read_file(packed(with_chart), "a.docx").not_kept() == ["charts stay as they were"]


def parts_of(data: bytes) -> Parts:
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        return {name: package.read(name) for name in package.namelist()}


def with_paragraphs(paragraphs: str) -> bytes:
    def change(parts: Parts) -> None:
        parts[BODY] = re.sub(b"<w:p>.*</w:p>", paragraphs.encode(), parts[BODY], flags=re.DOTALL)

    return packed(change)


def test_a_part_of_which_nothing_changes_keeps_its_bytes() -> None:
    """So does what no part refers to, and the white space between elements of one that changes."""

    def change(parts: Parts) -> None:
        parts["other/a.bin"] = b"a"
        parts["word/styles.xml"] = parts["word/styles.xml"].replace(b"><", b">\n  <")
        parts[BODY] = parts[BODY].replace(b"><", b">\n  <")

    data = packed(change)
    form = read_file(data, "a.docx")
    assert form.rewritten(form.text) == data
    done = parts_of(form.rewritten(form.text.replace(WRONG, RIGHT, 1)))
    before = parts_of(data)
    assert [*done] == [*before]
    assert done.pop(BODY) == re.sub(
        b"<w:t>" + WRONG.encode(),
        b'<w:t xml:space="preserve">' + RIGHT.encode(),
        before.pop(BODY),
    )
    assert done == before


def test_places_are_those_of_their_part() -> None:
    form = read_file(packed(with_notes), "a.docx")
    assert form.text.split("\n") == [WRONG, WRONG, "He have a footnote.", "He have a endnote."]
    assert [form.place(line) for line in (1, 2, 3, 4)] == [
        "paragraph 1",
        "paragraph 1 of the header",
        "paragraph 1 of the footnotes",
        "paragraph 1 of the endnotes",
    ]
    form.rewritten(form.text.replace("He have a footnote", "Sie hat Fussnoten"))
    assert form.not_kept() == []


def test_estimates_are_listed_by_their_places() -> None:
    def change(parts: Parts) -> None:
        with_notes(parts)
        name = "word/endnotes.xml"
        bold = b"He </w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t>have</w:t></w:r><w:r><w:t> "
        parts[name] = parts[name].replace(b"He have ", bold).replace(b"<w:t>", KEPT_SPACES)

    form = read_file(packed(change), "a.docx")
    form.rewritten(form.text.replace("He have a endnote.", "Sie hat viele Noten am Ende."))
    (said,) = form.not_kept()
    assert said.startswith("paragraph 1 of the endnotes: the places of bold words")


@pytest.mark.parametrize("name", ["word/footnotes.xml", "word/endnotes.xml", "word/header1.xml"])
def test_a_document_type_is_refused_in_each_part(name: str) -> None:
    def change(parts: Parts) -> None:
        with_notes(parts)
        data = parts[name]
        end = data.index(b"?>") + 2 if data.startswith(b"<?xml") else 0
        parts[name] = data[:end] + ENTITIES.removeprefix(b"?>") + data[end:]

    with pytest.raises(ValueError, match="declares a document type") as raised:
        read_file(packed(change), "a.docx")
    check_message(str(raised.value), "a.docx")


KEPT_SPACES = b'<w:t xml:space="preserve">'


def test_spaces_that_are_not_shown_are_not_read() -> None:
    data = with_paragraphs(
        "<w:p><w:r><w:t>\n  Under </w:t></w:r><w:r><w:t> lined\ttext are here.\n</w:t></w:r></w:p>"
        '<w:p xml:space="preserve"><w:r><w:t> He go.</w:t></w:r></w:p>'
    )
    form = read_file(data, "a.docx")
    assert form.text.split("\n")[:2] == ["Underlined text are here.", " He go."]
    done = parts_of(form.rewritten(form.text.replace("are", "is")))[BODY]
    assert b"<w:t>\n  Under </w:t>" in done
    assert KEPT_SPACES + b"lined text is here.</w:t>" in done


def mark(kind: str) -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


def field(instruction: str, shown: str, tag: str = "instrText") -> str:
    code = f"<w:r><w:{tag}>{instruction}</w:{tag}></w:r>"
    return mark("begin") + code + mark("separate") + shown + mark("end")


def shown(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def control(kind: str, inner: str) -> str:
    return f"<w:sdt><w:sdtPr>{kind}</w:sdtPr><w:sdtContent>{inner}</w:sdtContent></w:sdt>"


MC = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
DELETED = '<w:del w:id="1" w:author="Bob">{}</w:del>'
BOX = "<w:r><w:pict><w:txbxContent><w:p>{}</w:p></w:txbxContent></w:pict></w:r>"
BOTH = (
    f"<mc:AlternateContent {MC}><mc:Choice>{{}}</mc:Choice><mc:Fallback>{{}}</mc:Fallback>"
    "</mc:AlternateContent>"
)
CODE = field("DATE", "").split(mark("separate"))[0]
READ = {  # lines; words of which those in capitals have to stay
    "a field that begins in a deletion": (
        f"<w:p>{DELETED.format(CODE)}{mark('separate')}{shown('ONE')}{mark('end')}"
        f"{shown(' two')}</w:p>",
        ["ONE two"],
    ),
    "a field that ends in a deletion": (
        f"<w:p>{CODE}{mark('separate')}{shown('ONE')}{DELETED.format(mark('end'))}</w:p>"
        f"<w:p>{shown('two')}</w:p>",
        ["two"],
    ),
    "a field that is deleted": (
        f"<w:p>{DELETED.format(field('DATE', '', 'delInstrText'))}{shown('one')}</w:p>",
        ["one"],
    ),
    "a field in the instruction of a link": (
        f"<w:p>{mark('begin')}<w:r><w:instrText>hyperlink </w:instrText></w:r>"
        f"{field('HYPERLINK x', shown('ONE'))}{mark('separate')}{shown('two')}{mark('end')}</w:p>",
        ["ONEtwo"],
    ),
    "a date in a link": (
        f"<w:p>{field('HYPERLINK x', shown('one ') + field('DATE', shown('TWO')))}</w:p>",
        ["one TWO"],
    ),
    "a link in a date": (
        f"<w:p>{field('DATE', field('HYPERLINK x', shown('ONE')))}{shown(' two')}</w:p>",
        ["ONE two"],
    ),
    "a simple link in a simple field": (
        '<w:p><w:fldSimple w:instr="DATE"><w:fldSimple w:instr="HYPERLINK x">'
        f"{shown('ONE')}</w:fldSimple></w:fldSimple>{shown(' two')}</w:p>",
        ["ONE two"],
    ),
    "a field that does not end in a text box": (
        f"<w:p>{BOX.format(CODE + mark('separate') + shown('ONE'))}{shown('two')}</w:p>"
        f"<w:p>{shown('three')}</w:p>",
        ["two", "three"],
    ),
    "a control that is bound to data": (
        f"<w:p>{control('<w:dataBinding/>', shown('ONE'))}{shown(' two')}</w:p>",
        ["ONE two"],
    ),
    "a list to choose from": (
        f"<w:p>{control('<w:dropDownList/>', shown('ONE'))}{shown(' two')}</w:p>",
        ["ONE two"],
    ),
    "a control": (f"<w:p>{control('<w:text/>', shown('one'))}{shown(' two')}</w:p>", ["one two"]),
    "a text box of two kinds": (
        f"<w:p>{shown('one')}<w:r>"
        + BOTH.format(*[f"<w:txbxContent><w:p>{shown('two')}</w:p></w:txbxContent>"] * 2)
        + f"</w:r>{shown(' three')}</w:p>",
        ["one three", "two", "two"],
    ),
    "a text box that is deleted": (
        f"<w:p>{shown('one')}<w:del>{BOX.format(shown('TWO'))}</w:del>{shown(' three')}</w:p>",
        ["one three"],
    ),
    "a text box that is moved away": (
        f"<w:p>{shown('one')}<w:moveFrom>{BOX.format(shown('TWO'))}</w:moveFrom></w:p>",
        ["one"],
    ),
    "runs of two kinds": (f"<w:p>{BOTH.format(shown('one'), shown('TWO'))}</w:p>", ["one"]),
    "a symbol": (
        f"<w:p>{shown('one ')}<w:r><w:sym/></w:r>{shown(' two')}</w:p>",
        ["one two"],
    ),
    "how a word is pronounced": (
        f"<w:p>{shown('one')}<w:r><w:ruby><w:rt>{shown('TWO')}</w:rt>"
        f"<w:rubyBase>{shown('three')}</w:rubyBase></w:ruby></w:r>{shown('four')}</w:p>",
        ["onethreefour"],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_words_are_read_and_what_programs_fill_stays(name: str) -> None:
    paragraphs, lines = READ[name]
    data = with_paragraphs(paragraphs)
    form = read_file(data, "a.docx")
    assert form.text.split("\n") == [*lines, WRONG]
    assert form.rewritten(form.text.replace("\n".join(lines), "\n".join(lines).lower())) == data


def test_what_is_not_read_is_listed() -> None:
    relation = (
        b'<Relationship Id="x" Target="charts/a.xml" Type="http://schemas.openxmlformats.org/'
        b'officeDocument/2006/relationships/chart"/></Relationships>'
    )

    def change(parts: Parts) -> None:
        parts["word/charts/a.xml"] = b"<a/>"
        parts[RELATIONS] = parts[RELATIONS].replace(b"</Relationships>", relation)
        kind = b'<Override PartName="/word/charts/a.xml" ContentType="application/xml"/></Types>'
        parts[TYPES] = parts[TYPES].replace(b"</Types>", kind)

    assert read_file(packed(change), "a.docx").not_kept() == ["charts stay as they were"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in").mkdir()
    return tmp_path


def test_a_folder_with_broken_documents_is_done(call: Call, here: Path) -> None:
    for kind, (data, _) in BROKEN.items():
        (here / "in" / f"{kind}.docx").write_bytes(data)
    (here / "in" / "whole.docx").write_bytes(WHOLE)
    done = call("document", "in", "--in-place")
    assert done.code == 1 and len(done.err) == 1 + len(BROKEN), done.err
    found = Word(str(here / "in" / "whole.docx"))
    assert found.paragraphs[0].text == found.sections[0].header.paragraphs[0].text == RIGHT
    (line,) = call("document", "in/encrypted.docx").err
    assert line.startswith("error: in/encrypted.docx has a password")


def test_a_field_without_an_end_is_said() -> None:
    open_field = field("PAGE", shown("one")).removesuffix(mark("end"))
    paragraphs = f"<w:p>{shown('He')}{open_field}</w:p><w:p>{shown('two')}</w:p>"
    form = read_file(with_paragraphs(paragraphs), "a.docx")
    assert form.text.split("\n") == ["Heone", WRONG]
    assert form.not_kept() == ["what follows a field without an end stays, in the document"]
    open_link = field("HYPERLINK a", shown("one")).removesuffix(mark("end"))
    assert not read_file(with_paragraphs(f"<w:p>{open_link}</w:p>"), "a.docx").not_kept()
