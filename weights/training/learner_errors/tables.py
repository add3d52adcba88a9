"""Rules as tables of rewritings: a pattern of right text, and the wrong texts that replace it."""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from corruption import bare, verb_forms

FORMS = ("BASE", "THIRD", "PAST", "PART", "ING")  # columns of `corruption.verb_forms`
# Groups that a pattern can name.
GROUPS = {
    "SUBJ": "I|you|he|she|it|we|they|Tom|Mary",
    "THIRDSUBJ": "he|she|it|Tom|Mary",
    "OBJ": "me|you|him|her|it|us|them|Tom|Mary",
    "POSS": "my|your|his|her|its|our|their",
    "NUM": "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty|fifty|"
    "a hundred|several|many|a few|[2-9]|[1-9][0-9]+",
    "SPAN": "minutes|hours|days|weeks|months|years",
    "FAMILY": "father|mother|brother|sister|uncle|aunt|son|daughter|wife|husband|friend|boss|"
    "teacher|cousin|grandfather|grandmother|neighbor|dad|mom",
}
_MACRO = re.compile(rf"\b({'|'.join(sorted([*GROUPS, *FORMS], key=len, reverse=True))})\b")
_TOKEN = re.compile(r"[\w']+")
_INSERT = re.compile(rf"<(\d) ({'|'.join(FORMS)})>|\\(\d)")


class Lexicon:
    """The words of some sentences: which there are, and the forms of the verbs among them."""

    def __init__(self, sentences: list[str]) -> None:
        counts = Counter(bare(word) for sentence in sentences for word in sentence.split())
        self.words = {word for word, n in counts.items() if n >= 5 and word.isalpha()}
        self.verbs = verb_forms(self.words)

    def form(self, word: str, name: str) -> str:
        """Return a verb's form, one of `FORMS`."""
        return self.verbs[word.lower()][FORMS.index(name)]

    def is_form(self, word: str, name: str) -> bool:
        """Whether a word is this form of a verb; `is` and `was` are not like others."""
        verb = self.verbs.get(word.lower())
        if verb is None or (verb[0] == "be" and name in ("THIRD", "PAST")):
            return False
        return verb[FORMS.index(name)] == word.lower()

    def singular(self, word: str) -> str | None:
        """Return the singular of a regular plural that has one among the words."""
        endings = (("ies", "y"), ("es", ""), ("s", ""))
        for ending, single in endings:
            stem = word.lower().removesuffix(ending) + single
            if word.endswith(ending) and len(stem) > 2 and stem in self.words:
                return stem
        return None


Rule = Callable[[str, random.Random, Lexicon], str | None]


@dataclass(frozen=True)
class Row:
    """A pattern, the verb form that each of some groups must have, and what may replace it."""

    pattern: re.Pattern[str]
    forms: Mapping[int, str]
    wrong: tuple[str, ...]
    first: frozenset[str]  # words of which a match begins with one; empty if it may be any

    def applies(self, found: re.Match[str], lexicon: Lexicon) -> bool:
        return all(lexicon.is_form(found[group], form) for group, form in self.forms.items())


@dataclass(frozen=True)
class Table:
    r"""A rule: one place that a row's pattern matches is rewritten, chosen at random.

    A line of `text` is `PATTERN => WRONG / WRONG`. A pattern is a regular expression of whole
    words, whatever their case, in which SUBJ and other names of `GROUPS` are groups, and BASE,
    THIRD, PAST, PART and ING are groups of one word that is that form of a verb. In a wrong text
    `\1` is a group, and `<1 ING>` a form of the verb in it.
    """

    meaning: str
    text: str
    needs: str = ""  # a pattern that must occur somewhere in the sentence
    rows: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        lines = [line for line in self.text.strip().splitlines() if line]
        object.__setattr__(self, "rows", tuple(map(_parse, lines)))

    def __call__(self, text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
        """Return the text with one error, or None where no row applies."""
        if self.needs and not re.search(rf"\b(?:{self.needs})", text, re.IGNORECASE):
            return None
        words = {part for word in _TOKEN.findall(text.lower()) for part in (word, *_parts(word))}
        places = [
            (row, found)
            for row in self.rows
            if not row.first or row.first & words
            for found in row.pattern.finditer(text)
            if row.applies(found, lexicon)
        ]
        rng.shuffle(places)
        for row, found in places:
            damaged = replace(text, found, _fill(rng.choice(row.wrong), found, lexicon))
            if damaged != text:
                return damaged
        return None


def replace(text: str, found: re.Match[str], wrong: str) -> str:
    """Replace a match, with a capital where it had one at the beginning of the sentence."""
    right = found[0]
    if found.start() == 0 or text[: found.start()].strip("\"'“‘") == "":
        wrong = wrong[:1].upper() + wrong[1:] if right[:1].isupper() else wrong
        head = right.split()[0]
        # The word that began the sentence now stands within it.
        if not wrong.startswith(head) and head not in ("I", "I'm", "I've", "Tom", "Mary"):
            wrong = re.sub(rf"(?<=\s){re.escape(head)}\b", head.lower(), wrong)
    damaged = text[: found.start()] + wrong + text[found.end() :]
    return " ".join(damaged.split())


def _parse(line: str) -> Row:
    left, _, right = line.partition(" => ")
    pattern, forms, last = "", {}, 0
    for part in _MACRO.finditer(left):
        pattern += left[last : part.start()]
        if pattern.count("(") > pattern.count(")"):  # within a group
            pattern += f"(?:{GROUPS[part[0]]})"
        else:
            if part[0] in FORMS:
                forms[len(re.findall(r"\((?!\?)", pattern)) + 1] = part[0]
            pattern += f"({GROUPS.get(part[0], '[A-Za-z]+')})"
        last = part.end()
    pattern += left[last:]
    compiled = re.compile(rf"(?<![\w'-]){pattern}(?![\w-])", re.IGNORECASE)
    return Row(compiled, forms, tuple(right.split(" / ")), _first_words(pattern))


def _first_words(pattern: str) -> frozenset[str]:
    """Return the words that a match can begin with, or none where the pattern does not list them."""
    beginning = re.match(r"\(((?:[^()]|\(\?:[^()]*\))*)\)(.?)", pattern)
    if beginning is None:
        alternatives = [pattern]
    elif beginning[2].strip():  # the word goes on, or there may be none
        return frozenset()
    else:
        alternatives = re.sub(r"\(\?:|\)", "", beginning[1]).split("|")
    words = set()
    for alternative in alternatives:
        word = alternative.split()[0].lower()
        optional = re.fullmatch(r"([a-z']*)([a-z])\?([a-z]*)", word)
        if optional:
            words |= {optional[1] + optional[3], optional[1] + optional[2] + optional[3]}
        elif re.fullmatch(r"[a-z0-9']+", word):
            words.add(word)
        else:
            return frozenset()
    return frozenset(words)


def _parts(word: str) -> list[str]:
    """Split a contraction: he's into he and 's, don't into don and n't."""
    before, apostrophe, after = word.partition("'")
    return [before, apostrophe + after, "n't"] if apostrophe else []


def _fill(wrong: str, found: re.Match[str], lexicon: Lexicon) -> str:
    def insert(part: re.Match[str]) -> str:
        if part[3]:
            return found[int(part[3])] or ""
        return lexicon.form(found[int(part[1])], part[2])

    return _INSERT.sub(insert, wrong)
