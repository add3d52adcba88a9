"""The roles that models play in the decoding loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import device


@dataclass(frozen=True)
class Vocabulary:
    """Identifies the tokenizer of a model's ids, which the models of a pair must share."""

    size: int  # number of pieces
    digest: str  # hexadecimal, of all pieces and their ids
    # Ids that stand for no text, such as padding, EOS, unknown and sentinels.
    special: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    # Codes xx of the tokens <2xx>, with which a prompt asks for a language.
    languages: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.size} pieces, digest {self.digest[:8]}"


@dataclass(frozen=True)
class Constraints:
    """What a checkpoint asks of outputs, if a call says nothing else; see `LogitsTransform`."""

    forced_tokens: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()


NO_CONSTRAINTS = Constraints()


@dataclass(frozen=True)
class ModelInfo:
    """What a model says of itself."""

    vocab_size: int  # width of the logits, padding included
    eos_token_id: int  # that usually ends an output
    eos_token_ids: frozenset[int]  # all that end one
    special_tokens: frozenset[int]  # ids that stand for no text, EOS among them
    is_decoder_only: bool  # whether contexts begin with the prompt
    max_source_length: int  # the longest source, in tokens, that it was made for
    max_context: int | None = None  # the most tokens that its decoder can read; None for any number
    vocabulary: Vocabulary | None = None  # of the tokenizer it was loaded with; None if unknown
    # Tokens that a pass proposes. A draft of blocks reads block - 1 masks after the last token,
    # whose ids are those from `vocab_size` on.
    block: int = 1
    constraints: Constraints = NO_CONSTRAINTS  # on outputs, of calls that have none of the kind

    def with_vocabulary(self, vocabulary: Vocabulary | None) -> ModelInfo:
        """Return the same for a model whose tokenizer is known."""
        special = self.special_tokens | (vocabulary.special if vocabulary else frozenset())
        return replace(self, vocabulary=vocabulary, special_tokens=special)


def fingerprint(description: str, parameters: Any) -> str:
    """Return a hexadecimal digest of a description and of eight values of every weight."""
    device.enter_thread()
    digest = hashlib.sha256(description.encode())
    weights = cast(list[tuple[str, mx.array]], tree_flatten(parameters))
    heads = {name: w.reshape(-1)[:8].astype(mx.float32) for name, w in weights}
    mx.eval(heads)
    for name, head in sorted(heads.items()):
        digest.update(f"{name} {head.tolist()}".encode())
    return digest.hexdigest()


Encoded = Any  # result of `Session.encode` for one prompt, opaque to others


class Session(Protocol):
    """A batch of sequences being decoded; owns the model's caches."""

    @property
    def lengths(self) -> list[int]:
        """Number of cached positions of each row."""

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        """Append `tokens` (B, L) int32, and return the logits (B, L, V) of what follows each.

        V is the model's vocabulary size, or `vocab_size` if that is smaller: only the first ids.
        """

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        """Append `tokens` as `step` does, and return the best ids, (B, L) int32.

        `best` of the logits finds them, with what marks those that are NaN.
        """

    def step_logprobs(self, tokens: mx.array) -> mx.array:
        """Append `tokens`, and return the best ids and how probable they are, (B, L, 2) int32.

        `best_logprobs` of the logits finds them.
        """

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` positions of each row; idempotent."""

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[Encoded]:
        """Encode prompts together, for rows to be given to later: one item for each prompt."""

    def replace(self, rows: Sequence[int], encoded: Sequence[Encoded]) -> list[list[int]]:
        """Give `rows[i]` to the prompt of `encoded[i]`, and return their initial contexts.

        Items may come from several calls of this session's `encode`, and be used in any order.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; a row may be kept several times."""


class LanguageModel(Protocol):
    """A model that can decode a batch of prompts: a target or a draft."""

    @property
    def info(self) -> ModelInfo:
        """What differs between models, their vocabularies and limits."""

    @property
    def fingerprint(self) -> str:
        """Identifies the model and its weights; what draft lengths gain is stored under it."""

    def start(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[Session, list[list[int]]]:
        """Return a session and each row's initial context, whose last token is not cached yet.

        Args:
            prompts: Ids of each row's prompt.
            width: Positions of every pass, for passes that are steady: more tokens are fed in
                several passes, and fewer are padded. The cache's capacity is then a function of the
                position. So what is computed at a position does not depend on how the tokens before
                it were fed. None makes passes as long as what they are fed.
        """


class SharingModel(LanguageModel, Protocol):
    """A draft that reads the encoding of its target, instead of encoding prompts itself."""

    def start_both(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[Session, Session, list[list[int]]]:
        """Return the target's session, the draft's own, and each row's initial context.

        The prompts are encoded once. Rows are replaced and selected in the target's session first.
        `width` is for the target's passes; see `start`.
        """
