"""What kind of mistake an edit mends: rules in LanguageTool's terms, by words alone.

The kinds are ERRANT's (Bryant et al. 2017, "Automatic annotation and evaluation of error types"),
as far as they can be told without parsing; in other languages than English, only what any has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..documents import num_same, similarity

SPELLED_ALIKE = 0.55  # of letters, from which a word is another spelling and no other word
COMMON_BEGINNING = 3  # letters, at least, of two forms of a word
SHOWN_IN_MESSAGE = 60  # characters of an edit in a message


@dataclass(frozen=True)
class EditRule:
    """A kind of edit."""

    kind: str
    name: str
    description: str
    category: str = "GRAMMAR"
    issue: str = "grammar"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": f"T5_{self.kind}",
            "description": self.description,
            "issueType": self.issue,
            "category": {
                "id": self.category,
                "name": self.category.replace("_", " ").capitalize(),
            },
        }


SPACES_RULE = EditRule(
    "SPACES", "Spaces", "Words are joined or divided.", "TYPOGRAPHY", "whitespace"
)
CASE_RULE = EditRule(
    "CASE", "Capitals", "A letter is a capital, or is none.", "CASING", "typographical"
)
PUNCTUATION_RULE = EditRule(
    "PUNCTUATION", "Punctuation", "Signs between words.", "PUNCTUATION", "typographical"
)
APOSTROPHE_RULE = EditRule(
    "APOSTROPHE", "Apostrophe", "An apostrophe in a word.", "PUNCTUATION", "typographical"
)
SPELLING_RULE = EditRule("SPELLING", "Spelling", "The letters of a word.", "TYPOS", "misspelling")
CONFUSION_RULE = EditRule(
    "CONFUSION", "Confused words", "Words that sound alike.", "CONFUSED_WORDS", "misspelling"
)
ARTICLE_RULE = EditRule("ARTICLE", "Article", "The words a, an and the.")
PREPOSITION_RULE = EditRule("PREPOSITION", "Preposition", "Words such as in, on and at.")
PRONOUN_RULE = EditRule("PRONOUN", "Pronoun", "Words such as he, him and his.")
AGREEMENT_RULE = EditRule("AGREEMENT", "Agreement", "A verb and the subject that it goes with.")
FORM_RULE = EditRule("FORM", "Form of a word", "A tense, a number or another form of a word.")
MISSING_WORD_RULE = EditRule("MISSING", "Missing word", "Words are put in.")
EXTRA_WORD_RULE = EditRule("EXTRA", "Word too many", "Words are left out.")
WORD_RULE = EditRule("WORD", "Choice of word", "Another word.")
WORDS_RULE = EditRule("WORDS", "Choice of words", "Other words.")


_ARTICLES = frozenset("a an the".split())
_PREPOSITIONS = frozenset(
    "about above across after against along among around as at before behind below beside between "
    "by down during for from in inside into near of off on onto out over since through to toward "
    "towards under until up upon with within without".split()
)
PRONOUNS = (
    "i me my mine myself, you your yours yourself, he him his himself, she her hers herself, "
    "it its itself, we us our ours ourselves, they them their theirs themselves, "
    "who whom whose which that"
)
_SUBJECTS = frozenset("i you he she it we they who which that this these those there".split())
PRESENT = (
    "am is are 's, was were, have has, do does, don't doesn't, haven't hasn't, isn't aren't, "
    "wasn't weren't"
)
CONFUSED = (
    "their there they're, to too two, its it's, your you're, than then, lose loose, whose who's, "
    "affect effect, accept except, quite quiet quit, were where we're, weather whether, of off, "
    "know now no, hear here, by buy bye, right write, week weak, piece peace, threw through, "
    "passed past, advice advise, principal principle, brake break, bare bear, sea see, son sun, "
    "whole hole, would wood, lead led, lie lay, breath breathe"
)
FORMS = (
    "am is are was were be been being, have has had having, do does did done doing, "
    "go goes went gone going, come came, become became, begin began begun, break broke broken, "
    "bring brought, build built, buy bought, catch caught, choose chose chosen, drink drank drunk, "
    "drive drove driven, eat ate eaten, fall fell fallen, feel felt, fight fought, find found, "
    "fly flew flown, forget forgot forgotten, get got gotten, give gave given, grow grew grown, "
    "hear heard, hold held, keep kept, know knew known, leave left, lose lost, make made, "
    "mean meant, meet met, pay paid, ride rode ridden, ring rang rung, run ran, say said, "
    "see saw seen, sell sold, send sent, sing sang sung, sit sat, sleep slept, speak spoke spoken, "
    "spend spent, stand stood, steal stole stolen, swim swam swum, take took taken, teach taught, "
    "tell told, think thought, throw threw thrown, understand understood, wake woke woken, "
    "wear wore worn, win won, write wrote written, child children, man men, woman women, "
    "person people, foot feet, tooth teeth, mouse mice, good better best well, bad worse worst, "
    "much many more most, little less least few fewer, this these, that those, can could, "
    "will would, shall should, may might"
)


def _groups(text: str) -> dict[str, int]:
    """Return the group of each word; groups are divided by commas, words by blanks."""
    return {word: number for number, group in enumerate(text.split(",")) for word in group.split()}


_OF_PRONOUNS, _OF_PRESENT, _OF_CONFUSED, _OF_FORMS = map(
    _groups, (PRONOUNS, PRESENT, CONFUSED, FORMS)
)
_WORD_OF_EDIT = re.compile(r"\w+(?:['’]\w+)*")


def rule_of(before: str, after: str, previous: str = "", language: str = "en") -> EditRule:
    """Return the rule for an edit by its kind; `previous` is the word before it."""
    if "".join(before.split()) == "".join(after.split()):
        return SPACES_RULE
    if before.casefold() == after.casefold():
        return CASE_RULE
    old, new = (
        _WORD_OF_EDIT.findall(text.casefold().replace("’", "'")) for text in (before, after)
    )
    if old == new:
        return PUNCTUATION_RULE
    same, left, put = _different(old, new)
    if language == "en" and (rule := _english_rule(left, put, same or _bare(previous))):
        return rule
    if not left or not put:
        return MISSING_WORD_RULE if put else EXTRA_WORD_RULE
    if len(left) == len(put) == 1:
        return SPELLING_RULE if _is_spelled_alike(*left, *put) else WORD_RULE
    return WORDS_RULE


def _bare(word: str) -> str:
    """Return a word in small letters, without the signs around it."""
    return "".join(_WORD_OF_EDIT.findall(word.casefold())[-1:])


def _different(old: Sequence[str], new: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the words in which two texts differ, and before these the last that both have."""
    start = num_same(old, new)
    end = num_same(old[start:][::-1], new[start:][::-1])
    left, put = ([*words[start : len(words) - end]] for words in (old, new))
    return old[start - 1] if start else "", left, put


