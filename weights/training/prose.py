"""Examples from edited prose: technical text and stories, most of it to be left as it is.

Short everyday sentences do not show a model what documents have: Markdown, code, names in small
letters, items of lists without a full stop, and long sentences. Here one to several sentences of a
paragraph are an example, some of them in the form of a list's item, a label's text or a fragment.
Where an example is damaged, it is by rules of which no outcome is good English of another meaning,
and neither the capital nor the full stop of a sentence is taken away: edited text has many lines
that lack them rightly. Code, addresses, numbers and names are never damaged.
"""

import lzma
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from speculative_t5.documents.splitting import segments

from corruption import NEIGHBOURS, PREFIX, bare, held_out
from held_text import Held, held
from learner_errors import nouns, phrases, spelling, verbs
from learner_errors.surroundings import quote
from learner_errors.tables import Lexicon, Rule, replace
from learner_errors.unseen import Pair, Words

LONGEST = 400  # characters of an example, some 150 tokens
STORIES = 0.2  # share of the examples
RIGHT = {"technical": 2 / 3, "stories": 1 / 2}  # shares of the examples that are left alone
SHAPED = 0.4  # share of single technical sentences that become items, labels and the like
PLAIN = 0.6  # share of examples without their marks, as `document` gives text to a model

# Words that sound or look alike, of which only one can stand in a place.
ALIKE = [
    "their there they're", "its it's", "then than", "your you're", "to too", "of off", "by buy",
    "where were", "hear here", "whose who's", "lose loose", "affect effect",
    "quite quiet", "whether weather", "right write", "whole hole", "piece peace",
    "except accept", "past passed", "through threw", "new knew", "a an", "is are", "has have",
    "does do", "doesn't don't", "this these", "these this", "many much",
]  # fmt: skip
_OTHERS = {words.split()[0]: words.split()[1:] for words in ALIKE} | {
    words.split()[1]: words.split()[:1] for words in ALIKE
}
# Where these are put in or taken out, the sentence may be as good, or mean something else.
_NEGATIVE = frozenset("no not never nor cannot nobody none nothing without".split())
_TIMES = frozenset("until till since during".split())
_REPEATED = frozenset("that had very so on".split())  # "He had had it"
_ADJECTIVES = frozenset("kindly weekly monthly yearly quarterly hourly deadly costly".split())
_ARTICLES = frozenset({"a", "an", "the", "one"})
_BEFORE_TO = frozenset("is are was were be been am have has had used".split())
_LABELS = (
    "Note|NOTE|Warning|Tip|Hint|Important|Example|For example|In short|Caution|Security notice|"
    "Known problem|New in this version|Changed|Fixed|Default|Returns|Usage|Remember|Limits"
).split("|")
_MARKERS = ("", "", "", "- ", "* ", "• ", "1. ", "2) ", "+ ", "[ ] ")


