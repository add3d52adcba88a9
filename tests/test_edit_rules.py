"""Rules of edits, by the mistake that they mend."""

from collections import Counter

from speculative_t5.serve import edit_rules
from speculative_t5.serve.edit_rules import ARTICLE_RULE, message_of, rule_of

import pytest

pytestmark = pytest.mark.cpu

KINDS = """
SPACES: a lot < alot / anything < any thing
CASE: Paris < paris
PUNCTUATION: home, < home
APOSTROPHE: don't < dont / Tom's < Toms
SPELLING: receive < recieve / Wednesday < Wensday / beautiful < beatiful
CONFUSION: it's < its / their < there / too < to / than < then
ARTICLE: an < a / the book < book / school < the school / a < the
PREPOSITION: on < in / at home < home / home < to home
PRONOUN: him < he / her < she / she < he
AGREEMENT: has < have / were < was / he goes < he go / which work < which works / don't < doesn't
FORM: went < go / children < childs / apples < apple / happier < happy / those < that
MISSING: to be < to / it very much < it
EXTRA: the < the the / we < we also
WORD: tired < sorry / make < do
WORDS: much cash < many money / b a < a b / b c < a
"""


@pytest.mark.parametrize("line", KINDS.strip().splitlines())
def test_edits_have_the_kinds_of_their_mistakes(line: str) -> None:
    kind, _, pairs = line.partition(": ")
    for pair in pairs.split(" / "):
        after, _, before = pair.partition(" < ")
        assert rule_of(before, after).kind == kind, pair


def test_the_word_before_tells_verbs_from_nouns() -> None:
    assert rule_of("like", "likes", "She").kind == "AGREEMENT"
    assert rule_of("like", "likes", "“she").kind == "AGREEMENT"
    assert rule_of("like", "likes", "two").kind == "FORM"
    assert rule_of("one stop", "one stops").kind == "FORM"


def test_other_languages_have_no_rules_of_english() -> None:
    assert rule_of("a", "an", language="de").kind == "SPELLING"
    assert rule_of("in", "auf", language="de").kind == "WORD"
    assert rule_of("Haus", "haus", language="de").kind == "CASE"


def test_messages_show_the_words_and_those_beside_them() -> None:
    assert message_of(ARTICLE_RULE, ["eats", "an", "apple."]) == "Article: “eats an apple.”"
    assert len(message_of(ARTICLE_RULE, ["word"] * 1000)) < 80


def test_no_word_is_in_two_groups() -> None:
    for text in (edit_rules.PRONOUNS, edit_rules.PRESENT, edit_rules.CONFUSED, edit_rules.FORMS):
        assert not [word for word, n in Counter(text.replace(",", " ").split()).items() if n > 1]
