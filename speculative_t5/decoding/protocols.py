"""The two roles a model plays in the decoding loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import device


@dataclass(frozen=True)
class Vocabulary:
    """Which tokenizer a model's ids come from: models of one pair must agree in it.

    Attributes:
        size: Number of pieces.
        digest: Hexadecimal digest of all pieces and their ids.
        special: Ids that are no text: padding, end, unknown, sentinels and the like.
    """

    size: int
    digest: str
    special: frozenset[int] = field(default=frozenset(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.size} pieces, digest {self.digest[:8]}"


def fingerprint(description: str, parameters: Any) -> str:
    """Hexadecimal digest of a description and of a sample of every weight in a tree of them."""
    device.enter_thread()
    digest = hashlib.sha256(description.encode())
    weights = cast(list[tuple[str, mx.array]], tree_flatten(parameters))
    samples = {name: w.reshape(-1)[:8].astype(mx.float32) for name, w in weights}
    mx.eval(samples)
    for name, sample in sorted(samples.items()):
        digest.update(f"{name} {sample.tolist()}".encode())
    return digest.hexdigest()


Encoded = Any  # one prompt as a session's `encode` leaves it; only that session looks inside


class Session(Protocol):
    """One batch of sequences being decoded; owns its caches."""

    @property
    def lengths(self) -> list[int]:
        """Cached positions of each row."""

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        """Append `tokens` (B, L) int32 to every row: logits (B, L, V) of what follows each.

        V is `vocab_size`, where that is given and less than the model's: of the first ids only.
        """

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        """As `step`, but the best ids only, (B, L) int32."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` positions of each row; idempotent."""

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[Encoded]:
        """Encode prompts together, for rows to be given to later: one item for each prompt."""

    def replace(self, rows: Sequence[int], encoded: Sequence[Encoded]) -> list[list[int]]:
        """Give `rows[i]` to the prompt of `encoded[i]`, and return their initial contexts.

        Items may come from several calls of this session's `encode`, and be used in any order.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""


class LanguageModel(Protocol):
    """Something that can decode a batch of prompts."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padding included."""

    @property
    def eos_token_id(self) -> int:
        """The id that ends an output."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end an output, that one among them."""

    @property
    def fingerprint(self) -> str:
        """What tells this model from others: what is measured of it is kept under this."""

    @property
    def max_source_length(self) -> int:
        """Tokens of a source, at most, that it was made for."""

    @property
    def max_context(self) -> int | None:
        """Tokens that its decoder can read, at most; None for any number."""

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids that are no text, EOS among them."""

    @property
    def is_decoder_only(self) -> bool:
        """Whether contexts begin with the prompt, as those of decoder-only models do."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer it was loaded with; None if unknown."""

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[Session, list[list[int]]]:
        """Begin decoding: a session, and each row's initial context (not in the cache yet)."""
