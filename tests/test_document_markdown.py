"""Markdown: what a reader sees is corrected, and all else keeps its bytes."""

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
    document = Document(decoder, form.text, RewriteOptions(), form.lines)
    return form.rewritten(document.result(document.rewrite()).text).decode(), form.not_kept()


BAD, GOOD = "She have a apple", "She has an apple"
CASES = {  # with {} where a mistake is mended, and [] where one stays
    "emphasis": "{she} have **a{n} apple**, and *he* is _not_ here.",
    "link": "She ha{ve} [a{n} apple](docs/she-have-a.md 'She have a apple') here, or [it][ref].",
    "picture": "She ha{ve} ![she have a apple](a.png) no apple at all.",
    "lines": "So, she ha{ve} [a{n}\napple](b.md) and *he\nis* there, as all of them are here.",
    "lines that are not full": "It is told here ([She ha{ve}\n  Markdown](she-have.md)), or.",
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
