"""From rounds of ids to what users get."""

from __future__ import annotations

from collections.abc import Iterator

from .results import Chunk, Generation, Round
from .tokenizer import Detokenizer, Tokenizer, pieces


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
