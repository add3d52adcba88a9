"""Change random documents at random, and see whether anything else changes.

    python scripts/checks/random_documents.py                   # 100,000 of each format
    python scripts/checks/random_documents.py html --count 1000 --seed 7

Each document is made of the constructs that its format has, and each of its words is another one.
Words are replaced, left out and put in. Then the file has the new text and nothing else is new:
tags, programs and pictures are the same in the same order, and every word that stayed has its marks
and its spelling. Where words were only replaced, replacing them back gives the bytes of the file.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from speculative_t5.documents import FormatOptions, PlainFile, read_file
from speculative_t5.documents.marks import is_other

import typer
from random_catalogs import CATALOG_KINDS
from random_html import html, skeleton_of_html
from random_markdown import markdown, skeleton_of_markdown
from random_subtitles import ass, lrc, skeleton_of_subtitles, srt, vtt
from random_word import docx
from random_words import WORD, Skeleton, Words
from word_faults import faults_of_changes, faults_of_reading, skeleton_of_docx

_APART = re.compile(r"(?<![\w\u0301])[a-zäßéж]*\d+x(?!\w)")  # from its neighbours
_TOGETHER = re.compile(r"\dx\w*\d+x")  # in which marks begin and end within what is changed


@dataclass(frozen=True)
class Kind:
    """A format: what makes a document, and what of one is to stay."""

    make: Callable[[Words], bytes]
    skeleton: Callable[[bytes], Skeleton]
    name: str
    options: FormatOptions = FormatOptions()
    unread: Callable[[bytes, str], list[str]] = lambda data, text: []  # says what is not in a text

    def read(self, data: bytes) -> PlainFile:
        """Read a document of it."""
        return read_file(data, self.name, None, self.options)


KINDS = {
    "html": Kind(html, skeleton_of_html, "a.html"),
    "attributes": Kind(html, skeleton_of_html, "a.html", FormatOptions(attributes=True)),
    "md": Kind(markdown, skeleton_of_markdown, "a.md"),
    "docx": Kind(docx, skeleton_of_docx, "a.docx", unread=faults_of_reading),
    "docx-tracked": Kind(docx, skeleton_of_docx, "a.docx", FormatOptions(track_changes="Ann")),
    **{name: Kind(each.make, each.skeleton, each.name) for name, each in CATALOG_KINDS.items()},
    "srt": Kind(srt, skeleton_of_subtitles, "a.srt"),
    "vtt": Kind(vtt, skeleton_of_subtitles, "a.vtt"),
    "ass": Kind(ass, skeleton_of_subtitles, "a.ass"),
    "lrc": Kind(lrc, skeleton_of_subtitles, "a.lrc"),
}


def edited(text: str, words: Words, *, only_replace: bool, changes_all: bool = True) -> str:
    """Return a text with some of its words replaced, left out, and with others put in.

    Words that have to stay, those with a q, are among them if it `changes_all`.
    """
    draw = words.draw

    def change(found: re.Match[str]) -> str:
        kind = draw.random()
        if found[0].startswith("q") and not changes_all:
            return found[0]
        if kind < 0.2:
            return words.new()
        if only_replace or kind > 0.35:
            return found[0]
        return "" if kind < 0.27 else f"{found[0]} {words.new()}"

    return "\n".join(WORD.sub(change, line) or line for line in text.split("\n"))


def _faults_of_text(
    pairs: list[tuple[str, str]], text: str, read: Callable[[str], list[str]]
) -> list[str]:
    """Say if a text that is read again is not the one that was wanted."""
    wanted = "\n".join(new for _, new in pairs)
    # Of a line of which nothing is left but what has to stay, nothing is read.
    has_all = text.count("\n") == wanted.count("\n")
    has_all = has_all and not any(_has_free_words(a) and not _has_free_words(b) for a, b in pairs)
    if has_all and read(text) != read(wanted):
        return [f"the text is {text!r}, not {wanted!r}"]
    return []


def _has_free_words(text: str) -> bool:
    """Whether a text has a word that may change."""
    return any(not word.startswith("q") for word in WORD.findall(text))


def _signs_of_cues(text: str) -> list[str]:
    """Return the words and signs of cues without spaces.

    Cues may be in any order: what is heard comes behind a sentence. A dash may become a speaker's.
    """
    return sorted(" ".join(re.findall(r"\w+|[^\w\s–-]", line)) for line in text.split("\n"))


def _faults_of_marks(*documents: tuple[str, Skeleton]) -> list[str]:
    """Say which words of two texts have other marks in one."""
    (text, (_, before)), (new_text, (_, after)) = documents
    apart = {*_APART.findall(text)} & {*_APART.findall(new_text)}
    return [
        f"the marks of {word} have changed"
        for word in apart & before.keys() & after.keys()
        if before[word] != after[word]
    ]


def faults_of(kind: Kind, seed: int) -> list[str]:
    """Return what is wrong with one random document after random changes."""
    words = Words(random.Random(seed))
    data, faults = kind.make(words), []
    form = kind.read(data)
    if form.rewritten(form.text) != data:
        faults.append("a text that is the same changes the file")
    only_replace = seed % 2 == 0
    wanted = edited(form.text, words, only_replace=only_replace, changes_all=seed % 4 > 1)
    if kind.make is not docx:  # which is not changed by a text that is the same
        form = kind.read(data)
    made = form.rewritten(wanted)
    faults += kind.unread(data, form.text)
    if author := kind.options.track_changes:
        direct = read_file(data, kind.name).rewritten(wanted)
        return faults + faults_of_changes(data, made, direct, author)
    has_refused = any("left out" in said for said in form.not_kept())
    again = kind.read(made)
    pairs = [*zip(form.text.split("\n"), wanted.split("\n"), strict=True)]
    # New words are one, and cues wrapped anew, in one of the two directions.
    is_retold = any(is_other(old, new) or is_other(new, old) for old, new in pairs)
    has_cues = kind.make in (srt, vtt, ass, lrc)
    if not has_refused and not (has_cues and is_retold):
        faults += _faults_of_text(pairs, again.text, _signs_of_cues if has_cues else str.split)
    before, after = kind.skeleton(data), kind.skeleton(made)
    if before[0] != after[0]:
        faults.append("what is no text has changed")
    if any("estimates" in said for said in form.not_kept()):
        return faults
    faults += _faults_of_marks((form.text, before), (again.text, after))
    if is_retold:
        return faults
    if only_replace and not has_refused and not _TOGETHER.search(form.text + " " + again.text):
        back = again.rewritten(form.text)
        if kind.skeleton(back) != before or (not kind.name.endswith("docx") and back != data):
            faults.append("replacing words back does not give the file back")
    return faults


def main(
    formats: Annotated[list[str] | None, typer.Argument(help="Formats.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Documents of each.")] = 100_000,
    seed: Annotated[int, typer.Option(help="That of the first.")] = 0,
) -> None:
    """Change random documents, and report what else has changed."""
    wrong = 0
    for name in formats or [*KINDS]:
        began = time.perf_counter()
        for number in range(seed, seed + count):
            for fault in faults_of(KINDS[name], number):
                wrong += 1
                print(f"{name}, seed {number}: {fault}")
        print(f"{name}: {count:,} documents, {time.perf_counter() - began:.0f} s")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
