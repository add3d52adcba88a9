"""Translations of whole texts, with outputs that are set: what is seen to be wrong, what is tried.

The bounds were chosen with scripts/checks/translation_faults.py on other texts, see docs.
"""

import re
from typing import Any

from speculative_t5.documents import (
    Document,
    RewriteOptions,
    Rewritten,
    check_rewriting,
    rewrite,
)
from speculative_t5.documents.splitting import clauses, paragraphs
from speculative_t5.documents.translation import Translation

import pytest
from messages import check_message
from pieces import Scripted

GERMAN = Translation("de", "en")
RIGHT = (
    ("Wo wohnt er?", "Where does he live?"),
    ("Er kam um 3 Uhr mit 40 Leuten.", "He came at three with 40 people."),
    ("Das kostet 1.000,50 Euro.", "That costs 1,000.50 euros."),
    ("Hallo {name}, %(n)d neue Nachrichten.", "Hello {name}, %(n)d new messages."),
    ("Siehe [hier](https://a.org/b) und `x = 1`.", "See [here](https://a.org/b) and `x = 1`."),
    ("Sie schreibt an a.b@c.de von ihrem iPhone.", "She writes to a.b@c.de on her iPhone."),
    ("Tom!", "Tom!"), ("Berlin", "Berlin"), ("sehr, sehr, sehr gut", "very, very, very good"),
    ("1) Milch 2) Brot", "1) milk 2) bread"), ("Rabatt von 100% auf alles!", "100% off it all!"),
    ("Ich weiß nicht. " * 4, "I don't know. " * 4),
    ("Dies ist ein langes Wort: Donaudampfschifffahrt.", "This is a long word: Danube steamboat."),
)  # fmt: skip
LONG = ("Er ging nach Hause. Es regnete stark. Niemand war da.", "He went home. It rained. ")


def test_right_translations_pass() -> None:
    for source, output in RIGHT:
        assert GERMAN.fault(source, output.strip()) is None, source
    japanese = Translation("ja", "en")
    assert japanese.fault("東京で USB を買いました。", "I bought a USB stick in Tokyo.") is None
    source = (
        "Yesterday we walked through the old town together and bought some bread, some cheese "
        "and a bottle of wine for the evening."
    )
    output = "昨天我们一起走过老城，买了一些面包、奶酪和一瓶晚上喝的酒。"
    assert Translation("en", "zh").fault(source, output) is None
    assert Translation("zh", "en").fault(output, source) is None
    assert Translation("xx", "yy").fault("abc def ghi jkl", "mno pqr stu vwx") is None


@pytest.mark.parametrize(
    ("source", "output", "found"),
    [
        ("Er sah den Hund.", "He saw the dog and the dog and the dog and the dog.", "repeats"),
        ("他看见了一只狗。", "狗狗狗狗狗狗狗狗狗狗狗狗狗狗狗狗狗狗狗狗", "repeats"),
        ("Er kam 1999 an.", "He arrived in 1998.", "lacks the number '1999'"),
        ("Es kostet 13 Euro.", "It costs euros.", "lacks the number '13'"),
        ("Hallo {name}!", "Hello {Name}!", "placeholder '{name}'"),
        ("Hallo %s!", "Hello!", "placeholder '%s'"),
        ("Das ist <b>gut</b>.", "That is <b>good.", "placeholder '</b>'"),
        ("Hallo du!", "Hello {you}!", "placeholder '{you}'"),
        ("Siehe www.a.de/x bitte.", "See www.b.de/x please.", "address 'www.a.de/x'"),
        ("Mein iPhone ist neu.", "My phone is new.", "lacks the name 'iPhone'"),
        ("1) Milch 2) Brot", "1) Milk and bread", "list marker"),
        ("Er ging gestern ins Kino.", "He went yesterday to", "ends within a sentence"),
        (LONG[0], "He went home.", "too short"),
        ("Er ging. Es regnete stark an diesem Tag.", "He left and that's.", "lacks a sentence"),
        (
            "Er ging nach Hause.",
            "He went home. " + "And then he went on and away. " * 2,
            "too long",
        ),
        (
            "Er ging gestern nach Hause.",
            "He went home yesterday. It was late.",
            "one more sentence",
        ),
        ("Wo wohnt er denn jetzt?", "Wo wohnt er denn jetzt?", "is not translated"),
        (
            "Wo wohnt er denn? Er geht jetzt.",
            "Where does he live? Er geht jetzt.",
            "not translated",
        ),
    ],
)
def test_what_is_wrong_is_said(source: str, output: str, found: str) -> None:
    said = GERMAN if source.isascii() or "ß" in source else Translation("zh", "en")
    assert found in str(said.fault(source, output.strip()))


