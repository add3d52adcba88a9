"""From rounds of ids to what users get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..decoding import FinishReason, Origin, Round, Stats, origins_of_round
from ..tokenizers import Detokenizer, Tokenizer, pieces

MEANINGS: dict[Origin, str] = {
    "accepted": "drafted",
    "recovered": "the target's, for a rejected draft",
    "bonus": "the target's, after a whole draft",
    "regular": "the target's, with nothing drafted",
}


@dataclass(frozen=True)
class Token:
    """One emitted token.

    Attributes:
        id: Its id.
        text: What it adds to the output's text; empty where a character is not complete yet, and
            without a tokenizer.
        origin: Where it came from, see `MEANINGS`.
        round: Its round, from 1.
        p: The target's probability of it, given all before it, after temperature, top-k and top-p;
            at temperature 0 that of temperature 1. None if it was not asked for.
        q: The draft model's, in the same way, even where a lookup proposed the token; None also
            without a draft model.
    """

    id: int
    text: str
    origin: Origin
    round: int
    p: float | None = None
    q: float | None = None


@dataclass(frozen=True)
class Chunk:
    """A round as a stream shows it: `text` continues the text of the chunks before it.

    `pieces` are its parts by token: empty where a character is not complete yet, and none at all
    without a tokenizer.
    """

    text: str
    tokens: list[int]
    num_accepted: int
    stats: Stats
    finish_reason: FinishReason | None = None
    pieces: tuple[str, ...] = ()

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` came from."""
        own = len(self.tokens) + (self.finish_reason == "eos")
        _, num_drafted, num_accepted = self.stats.last_round
        return origins_of_round(num_drafted, num_accepted, own)[: len(self.tokens)]


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished output. A notebook shows it as `_repr_html_` draws it.

    Attributes:
        text: The output.
        tokens: Its ids, without EOS.
        finish_reason: "eos" or "length".
        stats: What it cost.
        pieces: The text by token, joined the same; none without a tokenizer.
        probabilities: p and q of each token, if they were asked for, see `Token`.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    pieces: tuple[str, ...] = ()
    probabilities: tuple[tuple[float, float | None], ...] | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"Generation({text!r}, {self.finish_reason!r}, {self.stats!r})"

    @property
    def trace(self) -> list[Token]:
        """Each token with where it came from."""
        nothing = [None] * len(self.tokens)
        return [
            Token(token, piece or "", origin, number, *(odds or (None, None)))
            for token, piece, odds, (number, origin) in zip(
                self.tokens,
                self.pieces or nothing,
                self.probabilities or nothing,
                self.stats.origins(),
                strict=False,  # origins have EOS, too
            )
        ]

    def _repr_html_(self) -> str:
        """Text shaded by where it came from, accepted tokens by round, and the totals."""
        from .html_view import as_html

        stats = self.stats
        return as_html(
            self.trace,
            list(zip(stats.num_drafted, stats.num_accepted, strict=True)),
            stats.summary(),
        )


def as_generations(
    rounds: Iterator[Round], tokenizer: Tokenizer | None
) -> Iterator[tuple[int, Generation]]:
    """Index and output of each prompt as it ends; without a tokenizer texts are empty."""
    for done in rounds:
        if done.finish_reason:
            parts: tuple[str, ...] = ()
            if tokenizer:
                parts = pieces(done.output, Detokenizer(tokenizer), end=True)
            text = "".join(parts)
            yield done.index, Generation(text, done.output, done.finish_reason, done.stats, parts)


def as_chunks(rounds: Iterator[Round], tokenizer: Tokenizer | None) -> Iterator[Chunk]:
    """The rounds of one prompt, with the text that each adds."""
    detokenizer = Detokenizer(tokenizer) if tokenizer else None
    for done in rounds:
        parts: tuple[str, ...] = ()
        if detokenizer:
            parts = pieces(done.tokens, detokenizer, end=done.finish_reason is not None)
        yield Chunk(
            "".join(parts), done.tokens, done.num_accepted, done.stats, done.finish_reason, parts
        )
