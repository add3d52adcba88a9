"""Markdown: what a reader sees is corrected, and all else keeps its bytes."""

import json
import re
from typing import Any

from speculative_t5.documents import Document, FileLines, RewriteOptions, read_file

import pytest
from pieces import Scripted

RIGHT = {"She have": "She has", "she have": "she has", "a apple": "an apple", "He go ": "He goes "}


def corrected(text: str) -> str:
    for wrong, right in RIGHT.items():
        text = text.replace(wrong, right)
    return text


def rewritten(text: str, answer: Any = corrected, **more: Any) -> tuple[str, list[str]]:
    form = read_file(text.encode(), "a.md")
    decoder: Any = Scripted(answer, limit=10**6, **more)
    # Without the guard, which leaves code alone itself.
    document = Document(decoder, form.text, RewriteOptions(guard=False), form.lines)
    return form.rewritten(document.result(document.rewrite()).text).decode(), form.not_kept()


BAD, GOOD = "She have a apple", "She has an apple"
CASES = {  # with {} where a mistake is mended, and [] where one stays
    "emphasis": "{she} have **a{n} apple**, and *he* is _not_ here.",
    "link": "She ha{ve} [a{n} apple](docs/she-have-a.md 'She have a apple') here, or [it][ref].",
    "picture": "She ha{ve} ![she have a apple](a.png) no apple at all.",
    "lines": "So, she ha{ve} [a{n}\napple](b.md) and *he\nis* there, as all of them are here.",
    "lines that are not full": "It is told ([She ha{ve}\n  It](a.md 'She have a apple')), or.",
    "quoted lines": "> It is told here [*She ha{ve}\n> Markdown*](she-have-a.md).",
    "instruction": "She ha{ve} a pear <?php have a apple ?> here.",
    "note": "She ha{ve} a pear[^1] here.\n\n[^1]: She ha{ve} a pear.",
    "target": "She ha{ve} a pear.\n\n[ref]: http://x.org/she-have-a-apple",
    "tags": "She ha{ve} <b class='she have'>a{n}</b> apple<br/>in her bag.",
    "escape": "She ha{ve} a \\* and 3 * 4 and snake_case_name and 2 \\_ here.",
    "template": "{{% if she have %}}She ha{ve} a pear.{{% endif %}}",
    "comment": "She ha{ve} a pear.\n\n<!--\nShe have a apple.\n-->",
    "block of HTML": "She ha{ve} a pear.\n\n<pre>\nShe have a apple.\n</pre>",
    "admonition": '!!! note "She have a apple."\n    She ha{ve} a pear in her bag.',
    "callout": "> [!NOTE]\n> She ha{ve} a pear in her bag.",
    "front matter": "---\ntitle: She have a apple.\n---\n\nShe ha{ve} a pear.",
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", CASES)
def test_marks_stay_where_they_are(name: str, line_end: str) -> None:
    shape = CASES[name].replace("\n", line_end)
    before = shape.format(she="She", n="", ve="ve")
    after = shape.format(she="She", n="n", ve="s").replace("have **", "has **")
    assert before != after
    assert rewritten(before) == (after, [])


@pytest.mark.parametrize(
    "fixed",
    ["`a apple`", "`` `a apple ``", "<https://x.org/a>", "https://x.org/a_b", "$a apple$"],
)
def test_what_is_no_language_is_read_and_stays(fixed: str) -> None:
    text = f"She have {fixed} in here."
    found, said = rewritten(text)
    assert found == text.replace("She have", "She has")
    assert said == (
        ["line 1: changes of code, or of an address, which has to stay, were left out"]
        if "a apple" in fixed
        else []
    )


def test_words_that_name_the_target_of_a_link_stay() -> None:
    text = "See [she have] and [she have][] or [she have](a) here.\n\n[she have]: http://x.org\n"
    found, said = rewritten(text)
    assert found == text.replace("[she have](a)", "[she has](a)") and len(said) == 1


def test_emphasis_of_words_that_are_left_out_goes_with_them() -> None:
    def shorter(text: str) -> str:
        return text.replace("very ", "").replace("very", "")

    assert rewritten("He is **very** tired of all this.", shorter)[0] == "He is tired of all this."


def test_a_translation_keeps_targets() -> None:
    text = "Read [the manual](docs/the-manual.md) and **stop** now, my friend.\n"
    words = {"Read the manual and stop now, my friend.": "Lies das Handbuch und halte nun an."}
    found, said = rewritten(text, words.__getitem__, prefix="", languages=("en", "de"))
    assert "](docs/the-manual.md)" in found and "Handbuch" in found and "**" in found
    assert said == ["line 1: the places of links and emphasis are estimates"]


def test_no_word_is_lost_where_code_of_one_line_has_to_stay() -> None:
    """Words of a translation may be in another line than those that they stand for."""
    text = "Please take the tool that is named `foo` and put\nit there."
    german = "Bitte nimm das Werkzeug und lege\nes dorthin, wo es hingehört."
    again = read_file(text.encode(), "a.md")
    assert again.rewritten(german).decode() == text
    what = "changes of code, or of an address, which has to stay, were left out"
    assert again.not_kept() == [f"line {number}: {what}" for number in (1, 2)]


def test_signs_that_would_be_marks_are_written_as_they_were() -> None:
    text = "Type \\`show w' and \\`show c' to see \\*it."
    form = read_file(text.encode(), "a.md")
    new = "Gib `zeig w' und `zeig c' ein und sieh *es."
    assert form.rewritten(new).decode() == new.replace("`", "\\`").replace("*", "\\*")


def test_emphasis_begins_and_ends_at_words() -> None:
    form = read_file(b"He is in *Berlin*'s [new house](a.md) now.", "a.md")
    found = form.rewritten("Berlin's neues Haus ist nun seins.").decode()
    assert found.count("*") == 2 and " *" in f" {found}" and not re.search(r" \*(?:\W|$)", found)


def test_a_line_is_full_with_what_is_not_read_of_it() -> None:
    text = "See [it](http://example.org/which/is/a/long/address), as\nShe have a apple.\n"
    form = read_file(text.encode(), "a.md")
    for unread, wanted in (
        (form.unread, ["See it, as\nShe have a apple."]),
        ((), ["She have a apple."]),
    ):
        decoder: Any = Scripted(corrected, limit=10**6)
        whole = Document(decoder, form.text, RewriteOptions(), FileLines(form.breaks, unread))
        assert [piece.source for piece in whole.rewrite()] == wanted


@pytest.mark.parametrize("piece", ["`", "[", "](", "<b", "{{", "**", "$a", "<pre>", "<!--", "\\"])
def test_marks_without_end_are_text(piece: str) -> None:
    text = f"She have {piece} x.\n" * 3
    form = read_file(text.encode(), "a.md")
    assert form.rewritten(form.text).decode() == text
    found, _ = rewritten(text)
    assert found.count(piece) == 3


def reworded(text: str, words: str) -> tuple[str, list[str]]:
    """Return a file with other words, as which it is read again, and what is said of it."""
    form = read_file(text.encode(), "a.md")
    made = form.rewritten(words).decode()
    if not (said := form.not_kept()):
        assert read_file(made.encode(), "a.md").text.split() == words.split()
    return made, said


def test_signs_that_would_become_marks_are_escaped() -> None:
    for text, words, wanted in (
        ("Ab cd *[^1] ef", "Ab * ef", "Ab * *[^1] ef"),
        ("Ab, [^1] * cd * {# a #} ef", "Ab, * c * ef", "Ab, [^1] * c * {# a #} ef"),
        ("A b c", "A *b* 3*4 a_b c_d c", r"A \*b\* 3\*4 a_b c_d c"),
        ("A b.", "A <b>b</b> [b](x) `b` {% b %} b.", r"A \<b>b\</b> \[b\](x) \`b\` \{% b %} b."),
        ("A b.", r"A \* [^1] <!-- a --> b.", r"A \\\* \[^1] \<!-- a --> b."),
        ("A [b c](x) d.", "A b] c d.", r"A [b\] c](x) d."),
        ("A **b** c", "A *b c", r"A \***b** c"),
        ("A `b` c", "A `b`` c", r"A \``b`\`` c"),
        ("A https://a.b/c d", "A https://a.b/c & e_ d", r"A https://a.b/c & e\_ d"),
    ):
        assert reworded(text, words) == (wanted, [])


def test_a_line_does_not_become_one_of_another_kind() -> None:
    for text, words, wanted in (
        ("Ab * c", " * c", r" \* c"),
        ("Ab - c", "- c", r"\- c"),
        ("Ab > c", "> c", r"\> c"),
        ("Ab # c", "# c", r"\# c"),
        ("Ab | c", "| c", r"\| c"),
        ("Ab ---", "---", r"\---"),
        ("> - Ab 2024. Then", "> - 2024. Then", r"> - 2024\. Then"),
        ("- Ab * c", "- * c", r"- \* c"),
        ("- Ab -5 #a c", "- -5 #a c", "- -5 #a c"),
        ("[^1]: A  b  [c](x)", "[^1]: A    c", "[^1]: A [c](x)"),
        ("A    b  d  e", "A    d    e", "A    d    e"),
    ):
        assert reworded(text, words) == (wanted, []), text


def test_no_blanks_come_to_stand_within_emphasis() -> None:
    for text, words, wanted in (
        ("Ab **cd**; ef * gh ij.", "Ab ; ek *  gl mn.", "Ab ; **ek** *  gl mn."),
        ("Ab **cd ef**; *gh* here.", "Ab cd; gh here.", "Ab **cd**; *gh* here."),
        ("*Ab* cd *ef* gh.", "Ab ef gh.", "*Ab* *ef* gh."),
        ("Ab **cd ef**; *gh* here.", "Ab cd ; gh here.", "Ab **cd** ; *gh* here."),
    ):
        assert reworded(text, words)[0] == wanted


def test_emphasis_of_nothing_goes() -> None:
    for text, words, wanted in (
        ("Ab *c*-*d* ef.", "Ab cd ef.", "Ab *cd* ef."),
        (r"Ab *c\*d* ef.", "Ab ef.", "Ab ef."),
        ("Ab **_c_** ef.", "Ab ef.", "Ab ef."),
    ):
        assert reworded(text, words)[0] == wanted


def test_blanks_move_out_of_emphasis_that_has_marks_within() -> None:
    for text, words, wanted in (
        ("**see [it](x) then**, ok.", "see it , ok.", "**see [it](x)** , ok."),
        ("Ab **_it\tnow_ then** cd.", "Ab\tnow then cd.", "Ab\t**_now_ then** cd."),
        ("Ab **then _now it_** cd.", "Ab then now  cd.", "Ab **then _now_**  cd."),
    ):
        assert reworded(text, words)[0] == wanted


def test_a_translation_stays_where_one_of_its_lines_cannot_be_written() -> None:
    text = "All of you know that <!--\nwe are here."
    made, said = reworded(text, "Nun wissen wir alle, wer\ndort --> sein soll.")
    assert made == text
    assert said == ["lines 1, 2 left as is: new words there would be read as marks of Markdown"]


def test_a_line_that_cannot_be_written_stays_and_is_listed() -> None:
    made, said = reworded("A <!-- b\nc d.\n\nE f.", "A b\nc --> d.\n\nE g.")
    assert made == "A <!-- b\nc d.\n\nE g."  # what is in a comment would be gone
    assert said == ["line 2 left as is: new words there would be read as marks of Markdown"]


@pytest.mark.parametrize("rule", ["---", "+++"])
def test_rules_in_a_cell_are_front_matter_in_the_first_one_only(rule: str) -> None:
    texts = [f"{rule}\ntitle: A\n{rule}\n\nAs seen.", f"{rule}\n\nHe go to *it*.\n\n{rule}\n"]
    cells = [{"cell_type": "markdown", "source": text} for text in texts]
    code = {"cell_type": "code", "source": ""}
    for some in (cells, [code, cells[1]], [cells[1]]):
        form = read_file(json.dumps({"cells": some}).encode(), "a.ipynb")
        is_first = len(some) == 1
        assert ("He go to *it*" in form.text) == is_first, form.text
        decoder: Any = Scripted(corrected, limit=10**6)
        document = Document(decoder, form.text, RewriteOptions(), form.lines)
        made = form.rewritten(document.result(document.rewrite()).text).decode()
        right = json.dumps({"cells": some})
        assert made == (right if is_first else right.replace("He go ", "He goes "))
