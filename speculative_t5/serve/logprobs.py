"""How probable the tokens of outputs are, and which ones are most, as OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..generation import Chunk
from ..tokenizers import Detokenizer, Tokenizer

TOKENS_BEFORE = 3  # tokens that decide what text the next one adds


@dataclass(frozen=True)
class ScoredToken:
    """A token of an output, with natural logarithms of the target's probabilities."""

    text: str
    offset: int  # where it begins in the output, in characters
    logprob: float
    top: tuple[tuple[str, float], ...]  # the most probable tokens, the best one first


class ScoredOutput:
    """The tokens of an output, as rounds add them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens: list[ScoredToken] = []
        self.added: list[ScoredToken] = []  # by the last round
        self._tokenizer, self._ids, self._offset = tokenizer, list[int](), 0

    def add(self, chunk: Chunk) -> None:
        """Take a round, whose chunk has `logprobs`."""
        self.added = []
        for token, piece, found in zip(
            chunk.tokens, chunk.pieces, chunk.logprobs or (), strict=False
        ):
            before = self._ids[-TOKENS_BEFORE:]
            named = tuple(
                (_text_after(self._tokenizer, before, other), p) for other, p in found.top.items()
            )
            self.added.append(ScoredToken(piece, self._offset, found.value, named))
            self._ids.append(token)
            self._offset += len(piece)
        if self.tokens and not chunk.tokens:  # its text is what was held back
            self.tokens[-1] = replace(self.tokens[-1], text=self.tokens[-1].text + chunk.text)
        self.tokens += self.added


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
