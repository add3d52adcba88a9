"""Words that are in no training sentence, for both sides alike: they can only be copied."""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

Pair = tuple[str, str]

ORDER = 3  # letters that determine the next one
ENDINGS = ("ings", "ing", "ed", "ly", "ers", "er", "est", "s")
# American and British spellings; Tatoeba's sentences have mostly American ones.
AMERICAN_AND_BRITISH = """
color:colour colors:colours colored:coloured colorful:colourful favorite:favourite
favorites:favourites neighbor:neighbour neighbors:neighbours neighborhood:neighbourhood
honor:honour humor:humour labor:labour behavior:behaviour flavor:flavour harbor:harbour
rumor:rumour favor:favour favors:favours center:centre theater:theatre theaters:theatres
liter:litre liters:litres meter:metre meters:metres kilometers:kilometres fiber:fibre
traveled:travelled traveling:travelling traveler:traveller canceled:cancelled
canceling:cancelling jewelry:jewellery marvelous:marvellous realize:realise
realized:realised realizes:realises recognize:recognise recognized:recognised
apologize:apologise apologized:apologised organize:organise organized:organised
organization:organisation criticized:criticised criticize:criticise memorize:memorise
analyze:analyse gray:grey mom:mum pajamas:pyjamas defense:defence offense:offence
skillful:skilful fulfill:fulfil mustache:moustache airplane:aeroplane
airplanes:aeroplanes catalog:catalogue dialog:dialogue enrollment:enrolment
installment:instalment
"""
SPELLINGS = dict(pair.split(":") for pair in AMERICAN_AND_BRITISH.split())


# The letters of other scripts: first and last of each.
SCRIPTS = "αω ΑΩ ая АЯ ぁん ァン 一龥 가힣 ءي את अह กฮ აჰ աֆ".split()
ACCENTS = {
    "a": "àáâãäåāăą", "e": "èéêëēęě", "i": "ìíîïıī", "o": "òóôõöøōő", "u": "ùúûüůűū", "c": "çćč",
    "n": "ñńň", "s": "śšşș", "z": "źżž", "l": "ł", "y": "ýÿ", "d": "ďđ", "r": "řŕ", "t": "ťțþ",
    "g": "ğģ",
}  # fmt: skip


class Words:
    """Makes words up: letter by letter, each as likely after the last three as in known words.

    Args:
        texts: Where the known words are taken from.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._counts = Counter(word for text in texts for word in re.findall(r"[^\W\d_]+", text))
        following: dict[str, Counter[str]] = defaultdict(Counter)
        for word in sorted({word.lower() for word in self._counts}):
            padded = "^" * ORDER + word + "$"
            for i in range(ORDER, len(padded)):
                following[padded[i - ORDER : i]][padded[i]] += 1
        self._following = {
            before: (list(letters), list(letters.values())) for before, letters in following.items()
        }

    def new(self, rng: random.Random) -> str:
        """Return a word of 3 to 14 letters; few of them exist."""
        while True:
            word = "^" * ORDER
            while not word.endswith("$") and len(word) < 20:
                word += rng.choices(*self._following[word[-ORDER:]])[0]
            word = word.strip("^$")
            if 3 <= len(word) <= 14:
                return word

    def accented(self, rng: random.Random) -> str:
        """Return a new word with one to three accents, if it has letters that can have one."""
        word = list(self.new(rng))
        for _ in range(rng.choice([1, 1, 2, 3])):
            place = rng.randrange(len(word))
            word[place] = rng.choice(ACCENTS.get(word[place], word[place]))
        return "".join(word)

    def foreign(self, rng: random.Random) -> str:
        """Return one to eight letters of another script."""
        first, last = map(ord, rng.choice(SCRIPTS))
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.choice([1, 2, 3, 5, 8])))

    def any(self, rng: random.Random) -> str:
        """Return a word of any of these kinds."""
        make = rng.choice(
            [self.new, self.new, self.accented, self.accented, self.foreign, self.code]
        )
        return make(rng)

    def code(self, rng: random.Random) -> str:
        """Return letters, digits and signs in any order, as in the names of files and parts."""
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        run = "".join(rng.choices(letters, k=rng.randint(2, 7)))
        shape = rng.choice([
            "{}", "{}_{}", "{}-{}", "{}.{}", "{}/{}", "{}()", "#{}", "@{}", "<{}>",
            "{}={}", "`{}`", "{}:{}", "%{}", "{}+{}",
        ])  # fmt: skip
        return shape.format(run, self.new(rng))

    def seldom(self, word: str) -> bool:
        return self._counts[word] < 250


def replace_words(pair: Pair, words: Words, rng: random.Random) -> Pair:
    """Put up to three new words in the place of seldom ones that both sides have once.

    An ending such as -s or -ing stays, so that grammar can be seen. Names get new names.
    """
    shared = sorted(w for w in _once(pair[0]) & _once(pair[1]) if len(w) > 3 and words.seldom(w))
    for old in rng.sample(shared, min(len(shared), rng.choice([1, 1, 2, 3]))):
        new = words.new(rng)
        if old[0].isupper():
            if pair[1].startswith(old) or not old.istitle():
                continue
            new = new.capitalize() if rng.random() < 0.7 else words.any(rng)
        elif rng.random() < 0.2:
            new = words.any(rng)
        else:
            new += next((end for end in ENDINGS if old.endswith(end)), "")
        pair = _replaced(pair, old, new)
    return pair


def interject(pair: Pair, text: str, rng: random.Random) -> Pair:
    """Put a text after a word that both sides have once and that no punctuation follows."""
    source, target = pair
    shared = sorted(_once(source) & _once(target))
    rng.shuffle(shared)
    for word in shared:
        places = [re.search(rf"\b{word} (?=\w)", side) for side in pair]
        if all(places):
            source, target = (
                side[: found.end()] + text + side[found.end() - 1 :]
                for side, found in zip(pair, places, strict=True)
                if found
            )
            return source, target
    return pair


def british(pair: Pair) -> Pair:
    """Spell the words of both sides in the British way."""
    for american in {word for word in re.findall("[a-z]+", pair[1]) if word in SPELLINGS}:
        if re.search(rf"\b{american}\b", pair[0]):
            pair = _replaced(pair, american, SPELLINGS[american])
    return pair


def _replaced(pair: Pair, old: str, new: str) -> Pair:
    source, target = (re.sub(rf"\b{old}\b", new, side) for side in pair)
    return source, target


def _once(text: str) -> set[str]:
    counts = Counter(re.findall(r"(?<![\w'-])[A-Za-z]+(?![\w'-])", text))
    return {word for word, count in counts.items() if count == 1}
