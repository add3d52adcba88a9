"""From rounds of ids to the values that users get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..decoding import FinishReason, Origin, Round, Stats, origins_of_round
from ..tokenizers import Detokenizer, Tokenizer, pieces
from .stops import StopFilter, cut_pieces

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
        text: The text that it adds to the output; empty where a character is not complete yet, and
            without a tokenizer.
        origin: Where it came from, see `MEANINGS`.
        round: The number of its round, from 1.
        p: Its probability by the target, given all tokens before it, after temperature, top-k and
            top-p; at temperature 0, that at temperature 1. None unless `probabilities` was set.
        q: Its probability by the draft model, computed in the same way even where a lookup proposed
            the token; None also without a draft model.
    """

    id: int
    text: str
    origin: Origin
    round: int
    p: float | None = None
    q: float | None = None


@dataclass(frozen=True)
class Chunk:
    """One round of a stream; its `text` continues that of the chunks before it.

    `pieces` has the text of each token: empty where a character is not complete yet. Without a
    tokenizer there are none.
    """

    text: str
    tokens: list[int]
    num_accepted: int
    stats: Stats
    finish_reason: FinishReason | None = None
    pieces: tuple[str, ...] = ()
    end_id: int | None = None  # the EOS or stop id that ended the output, in the last chunk

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` came from."""
        emitted = len(self.tokens) + (self.end_id is not None)
        _, num_drafted, num_accepted = self.stats.last_round
        return origins_of_round(num_drafted, num_accepted, emitted)[: len(self.tokens)]


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished output; notebooks display it through `_repr_html_`.

    Attributes:
        text: The output, up to a stop string; empty without a tokenizer.
        tokens: Its ids, without EOS or the stop id; the last may complete a stop string.
        finish_reason: "eos"; "length", at `max_tokens` or where the context ends; or "stop", at a
            stop string or id.
        stats: Its rounds, drafted and accepted tokens, and seconds.
        pieces: The text of each token; joined, they are `text`. Without a tokenizer there are none.
        probabilities: p and q of each token if `probabilities` was set, see `Token`.
        score: The natural logarithm of its probability if `scores` was set, EOS included, by the
            target alone: at temperature 1, and without options that change the distribution. After
            a beam search, what beams were ranked by.
        alternatives: The other outputs if `num_return_sequences` is above 1: samples in their
            order, beams from better to worse.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    pieces: tuple[str, ...] = ()
    probabilities: tuple[tuple[float, float | None], ...] | None = None
    score: float | None = None
    alternatives: tuple[Generation, ...] = ()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"Generation({text!r}, {self.finish_reason!r}, {self.stats!r})"

    @property
    def trace(self) -> list[Token]:
        """Each token with where it came from."""
        count = len(self.tokens)
        pieces = self.pieces or [""] * count
        probabilities = self.probabilities or [(None, None)] * count
        # Origins include that of EOS.
        origins = zip(self.tokens, pieces, probabilities, self.stats.origins(), strict=False)
        return [
            Token(token, piece, origin, number, p, q)
            for token, piece, (p, q), (number, origin) in origins
        ]

    def _repr_html_(self) -> str:
        """Return the text shaded by origin, a chart of accepted tokens by round, and the totals."""
        from .html_view import as_html

        stats = self.stats
        rounds = list(zip(stats.num_drafted, stats.num_accepted, strict=True))
        return as_html(self.trace, rounds, stats.summary())


Stops = Callable[[], StopFilter | None]  # makes a filter for each output, if there are stops


def as_generations(
    rounds: Iterator[Round],
    tokenizer: Tokenizer | None,
    stops: Stops = lambda: None,
    score: Callable[[Round], float] | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Yield index and output of each prompt as it ends; without a tokenizer texts are empty."""
    for done in rounds:
        if done.finish_reason:
            parts = pieces(done.output, Detokenizer(tokenizer), end=True) if tokenizer else ()
            if found := stops():
                parts = cut_pieces(parts, found, end=True)
            made = Generation("".join(parts), done.output, done.finish_reason, done.stats, parts)
            yield done.index, replace(made, score=score(done)) if score else made


class ChunkMaker:
    """Turns the rounds of one output into chunks with the text that each adds."""

    def __init__(self, tokenizer: Tokenizer | None, stops: StopFilter | None = None) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stops = stops

    def chunk(self, done: Round) -> Chunk:
        """Return the next round as a chunk."""
        ends = done.finish_reason is not None
        parts = pieces(done.tokens, self._detokenizer, end=ends) if self._detokenizer else ()
        if self._stops:
            parts = cut_pieces(parts, self._stops, end=ends)
        return Chunk(
            "".join(parts), done.tokens, done.num_accepted, done.stats, done.finish_reason, parts,
            done.end_id,
        )  # fmt: skip


def as_chunks(
    rounds: Iterator[Round], tokenizer: Tokenizer | None, stops: Stops = lambda: None
) -> Iterator[Chunk]:
    """Yield the rounds of one prompt with the text that each adds."""
    maker = ChunkMaker(tokenizer, stops())
    for done in rounds:
        yield maker.chunk(done)


def with_bar(rounds: Iterator[Round], max_tokens: int) -> Iterator[Round]:
    """Yield the rounds of one output unchanged, and count their tokens in a bar on stderr."""
    from tqdm import tqdm  # only where a bar is wanted

    with tqdm(total=max_tokens, unit="token", desc="generating") as bar:
        for done in rounds:
            bar.set_postfix_str(f"{done.stats.tokens_per_round:.1f} per round", refresh=False)
            bar.update(done.stats.emitted - bar.n)
            if done.finish_reason in ("eos", "stop"):
                bar.total = bar.n  # max_tokens is only an upper bound
            yield done
