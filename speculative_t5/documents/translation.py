"""What is seen to be wrong with a translation by comparing it with its source.

Models for translation repeat themselves, end early, leave sentences out, copy what they should
translate, and lose numbers and the like, above all in long or unusual texts. No check knows what
the words mean: a translation that passes all of them may be wrong.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from .placeholders import PLACEHOLDER_PATTERN, TAG_PATTERN
from .splitting import SENTENCE_LANGUAGES, identifier, segments

# How many letters of an alphabet a character stands for, by the beginning of its Unicode name.
# Estimates: the bounds below are wide.
LETTERS_EACH = {"CJK": 3.0, "HANGUL": 2.2, "HIRAGANA": 1.6, "KATAKANA": 1.6, "ETHIOPIC": 1.6}
# How far the lengths may differ: by multiples of the square root of the source's length, as the
# spread of Gale and Church (1993) grows, and by parts of it, as whole texts are short or long.
SHORTER_BY, LONGER_BY = (3.0, 0.25), (4.0, 0.5)
FEWER_BELOW, MORE_ABOVE = 0.75, 1.25  # of the source's length, beyond which sentences are counted
MAX_SPELLED = 12  # numbers up to here are often digits in one language and words in another
MAX_REPEATS = 2  # times that an n-gram may come in any text
NGRAM_WORDS, NGRAM_CHARACTERS = 4, 12  # of an n-gram that may not come more often, in a row or not
MIN_COPIED = 3  # words of a sentence whose language can be told
SURE_OF_SOURCE = 0.9  # probability that it is the source's

_OUTPUT_END = re.compile(r"[.!?…。！？؟।։][\"'”“’»«)\]*_]*$")
_NUMBER = re.compile(r"\d(?:[\d.,:'’\u00a0\u202f]*\d)?")
_ADDRESS = re.compile(
    r"""
    (?<![^\s<>()"]) [^\s<>()"@]++ @ [^\s<>()"]+ \w
    | (?:https?://|www\.) [^\s<>()"]* [\w/]
    """,
    re.VERBOSE,
)
_PLACEHOLDER = re.compile(
    rf"{PLACEHOLDER_PATTERN} | {TAG_PATTERN} | &\#?\w+; | \[\^\w+\] | `[^`]+`", re.VERBOSE
)
_ENUMERATOR = re.compile(r"(?<!\S)\(?(?:\d{1,2}|[a-z])\)(?=\s)")
# Words that are written alike in all languages: those with capitals or digits behind a small
# letter, such as iPhone; in texts of other scripts, all in Latin letters.
_MIXED = re.compile(r"\b(?:[A-Z]?[a-z]+[A-Z0-9]\w*)\b")
_NOTED = re.compile(r"[A-Z]?[a-z]+([0-9]{1,3})")  # a word, and what may be the mark of a note
_LATIN = re.compile(r"[A-Za-z][A-Za-z0-9]+")


@dataclass(frozen=True)
class Translation:
    """The languages of a translation: BCP 47 codes."""

    source: str
    target: str

    def fault(self, source: str, output: str) -> str | None:
        """Say what is wrong with the translation of a text, if anything is seen."""
        if again := _repeated(source, output):
            return f"its output repeats {again!r}"
        for kind, pattern in (("placeholder", _PLACEHOLDER), ("address", _ADDRESS)):
            before, after = (Counter(pattern.findall(text)) for text in (source, output))
            if before != after:
                (found, *_) = [*(before - after), *(after - before)]
                return f"its output has {kind} {found!r} more or less often"
            source, output = (pattern.sub(" ", text) for text in (source, output))
        if fault := _lost(source, output):
            return fault
        if _OUTPUT_END.search(source) and output[-1:].isalpha() and " " in output:
            return "its output ends within a sentence"
        return self._fault_of_sentences(source, output)

    def _fault_of_sentences(self, source: str, output: str) -> str | None:
        """Say whether an output is too short or long, or a sentence is missing, added or copied."""
        have, want = _letters(output), _letters(source)
        for sign, (roots, part), word in ((-1, SHORTER_BY, "short"), (1, LONGER_BY, "long")):
            if sign * (have - want) > roots * math.sqrt(want) + part * want:
                return f"its output is too {word}"
        sentences = _sentences(output, self.target)
        added = len(sentences) - len(_sentences(source, self.source))
        if added < 0 and have < FEWER_BELOW * want:
            return "its output lacks a sentence"
        if added > 0 and have > MORE_ABOVE * want:
            return "its output has one more sentence"
        if any(self._is_copied(source, text) for text in (output, *sentences)):
            return "its output is not translated"
        return None

    def _is_copied(self, source: str, text: str) -> bool:
        """Whether a text is in the language of its source, and should not be."""
        words = [word for word in _folded_words(text) if word.isalpha()]
        if len(words) < MIN_COPIED:
            return False
        codes = [code.partition("-")[0] for code in (self.source, self.target)]
        if len({*codes} & {*identifier().labels}) == 2:
            language, probability = identifier(*codes).classify(text)
            return bool(language == codes[0] and probability >= SURE_OF_SOURCE)
        same = (Counter(words) & Counter(_folded_words(source))).total()
        return same >= SURE_OF_SOURCE * len(words)


def has_words(text: str) -> bool:
    """Whether there is anything to translate in a text."""
    for pattern in (_PLACEHOLDER, _ADDRESS):
        text = pattern.sub(" ", text)
    return any(map(str.isalpha, text))


def _lost(source: str, output: str) -> str | None:
    """Say which number, name or marker of a list is not in an output, if there is one."""
    for kind, lost in (
        ("number", _numbers(source, output)),
        ("name", _lost_names(source, output)),
        ("list marker", _enumerators(source) - _enumerators(output)),
    ):
        if lost:
            return f"its output lacks the {kind} {next(iter(lost))!r}"
    return None


def _enumerators(text: str) -> Counter[str]:
    return Counter(_ENUMERATOR.findall(text))


def _numbers(source: str, output: str) -> list[str]:
    """Return the numbers of a source that its output lacks; marks between digits don't matter."""

    def digits(number: str) -> str:
        return re.sub(r"\D", "", number).lstrip("0")

    left = Counter(map(digits, _NUMBER.findall(output)))
    lost = []
    for number in _NUMBER.findall(source):
        if left[digits(number)]:
            left[digits(number)] -= 1
        elif len(digits(number)) > 2 or int(digits(number) or 0) > MAX_SPELLED:
            lost.append(number)
    return lost


def _lost_names(source: str, output: str) -> list[str]:
    """Return the names that an output lacks; a small number may be the mark of a note."""
    lost = _kept_names(source) - Counter(_LATIN.findall(output))
    numbers = {*re.findall(r"\d+", output)}
    noted = {name: _NOTED.fullmatch(name) for name in lost}
    return [name for name, found in noted.items() if not (found and found[1] in numbers)]


def _kept_names(text: str) -> Counter[str]:
    letters = [unicodedata.name(c, "").startswith("LATIN") for c in text if c.isalpha()]
    return Counter((_MIXED if 2 * sum(letters) > len(letters) else _LATIN).findall(text))


def _folded_words(text: str) -> list[str]:
    return re.findall(r"[\w'’]+", text.casefold())


def _sentences(text: str, language: str) -> list[str]:
    code = language.partition("-")[0]
    found = segments(code if code in SENTENCE_LANGUAGES else "en", text)
    return [each for each in found if any(map(str.isalpha, each))]


def _letters(text: str) -> float:
    names = (unicodedata.name(c, "") for c in text if not c.isspace())
    return sum(LETTERS_EACH.get(name.partition(" ")[0], 1.0) for name in names)


def _repeated(source: str, output: str) -> str | None:
    """Return words that an output has more often than its source has any of nearly that number."""
    spaced = 2 * NGRAM_CHARACTERS * output.count(" ") > len(output)
    size = NGRAM_WORDS if spaced else NGRAM_CHARACTERS
    after = _folded_words(output) if spaced else output
    before = _folded_words(source) if " " in source else source
    most = max(MAX_REPEATS, *_ngrams(before, NGRAM_WORDS - 1).values(), 0)
    ngram, times = max(_ngrams(after, size).items(), key=itemgetter(1), default=((), 0))
    return (" " * spaced).join(ngram) if times > most else None


def _ngrams(units: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(units[i:] for i in range(size)), strict=False))
