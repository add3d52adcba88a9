"""Damage English sentences by rule: the training and test data of the correction models.

Each rule takes a sentence as a list of words (punctuation attached) and returns a damaged copy,
or None where it does not apply. A careful reader can undo each of them: words are dropped only
where grammar requires them, and verb forms are changed only where the words before them determine
the right one.
"""

import hashlib
import lzma
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Rule = Callable[[list[str], random.Random], list[str] | None]

PREFIX = "correct: "
DataOption = Annotated[Path, typer.Option(help="deu.txt.xz: English, a tab, German, a line each.")]

# Sets of words that are confused with one another.
CONFUSED = [
    "their there they're", "its it's", "a an", "is are", "was were", "has have", "then than",
    "your you're", "to too two", "do does", "don't doesn't", "isn't aren't", "wasn't weren't",
    "hasn't haven't", "this these", "that those", "much many", "whose who's", "lose loose",
    "affect effect", "quiet quite", "of off", "where were wear", "hear here", "know no now",
    "by buy bye", "weather whether", "write right", "whole hole", "piece peace", "advice advise",
    "accept except", "passed past", "brake break", "meat meet", "week weak", "wait weight",
    "threw through", "new knew", "son sun", "sea see", "our are hour", "for four", "hole whole",
    "i me", "he him", "she her", "they them", "we us", "good well", "bored boring",
    "interested interesting", "less fewer", "lay lie", "rise raise", "say tell", "since for",
]  # fmt: skip

# base, third person, past, participle, -ing
IRREGULAR = """
go goes went gone going/be is was been being/do does did done doing/see sees saw seen seeing
come comes came come coming/take takes took taken taking/give gives gave given giving
know knows knew known knowing/get gets got gotten getting/make makes made made making
think thinks thought thought thinking/say says said said saying/tell tells told told telling
find finds found found finding/leave leaves left left leaving/feel feels felt felt feeling
keep keeps kept kept keeping/begin begins began begun beginning/write writes wrote written writing
speak speaks spoke spoken speaking/break breaks broke broken breaking/eat eats ate eaten eating
drink drinks drank drunk drinking/buy buys bought bought buying
bring brings brought brought bringing/sleep sleeps slept slept sleeping/run runs ran run running
sit sits sat sat sitting/stand stands stood stood standing/lose loses lost lost losing
pay pays paid paid paying/meet meets met met meeting/teach teaches taught taught teaching
catch catches caught caught catching/drive drives drove driven driving/ride rides rode ridden riding
fall falls fell fallen falling/forget forgets forgot forgotten forgetting
choose chooses chose chosen choosing/wear wears wore worn wearing/sing sings sang sung singing
swim swims swam swum swimming/fly flies flew flown flying/grow grows grew grown growing
throw throws threw thrown throwing/draw draws drew drawn drawing
understand understands understood understood understanding/hear hears heard heard hearing
hold holds held held holding/send sends sent sent sending/spend spends spent spent spending
build builds built built building/win wins won won winning/sell sells sold sold selling
have has had had having/die dies died died dying/lie lies lied lied lying
read reads read read reading/put puts put put putting/cut cuts cut cut cutting
let lets let let letting/study studies studied studied studying/try tries tried tried trying
cry cries cried cried crying/play plays played played playing/stop stops stopped stopped stopping
plan plans planned planned planning
"""

# Words, the form that a verb has after them, and the wrong forms to replace it with, by column.
AGREEMENT = [
    ("to can can't could couldn't will won't would wouldn't should shouldn't must may might shall "
     "don't doesn't didn't did i'll you'll he'll she'll we'll they'll it'll let's cannot",
     0, (1, 2, 4)),
    ("have has had haven't hasn't hadn't i've you've we've they've", 3, (0, 2, 4)),
    ("am is are was were been i'm you're he's she's we're they're it's isn't aren't wasn't "
     "weren't", 4, (0, 1)),
    ("he she it tom mary who everyone everybody nobody someone", 1, (0, 4)),
    ("i you we they people", 0, (1, 4)),
]  # fmt: skip
DROPPABLE = set(
    "a an the to of in on at for is are was were am be been do does did has have had will "
    "it with by from as that".split()
)
NEIGHBOURS = {
    "q": "wa", "w": "qes", "e": "wrd", "r": "etf", "t": "ryg", "y": "tuh", "u": "yij",
    "i": "uok", "o": "ipl", "p": "ol", "a": "sqz", "s": "adw", "d": "sfe", "f": "dgr",
    "g": "fht", "h": "gjy", "j": "hku", "k": "jli", "l": "ko", "z": "xa", "x": "zcs",
    "c": "xvd", "v": "cbf", "b": "vng", "n": "bmh", "m": "nk",
}  # fmt: skip