def test_a_number_stands_for_itself_alone() -> None:
    source = "Er sah 20 Hunde, 20 Katzen und 1.000 Vögel."
    assert GERMAN.fault(source, "He saw 20 dogs, 20 cats and 1,000 birds.") is None
    for output in ("He saw 20 dogs, cats and 1,000 birds.", "He saw 20 dogs, 20 cats and 1 bird."):
        assert "lacks the number" in str(GERMAN.fault(source, output))


def test_the_mark_of_a_note_behind_a_word_is_no_part_of_a_name() -> None:
    assert GERMAN.fault("Der Hund1 schläft heute.", "The dog1 sleeps today.") is None
    assert GERMAN.fault("Der Hund1 schläft heute.", "The dog 1 sleeps today.") is None
    for output in ("The dog sleeps today.", "The dog12 sleeps today."):
        assert "lacks the name 'Hund1'" in str(GERMAN.fault("Der Hund1 schläft heute.", output))
    said = GERMAN.fault("Der iPhone5 ist heute neu.", "The phone5 is new today.")
    assert "lacks the name 'iPhone5'" in str(said)


def test_a_language_that_cannot_be_told_is_compared_word_by_word() -> None:
    said = Translation("xx", "yy")
    assert said.fault("abc def ghi jkl", "abc def ghi jkl") == "its output is not translated"
    assert Translation("de", "de-AT").fault("Wo ist er denn?", "Wo isser denn?") is None


WORDS = {"Haus": "house", "das": "the", "Das": "The", "ist": "is", "alt": "old", "und": "and",
         "groß": "large", "Liste": "List", "Milch": "milk", "Name": "Name", "Jahr": "Year",
         "Wir": "We", "gehen": "go", "heim": "home"}  # fmt: skip


def english(text: str) -> str:
    return re.sub(r"\w+", lambda word: WORDS.get(word[0], word[0]), text)


def translated(text: str, decoder: Scripted | None = None, **options: Any) -> Rewritten:
    decoder = decoder or Scripted(english, limit=40)
    decoder.languages = ("de", "en")
    return rewrite(decoder, text, **options)


def test_headings_tables_and_labels_are_translated_and_the_rest_stays() -> None:
    text = (
        "---\nName: Haus\n---\n\n# Das Haus #\r\n\r\nDas Haus\n===\n\n- Milch\n- [ ] Das Haus ist "
        "alt\n\n| Name | Jahr |\n|---|:--:|\n| Haus | 1900 |\nName\tJahr\n\n```\nDas Haus\n```\n"
        "[Haus]: https://haus.de\n\n> Wir gehen heim, das ist\n> alt und groß.\n\n{name}\n12.\n"
    )
    done = translated(text)
    kept = ("Name: Haus", "```\nDas Haus\n```", "[Haus]: https://haus.de")
    expected = english(text)
    for each in kept:
        expected = expected.replace(english(each), each)
    assert done.text == expected and not done.kept
    assert done.summary() == "8 of 10 pieces changed"
    correction = rewrite(Scripted(english, limit=40), text)
    assert [piece.line for piece in correction.pieces] == [23]


def test_pieces_are_as_many_sentences_as_were_trained_on() -> None:
    decoder = Scripted(english, trained_length=8)
    text = "Das Haus ist alt. Wir gehen heim. Das ist alt.\n\nWir gehen."
    translated(text, decoder)
    first = ["Das Haus ist alt. Wir gehen heim.", "Das ist alt.", "Wir gehen."]
    assert sorted(decoder.read) == sorted(first)


@pytest.mark.parametrize("by", ["sentence", "paragraph", "tokens"])
def test_what_is_not_text_stays_between_sentences(by: Any) -> None:
    text = "Das Haus ist alt. 1900! Wir gehen heim. {name}. Das ist alt.\n"
    done = translated(text, by=by, language="en")
    assert done.text == english(text)
    assert not any("1900" in piece.source for piece in done.pieces)
    assert "1900!" in rewrite(Scripted(english), text, by=by, min_similarity=0).text


