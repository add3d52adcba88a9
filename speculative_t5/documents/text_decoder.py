"""What a text needs of a decoder: `SpeculativeDecoder` has it, and so has the server's stand-in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ..decoding import Logprob
from ..generation import BatchOptions, Generation
from ..tokenizers import Source


class TextDecoder(Protocol):
    """Encodes and decodes the parts of a text; see `SpeculativeDecoder` for each name."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, which may have an `unknown_id`; None if prompts have to be ids."""

    @property
    def prefix(self) -> str:
        """What goes before each part; "" if the parts go as they are."""

    @property
    def languages(self) -> tuple[str, str] | None:
        """Codes of the languages to translate from ("" if unknown) and to, if it translates."""

    @property
    def trained_length(self) -> int | None:
        """How many tokens the model was trained on at most, if it says so."""

    @property
    def min_probability(self) -> float:
        """The probability below which a token makes an output doubtful."""

    @property
    def is_steady(self) -> bool:
        """Whether prompts are decoded one at a time, and no beams are searched."""

    def check_batch(self, options: BatchOptions, /) -> None:
        """Refuse options that `iter_batch` would refuse, before anything is decoded."""

    def iter_batch(
        self,
        prompts: Iterable[tuple[int, list[int]]],
        /,
        *,
        max_tokens: int = ...,
        batch_size: int | None = ...,
        speculative: bool = ...,
        num_beams: int = ...,
        num_return_sequences: int = ...,
        logprobs: int | None = ...,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield index and output for pairs of an index and ids, in any order."""

    def encode(self, prompt: str, /) -> list[int]:
        """Return the ids of a part, with the prefix, of any length."""

    def fit(self, prompt: str, /) -> Source:
        """Encode a part; ValueError is raised if it is longer than the model reads."""

    def log_probabilities(self, source: Sequence[int], tokens: Sequence[int]) -> list[Logprob]:
        """Return how probable each token of any output is, given the ids of a part."""