_WORD = re.compile(r"^(\W*)(.*?)(\W*)$", re.DOTALL)


def _split(word: str) -> tuple[str, str, str]:
    """Split into the punctuation before, the word itself, and the punctuation after."""
    match = _WORD.match(word)
    assert match is not None
    before, core, after = match.groups()
    return before, core, after


def _replace(words: list[str], i: int, new: str) -> list[str]:
    before, core, after = _split(words[i])
    new = new[:1].upper() + new[1:] if core[:1].isupper() else new
    return [*words[:i], before + new + after, *words[i + 1 :]]


def bare(word: str) -> str:
    """Return a word without the punctuation around it, in lower case."""
    return _split(word)[1].lower()


def _pick(rng: random.Random, candidates: list[int]) -> int | None:
    return rng.choice(candidates) if candidates else None


def slip(words: list[str], rng: random.Random) -> list[str] | None:
    """Make a typing slip: a letter swapped with the next, dropped, doubled, or a key beside it."""
    i = _pick(rng, [i for i, w in enumerate(words) if len(bare(w)) > 2])
    if i is None:
        return None
    before, core, after = _split(words[i])
    k = rng.randrange(len(core) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        new = core[:k] + core[k + 1] + core[k] + core[k + 2 :]
    elif kind == 1:
        new = core[: k + 1] + core[k + 2 :]
    elif kind == 2:
        new = core[: k + 1] + core[k] + core[k + 1 :]
    else:
        near = NEIGHBOURS.get(core[k + 1].lower())
        if near is None:
            return None
        new = core[: k + 1] + rng.choice(near) + core[k + 2 :]
    return [*words[:i], before + new + after, *words[i + 1 :]]


def drop_word(words: list[str], rng: random.Random) -> list[str] | None:
    """Drop an article, a preposition or an auxiliary."""
    i = _pick(rng, [i for i, w in enumerate(words[:-1]) if i and w in DROPPABLE])
    return None if i is None else words[:i] + words[i + 1 :]


def double_word(words: list[str], rng: random.Random) -> list[str] | None:
    """Write a word twice."""
    i = _pick(rng, [i for i, w in enumerate(words) if w.isalpha()])
    if i is None:
        return None
    again = words[i].lower() if i == 0 and words[i] != "I" else words[i]
    return [*words[: i + 1], again, *words[i + 1 :]]


def drop_apostrophe(words: list[str], rng: random.Random) -> list[str] | None:
    i = _pick(rng, [i for i, w in enumerate(words) if "'" in bare(w)])
    return None if i is None else [*words[:i], words[i].replace("'", ""), *words[i + 1 :]]


def drop_capital(words: list[str], rng: random.Random) -> list[str] | None:
    """Write a capitalized word in lower case."""
    i = _pick(rng, [i for i, w in enumerate(words) if _split(w)[1][:1].isupper()])
    return None if i is None else [*words[:i], words[i].lower(), *words[i + 1 :]]


def drop_stop(words: list[str], rng: random.Random) -> list[str] | None:
    last = words[-1].rstrip(".?!")
    return [*words[:-1], last] if last and last != words[-1] else None


def _confuse_rule() -> Rule:
    others: dict[str, list[str]] = {}
    for group in CONFUSED:
        for word in group.split():
            others.setdefault(word, []).extend(w for w in group.split() if w != word)

    def confuse(words: list[str], rng: random.Random) -> list[str] | None:
        i = _pick(rng, [i for i, w in enumerate(words) if bare(w) in others])
        return None if i is None else _replace(words, i, rng.choice(others[bare(words[i])]))

    return confuse


def verb_forms(vocabulary: set[str]) -> dict[str, tuple[str, ...]]:
    """Return base, third person, past, participle and -ing by each; regular ones are all known."""
    forms: dict[str, tuple[str, ...]] = {}
    for word in vocabulary:
        stem = word.removesuffix("e")
        regular = (word, word + "s", stem + "ed", stem + "ed", stem + "ing")
        if vocabulary.issuperset(regular):
            forms.update(dict.fromkeys(regular, regular))
    for line in IRREGULAR.replace("/", "\n").strip().splitlines():
        verb = tuple(line.split())
        forms.update(dict.fromkeys(verb, verb))
    return forms


def _verb_rule(vocabulary: set[str]) -> Rule:
    """Return a rule for wrong verb forms; regular verbs have all four forms in the vocabulary."""
    forms = verb_forms(vocabulary)

    def wrong_forms(before: str, word: str) -> list[str]:
        verb = forms[word]
        for words, right, wrong in AGREEMENT:
            if before in words.split() and word == verb[right]:
                return [verb[i] for i in wrong if verb[i] != word]
        return []

    def wrong_verb(words: list[str], rng: random.Random) -> list[str] | None:
        cores = [bare(w) for w in words]
        options = [
            (i, new)
            for i in range(1, len(words))
            if cores[i] in forms
            for new in wrong_forms(cores[i - 1], cores[i])
        ]
        return _replace(words, *rng.choice(options)) if options else None

    return wrong_verb


class Corruptor:
    """Damages sentences with a fixed mix of rules; their vocabulary shows the regular verbs."""

    def __init__(self, sentences: list[str]) -> None:
        counts = Counter(bare(word) for sentence in sentences for word in sentence.split())
        vocabulary = {word for word, n in counts.items() if n >= 5 and word.isalpha()}
        self._rules: list[Rule] = [
            slip, _confuse_rule(), _verb_rule(vocabulary), drop_word, double_word,
            drop_apostrophe, drop_capital, drop_stop,
        ]  # fmt: skip
        self._weights = [26, 18, 14, 8, 8, 8, 10, 8]

    def sentence(self, text: str, rng: random.Random) -> str:
        """Damage one sentence in zero to five places."""
        words = text.split()
        wanted = rng.choices([0, 1, 2, 3, 4, 5], [10, 34, 30, 15, 8, 3])[0]
        for _ in range(wanted):
            for _attempt in range(4):
                damaged = rng.choices(self._rules, self._weights)[0](words, rng)
                if damaged is not None:
                    words = damaged
                    break
        return " ".join(words)

    def example(
        self, sentences: list[str], rng: random.Random, *, single: bool = False
    ) -> tuple[str, str]:
        """Join one to four sentences, each damaged on its own: (source, target)."""
        count = 1 if single else rng.choices([1, 2, 3, 4], [60, 22, 11, 7])[0]
        clean = [rng.choice(sentences) for _ in range(count)]
        damaged = [self.sentence(sentence, rng) for sentence in clean]
        return PREFIX + " ".join(damaged), " ".join(clean)


def held_out(sentence: str) -> bool:
    """Whether a sentence is among the fixed 2 % that no model is trained on."""
    return int(hashlib.sha256(sentence.encode()).hexdigest(), 16) % 100 < 2


def read_sentences(path: Path) -> tuple[list[str], list[str]]:
    """Read the unique English sentences of the pairs file, in its order: (training, held out)."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        unique = dict.fromkeys(line.split("\t", 1)[0] for line in file)
    return [s for s in unique if not held_out(s)], [s for s in unique if held_out(s)]


def held_out_examples(
    path: Path, count: int, *, single: bool = True, seed: int = 0
) -> list[tuple[str, str]]:
    """Return `count` examples of held-out sentences; with `single`, each sentence is used once."""
    train, test = read_sentences(path)
    corruptor, rng = Corruptor(train), random.Random(seed)
    if not single:
        return [corruptor.example(test, rng) for _ in range(count)]
    chosen = rng.sample(test, count)
    return [(PREFIX + corruptor.sentence(s, rng), s) for s in chosen]


def training_examples(sentences: list[str], corruptor: Any, seed: int) -> Iterator[tuple[str, str]]:
    """Yield examples of a `Corruptor`, or of a `Learner`, forever."""
    rng = random.Random(seed)
    while True:
        yield corruptor.example(sentences, rng)


def word_errors(hypothesis: str, reference: str) -> int:
    """Return the word-level Levenshtein distance."""
    a, b = hypothesis.split(), reference.split()
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]
