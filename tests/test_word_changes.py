"""Tracked changes of Word: accepted they are our text, rejected the one that was there."""

import io
import re
import zipfile
from pathlib import Path
from typing import Any

from speculative_t5.documents import FormatOptions, read_file

import pytest
from commands import Call
from conftest import REPOSITORY
from docx import Document as Word
from docx.oxml import parse_xml
from docx.oxml.ns import qn
from messages import check_message
from test_document_marks import MARK, NOTE, PARAGRAPHS, corrected, run, word
from test_document_word import BODY, packed, with_notes

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
OURS = "Ann"
OTHERS = 'w:author="Bob" w:date="2020-01-01T00:00:00Z"'


def tracked(data: bytes) -> bytes:
    """Return a document whose corrections are tracked changes."""
    form = read_file(data, "a.docx", None, FormatOptions(track_changes=OURS))
    return form.rewritten("\n".join(map(corrected, form.text.split("\n"))))


def direct(data: bytes) -> bytes:
    """Return a document whose corrections have replaced the text."""
    form = read_file(data, "a.docx")
    return form.rewritten("\n".join(map(corrected, form.text.split("\n"))))


def body(data: bytes, part: str = BODY) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        return parse_xml(package.read(part))


def decided(root: Any, *, accept: bool, authors: tuple[str, ...] = (OURS,)) -> Any:
    """Accept or reject the changes of authors, as Word does."""
    pairs = ("w:ins", "w:moveTo"), ("w:del", "w:moveFrom")
    kept, dropped = (map(qn, names) for names in (pairs if accept else reversed(pairs)))
    for change in [*root.iter(*dropped)]:
        if change.get(qn("w:author")) in authors:
            change.getparent().remove(change)
    for change in [*root.iter(qn("w:rPrChange"))] if accept else ():
        if change.get(qn("w:author")) in authors:
            change.getparent().remove(change)
    for change in [*root.iter(*kept)]:
        if change.get(qn("w:author")) in authors:
            for text in [*change.iter(qn("w:delText"))]:
                text.tag = qn("w:t")
            for child in [*change]:
                change.addprevious(child)
            change.getparent().remove(change)
    return root


def characters(root: Any) -> list[tuple[str, ...]]:
    """Return each character with the looks of its run and what is around it, and what is no text.

    Runs that are divided, and insertions that are, have the same ones.
    """
    found = []
    for part in root.iter(qn("w:r")):
        looks = parts_of(part.rPr) if part.rPr is not None else ""
        around = "/".join(f"{each.tag} {each.get(qn('w:author'))}" for each in part.iterancestors())
        for child in part:
            if child.tag in (qn("w:t"), qn("w:delText")):
                found += [(each, child.tag, looks, around) for each in child.text or ""]
            elif child.tag != qn("w:rPr"):
                found.append((parts_of(child), looks, around))
    return found


def parts_of(element: Any) -> str:
    """Return the elements in one, with their attributes but for the numbers of changes."""
    shown = [
        (each.tag, sorted(pair for pair in each.items() if pair[0] != qn("w:id")))
        for each in element.iter()
    ]
    return str(shown)


def accepted(data: bytes, authors: tuple[str, ...]) -> list[tuple[str, ...]]:
    return characters(decided(body(data), accept=True, authors=authors))


def rejected(data: bytes, authors: tuple[str, ...]) -> list[tuple[str, ...]]:
    return characters(decided(body(data), accept=False, authors=authors))


def check_changes(before: bytes) -> bytes:
    """Check the tracked changes of a document, and return it."""
    made = tracked(before)
    ours, everybody = (OURS,), (OURS, "Bob", "a")
    assert accepted(made, everybody) == accepted(direct(before), everybody)
    for authors in (ours, everybody):
        assert rejected(made, authors) == rejected(before, authors)
    assert rejected(before, ours) == characters(body(before))
    changes = [each for each in body(made).iter(*map(qn, ("w:ins", "w:del", "w:rPrChange")))]
    ids = [each.get(qn("w:id")) for each in changes]
    ids += [each.get(qn("w:id")) for each in body(made).iter(qn("w:bookmarkStart"))]
    assert len({*ids}) == len(ids)
    made_here = [each for each in changes if each.get(qn("w:author")) == OURS]
    assert made_here
    for each in made_here:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", each.get(qn("w:date")))
        assert len(each) == 1 and each.getparent().tag != each.tag
    texts = [*body(made).iter(qn("w:t"), qn("w:delText"))]
    assert not [each for each in texts if each.tag == qn("w:t") and _is_in(each, "w:del")]
    assert not [each for each in texts if each.tag == qn("w:delText") and not _is_in(each, "w:del")]
    return made


def _is_in(element: Any, name: str) -> bool:
    return next(element.iterancestors(qn(name)), None) is not None


