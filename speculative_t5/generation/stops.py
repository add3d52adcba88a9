"""Stop strings: where an output's text ends, wherever the borders of its tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..tokenizers import Detokenizer, Tokenizer


@dataclass
class StopFilter:
    """Passes text on, piece by piece, up to the first of some strings.

    The string that ends first counts, as if the text came character by character. Text that may be
    the beginning of one is held back until it is known not to be.

    Attributes:
        strings: None is empty.
        min_pieces: A string that ends in an earlier piece is text like any other.
        stopped: Whether one of the strings has come.
    """

    strings: Sequence[str]
    min_pieces: int = 0
    stopped: bool = False
    _held: str = field(default="", init=False)
    _count: int = field(default=0, init=False)

    def add(self, piece: str) -> str:
        """Return the text that can be passed on now; after a stop there is none."""
        if self.stopped:
            return ""
        self._count += 1
        text, new = self._held + piece, len(self._held)
        if self._count >= self.min_pieces:
            found = []
            for string in self.strings:
                # It ends in the new piece: what was held back is only the beginning of one.
                start = text.find(string, max(0, new - len(string) + 1))
                if start >= 0:
                    found.append((start + len(string), start))
            if found:
                self.stopped, self._held = True, ""
                return text[: min(found)[1]]
        keep = max(self._starts(text), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _starts(self, text: str) -> list[int]:
        """Return the lengths of the ends of a text that begin a stop string."""
        return [
            length
            for string in self.strings
            for length in range(1, min(len(string), len(text) + 1))
            if text.endswith(string[:length])
        ]

    def finish(self) -> str:
        """Return the text still held back."""
        held, self._held = self._held, ""
        return held


def cut_pieces(pieces: Sequence[str], stops: StopFilter, *, end: bool) -> tuple[str, ...]:
    """Return the text that each piece adds; at the `end` the last includes what was held back."""
    texts = [stops.add(piece) for piece in pieces]
    if end and (rest := stops.finish()):
        texts = [*texts[:-1], "".join(texts[-1:]) + rest]
    return tuple(texts)


class StopSearch:
    """Finds the token that completes a stop string; a `Stopper`."""

    def __init__(self, tokenizer: Tokenizer, stops: StopFilter) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops

    def __call__(self, tokens: Sequence[int]) -> int | None:
        for count, token in enumerate(tokens, start=1):
            self._stops.add(self._detokenizer.add(token))
            if self._stops.stopped:
                return count
        return None
