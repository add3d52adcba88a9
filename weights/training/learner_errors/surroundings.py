"""Numbers, names, quotes and the like, which a correction has to copy: added to both sides alike."""

import random
import re
from collections.abc import Callable

from .unseen import Pair, Words

NAMES = (
    "Zoë François Łukasz Siobhán Jürgen Ángela Søren Åsa Nguyễn Đặng Šárka Ömer Çağla Ioana Ștefan "
    "Ana Luca Priya Arjun Fatima Yusuf Kenji Haruto Wei Xiulan Olga Dmitri Chidi Ngozi Kwame Lars "
    "Ingrid Marek Agnieszka Pilar Joaquín Beatriz João Élodie Benoît Giulia Matteo Sofia Nikos "
    "Eleni Ahmed Leila Ravi Sunita Emma Oliver Charlotte Henry Grace Daniel Sarah Peter Anna Paul "
    "Julia Markus Sabine Hans Petra Rafael Camila Diego Valentina Aoife Eoin Rhys Dafydd Mei Jin"
).split()
FOREIGN_NAMES = (
    "Владимир Анна Нина Μαρία Γιώργος 田中 さくら 김민준 李明 محمد فاطمة דוד अनिता สมชาย Նարե ნინო"
).split()
SURNAMES = (
    "Müller Nowak García O'Brien Nakamura Okonkwo Kowalczyk Dvořák Lindström Rossi Dubois Silva "
    "Papadopoulos Yılmaz Ivanova Schmidt Fernández Jørgensen Singh Chen Kim Tanaka Haddad Keller"
).split()
PLACES = (
    "Kraków|Zürich|São Paulo|Málaga|Göteborg|Łódź|Reykjavík|Bogotá|Montréal|Düsseldorf|Nairobi|"
    "Hanoi|Buenos Aires|Athens|Dublin|Prague|Vienna|Istanbul|Seoul|Mumbai|Lagos|Oslo|Lisbon"
).split("|")
CODES = (
    "setup.py main() README.md x_1 config.json C++ C# Ctrl+C --help $HOME foo_bar i++ HTTP/2 404 "
    "IPv6 UTF-8 #hashtag @user A4 B12 COVID-19 iPhone YouTube e-mail Wi-Fi PDF USB-C OK/Cancel"
).split()
EMOJI = "😀 😊 😂 🎉 👍 ❤️ 🙏 🎵 ☕ 🐶 🚀 🌍 ☀️ 😢 🔥 ✅ 👩‍🏫 🇪🇺".split()
TEMPLATES = [
    "The meeting starts at {time}.", "It costs {price}.", "Call me at {phone}.", "See {url}.",
    "Write to {mail}.", "Her birthday is on {date}.", "We need {number} of them.",
    "The train leaves at {time} from platform {small}.", "He lives at {small} Main Street.",
    "I paid {price} for {small} tickets.", "My phone number is {phone}.", "Read pages {small}–{number}.",
    "{full} will see you at {time}.", "{name} and {other} live in {place}.", "Open {code} first.",
    "The answer is {number}.", "You can find it at {url}.", "My email address is {mail}.",
    "I have known {full} since {year}.", "In {year}, {name} moved to {place}.", "I love {place}!",
    "Have you met {full}?", "The word {quoted} is German.", "{foreign} is a common name.",
    "It was {small} °C in {place} this morning.", "About {percent} of them agreed.",
    "Please send the form to {mail} before {date}.", "The shop is open from {time} to {time}.",
    "Dear {full},", "Order no. {ref} has arrived.", "{name} said {quoted}.", "What does {quoted} mean?",
    "We flew from {place} to {place}.", "Press {code} to continue.", "It weighs {small}.{small} kg.",
    "{name} is {small} years old.", "They sold {number} copies in {year}.", "Ask {foreign}!",
]  # fmt: skip
QUOTES = ['""', "“”", "«»", "„“", "‘’", "''", "‹›"]
BRACKETS = ["()", "[]", "**", "__"]


def number(rng: random.Random) -> str:
    kinds = [
        "{a}", "{a},{b:03}", "{a}.{c}", "{a},{b:03},{d:03}", "{b}", "-{a}", "{a}/{c}", "{b}{b}",
        "{a}–{b}", "{a}-{c}", "{a}:{c:02}", "{a}×{c}", "{a}.{b}{d}", "{a}.{c}.{d}", "{b}a", "+{a} {b}",
        "{a}00", "{a},000", "{a},000,000",
    ]  # fmt: skip
    values = {"a": rng.randint(1, 99), "b": rng.randint(0, 999), "c": rng.randint(0, 99)}
    return rng.choice(kinds).format(**values, d=rng.randint(0, 999))


def _digits(rng: random.Random, pattern: str) -> str:
    return re.sub("#", lambda _: str(rng.randrange(10)), pattern)