def _english_rule(left: Sequence[str], put: Sequence[str], previous: str) -> EditRule | None:
    """Return the rule of English for a word that is another one, put in or left out."""
    changed = {*left, *put}
    if len(left) > 1 or len(put) > 1 or not changed or (changed == {previous} and not put):
        return None
    closed = (
        (_ARTICLES, ARTICLE_RULE),
        (_PREPOSITIONS, PREPOSITION_RULE),
        (_OF_PRONOUNS, PRONOUN_RULE),
    )
    for words, rule in closed:
        if changed <= {*words}:
            return rule
    return _rule_of_words(left[0], put[0], previous) if left and put else None


def _rule_of_words(old: str, new: str, previous: str) -> EditRule | None:
    """Return the rule of English for a word that is another one."""
    if _same(_OF_CONFUSED, old, new):
        return CONFUSION_RULE
    if old.replace("'", "") == new.replace("'", ""):
        return APOSTROPHE_RULE
    if _same(_OF_PRESENT, old, new) or (previous in _SUBJECTS and _has_ending(old, new)):
        return AGREEMENT_RULE
    bases = {old, re.sub(r"(?:s|es|d|ed|ing)$", "", old)}  # of "childs", too
    if any(_same(_OF_FORMS, base, new) for base in bases) or _is_regular_form(old, new):
        return FORM_RULE
    return None


def _same(groups: dict[str, int], old: str, new: str) -> bool:
    return old in groups and groups[old] == groups.get(new)


def _has_ending(old: str, new: str) -> bool:
    """Whether one of two words is the other with an s."""
    short, long = sorted((old, new), key=len)
    return long in (f"{short}s", f"{short}es", re.sub("y$", "ies", short))


def _is_regular_form(old: str, new: str) -> bool:
    """Whether two words differ in an ending of English alone."""
    stems = [re.sub(r"(?:i?(?:er|est|ed|es|ly)|ing|[esdyi])$", "", word) for word in (old, new)]
    short, long = sorted(stems, key=len)
    doubled = short + short[-1:]
    return len(short) >= COMMON_BEGINNING and long in (short, doubled) and old[0] == new[0]


def _is_spelled_alike(old: str, new: str) -> bool:
    return similarity(old, new) >= SPELLED_ALIKE


def message_of(rule: EditRule, words: Sequence[str]) -> str:
    """Return what is said of an edit: its kind, and the new words with those beside them."""
    return f"{rule.name}: “{' '.join(words)[:SHOWN_IN_MESSAGE]}”"
