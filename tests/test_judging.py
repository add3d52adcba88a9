"""Changes of a corrector, judged one by one."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from speculative_t5.decoding import Logprob
from speculative_t5.documents import Document, RewriteOptions, Rewritten, read_file
from speculative_t5.documents.judging import (
    LEAST_OF_ALL,
    MOST_OF_ALL,
    WordEdit,
    judged_edits,
    least_in_text,
    least_logprob,
    other_language,
)
from speculative_t5.generation import Generation

import pytest
from docx import Document as Word
from pieces import Scripted

pytestmark = pytest.mark.cpu


def judged(before: str, after: str, doubtful: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return a text with the changes that are good; those to `doubtful` words are not."""
    new = after.split()

    def probability(edit: WordEdit, _: Sequence[str]) -> float:
        return 0.5 if {*new[edit.new_start : edit.new_end]} & {*doubtful} else 0.9

    found = judged_edits(before.split(), new, probability, 0.7)
    return " ".join(found.words), found.reasons


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("He go home.", "He goes home."),
        ("THe end is near.", "The end is near."),
        ("i live in usa", "I live in USA"),
        ("HE GO HOME", "HE GOES HOME"),
        ("He say: i know.", "He says: I know it."),
        ("I have 2 apple, e.g. red one.", "I have 2 apples, e.g. red ones."),
        ("the iPhone are new", "The iPhone is new"),
        ("Run `git log` before you goes.", "Run `git log` before you go."),
        ("We discussed about it.", "We discussed it."),
        ("method returns it", "A method returns it"),
        ("It is here with", "It is here with us."),
        ("The well known man .", "The well-known man."),
        ("I know. he go", "I know. He goes."),
        ("She have two apple, and i has one.", "She has two apples, and I have one."),
        ("Note: i go home.", "Note: I go home."),
        ("See Mr Smith at 5 p.m tomorrow", "See Mr. Smith at 5 p.m. tomorrow"),
        ('He asked "where is it" and left.', 'He asked "Where is it?" and left.'),
        ("No, no he go.", "No, no, he goes."),
        ("I think that is it.", "I think that that is it."),
        ("He saw the the cat.", "He saw the cat."),
        ("He saw another another cat.", "He saw another cat."),
        ("He had had it eat.", "He had had it eaten."),
    ],
)
def test_corrections_are_made(before: str, after: str) -> None:
    assert judged(before, after) == (after, [])


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("I was born in 1981.", "I was born in 1891.", "name"),
        ("Ask ann@example.org now.", "Ask anne@example.org now.", "name"),
        ("See https://x.org/a here.", "See https://x.org here.", "name"),
        ("Our GitHub page", "Our Github page", "name"),
        ("The NASA page", "The NSA page", "name"),
        ("Call os.path.join first.", "Call os.path first.", "name"),
        ("Set item_id here.", "Set item_ed here.", "name"),
        ("Give --no-guard here.", "Give no-guard here.", "name"),
        ("Tea & cake", "Tea and cake", "name"),
        ("A → B", "A > B", "name"),
        ("It costs 5 €.", "It costs 5 E.", "name"),
        ("Wait - here.", "Wait here.", "name"),
        ("For example, list[float, x]", "For example, the list[float, x]", None),
        ("Run `a apple` now.", "Run `an apple` now.", "code"),
        ("Run `a apple` now.", "Run `a big apple` now.", "code"),
        ("Use a or b or c here.", "Use here.", "lose words"),
        ("He came very late.", "He came.", "lose words"),
        ("Hunting phishing websites.", "Hunting websites.", "lose a word"),
        ("He came.", "He came although though though though.", "add words"),
        ("Check out On The Road now.", "Check out. On The Road now.", "divide"),
        ("I go home it is late.", "I go home. It is late.", "divide"),
        ("He adds a form to it.", "He adds a form a form to it.", "repeat"),
        ("It is on and open.", "It is on on and open.", "repeat"),
    ],
)
def test_what_has_to_stay_stays(before: str, after: str, what: str | None) -> None:
    text, reasons = judged(before, after)
    assert text == (before if what else after)
    assert [what in each for each in reasons if what] == [True] * bool(what)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Note: you can go.", "Note: You can go."),
        ("email - for letters", "email - For letters"),
        ("It's “so”, isn’t it?", "It's \"so\", isn't it?"),
        ("pieces (i.e. the last)", "pieces (i.e. The last)"),
    ],
)
def test_what_is_a_matter_of_style_is_left_without_a_word(before: str, after: str) -> None:
    assert judged(before, after) == (before, [])


