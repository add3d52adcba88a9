"""What did not change keeps its bytes and its marks: HTML and Word after corrections."""

import io
from collections.abc import Sequence
from typing import Any

from speculative_t5.documents import Document, RewriteOptions, read_file
from speculative_t5.documents.dividing import TextPart, divided_by_words
from speculative_t5.documents.marks import (
    Character,
    MarkedLine,
    Part,
    least_edits,
    read_line,
    trimmed,
)

import pytest
import random_documents
from docx import Document as NewWord
from docx.oxml import parse_xml
from pieces import Scripted
from random_word import NAMESPACES
from word_faults import skeleton_of_docx

# Mistakes, and what is right.
RIGHT = {
    "He go ": "He goes ",
    " he go ": " he goes ",
    "he go.": "he goes.",
    "a apple": "an apple",
    "She have": "She has",
    "name }} have": "name }} has",
    "be an number": "be a number",
    " are here": " is here",
    "you is": "you are",
    "it are": "it is",
    "who live": "who lives",
    ", have a big": ", has a big",
    "every days": "every day",
}


def corrected(sentence: str) -> str:
    for wrong, right in RIGHT.items():
        sentence = sentence.replace(wrong, right)
    return sentence


def rewritten(data: bytes, name: str) -> tuple[bytes, list[str]]:
    """Return a document that is corrected, and what is said of it."""
    form = read_file(data, name)
    decoder: Any = Scripted(corrected, limit=10**6)
    document = Document(decoder, form.text, RewriteOptions(), form.lines)
    return form.rewritten(document.result(document.rewrite()).text), form.not_kept()