def test_a_bad_translation_is_tried_again_by_clauses_then_by_beams_and_kept_otherwise() -> None:
    text = "Das Haus ist alt, und das Haus ist groß.\n"
    whole = text.strip()

    def bad_when_long(each: str) -> str:
        return "bad" if len(each) > 24 else english(each)

    done = translated(text, Scripted(bad_when_long))
    (piece,) = done.pieces
    assert done.text == english(text) and (piece.status, piece.retried) == ("changed", "by clauses")
    assert (piece.reason, piece.refused) == ("its output is too short", "bad")
    assert done.summary() == "1 of 1 piece changed, 1 at another try" and not done.kept
    assert piece.stats and piece.stats.rounds == 3

    bad = Scripted(lambda _: "bad", beams=("bad", english(whole), "worse"))
    (piece,) = translated(text, bad).pieces
    assert (piece.retried, piece.output) == ("by beams", english(whole))
    assert bad.read.count(whole) == 2 and len(bad.read) == 4
    bad.is_steady, bad.read[:] = True, []
    done = translated(text, bad)
    assert done.text == text and done.kept[0].refused == "bad" and bad.read.count(whole) == 1
    done = translated("Das Haus.", Scripted(lambda _: "bad " * 9, beams=["bad " * 9]))
    assert done.text == "Das Haus." and "repeats" in str(done.kept[0].reason)


def test_a_sentence_that_fails_does_not_keep_its_neighbours() -> None:
    text = "Das Haus ist alt. Wir gehen\nheim 1999. Das ist alt.\n"
    decoder = Scripted(lambda each: english(each).replace("1999", "99"), trained_length=30)
    done = translated(text, decoder)
    assert done.text == "The house is old. Wir gehen\nheim 1999. The is old.\n"
    assert [(piece.line, piece.status) for piece in done.pieces] == [
        (1, "changed"),
        (1, "kept"),
        (2, "changed"),
    ]
    assert done.kept[0].reason == "its output lacks the number '1999'"
    assert done.stats.rounds == 5, "all, each sentence, and beams"
    document = Document(decoder, text, RewriteOptions())  # type: ignore[arg-type]
    for count in range(4):
        decoder.read.clear()
        kept = {piece.start: piece for piece in done.pieces[:count]}
        rest = [*document.rewrite(done=kept)]
        assert document.result([*kept.values(), *rest]).text == done.text
        assert sorted(piece.start for piece in rest) == [p.start for p in done.pieces[count:]]


def test_lines_of_a_language_without_spaces_are_filled() -> None:
    text = "> We go home today, as it\n> is late.\n"
    decoder = Scripted(lambda _: "今天我们回家吧，因为已经太晚了。", limit=40)
    decoder.languages = ("en", "zh")
    done = rewrite(decoder, text)
    first, second, _ = done.text.split("\n")
    assert first.startswith("> 今") and second.startswith("> ") and second.endswith("。")
    assert (first + second).replace("> ", "") == "今天我们回家吧，因为已经太晚了。"


def test_the_language_of_the_text_is_found_if_it_is_not_given() -> None:
    decoder = Scripted(str, limit=40)
    decoder.languages = ("", "en")
    done = rewrite(decoder, "Wo wohnt er denn jetzt gerade?")
    assert done.kept[0].reason == "its output is not translated"


def test_a_similarity_is_refused() -> None:
    with pytest.raises(ValueError) as raised:
        translated("Das Haus.", min_similarity=0.5)
    check_message(str(raised.value), "min_similarity is 0.5")


def test_a_text_needs_a_tokenizer_and_may_be_checked_before_it_is_read() -> None:
    decoder = Scripted(str)
    check_rewriting(decoder, RewriteOptions(min_similarity=0.5))
    decoder.tokenizer = None
    for refuse in (rewrite, lambda *_: check_rewriting(decoder, RewriteOptions())):
        with pytest.raises(ValueError) as raised:
            refuse(decoder, "Das Haus.")
        check_message(str(raised.value), "needs a tokenizer")


def test_clauses_stand_between_commas() -> None:
    for text, expected in (
        (
            "Eins zwei drei, vier fünf sechs: sieben, acht.",
            ["Eins zwei drei,", "vier fünf sechs: sieben, acht."],
        ),
        ("Eins zwei drei vier, fünf sechs.", ["Eins zwei drei vier, fünf sechs."]),
        ("Eins zwei drei", ["Eins zwei drei"]),
    ):
        (paragraph,) = paragraphs(text, labels=True)
        found = clauses(text, paragraph)
        assert [each.flat(text) for each in found] == expected