def fill(template: str, rng: random.Random, foreign_texts: list[str], words: Words) -> str:
    """Fill each {slot} of a template."""

    def word() -> str:
        return words.new(rng).lower()

    def name() -> str:
        return words.new(rng).capitalize() if rng.random() < 0.5 else rng.choice(NAMES)

    def written(*patterns: str) -> str:
        return rng.choice([_digits(rng, pattern) for pattern in patterns])

    slots: dict[str, Callable[[], str]] = {
        "time": lambda: written("1#:3#", "#:4#", "# p.m.", "9 a.m.", "2#.15"),
        "price": lambda: written("€1#.#0", "$#,##9", "£5", "3#0 €", "¥4##0", "20 CHF"),
        "phone": lambda: _digits(rng, rng.choice(["+49 30 ######", "555-01##", "(0##) ### ####"])),
        "url": lambda: rng.choice(
            [
                f"https://www.{word()}.com/{word()}?id={number(rng)}",
                f"http://{word()}.org",
                f"www.{word()}.de/{word()}",
            ]
        ),
        "mail": lambda: (
            f"{word()}{rng.choice(['.', '_', '', '-'])}{word()}@{word()}."
            + rng.choice(["com", "org", "de", "net", "co.uk"])
        ),
        "date": lambda: written(
            "1# May 20##", "0#/1#/20##", "20##-0#-1#", "31 January", "June 3rd"
        ),
        "number": lambda: number(rng),
        "small": lambda: str(rng.randint(2, 40)),
        "percent": lambda: _digits(rng, "##%"),
        "year": lambda: _digits(rng, "19##"),
        "name": name,
        "other": name,
        "full": lambda: (
            rng.choice(["Mr. ", "Mrs ", "Dr. ", "Ms. ", name() + " "]) + rng.choice(SURNAMES)
        ),
        "place": lambda: rng.choice(PLACES),
        "code": lambda: rng.choice([rng.choice(CODES), words.code(rng)]),
        "foreign": lambda: rng.choice(FOREIGN_NAMES),
        "ref": lambda: _digits(rng, "##8#-B"),
        "quoted": lambda: quote(rng.choice(foreign_texts).rstrip("."), rng),
    }
    return re.sub(r"\{(\w+)\}", lambda slot: slots[slot[1]](), template)


def quote(text: str, rng: random.Random) -> str:
    marks = rng.choice(QUOTES)
    return marks[0] + text + marks[-1]


def rename(pair: Pair, rng: random.Random, words: Words) -> Pair:
    """Give Tom, Mary or a place another name where both sides have it equally often."""
    new_names = {"Tom": NAMES, "Mary": NAMES, "Boston": PLACES, "John": NAMES, "Australia": PLACES}
    for old, names in new_names.items():
        counts = [len(re.findall(rf"\b{old}\b", side)) for side in pair]
        if counts[0] == counts[1] > 0 and rng.random() < 0.4:
            new = rng.choice(FOREIGN_NAMES if rng.random() < 0.08 else names)
            if rng.random() < 0.5:
                new = words.new(rng).capitalize()
            pair = tuple(re.sub(rf"\b{old}\b", new, side) for side in pair)  # type: ignore[assignment]
    return pair


def surround(pair: Pair, rng: random.Random, words: Words) -> Pair:
    """Put quotes, brackets, a list marker, a speaker, an emoji and the like around both sides."""
    marks = rng.choice(QUOTES)
    says = fill(
        rng.choice(["{name} said", "she said", "he asked", "{full} wrote"]), rng, [""], words
    )
    emoji, brackets = rng.choice(EMOJI), rng.choice(BRACKETS)
    # A quote before "she said" ends in a comma, and how it ended cannot be seen from it.
    shape = rng.choice([
        f"{marks[0]}{{}}{marks[-1]}", f"{marks[0]}{{}}{marks[-1]} – {rng.choice(NAMES)}",
        f"{says[0].upper()}{says[1:]}, {marks[0]}{{}}{marks[-1]}",
        f"{says[0].upper()}{says[1:]}: {marks[0]}{{}}{marks[-1]}",
        f"{brackets[0]}{{}}{brackets[-1]}", f"{{}} {emoji}", f"{emoji} {{}}",
        f"{rng.randint(1, 20)}. {{}}", "- {}", "• {}", "* {}", f"{rng.choice('abcd')}) {{}}",
        f"{rng.choice(['Note', 'Question', 'PS', 'NB', 'FYI', 'TIP', 'Re'])}: {{}}",
        f"{{}} {fill('({url})', rng, [''], words)}", f"{{}} (p. {rng.randint(2, 300)})",
        f"{rng.choice(NAMES)}: {{}}", f"[{number(rng)}] {{}}", "> {}", "# {}",
        "Well... {}", "Hmm… {}",
    ])  # fmt: skip
    source, target = (shape.format(side) for side in pair)
    return source, target


def aside(rng: random.Random, words: Words) -> str:
    """Return what may stand between two words: an emoji, a quote, or something in brackets."""
    if rng.random() < 0.25:
        return rng.choice(EMOJI)
    if rng.random() < 0.25:
        return quote(words.any(rng), rng)
    texts = ["no. {ref}", "{number}", "{number}–{number}", "pages {small}–{number}", "{code}",
             "{price}", "see {url}", "{mail}", "{year}–{year}", "{percent}", "{foreign}",
             "{time}", "{name}", "{number}, {number} and {number}", "{phone}"]  # fmt: skip
    text = fill(rng.choice(texts), rng, [""], words)
    brackets = rng.choice(["()", "()", "[]", "––", ""])
    return f"{brackets[0]}{text}{brackets[1]}" if brackets else text


def inserted(rng: random.Random, foreign_texts: list[str], words: Words) -> str:
    """Return a sentence with numbers, names, addresses or foreign words."""
    return fill(rng.choice(TEMPLATES), rng, foreign_texts, words)