def read_prose(paths: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Read the paragraphs of .txt or .txt.xz files, one a line: (training, held out)."""
    unique: dict[str, None] = {}
    for path in paths:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            unique.update(dict.fromkeys(" ".join(line.split()) for line in file if line.strip()))
    return [p for p in unique if not held_out(p)], [p for p in unique if held_out(p)]


@dataclass(frozen=True)
class Paragraphs:
    """Paragraphs of technical text and of stories; one of the two may have none."""

    technical: Sequence[str]
    stories: Sequence[str]

    @classmethod
    def read(
        cls, technical: Sequence[Path], stories: Sequence[Path]
    ) -> tuple["Paragraphs", "Paragraphs"]:
        """Read files of both kinds: (training, held out)."""
        both = zip(read_prose(technical), read_prose(stories), strict=True)
        seen, unseen = (cls(*kinds) for kinds in both)
        return seen, unseen

    def kind(self, rng: random.Random) -> str:
        """Choose a kind that there is, stories in their share."""
        if self.technical and self.stories:
            return "stories" if rng.random() < STORIES else "technical"
        return "technical" if self.technical else "stories"


class Prose:
    """Makes examples of paragraphs.

    Args:
        known: Paragraphs and sentences whose words tell a misspelling from another word.
        foreign_texts: Texts that are quoted within English ones.
    """

    def __init__(self, known: Sequence[str], foreign_texts: Sequence[str]) -> None:
        self.lexicon = Lexicon([*known])
        self._words = Words(known)
        self._foreign = foreign_texts
        codes = re.findall(r"`([^`\n]{2,40})`", "\n".join(known))
        self._codes = sorted({code for code in codes if code.strip() == code}) or ["x"]

    def example(self, paragraphs: Paragraphs, rng: random.Random) -> Pair:
        """Return a prompt and its correction, which for most is the same text."""
        kind = paragraphs.kind(rng)
        right = self._right(getattr(paragraphs, kind), rng, shaped=kind == "technical")
        text = held(right, self.lexicon.words)
        source = text.text
        if rng.random() >= RIGHT[kind]:
            source = self.damaged(text, rng)
        plain = rng.random() < PLAIN
        pair = text.filled(source, plain=plain), text.filled(text.text, plain=plain)
        if rng.random() < 0.2:
            pair = straight(pair[0]), straight(pair[1])
        return PREFIX + pair[0], pair[1]

    def damaged(self, text: Held, rng: random.Random) -> str:
        """Put one to three errors into the words of a text that may be damaged."""
        damaged = text.text
        for _ in range(rng.choices([1, 2, 3], [60, 28, 12])[0]):
            for _attempt in range(6):
                rule = rng.choices(RULES, WEIGHTS)[0]
                worse = rule(damaged, rng, self.lexicon)
                if worse is not None and is_error(damaged, worse) and text.keeps(worse):
                    damaged = worse
                    break
        return damaged

    def _right(self, paragraphs: Sequence[str], rng: random.Random, *, shaped: bool) -> str:
        """Return sentences of one paragraph, at most `LONGEST` characters in all."""
        while True:
            sentences = [s.strip() for s in segments("en", rng.choice(paragraphs))]
            first = rng.randrange(len(sentences))
            count = rng.choices([1, 2, 3, 5], [62, 20, 11, 7])[0]
            while count:
                text = " ".join(sentences[first : first + count])
                if 2 <= len(text) <= LONGEST and not Held.reserved(text):
                    if count == 1 and shaped and rng.random() < SHAPED:
                        return self.shaped(text, rng)
                    return text
                count -= 1

    def shaped(self, sentence: str, rng: random.Random) -> str:
        """Give a right sentence a form that lists, labels and fragments of sentences have."""
        shapes: list[Callable[[str, random.Random], str]] = [
            self._item, self._item, self._item, self._label, self._described, self._described,
            self._named, self._named, _fragment, _fragment, _ampersand, self._quoting, self._code,
        ]  # fmt: skip
        return rng.choice(shapes)(sentence, rng)

    def name(self, rng: random.Random) -> str:
        """Return a name in small letters: of a package, a command, an option."""
        if rng.random() < 0.3:
            codes = [rng.choice(self._codes) for _ in range(4)]
            return next((code for code in codes if re.fullmatch(r"[a-z][\w.-]*", code)), "x")
        name = self._words.new(rng).lower()
        if rng.random() < 0.3:
            parts = rng.choice(["{}-{}", "{}_{}", "{}.{}"])
            name = parts.format(name, self._words.new(rng).lower())
        return rng.choice(
            ["{}", "{}", "{}", "py{}", "{}2", "{}lib", "{}.py", "--{}", "{}()"]
        ).format(name)

    def _small(self, sentence: str) -> str:
        """Begin a sentence with a small letter, unless it begins with a name or `I`."""
        first = re.match(r"[A-Z][a-z]*(?=[ ,])", sentence)
        if first is None or first[0] == "I" or first[0].lower() not in self.lexicon.words:
            return sentence
        return sentence[0].lower() + sentence[1:]

    def _item(self, sentence: str, rng: random.Random) -> str:
        text = _unended(sentence) if rng.random() < 0.8 else sentence
        text = self._small(text) if rng.random() < 0.5 else text
        return rng.choice(_MARKERS) + text

    def _label(self, sentence: str, rng: random.Random) -> str:
        label = rng.choice(_LABELS)
        if rng.random() < 0.2:
            label = self._words.new(rng).capitalize()
        if rng.random() < 0.2:
            label = f"**{label}**"
        text = self._small(sentence) if rng.random() < 0.75 else sentence
        return f"{label}: {_unended(text) if rng.random() < 0.25 else text}"

    def _described(self, sentence: str, rng: random.Random) -> str:
        name = self.name(rng)
        name = rng.choice(["{}", "{}", "{}", "`{}`", "**{}**", "[{}]"]).format(name)
        text = self._small(sentence) if rng.random() < 0.6 else sentence
        text = _unended(text) if rng.random() < 0.6 else text
        between = rng.choice([": ", ": ", " - ", " - ", " – ", " — ", " = ", " -- "])
        return rng.choice(_MARKERS) + name + between + text

    def _named(self, sentence: str, rng: random.Random) -> str:
        """Put a name in small letters where a sentence begins with a name, or before it."""
        first = re.match(r"([A-Z]\w+) (?=is |was |has |can |will |[a-z]+s )", sentence)
        if first and first[1].lower() not in self.lexicon.words:
            return f"{self.name(rng)} {sentence[first.end() :]}"
        begin = rng.choice(["{} is new: ", "{} and {} differ: ", "{} (or {}): ", "In {}, "])
        return begin.format(self.name(rng), self.name(rng)) + self._small(sentence)

    def _quoting(self, sentence: str, rng: random.Random) -> str:
        """Quote a foreign phrase at the end of a sentence."""
        phrase = rng.choice(self._foreign) if self._foreign else self._words.foreign(rng)
        phrase = rng.choice(["*{}*", "_{}_"]).format(phrase)
        phrase = phrase if rng.random() < 0.5 else quote(phrase.strip("*_"), rng)
        return f"{_unended(sentence)} ({phrase})."

    def _code(self, sentence: str, rng: random.Random) -> str:
        """Return code alone, as lines of a document are."""
        codes = [rng.choice(self._codes) for _ in range(rng.choice([1, 1, 2, 3]))]
        return rng.choice(["{}", "`{}`", "$ {}", "{}:"]).format(rng.choice([" ", ", "]).join(codes))


def straight(text: str) -> str:
    """Replace curly quotes and apostrophes with straight ones."""
    return re.sub("[‘’]", "'", re.sub("[“”]", '"', text))


def is_error(right: str, wrong: str) -> bool:
    """Whether what was changed is an error to a reader, and not another right text."""
    before, after = _words(right), _words(wrong)
    for kind, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        gone, come = set(before[i:j]), set(after[k:m])
        if (gone ^ come) & _NEGATIVE or come & _TIMES or gone & _ADJECTIVES:
            return False
        if "to" in come - gone and set(after[max(0, k - 2) : m]) & _BEFORE_TO:
            return False
        if gone & _ARTICLES and come & _ARTICLES and (gone | come) & {"the", "one"}:
            return False
        if "the" in gone | come and "the" not in gone & come:
            return False
        if "a" in gone and set(before[j : j + 1]) & {"few", "little", "lot", "bit"}:
            return False
    return right != wrong


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'’]+", text.lower())


def _unended(sentence: str) -> str:
    return sentence[:-1] if sentence.endswith(".") and not sentence.endswith("..") else sentence


def _fragment(sentence: str, rng: random.Random) -> str:
    """Cut a sentence where a line or an item may end: before a conjunction, behind a comma."""
    cut = _choose(
        r",? (?=(?:and|or|but|which|that|because|if|to|for|with) )|[,:;] ",
        sentence,
        rng,
        lambda found: 8 < found.start() < len(sentence) - 8,
    )
    if cut is None:
        return sentence
    if rng.random() < 0.5:
        return sentence[cut.end() :]
    return sentence[: cut.start()] + rng.choice(["", "", "", ":", ","])


def _ampersand(sentence: str, rng: random.Random) -> str:
    return _unended(sentence).replace(" and ", " & ")


def _choose(
    pattern: str, text: str, rng: random.Random, right: Callable[[re.Match[str]], bool] = bool
) -> re.Match[str] | None:
    found = [match for match in re.finditer(pattern, text) if right(match)]
    return rng.choice(found) if found else None


def slip_in_known(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Swap, drop, double or replace a letter of a known word, so that it is no word."""
    found = _choose(r"\b[A-Za-z][a-z]{3,}\b", text, rng, lambda m: m[0].lower() in lexicon.words)
    if found is None:
        return None
    word, k = found[0], rng.randrange(1, len(found[0]) - 1)
    before, letter, after = word[:k], word[k], word[k + 1 :]
    wrong = before + rng.choice(
        [
            after[0] + letter + after[1:],
            after,
            letter + letter + after,
            rng.choice(NEIGHBOURS[letter]) + after,
        ]
    )
    if wrong == word or wrong.lower() in lexicon.words:
        return None
    return text[: found.start()] + wrong + text[found.end() :]


def take_for_another(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Write another word of `ALIKE`."""
    apostrophes = text.replace("’", "'")
    places = [
        found
        for found in re.finditer(r"(?<![\w'-])[A-Za-z']+(?![\w'-])", apostrophes)
        if found[0].lower() in _OTHERS
    ]
    if not places:
        return None
    # Each word alike: nearly every sentence has a `to`.
    word = rng.choice(sorted({found[0].lower() for found in places}))
    found = rng.choice([found for found in places if found[0].lower() == word])
    wrong = rng.choice(_OTHERS[found[0].lower()])
    wrong = wrong[0].upper() + wrong[1:] if found[0][0].isupper() else wrong
    return text[: found.start()] + wrong + text[found.end() :]


def write_twice(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    found = _choose(r"(?<=\s)[a-z]+(?=\s)", text, rng, lambda m: m[0] not in _REPEATED)
    return text[: found.end()] + " " + text[found.start() :] if found else None


def contract_wrongly(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Drop the apostrophe of a contraction."""
    pattern = r"(?i)\b(?:\w+n['’]t|(?:it|that|there|what|let|he|she|who)['’]s|\w+['’](?:re|ve))\b"
    found = _choose(pattern, text, rng)
    if found is None:
        return None
    return text[: found.start()] + re.sub("['’]", "", found[0]) + text[found.end() :]


def drop_small_word(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Drop a word that cannot be missing: an article, `of`, `to` or `be` in some places."""
    found = _choose(
        r"(?<=\s)(?:of (?=the |a |an |this |these |its |their |our )"
        r"|to (?=be |have |make |use |see |get |do |go |take |find |create |provide )"
        r"|(?<=can )be |(?<=should )be |(?<=must )be |(?<=may )be |(?<=will )be "
        r"|an? (?=[a-z]+ (?:of|that|which|to|for|in|with|from|is|was)\b))",
        text,
        rng,
        # "can be read" without `be` is right, too.
        lambda m: m[0] != "be " or not lexicon.is_form(bare(text[m.end() :].split()[0]), "BASE"),
    )
    return text[: found.start()] + text[found.end() :] if found else None


def space_comma_wrongly(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    found = _choose(r"(?<=[a-z]), (?=[a-z])", text, rng)
    if found is None:
        return None
    return text[: found.start()] + rng.choice([" ,", " , ", ","]) + text[found.end() :]


def plural_for_one(text: str, rng: random.Random, lexicon: Lexicon) -> str | None:
    """Write a plural after `this`, `each` and the like."""
    found = _choose(
        r"\b(?:this|each|every|another) (?!can\b|will\b|may\b|must\b|might\b)([a-z]{3,})\b",
        text,
        rng,
        lambda m: m[1] + "s" in lexicon.words,
    )
    return replace(text, found, found[0] + "s") if found else None


_WEIGHTED: tuple[tuple[Rule, float], ...] = (
    (slip_in_known, 13), (spelling.by_ear, 4), (spelling.MISSPELT, 8), (spelling.APART, 4),
    (spelling.lower_title, 2), (take_for_another, 14), (write_twice, 5), (contract_wrongly, 5),
    (drop_small_word, 8), (space_comma_wrongly, 2), (plural_for_one, 4),
    (verbs.AGREEMENT, 12), (verbs.PERFECT, 8), (verbs.COMPLEMENT, 8), (verbs.NEGATION, 2),
    (phrases.GOVERNED, 5), (phrases.PLACE_AND_TIME, 2), (phrases.UNCOUNTABLE, 3),
    (nouns.bare_plural, 8), (nouns.PLURAL, 4), (nouns.COMPARISON, 4), (nouns.ADJECTIVE, 2),
    (nouns.bare_adverb, 3), (nouns.POSSESSIVE, 2), (nouns.ARTICLE, 4),
)  # fmt: skip
RULES, WEIGHTS = zip(*_WEIGHTED, strict=True)
