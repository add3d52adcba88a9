"""How probable the tokens of outputs are, and which ones are most, as OpenAI's clients read it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..generation import Chunk, SpeculativeDecoder
from ..tokenizers import Detokenizer, Tokenizer
from .service import Service

TOKENS_BEFORE = 3  # tokens that decide what text the next one adds


@dataclass(frozen=True)
class ScoredToken:
    """A token of an output, with natural logarithms of the target's probabilities."""

    text: str
    offset: int  # where it begins in the output, in characters
    logprob: float
    top: tuple[tuple[str, float], ...]  # the most probable tokens, the best one first


async def explain(
    service: Service,
    source: Sequence[int],
    chunks: Sequence[Chunk],
    top: int | None,
    start: int | None = None,
) -> list[ScoredToken]:
    """Return the tokens of an output that has ended, by one more pass of the target.

    `start` is its decoder_start_token_id, if the call gave one.
    """
    ids = [token for chunk in chunks for token in chunk.tokens]
    pieces: list[str] = []
    for chunk in chunks:
        if chunk.tokens:
            pieces += chunk.pieces
        elif pieces:  # it has what was held back
            pieces[-1] += chunk.text

    def score(decoder: SpeculativeDecoder) -> list[tuple[float, dict[int, float]]]:
        return decoder.log_probabilities(source, ids, top or 0, decoder_start_token_id=start)

    scores = await asyncio.wrap_future(service.compute(score))
    tokenizer = service.decoder.tokenizer
    assert tokenizer is not None
    return await asyncio.to_thread(partial(_tokens, tokenizer, ids, pieces, scores))


def _tokens(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    pieces: Sequence[str],
    scores: Sequence[tuple[float, dict[int, float]]],
) -> list[ScoredToken]:
    found, offset = [], 0
    for i, (piece, (logprob, top)) in enumerate(zip(pieces, scores, strict=True)):
        before = ids[max(0, i - TOKENS_BEFORE) : i]
        named = tuple((_text_after(tokenizer, before, token), p) for token, p in top.items())
        found.append(ScoredToken(piece, offset, logprob, named))
        offset += len(piece)
    return found


def _text_after(tokenizer: Tokenizer, before: Sequence[int], token: int) -> str:
    """Return the text that a token would add."""
    detokenizer = Detokenizer(tokenizer)
    for each in before:
        detokenizer.add(each)
    return detokenizer.add(token)


def as_completion(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return tokens in the form of completions; of equal texts, the more probable token counts."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(reversed(token.top)) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def as_chat(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return tokens in the form of chats."""

    def shown(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

    content = [
        shown(token.text, token.logprob) | {"top_logprobs": [shown(*each) for each in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}