def test_doubtful_changes_go_with_those_beside_them_and_no_others() -> None:
    before = "What means this word, and why do he always say it to all of the childs?"
    after = "What does this word mean, and why does he always say it to all of the children?"
    assert judged(before, after) == (after, [])
    part, reasons = judged(before, after, ["mean,"])
    assert part == "What means this word, and why do he always say it to all of the children?"
    assert len(reasons) == 1 and 'mean,"' in reasons[0] and "0.5000" in reasons[0]
    part, _ = judged(before, after, ["children?"])
    assert part == after.replace("children", "childs")
    assert judged(before, after, ["does", "children?"])[0] == before


def test_the_tokens_of_a_change_and_those_beside_it_tell_how_sure_a_model_is() -> None:
    own = [*range(20)]
    found = [Logprob(-1.0 - i, {}) for i in own]
    changed = [*own[:10], 99, 98, *own[11:]]
    assert least_logprob(found, own, changed) == -13.0, "two beside it"
    assert least_logprob(found, own, [*own[:10], *own[12:]]) == -14.0, "what was put in"
    assert least_logprob(found, own, [*own[:10], 99, *own[10:]]) == -13.0, "what was left out"
    assert least_logprob(found, own, [*own[:19], 99]) == -20.0


def test_a_sentence_keeps_its_sure_changes() -> None:
    source = "He go home and then she have a long walk with a apple."
    output = "He goes home and then she has a long walk with an apple."
    low = {"has": 0.5}

    class Sure(Scripted):
        def log_probabilities(self, source: Sequence[int], tokens: Sequence[int]) -> list[Logprob]:
            return [Logprob(math.log(low.get(word, 0.99)), {}) for word in output.split()]

    tokenizer = SimpleNamespace(unknown_id=None)
    decoder: Any = Sure(lambda _: output, limit=99, prefix="", tokenizer=tokenizer)
    document = Document(decoder, source, RewriteOptions(min_probability=0.7))
    result = document.result(document.rewrite())
    assert result.text == output.replace("has", "have")
    (piece,) = result.pieces
    assert (piece.status, piece.refused) == ("changed", output) and not result.kept
    assert piece.reason == '"has" for "have" has a probability of 0.5000, which is below 0.7'


@pytest.mark.parametrize(
    ("source", "output", "is_changed"),
    [
        ("Elle mange des pommes et du pain.", "Elle mange des poems et du pain.", False),
        ("Der Hund hat einen Ball gefunden.", "Der Hund had einen Ball found.", False),
        ("She eat a apple and some bread.", "She eats an apple and some bread.", True),
    ],
)
def test_sentences_in_other_languages_stay(source: str, output: str, is_changed: bool) -> None:
    def result(*corrects: str) -> Rewritten:
        tokenizer = SimpleNamespace(unknown_id=None, corrects=[*corrects])
        decoder: Any = Scripted(lambda _: output, limit=99, tokenizer=tokenizer)
        document = Document(decoder, source, RewriteOptions())
        return document.result(document.rewrite())

    done = result("en")
    assert done.text == (output if is_changed else source)
    if not is_changed:
        (piece,) = done.kept
        assert piece.reason and "seems to be" in piece.reason and "not correct" in piece.reason
    assert result("en", "fr", "de").text == output == result().text, "a model may know it"


def scripted_by(answer: Callable[[str], str]) -> Any:
    return Scripted(answer, limit=99)


def test_items_of_lists_get_no_capital() -> None:
    text = "he go home.\n\n- he go home. he go on.\n1. it go by.\n> - [ ] they go.\n\nsee it go."
    items = Document(scripted_by(str.capitalize), "- i go.\n- i'm in.", RewriteOptions())
    assert items.result(items.rewrite()).text == "- I go.\n- I'm in."
    decoder: Any = Scripted(lambda read: read.capitalize().replace("go", "goes"), limit=99)
    result = [Document(decoder, text, RewriteOptions(guard=guard)) for guard in (True, False)]
    guarded, all_made = (each.result(each.rewrite()).text for each in result)
    made = "- {}e goes home. He goes on.\n1. {}t goes by.\n> - [ ] {}hey goes.\n\nSee it goes."
    assert guarded == "He goes home.\n\n" + made.format("h", "i", "t")
    assert all_made == "He goes home.\n\n" + made.format("H", "I", "T")