PAGES = {
    "links": (
        '<p>He go to <a href="x">the shop</a>. Then <b>stop</b>, and wait (<i>now</i>). See '
        '<a href="y">this page</a>!</p>'
    ),
    "parts of words": "<p>H<sub>2</sub>O is wet. He go home. E=mc<sup>2</sup> is right.</p>",
    "half a word": "<p>He go <em>ho</em>me and under<u>line</u>d text are here.</p>",
    "equations": "<p>Let <math><mi>x</mi></math> be an number. Then <span>x</span> are here.</p>",
    "names of characters": "<p>R&amp;D&nbsp;&copy;. She have a apple &amp; a pear &mdash; x.</p>",
    "templates": "<p>{{ user.name }} have {% if x %}a apple{% endif %}. Dear {name}, he go.</p>",
    "programs": '<?php echo "<p>She have.</p>"; ?>\n<p>She have a apple.</p><![CDATA[ She have ]]>',
    "pictures": '<p>She have <img src="x.png" alt="She have"> a apple.</p>',
    "buttons": "<p>Click <button>She have a apple.</button> and he go home.</p>",
    "code": "<p>She have <code>a apple</code>, and he go home.</p>",
    "not to be translated": (
        '<p translate="no">She have.</p><p>She have <i class="x notranslate">a apple</i> now.</p>'
        '<div translate=no><p>She have.</p><p translate="yes">She have.</p></div>'
    ),
    "lines": "<p>\n\tShe have\n\tno verb and\tit are\n\twrong.\n</p>",
    "paragraphs without ends": "<p translate=no>She have.<p>She have a apple.<li>He go home.",
}
STAYS = {  # what is right in them and looks wrong
    "programs": ('"<p>She have', "[ She have"),
    "pictures": ('alt="She have',),
    "code": (">a apple<",),
    "not to be translated": ('"no">She have', ">a apple<", "<p>She have."),
    "paragraphs without ends": ("no>She have",),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_change_where_words_do(name: str) -> None:
    page, marker = PAGES[name], "\N{SNOWMAN}"
    wanted = page
    for number, kept in enumerate(STAYS.get(name, ())):
        wanted = wanted.replace(kept, f"{marker}{number}{marker}")
    wanted = corrected(wanted.replace("</math> be an", "</math> be a"))
    wanted = wanted.replace("%}a apple", "%}an apple").replace("it are", "it is")
    for number, kept in enumerate(STAYS.get(name, ())):
        wanted = wanted.replace(f"{marker}{number}{marker}", kept)
    found, said = rewritten(page.encode(), "a.html")
    assert found.decode() == wanted != page
    assert bool(said) == (name == "code" or name == "not to be translated"), said


TIME = "{} --> {}"
CUES = {  # what is shown, and as it is right
    "lines": ("She have\na apple\nin here.", "She has\nan apple\nin here."),
    "tags": (
        "<i>He go</i>\n<i>home</i> to <b>the</b> shop.",
        "<i>He goes</i>\n<i>home</i> to <b>the</b> shop.",
    ),
    "breaks": ("She have<br>a apple.", "She has<br>an apple."),
    "words that light up": (
        "so<00:00:00.560><c> you is</c><00:00:00.880><c> here</c>",
        "so<00:00:00.560><c> you are</c><00:00:00.880><c> here</c>",
    ),
    "speakers": ("- She have a apple.\n- He go home.", "- She has an apple.\n- He goes home."),
    "signs": ("1 < 2 > 3, and it are so.", "1 < 2 > 3, and it is so."),
    "text behind a blank line": (
        "The first half of this.\n\nShe have a apple.",
        "The first half of this.\n\nShe has an apple.",
    ),
    "the same behind a blank": ("One.\n \nShe have a apple.", "One.\n \nShe has an apple."),
    "spaces": ("She  have\ta apple. ", "She  has\tan apple. "),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", CUES)
def test_cues_keep_their_lines_and_tags(name: str, line_end: str) -> None:
    shown, wanted = CUES[name]
    head = f"1\n{TIME.format('00:00:01,000', '00:00:02,000')}\n"
    tail = f"\n\n2\n{TIME.format('00:00:03,000', '00:00:04,000')}\nAll is well.\n"
    before, after = (f"{head}{each}{tail}".replace("\n", line_end) for each in (shown, wanted))
    found, _ = rewritten(before.encode(), "a.srt")
    assert found.decode() == after


@pytest.mark.parametrize("languages", [None, ("en", "de")])
def test_cues_without_full_stops_are_divided_where_they_end(languages: Any) -> None:
    """One by one to be corrected, and in runs to be translated; with full stops by sentences."""
    cues = [f"so we was in street {number}" for number in range(40)]
    times = [f"{n}\n{TIME.format(f'00:00:{n:02},000', f'00:00:{n:02},900')}\n" for n in range(40)]
    text = "".join(f"{time}{cue}\n\n" for time, cue in zip(times, cues, strict=True))
    form = read_file(text.encode(), "a.srt")
    decoder: Any = Scripted(
        lambda each: each.replace("was", "were"), limit=60, prefix="", languages=languages
    )
    document = Document(decoder, form.text, RewriteOptions(piece_tokens=30), form.lines)
    found = form.rewritten(document.result(document.rewrite()).text).decode()
    assert len(document) == 40 if languages is None else 2 < len(document) < 40
    if languages is None:
        assert found == text.replace("was", "were")


def test_numbers_and_notes_between_cues_are_no_words() -> None:
    time = TIME.format("00:01.000", "00:02.000")
    for text in (
        f"WEBVTT\nKind: captions\n\n{time}\nShe has.\n\nNOTE She have a apple.\n\n{time}\nOh.\n",
        f"WEBVTT\n\nSTYLE\n::cue {{}}\n\nid\n{time}\nShe has.\n",
        f"1\n{time}\nShe has.\n2\n{time}\nOh.\n",
    ):
        form = read_file(text.encode(), "a.vtt")
        assert "have" not in form.text and "id" not in form.text
        assert form.rewritten(form.text).decode() == text
    form = read_file(f"1\n{time}\nOne.\n\nTwo.\n3\n{time}\nThree.\n".encode(), "a.srt")
    assert form.text.split("\n") == ["One.", "Two.", "Three."]
    assert [form.number(line) for line in (1, 2, 3)] == [1, 1, 2]


def word(*paragraphs: str) -> bytes:
    document = NewWord()
    body = document.element.body
    for each in paragraphs:
        element = parse_xml(f"<w:p {NAMESPACES}>{each}</w:p>")
        body.insert(len(body) - 1, element)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def run(text: str, looks: str = "") -> str:
    own = f"<w:rPr>{looks}</w:rPr>" if looks else ""
    return f'<w:r>{own}<w:t xml:space="preserve">{text}</w:t></w:r>'


NOTE = '<w:r><w:footnoteReference w:id="2"/></w:r>'
MARK = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
PARAGRAPHS: dict[str, tuple[str, list[str]]] = {
    "equation": (
        run("Let ") + "<m:oMath><m:r><m:t>x</m:t></m:r></m:oMath>" + run(" be an number."),
        ["Let ", " be a number."],
    ),
    "bookmark": (
        run("In ") + '<w:bookmarkStart w:id="1" w:name="a"/>' + run("the book") + run(" he go on."),
        ["In ", "the book", " he goes on."],
    ),
    "half a word": (
        run("She ha") + run("ve a app", "<w:b/>") + run("le now."),
        ["She ha", "s an app", "le now."],
    ),
    "small numbers": (
        run("Water is H") + run("2", '<w:vertAlign w:val="subscript"/>') + run("O. He go home."),
        ["Water is H", "2", "O. He goes home."],
    ),
    "note": (
        run("My brother, who live in Paris") + NOTE + run(", have a big house."),
        ["My brother, who lives in Paris", ", has a big house."],
    ),
    "soft hyphen": (
        run("He go to the super") + "<w:r><w:softHyphen/></w:r>" + run("market every days."),
        ["He goes to the super", "market every day."],
    ),
    "hyphen": (
        run("He is a well") + "<w:r><w:noBreakHyphen/></w:r>" + run("known man, and he go home."),
        ["He is a well", "known man, and he goes home."],
    ),
    "picture": (
        run("She have ") + "<w:r><w:drawing/></w:r>" + run("a apple."),
        ["She has ", "an apple."],
    ),
    "field": (
        run("See ") + MARK.format("begin") + "<w:r><w:instrText>REF a</w:instrText></w:r>"
        + MARK.format("separate") + run("a apple") + MARK.format("end") + run(" that he go for."),
        ["See ", "a apple", " that he goes for."],
    ),
    "simple field": (
        run("On ") + f'<w:fldSimple w:instr="A">{run("a apple")}</w:fldSimple>' + run(" it are."),
        ["On ", "a apple", " it is."],
    ),
    "link as a field": (
        MARK.format("begin") + "<w:r><w:instrText>HYPERLINK x</w:instrText></w:r>"
        + MARK.format("separate") + run("She have a apple.") + MARK.format("end"),
        ["She has an apple."],
    ),
    "link": (
        run("He go to ") + f'<w:hyperlink w:anchor="x">{run("the shop")}</w:hyperlink>' + run("."),
        ["He goes to ", "the shop", "."],
    ),
    "tracked changes": (
        run("He go ")
        + '<w:del w:id="1" w:author="a"><w:r><w:delText>away </w:delText></w:r></w:del>'
        + f'<w:ins w:id="2" w:author="a">{run("home every days.")}</w:ins>',
        ["He goes ", "home every day."],
    ),
    "tab": (run("She have") + "<w:r><w:tab/></w:r>" + run("a apple"), ["She have", "a apple"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAGRAPHS)
def test_runs_of_word_keep_their_characters(name: str) -> None:
    paragraph, wanted = PARAGRAPHS[name]
    before = word(paragraph)
    found, _ = rewritten(before, "a.docx")
    texts = NewWord(io.BytesIO(found)).element.xpath("//w:t")
    assert [each.text for each in texts if each.text] == wanted
    assert skeleton_of_docx(found)[0] == skeleton_of_docx(before)[0]


@pytest.mark.parametrize(
    ("kind", "count"), [("html", 400), ("md", 400), ("docx", 25), ("docx-tracked", 25)]
)
def test_nothing_else_changes_in_random_documents(kind: str, count: int) -> None:
    """More of them: scripts/checks/random_documents.py."""
    for seed in range(count):
        assert not random_documents.faults_of(random_documents.KINDS[kind], seed), seed


def test_edits_are_short_and_make_the_other_text() -> None:
    for before, after, expected in [
        ("He go home.", "He goes home.", [(5, 5, "es")]),
        ("a b c", "a c", [(1, 3, "")]),
        ("a c", "a b c", [(1, 1, " b")]),
        ("b c", "a b c", [(0, 0, "a ")]),
        ("have a apple", "has an apple", [(2, 4, "s"), (6, 6, "n")]),
        ("x  y", "x y", [(2, 3, "")]),
        ("a", "a.", [(1, 1, ".")]),
        ("cafe\u0301", "cafe", [(3, 5, "e")]),
        ("", "a", [(0, 0, "a")]),
        ("a", "", [(0, 1, "")]),
    ]:
        found = [*least_edits(before, after)]
        assert found == expected, (before, after)
        made, at = "", 0
        for start, end, new in found:
            made, at = made + before[at:start] + new, end
        assert made + before[at:] == after
    assert trimmed("abc", "abxc") == (2, 2, "x")


def changed(text: str, new: str, *sizes: int, fixed: Sequence[int] = ()) -> Any:
    """Change a line whose parts have these sizes; every second one is a mark."""
    characters, at = [], 0
    for part, size in enumerate(sizes):
        characters += [Character(each, part, each) for each in text[at : at + size]]
        at += size
    parts = [Part(part % 2, part in fixed) for part in range(len(sizes))]
    return MarkedLine(characters, parts).changed(new)


def test_what_is_put_in_takes_the_marks_of_its_word_or_none() -> None:
    assert changed("go far", "goes far", 2, 4).parts == ["goes", " far"]
    assert changed("a stop b", "a stop now b", 2, 4, 2).parts == ["a ", "stop", " now b"]
    assert changed("a stop b", "a now stop b", 2, 4, 2).parts == ["a now ", "stop", " b"]
    assert changed("stop b", "stops b", 0, 4, 2).parts == ["", "stops", " b"]
    assert changed("stop b", "now stop b", 0, 4, 2).parts == ["now ", "stop", " b"]
    assert changed("a stop", "a stop.", 2, 4, 0).parts == ["a ", "stop", "."]
    assert changed("I cannot b", "I can not b", 2, 6, 2).parts == ["I ", "can not", " b"]
    assert changed("a stop b", "a b", 2, 4, 2).parts == ["a", "", " b"]


def test_what_has_to_stay_does() -> None:
    done = changed("use foo here now", "use bar there now", 4, 3, 9, fixed=[1])
    assert done.parts == ["use ", "foo", " there now"] and done.has_refused
    done = changed("use foo here", "used foo here now", 4, 3, 5, fixed=[1])
    assert done.parts == ["used ", "foo", " here now"] and not done.has_refused
    done = changed("use foo here", "foo", 4, 3, 5, fixed=[1])
    assert "".join(done.parts) == "foo" and not done.has_refused
    done = changed("Nimm foo hier bitte", "Please take foo from there", 5, 3, 11, fixed=[1])
    assert done.parts[1] == "foo" and "".join(done.parts) == "Please take foo from there"


def test_words_come_once_where_others_have_to_stay() -> None:
    """What is put in may stand for what has to stay."""
    text, new = "see foo, do foo and stop foo now", "see bar, or foo, do bar and stops bar now"
    done = changed(text, new, 4, 3, 5, 3, 10, 3, 4, fixed=[1, 3, 5])
    assert done.has_refused and "".join(done.parts) == "see foo, do foo and stops foo now"
    done = changed("red foobars now", "fooba xyars now", 4, 7, 4, fixed=[1])
    assert done.has_refused and "".join(done.parts) == "red foobars now"
    done = changed("go foobar now", "gone xfoobar", 3, 6, 4, fixed=[1])
    assert done.has_refused and "".join(done.parts).count("foobar") == 1


def test_a_character_that_is_written_as_one_goes_as_one() -> None:
    characters = [Character("a", 0, "&x;"), Character("b", 0, ""), Character("c", 0, "c")]
    line = MarkedLine(characters, [Part()])
    assert line.changed("abd").parts == ["&x;d"]
    assert line.changed("axc").parts == ["axc"]
    assert line.changed("bc").parts == ["bc"]


@pytest.mark.parametrize("pair", [None, ("en", "de")], ids=["corrected", "translated"])
def test_parts_of_a_sentence_get_no_capital_and_no_full_stop(pair: tuple[str, str] | None) -> None:
    def whole(read: str) -> str:
        return f"{read[0].upper()}{read[1:]}." if read[-1].isalpha() else read.capitalize()

    def made(data: bytes, name: str) -> bytes:
        form = read_file(data, name)
        decoder: Any = Scripted(whole, limit=10**6, languages=pair)
        document = Document(decoder, form.text, RewriteOptions(guard=False), form.lines)
        return form.rewritten(document.result(document.rewrite()).text)

    texts = ["we asked all of you", "to wait here with us", "until he comes to the end"]
    right = ["We asked all of you", "to wait here with us", "until he comes to the end."]
    for brk in ("<br>", "\n<BR/> ", "<b><br></b>"):
        page = f"<p>{brk.join(texts)}</p><p>{texts[1]}<br><br>{texts[0]}</p><p>"
        after = page.replace(brk.join(texts), brk.join(right))
        after = after.replace("<p>to", "<p>To").replace("us<br><br>we", "us.<br><br>We")
        after = after.replace("you</p>", "you.</p>")
        assert made(page.encode(), "a.html").decode() == after
    for brk in ("<w:br/>", "<w:tab/>"):
        runs = f"<w:r>{brk}</w:r>".join(map(run, texts)), run(texts[1])
        form = read_file(made(word(*runs), "a.docx"), "a.docx")
        assert form.text.split("\n") == [*right, "To wait here with us."]


def test_no_word_is_divided_where_small_letters_are_more() -> None:
    parts = [TextPart("Nimm die ßßß: "), TextPart("sie ist da.")]
    assert divided_by_words(parts, "Take the ßßß that is: there.") == [
        "Take the ßßß that is: ",
        "there.",
    ]


def test_words_that_are_retold_do_not_come_before_what_stays() -> None:
    for end in ([""], ["", " h"]):  # the same mark is on all parts
        places = enumerate(["", "ab1x; g2x", *end])
        letters = [Character(char, part, char) for part, text in places for char in text]
        line = MarkedLine(letters, [Part(1)] * (2 + len(end)))
        assert line.changed(f"; cj3x{''.join(end)}").parts == ["", "; cj3x", *end]


def test_no_blank_comes_behind_what_stays() -> None:
    texts = ["ab1x\t", " ", "{{n}}", ") ", " - cd2x?"]
    letters = [*read_line(texts, lambda text: zip(text, text, strict=True))]
    line = MarkedLine(letters, [Part(is_fixed=text == "{{n}}") for text in texts])
    assert "".join(line.changed("fg3x e3x {{n}}) - ?").parts) == "fg3x e3x\t {{n}}) - ?"
