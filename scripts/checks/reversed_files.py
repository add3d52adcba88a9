"""Passes of whole files through a decoder that reverses the letters of words.

What comes out has the letters that were there, so that all that is lost or comes twice is seen.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative_t5.documents import (
    Document,
    FormatOptions,
    PlainFile,
    RewriteOptions,
    format_of,
    read_file,
)

READ_TEXT_ALONE = FormatOptions()
sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]  # where the decoder is

EVERY_WORD, SOME_WORDS = 1, 5  # which words of a text a pass reverses
_ANY_WORD = re.compile(r"\w+")


def reversed_words(text: str, every: int = EVERY_WORD) -> str:
    """Reverse the letters of every word of a line, or of one word in `every`."""
    count = 0

    def turn(found: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return found[0] if count % every else found[0][::-1]

    return "\n".join(_ANY_WORD.sub(turn, line) for line in text.split("\n"))


def set_decoder(answer: Callable[[str], str], **options: Any) -> Any:
    """Return a decoder that answers each text by a function, however long it is."""
    from pieces import Scripted

    return Scripted(answer, limit=10**9, is_steady=True, prefix="", **options)


@dataclass(frozen=True)
class Pass:
    """What became of a file."""

    before: bytes
    after: bytes
    form: PlainFile  # as it was read
    wanted: str  # the text that it was to have
    pieces: int
    seconds: float

    @property
    def said(self) -> list[str]:
        """What was said to be not kept."""
        return self.form.not_kept()

    @property
    def read(self) -> int:
        """How many lines were read."""
        return sum(bool(line.strip()) for line in self.form.text.split("\n"))

    @property
    def changed(self) -> int:
        """How many lines were to have other words."""
        pairs = zip(self.form.text.split("\n"), self.wanted.split("\n"), strict=True)
        return sum(old != new for old, new in pairs)


def passed(data: bytes, name: str, decoder: Any, options: FormatOptions = READ_TEXT_ALONE) -> Pass:
    """Rewrite a file as the command `document` does, with no guard that leaves passages out.

    Options that its format does not have are left out.
    """
    began = time.process_time()
    form = read_file(data, name, format_of(name), options)
    if decoder.languages:
        form.translate_into(decoder.languages[1])
    wanted = RewriteOptions(guard=False)
    document = Document(decoder, form.text, wanted, form.lines)
    done = document.result(document.rewrite())
    after = form.rewritten(done.text) if done.text != done.source else data
    seconds = time.process_time() - began
    return Pass(data, after, form, done.text, len(done.pieces), seconds)


def reversing_pass(
    data: bytes,
    name: str,
    *,
    translates: bool,
    options: FormatOptions = READ_TEXT_ALONE,
) -> Pass:
    """Correct a file, in which some words are reversed, or translate it, in which all are."""
    every = EVERY_WORD if translates else SOME_WORDS
    decoder = set_decoder(
        lambda text: reversed_words(text, every), languages=("en", "de") if translates else None
    )
    return passed(data, name, decoder, options)