def test_items_without_markers_get_no_capital() -> None:
    page = b"<ul><li>he go.<li><p>it <b>go.</b></p><p>i go.</p></ul><p>she go.</p>"
    capitals: Any = Scripted(lambda read: read.capitalize().replace("go", "goes"), limit=99)

    def made(data: bytes, name: str) -> bytes:
        form = read_file(data, name)
        document = Document(capitals, form.text, RewriteOptions(), form.lines)
        return form.rewritten(document.result(document.rewrite()).text)

    items = b"<ul><li>he goes.<li><p>it <b>goes.</b></p><p>I goes.</p></ul>"
    assert made(page, "a.html") == items + b"<p>She goes.</p>"
    word = Word()
    word.add_paragraph("she go.")
    word.add_paragraph("he go.", "List Bullet")
    numbered = word.add_paragraph("it go.")
    numbered._p.get_or_add_pPr().get_or_add_numPr().get_or_add_numId().val = 1
    word.add_paragraph("they go.", "List Number").paragraph_format.left_indent = 1
    plain = word.add_paragraph("we go.", "List Bullet")
    plain._p.get_or_add_pPr().get_or_add_numPr().get_or_add_numId().val = 0
    file = io.BytesIO()
    word.save(file)
    data = made(file.getvalue(), "a.docx")
    texts = [each.text for each in Word(io.BytesIO(data)).paragraphs]
    assert texts == ["She goes.", "he goes.", "it goes.", "they goes.", "We goes."]


def test_changes_have_to_be_surer_where_few_sentences_have_errors() -> None:
    for least in (0.1, 0.3, 0.7, 0.99, 1.0):
        assert least_in_text(least, 0, 0) == least, "nothing is known"
    assert least_in_text(0.7, 40, 100) == 0.7, "as many as are expected"
    few, many = least_in_text(0.7, 0, 99), least_in_text(0.7, 90, 99)
    assert 0.95 < few <= MOST_OF_ALL and LEAST_OF_ALL <= many < 0.55
    assert least_in_text(1, 0, 99) == 1 and least_in_text(0.99, 0, 99) == 0.99
    assert least_in_text(0.3, 99, 99) == 0.3
    rising = [least_in_text(0.7, 0.8, count) for count in range(1, 60, 5)]
    assert rising == sorted(rising) and rising[0] < 0.7 < rising[-1]
    # Bayes' rule: where the odds of an error are a third, those of a change have to be three times.
    least = least_in_text(0.7, 10**6 * 0.4 / (0.4 + 3 * 0.6), 10**6)
    assert least / (1 - least) == pytest.approx(3 * 0.7 / 0.3, rel=0.05)


@pytest.mark.parametrize("asked", [None, 0.7])
def test_a_text_is_judged_by_how_many_of_its_sentences_have_errors(asked: float | None) -> None:
    doubtful = "He go home with me."
    right = "We are here now. " * 60

    class Sure(Scripted):
        def iter_batch(self, *prompts: Any, **options: Any) -> Iterator[tuple[int, Generation]]:
            for index, done in super().iter_batch(*prompts, **options):
                values = (Logprob(math.log(0.8), {}) for _ in done.tokens)
                yield index, replace(done, logprobs=tuple(values))

    def result(text: str) -> Rewritten:
        tokenizer = SimpleNamespace(unknown_id=None)
        decoder: Any = Sure(
            lambda read: read.replace("go ", "goes "),
            limit=99,
            tokenizer=tokenizer,
            min_probability=0.7,
        )
        document = Document(decoder, text, RewriteOptions(min_probability=asked))
        first = [*document.rewrite()]
        again = document.settled(reversed(first))
        assert document.settled(again) == again, "the same however often"
        return document.result(again)

    assert result(doubtful).text == doubtful.replace("go", "goes")
    done = result(right + doubtful)
    if asked:
        assert done.text == right + doubtful.replace("go", "goes")
        return
    assert done.text == right + doubtful
    (piece,) = done.kept
    assert piece.reason and re.search(r"0\.7999|0\.8000", piece.reason)
    assert float(piece.reason.rpartition(" ")[2]) > 0.9
    assert result(f"{doubtful} " * 60).text == f"{doubtful} ".replace("go", "goes") * 60


def test_a_language_that_cannot_be_told_is_not_refused() -> None:
    assert other_language("Jeg vil gjerne ha en kopp kaffe med melk.", ["nb"]) is None
    assert other_language("This is a test of the system.", ["EN"]) is None
    assert other_language("Das ist ein Test des Systems.", ["EN"]) == "de"
