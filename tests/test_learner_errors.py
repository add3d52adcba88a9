"""Learners' errors made by rule, and the surroundings that both sides share."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest
from conftest import REPOSITORY
from corruption import PREFIX, training_examples
from learner_errors import Learner, nouns, phrases, spelling, verbs
from learner_errors.surroundings import TEMPLATES, aside, fill, rename, surround
from learner_errors.tables import Lexicon, Row, Table
from learner_errors.unseen import Words, british, interject, replace_words

# Verbs are known by their forms, and a plural by its singular.
WORDS = """live lives lived living work works worked working like likes liked liking talk talks
talked talking enjoy enjoys enjoyed enjoying want wants wanted wanting finish finishes arrive
arrives arrived arriving hour book quick careful help helps helped helping""".split()
LEXICON = Lexicon(WORDS * 5)
MADE_UP = Words(WORDS)
TABLES = {
    f"{module.__name__}.{name}": table
    for module in (phrases, nouns, verbs, spelling)
    for name, table in vars(module).items()
    if isinstance(table, Table)
}


def wrong(rule: object, text: str) -> set[str | None]:
    assert callable(rule)
    return {rule(text, random.Random(seed), LEXICON) for seed in range(60)}


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (phrases.GOVERNED, "It depends on you.", {"It depends of you.", "It depends from you."}),
        (phrases.GOVERNED, "He is married to her.", {"He is married with her."}),
        (phrases.GOVERNED, "It is late.", {None}),
        (phrases.PLACE_AND_TIME, "I went home.", {"I went to home.", "I went at home."}),
        (phrases.WORD_CHOICE, "He told me.", {"He said me.", "He said to me that."}),
        (phrases.WORD_CHOICE, "I made a mistake.", {"I did a mistake."}),
        (phrases.UNCOUNTABLE, "So much money!", {"So many money!", "So much moneys!"}),
        (nouns.ARTICLE, "The sun is hot.", {"Sun is hot."}),
        (nouns.PLURAL, "The children ran.", {"The childs ran.", "The childrens ran.",
                                             "The child ran."}),
        (nouns.PLURAL, "People are kind.", {"People is kind.", "Peoples are kind."}),
        (nouns.COMPARISON, "It is worse.", {"It is more bad.", "It is more worse.",
                                            "It is badder.", "It is worser."}),
        (nouns.ADJECTIVE, "I was bored.", {"I was boreds.", "I was to bored.", "I was boring."}),
        (nouns.ADVERB, "She can swim well.", {"She can swim good."}),
        (nouns.POSSESSIVE, "It is mine.", {"It is my.", "It is mines."}),
        (nouns.bare_adverb, "Drive carefully.", {"Drive careful."}),
        (nouns.bare_adverb, "The family is here.", {None}),
        (nouns.bare_plural, "I read two books.", {"I read two book."}),
        (nouns.bare_plural, "I read books.", {None}),
        (verbs.TENSE, "Call me when you arrive.", {"Call me when you will arrive."}),
        (verbs.TENSE, "He smiles when you arrive.", {None}),
        (verbs.WOULD, "If I were you, I would go.", {"If I would be you, I would go.",
                                                     "If I will be you, I would go."}),
        (verbs.SINCE, "I've lived here for two years.", {
            "I live here for two years.", "I've lived here since two years.",
            "I've lived here during two years."}),
        (verbs.PAST, "She worked yesterday.", {
            "She has worked yesterday.", "She work yesterday.", "She works yesterday."}),
        (verbs.PAST, "She worked here.", {None}),
        (verbs.AGREEMENT, "He likes it.", {"He like it."}),
        (verbs.COMPLEMENT, "I enjoy talking.", {"I enjoy to talk.", "I enjoy talk."}),
        (verbs.COMPLEMENT, "Let me help.", {"Let me to help."}),
        (verbs.NEGATION, "I don't work.", {
            "I not work.", "I no work.", "I work not.", "I am not work."}),
        (verbs.QUESTION, "Where are you?", {"Where you are?"}),
        (verbs.QUESTION, "I know where he is.", {
            "I know where is he.", "I know that where is he."}),
        (verbs.QUESTION, "Where did you arrive?", {
            "Where you arrived?", "Where did you arrived?", "Where arrived you?"}),
        (verbs.ORDER, "I like tea very much.", {"I like very much tea."}),
        (verbs.ORDER, "Pick it up.", {"Pick up it."}),
        (verbs.SUBJECT, "It's late.", {"Is late."}),
        (spelling.MISSPELT, "I know because.", {
            "I now because.", "I konw because.", "I kno because.", "I know becouse.",
            "I know becuase.", "I know becaus.", "I know becose.", "I know beacause.",
            "I know cause of."}),
        (spelling.APART, "Thank you!", {"Thankyou!", "Thank's you!"}),
        (spelling.PUNCTUATION, "It's late.", {"Its late.", "It´s late."}),
        (spelling.lower_title, "I speak French.", {"i speak French.", "I speak french."}),
        (spelling.upper_noun, "I like the book.", {"I like the Book."}),
        (spelling.question_stop, "Who?", {"Who.", "Who", "Who ?"}),
        (spelling.question_stop, "Who.", {None}),
    ],
)  # fmt: skip
def test_rules(rule: object, text: str, expected: set[str | None]) -> None:
    assert wrong(rule, text) == expected


@pytest.mark.parametrize("name", TABLES)
def test_rows_refer_to_groups_that_their_patterns_have(name: str) -> None:
    for row in TABLES[name].rows:
        numbers = re.findall(r"[\\<](\d)", " ".join(row.wrong))
        assert all(1 <= int(number) <= row.pattern.groups for number in numbers), row
        forms = re.findall(r"<(\d) ", " ".join(row.wrong))
        assert {int(number) for number in forms} <= row.forms.keys(), row


def test_rows_are_skipped_only_where_they_do_not_match() -> None:
    def everywhere(row: Row) -> Row:
        return Row(row.pattern, row.forms, row.wrong, frozenset())

    sentences = (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()
    texts = [side for line in (REPOSITORY / "tests" / "learners.tsv").read_text().splitlines()
             for side in line.split("\t")]  # fmt: skip
    for table in TABLES.values():
        slow = Table(table.meaning, table.text, table.needs)
        object.__setattr__(slow, "rows", tuple(map(everywhere, table.rows)))
        for text in [*sentences, *texts][::2]:
            found = [t(text, random.Random(0), LEXICON) for t in (table, slow)]
            assert found[0] == found[1], text


def test_a_spelling_by_ear_is_no_other_word() -> None:
    for text in ("He talked.", "I finished.", "She arrives."):
        for out in wrong(spelling.by_ear, text):
            assert out is None or out.strip(".").split()[1] not in WORDS


def test_surroundings_are_the_same_on_both_sides() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        source, target = surround(("He go.", "He goes."), rng, MADE_UP)
        assert source.replace("He go.", "He goes.") == target
        source, target = rename(("Tom go.", "Tom goes."), rng, MADE_UP)
        assert source.split()[0] == target.split()[0]
        assert rename(("tom go.", "Tom goes."), rng, MADE_UP) == ("tom go.", "Tom goes.")
    for template in TEMPLATES:
        assert not re.search(r"[{}#]{2}|\{", fill(template, random.Random(0), ["Hallo"], MADE_UP))


def test_a_new_word_stands_on_both_sides_and_keeps_its_ending() -> None:
    found = {replace_words(("He talk slowly.", "He talks slowly."), MADE_UP, random.Random(seed))
             for seed in range(20)}  # fmt: skip
    assert len(found) > 5
    assert sum(source.endswith("ly.") for source, _ in found) > len(found) / 2
    for source, target in found:
        assert source.startswith("He talk ")
        assert source.replace("talk", "talks", 1) == target


def test_something_is_put_at_the_same_place_of_both_sides() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        text = aside(rng, MADE_UP)
        source, target = interject(("He go to work.", "He goes to work!"), text, rng)
        assert (source, target) in {
            (f"He go to {text} work.", f"He goes to {text} work!"),
            (f"He {text} go to work.", f"He {text} goes to work!"),
        }
    assert interject(("He go.", "She goes."), "x", random.Random(0)) == ("He go.", "She goes.")


def test_british_spellings_change_only_what_both_sides_have() -> None:
    assert british(("A colorful neighbor.", "A colorful neighbor!")) == (
        "A colourful neighbour.", "A colourful neighbour!")  # fmt: skip
    assert british(("A colr.", "A color.")) == ("A colr.", "A color.")


def test_examples_join_sentences_and_leave_some_alone() -> None:
    sentences = [line for line in (REPOSITORY / "tests" / "sentences.txt").read_text().splitlines()]
    learner = Learner(sentences * 5, ["Guten Tag."])
    pairs = list(islice(training_examples(sentences, learner, seed=0), 200))
    assert pairs[:20] == list(islice(training_examples(sentences, learner, seed=0), 20))
    same = sum(source == PREFIX + target for source, target in pairs)
    assert 200 * 0.2 < same < 200 * 0.5
    assert max(len(target) for _, target in pairs) > 200
    assert any("\n" in target for _, target in pairs)
