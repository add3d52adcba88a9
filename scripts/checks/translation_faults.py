"""What the checks of translations catch, and how often they are wrong.

    python scripts/checks/translation_faults.py --data deu.txt.xz

The data has lines of an English sentence, a tab and its German translation. Right pairs, alone and
two to six together, show false alarms. The same are then made wrong on purpose, in one way at a
time. The figures stand in docs/translating.md.
"""

import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from speculative_t5.documents.translation import Translation

import typer

GERMAN = Translation("de", "en")
Pair = tuple[str, str]  # a German sentence and its translation
Wrong = Callable[[str, list[Pair]], Pair]  # the source and a wrong output for some pairs


def joined(pairs: list[Pair]) -> Pair:
    source, output = (" ".join(texts) for texts in zip(*pairs, strict=True))
    return source, output


def looped(source: str, pairs: list[Pair]) -> Pair:
    words = joined(pairs)[1].split()
    size = random.randint(1, min(6, len(words)))
    at = random.randint(0, len(words) - size)
    again = words[at : at + size] * random.randint(4, 12)
    return source, " ".join([*words[: at + size], *again, *words[at + size :]])


def cut(source: str, pairs: list[Pair]) -> Pair:
    words = joined(pairs)[1].split()
    return source, " ".join(words[: len(words) // 2])


def copied(source: str, pairs: list[Pair]) -> Pair:
    place = random.randrange(len(pairs))
    outputs = [pair[0 if i == place else 1] for i, pair in enumerate(pairs)]
    return source, " ".join(outputs)


def without_the_last(source: str, pairs: list[Pair]) -> Pair:
    return source, joined(pairs[:-1])[1]


def with_another(source: str, pairs: list[Pair]) -> Pair:
    return joined(pairs[:-1])[0], joined(pairs)[1]


def other(before: str, after: str) -> Wrong:
    """Put a word at the end of the source, and another one at the end of the output."""

    def changed(source: str, pairs: list[Pair]) -> Pair:
        number = str(random.randint(13, 9999))
        found, made = (text.replace("N", number) for text in (before, after))
        return f"{source} {found}", f"{joined(pairs)[1]} {made}".strip()

    return changed


# Ways to be wrong, and how many sentences are in each text.
WRONG: dict[str, tuple[int, Wrong]] = {
    "words repeated, one sentence": (1, looped),
    "words repeated, three sentences": (3, looped),
    "second half missing, one sentence": (1, cut),
    "second half missing, four sentences": (4, cut),
    "last of four sentences missing": (4, without_the_last),
    "a sentence more than one": (2, with_another),
    "copied, one sentence": (1, copied),
    "copied, one of three sentences": (3, copied),
    "a number missing": (1, other("(N)", "")),
    "another number": (1, other("(N)", "(N0)")),
    "a placeholder missing": (1, other("{name}", "")),
    "a placeholder translated": (1, other("%(zahl)d", "%(number)d")),
    "another address": (1, other("www.beispiel.de/a", "www.example.de/a")),
    "a name missing": (1, other("(iPhone)", "(phone)")),
}


def main(
    data: Annotated[Path, typer.Option(help="File of pairs, perhaps compressed by xz.")],
    count: Annotated[int, typer.Option(help="Texts of each kind.")] = 500,
    seed: Annotated[int, typer.Option(help="Chooses the pairs.")] = 0,
) -> None:
    """Print the shares of texts in which something was seen to be wrong."""
    random.seed(seed)
    with (lzma.open if data.suffix == ".xz" else open)(data, "rt", encoding="utf-8") as file:
        pairs = [tuple(line.rstrip("\n").split("\t")[1::-1]) for line in file]

    def seen(size: int, wrong: Wrong | None = None) -> float:
        found = 0
        for _ in range(count):
            some = random.sample(pairs, size or random.randint(2, 6))
            source, output = joined(some)
            if wrong:
                source, output = wrong(source, some)
            found += GERMAN.fault(source, output) is not None
        return found / count

    print(f"{count} texts of each kind\n\n| right | seen |\n|---|---|")
    print(f"| one sentence | {seen(1):.1%} |\n| two to six sentences | {seen(0):.1%} |")
    print("\n| wrong | seen |\n|---|---|")
    for name, (size, wrong) in WRONG.items():
        print(f"| {name} | {seen(size, wrong):.1%} |")


if __name__ == "__main__":
    typer.run(main)
