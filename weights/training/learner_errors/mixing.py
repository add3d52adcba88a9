"""Examples that mix the rules of learners' errors with those of `corruption`."""

import lzma
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from corruption import PREFIX, Corruptor, held_out, read_sentences, training_examples

from . import nouns, phrases, spelling, verbs
from .surroundings import aside, inserted, rename, surround
from .tables import Lexicon, Rule
from .unseen import Pair, Words, british, interject, replace_words

GRAMMAR: tuple[Rule, ...] = (
    phrases.GOVERNED, phrases.PLACE_AND_TIME, phrases.WORD_CHOICE, phrases.WORD_CHOICE,
    phrases.UNCOUNTABLE, *nouns.RULES, *verbs.RULES,
)  # fmt: skip
OLD_KIND = 0.15  # share of examples that `corruption` alone damages
PROSE = 0.35  # share of examples from edited prose, where there is any


class Learner:
    """Damages sentences as learners do, and adds surroundings that have to be copied.

    The words of right sentences tell misspellings from other words, and what verbs and plurals
    there are. Foreign texts are to be quoted.
    """

    def __init__(self, sentences: list[str], foreign_texts: list[str]) -> None:
        self._lexicon = Lexicon(sentences)
        self._slips = Corruptor(sentences)
        self._words = Words([*sentences, *foreign_texts])
        self._sentences, self._foreign = sentences, foreign_texts

    def sentence(self, text: str, rng: random.Random) -> str:
        """Damage a sentence: up to three errors of grammar, two of spelling, and slips."""
        errors = rng.choices([0, 1, 2, 3], [20, 42, 26, 12])[0]
        for _ in range(errors):
            text = self._first(GRAMMAR, text, rng)
        for _ in range(rng.choices([0, 1, 2], [60, 30, 10])[0]):
            text = self._first(spelling.RULES, text, rng)
        if rng.random() < 0.35:
            text = self._slips.sentence(text, rng)
        if rng.random() < 0.03:
            text = text.lower()
        return text

    def _first(self, rules: tuple[Rule, ...], text: str, rng: random.Random) -> str:
        """Apply the first rule that can be, in random order: rare ones get their share."""
        for rule in rng.sample(rules, len(rules)):
            damaged = rule(text, rng, self._lexicon)
            if damaged is not None:
                return damaged
        return text

    def pair(self, sentences: list[str], rng: random.Random) -> Pair:
        """Return a sentence, damaged or not, and itself; surroundings are on both sides."""
        right = rng.choice(sentences)
        if rng.random() < 0.5:  # most of Tatoeba's sentences are short
            right = max(right, rng.choice(sentences), key=len)
        if rng.random() < 0.015:
            foreign = rng.choice(self._foreign)
            return foreign, foreign
        if rng.random() < 0.1:
            right = inserted(rng, self._foreign, self._words)
            # Not the spelling: names and numbers could not be restored.
            damaged = right if rng.random() < 0.7 else self._first(GRAMMAR, right, rng)
            return damaged, right
        damaged = right if rng.random() < 0.26 else self.sentence(right, rng)
        pair = rename((damaged, right), rng, self._words)
        if rng.random() < 0.18:
            pair = replace_words(pair, self._words, rng)
        if rng.random() < 0.4:
            pair = british(pair)
        if rng.random() < 0.1:
            pair = interject(pair, aside(rng, self._words), rng)
        if rng.random() < 0.12:
            pair = surround(pair, rng, self._words)
        if rng.random() < 0.012:
            return pair[0].upper(), pair[1].upper()
        return pair

    def example(self, sentences: list[str], rng: random.Random) -> Pair:
        """Join one to eight sentences to a prompt and its correction."""
        count = rng.choices(range(1, 9), [54, 18, 11, 7, 4, 3, 2, 1])[0]
        pairs = [self.pair(sentences, rng) for _ in range(count)]
        if rng.random() < 0.14:  # text that is right as a whole
            pairs = [(right, right) for _, right in pairs]
        between = "\n" if count > 1 and rng.random() < 0.06 else " "
        source, target = (between.join(side) for side in zip(*pairs, strict=True))
        return PREFIX + source, target


def read_german(path: Path) -> list[str]:
    """Read short German sentences of the pairs file whose English is not held out."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        pairs = (line.rstrip("\n").split("\t")[:2] for line in file)
        return [german for english, german in pairs if len(german) < 80 and not held_out(english)]


def mixed_examples(
    learner: Learner,
    corruptor: Corruptor,
    sentences: list[str],
    seed: int,
    *,
    prose: Callable[[random.Random], Pair] | None = None,
    share: float = PROSE,
) -> Iterator[Pair]:
    """Yield examples forever, some of `corruption`'s kind: what correct-base is trained on.

    With `prose`, a share of the examples comes from it.
    """
    rng = random.Random(seed)
    while True:
        if prose is not None and rng.random() < share:
            yield prose(rng)
        else:
            yield (corruptor if rng.random() < OLD_KIND else learner).example(sentences, rng)


def held_out_texts(path: Path, count: int, seed: int = 0, *, single: bool = False) -> list[Pair]:
    """Return `count` examples made of held-out sentences, of one to eight or of one each."""
    sentences, unseen = read_sentences(path)
    learner = Learner(sentences, read_german(path))
    if not single:
        return list(islice(training_examples(unseen, learner, seed), count))
    rng = random.Random(seed)
    pairs = [learner.pair(unseen, rng) for _ in range(count)]
    return [(PREFIX + source, target) for source, target in pairs]