BOLD = "<w:b/>"
WAS_PLAIN = f'<w:b/><w:rPrChange w:id="9" {OTHERS}><w:rPr/></w:rPrChange>'
CHANGED = {
    "several texts in a run": (
        f'<w:r><w:rPr>{BOLD}</w:rPr><w:softHyphen/><w:t xml:space="preserve">He go </w:t>'
        "<w:softHyphen/><w:t>every days.</w:t><w:tab/></w:r>"
    ),
    "an edit at a border": run("She ha", BOLD) + run("ve a", "<w:i/>") + run(" apple."),
    "a whole run": run("He ") + run("go", BOLD) + run(" home."),
    "a link": f'<w:hyperlink w:anchor="x">{run("He go home.", BOLD)}</w:hyperlink>',
    "tracked looks": run("She have a apple.", WAS_PLAIN),
    "the start of an insertion": run("Now ") + f'<w:ins w:id="7" {OTHERS}>{run("he go.")}</w:ins>',
    "within an insertion": (
        run("Now ") + f'<w:ins w:id="7" {OTHERS}>{run("it", BOLD)}{run(" are a apple, ")}'
        f"{run('and he go ')}</w:ins>" + run("home.")
    ),
    "an insertion of one run": (
        run("He ") + f'<w:ins w:id="1" {OTHERS}>{run("go")}</w:ins>' + run(" home.")
    ),
    "before an insertion": run("it are") + f'<w:ins w:id="7" {OTHERS}>{run(" a apple.")}</w:ins>',
    "within what was moved": (
        '<w:moveFromRangeStart w:id="3" w:name="m"/>'
        f'<w:moveFrom w:id="4" {OTHERS}>{run("He go home.")}</w:moveFrom>'
        '<w:moveFromRangeEnd w:id="3"/>' + run("So ")
        + f'<w:moveTo w:id="5" {OTHERS}>{run("now ")}{run("he go.")}</w:moveTo>'
    ),
    "a number that is taken": (
        '<w:bookmarkStart w:id="1" w:name="a"/>' + run("He go home.") + '<w:bookmarkEnd w:id="1"/>'
    ),
    "a field that begins in a deletion": (
        f'<w:del w:id="7" {OTHERS}>{MARK.format("begin")}'
        "<w:r><w:delInstrText>PAGE</w:delInstrText></w:r>" + MARK.format("separate")
        + f'<w:r><w:delText>1</w:delText></w:r>{MARK.format("end")}</w:del>' + run("He go home.")
    ),
    "a note": run("My brother, who live") + NOTE + run(" here, have a big house."),
}  # fmt: skip
CHANGED |= {name: paragraph for name, (paragraph, _) in PARAGRAPHS.items() if name != "tab"}


@pytest.mark.parametrize("name", CHANGED)
def test_accepted_they_are_our_text_and_rejected_the_old_one(name: str) -> None:
    check_changes(word(CHANGED[name]))


def test_changes_are_of_words_or_less() -> None:
    root = body(check_changes(word(run("She have a apple, and he go home.", BOLD))))
    shown = [
        (each.tag.split("}")[1], each.getparent().rPr[0].tag == qn("w:b"), each.text)
        for each in root.iter(qn("w:t"), qn("w:delText"))
    ]
    assert shown == [
        ("t", True, "She ha"),
        ("delText", True, "ve"),
        ("t", True, "s"),
        ("t", True, " a"),
        ("t", True, "n"),
        ("t", True, " apple, and he go"),
        ("t", True, "es"),
        ("t", True, " home."),
    ]


def test_another_insertion_is_divided_around_ours() -> None:
    """Words put in are nobody's insertion but ours; words deleted are deleted in the other's."""
    root = body(check_changes(word(CHANGED["within an insertion"])))
    kinds = [(each.tag.split("}")[1], each.get(qn("w:author"))) for each in root.iter(qn("w:ins"))]
    assert kinds == [("ins", author) for author in ("Bob", OURS, "Bob", OURS, "Bob", OURS, "Bob")]
    left = decided(root, accept=False, authors=(OURS, "Bob")).iter(qn("w:t"))
    assert "".join(each.text for each in left) == "Now home."


def test_a_translation_is_one_change_of_a_run() -> None:
    form = read_file(word(run("He go home.")), "a.docx", None, FormatOptions(track_changes=OURS))
    root = body(form.rewritten("Il rentre a la maison."))
    (gone,), (new,) = [*root.iter(qn("w:del"))], [*root.iter(qn("w:ins"))]
    assert (gone[0][-1].text, new[0][-1].text) == ("He go home", "Il rentre a la maison")


def test_changes_of_notes_are_tracked() -> None:
    data = packed(with_notes)
    form = read_file(data, "a.docx", None, FormatOptions(track_changes=OURS))
    made = form.rewritten(form.text.replace("have a footnote", "has a footnote"))
    root = body(made, "word/footnotes.xml")
    assert characters(decided(root, accept=False)) == characters(body(data, "word/footnotes.xml"))
    right = decided(body(made, "word/footnotes.xml"), accept=True)
    assert "".join(each.text for each in right.iter(qn("w:t"))) == "He has a footnote."


def test_they_are_read_as_accepted() -> None:
    before = word(run("She have a apple, and he go home."))
    assert read_file(tracked(before), "a.docx").text == read_file(direct(before), "a.docx").text


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    return tmp_path


def test_the_command_tracks_changes_of_word_alone(call: Call, here: Path) -> None:
    (here / "a.docx").write_bytes(word(run("She have a apple.")))
    (here / "a.txt").write_text("She have a apple.")
    for author, given in (("speculative-t5", ()), ("Ann <b>", ("--author", "Ann <b>"))):
        given = ("--output", "b.docx", "--force", "--track-changes", *given)
        done = call("document", "a.docx", *given)
        assert not done.code, done.err
        root = Word(str(here / "b.docx")).element
        (name,) = {each.get(qn("w:author")) for each in root.iter(qn("w:ins"), qn("w:del"))}
        assert name == author
    refused = "--track-changes is for docx, and a.txt is read as txt"
    for command, found in (
        (("a.txt", "--track-changes"), refused),
        (
            ("a.docx", "a.txt", "--in-place", "--track-changes"),
            "--track-changes is for docx, and a.txt is read as txt",
        ),
        (("a.docx", "--author", "Ann"), "--author is of tracked changes"),
        (("a.docx", "--track-changes", "--author", " "), "--author must be a name"),
    ):
        done = call("document", *command)
        (line,) = done.err
        assert done.code and found in line, line
        check_message(line.removeprefix("error: "))
