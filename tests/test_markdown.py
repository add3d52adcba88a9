"""Random Markdown keeps its structure, as markdown-it reads it, whatever a model makes of it."""

from __future__ import annotations

import random
import re
from typing import Any

from speculative_t5.documents import rewrite

import pytest
from markdown_it import MarkdownIt
from pieces import Scripted

DOCUMENTS = 400
BLOCKS = MarkdownIt("commonmark", {"html": True}).enable("table")
WORDS = "He she go have a old house, and 12 (apples) in it is the *best* `x = 1` 1984".split()
# What a model might put before a word, within one or instead of one.
MARKS = (
    "2) * - + > # ## | || ``` ~~~~ --- === *** ___ 1. 1984. a) <div> <!-- [x] - [ ] [a]: \ufffd "
    "\u2013 \u2022 = : \\ >> 10) -> <b>"
).split(" ")
FIXED = (
    "# The Old House", "## He go home. ##", "The house of my father\n===", "~~~\nHe go.\n~~~",
    "```python\nHe go. = 1\n\n- She go.\n```", "| a | b |\n|---|---|\n| c | d |", "* * *",
    "    x = he.go()\n    y = 2", "<div>\nHe go.\n</div>\n", "---", "- [ ] milk and eggs",
    "[1]: https://a.example/b", "",
)  # fmt: skip
BEFORE = ("", "", "", "- ", "* ", "1. ", "2) ", "> ", "> > ", "> - ", "- [x] ", "  ", "- > ", "a) ")


def sentence(rng: random.Random, further: str) -> str:
    """Some words with an end, perhaps on several lines."""
    words = rng.choices(WORDS, k=rng.randint(3, 24))
    text = "He " + " ".join(words) + rng.choice(".?!")
    while rng.random() < 0.4:
        gaps = [found.start() for found in re.finditer(r"(?<=\w) (?=[a-z])", text)]
        if gaps:
            place = rng.choice(gaps)
            text = f"{text[:place]}\n{further}{text[place + 1 :]}"
    return text


def document(rng: random.Random) -> str:
    blocks = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.3:
            blocks.append(rng.choice(FIXED))
            continue
        before = rng.choice(BEFORE)
        further = re.sub(r"[^>\s]", " ", before.replace("[x] ", ""))
        several = (sentence(rng, further) for _ in range(rng.randint(1, 3)))
        blocks.append(before + " ".join(several))
    joint = rng.choice(("\n\n", "\n\n", "\n"))
    return joint.join(blocks).replace("\n", rng.choice(("\n", "\r\n"))) + rng.choice(("", "\n"))


def damaged(text: str, rng: random.Random) -> str:
    """An output with marks among its words, and some words less or more."""
    words = text.split()
    for _ in range(rng.randint(0, 4)):
        place = rng.choice((0, rng.randrange(len(words) + 1)))
        match rng.randrange(4):
            case 0:
                words.insert(place, rng.choice(MARKS))
            case 1:
                words[place : place + 1] = [rng.choice(MARKS) + "".join(words[place : place + 1])]
            case 2 if len(words) > 1:
                del words[place : place + 1]
            case _:
                words.insert(place, rng.choice(WORDS))
    return " ".join(words)


def structure(text: str) -> list[Any]:
    """The blocks of a text, where they are, and what stands in those that are no text."""
    return [
        (each.type, each.markup, each.info, each.level, each.map,
         each.content if each.type in ("fence", "code_block") else "")
        for each in BLOCKS.parse(text)
    ]  # fmt: skip


@pytest.mark.parametrize("least", [0, 0.75])
def test_structure_and_untouched_text_stay(least: float) -> None:
    changed = kept = 0
    for seed in range(DOCUMENTS):
        rng = random.Random(seed)
        text = document(rng)
        decoder: Any = Scripted(lambda each, rng=rng: damaged(each, rng), limit=999)
        done = rewrite(decoder, text, min_similarity=least)
        assert structure(done.text) == structure(text), f"seed {seed}: {text!r} {done.text!r}"
        before, after = (re.split(r"\r\n|\n", each) for each in (text, done.text))
        assert len(before) == len(after) and done.text.count("\r\n") == text.count("\r\n")
        rows = {
            piece.line + i for piece in done.pieces for i in range(piece.source.count("\n") + 1)
        }
        for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
            assert number in rows or old == new
        again = rewrite(Scripted(str, limit=999), text)  # type: ignore[arg-type]
        assert again.text == text
        changed += sum(piece.status == "changed" for piece in done.pieces)
        kept += len(done.kept)
    assert changed > DOCUMENTS / 2 and kept > DOCUMENTS / 2
