"""Options as values: checked where they are made, and passed on whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypedDict, cast

from ..decoding import Sampler, check_ngrams
from ..errors import check_integer, check_number
from ..tokenizers import Prompt

VerifyRule = Literal["auto", "token", "block"]
NumDraft = int | Literal["auto"]

BATCH, MAX_BATCH = 16, 2**16  # prompts side by side


@dataclass(frozen=True)
class GenerationOptions:
    """The options of one call, each in its range; `SpeculativeDecoder.generate` describes them."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    speculative: bool = True

    def __post_init__(self) -> None:
        _ = self.sampler  # which checks its own options
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_integer("max_tokens", self.max_tokens, 1)

    @cached_property
    def sampler(self) -> Sampler:
        """The transform from logits to probabilities."""
        return Sampler(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class DraftingOptions:
    """How a decoder drafts and verifies; `SpeculativeDecoder` describes options and ranges."""

    num_draft: NumDraft = 5
    delta: float = 0.0
    verify: VerifyRule = "auto"
    lookup: bool = False
    min_ngram: int = 1
    max_ngram: int = 8
    draft_vocab: int | None = None
    steady: bool = False

    def __post_init__(self) -> None:
        if not 0 <= check_number("delta", self.delta) <= 1:
            raise ValueError(f"delta must be between 0 and 1, got {self.delta}")
        if self.verify not in ("auto", "token", "block"):
            raise ValueError(f"verify must be 'auto', 'token' or 'block', got {self.verify!r}")
        if self.verify == "block" and self.delta > 0:
            raise ValueError(
                f"verify 'block' is exact and takes no delta above 0, got {self.delta}: "
                "use verify 'token' or delta 0"
            )
        check_ngrams(self.min_ngram, self.max_ngram)
        number = self.num_draft
        if number != "auto" and (not isinstance(number, int) or number < 1):
            raise ValueError(
                f"num_draft must be an integer of at least 1 or 'auto', got {number!r}"
            )
        if self.draft_vocab is not None:
            check_integer("draft_vocab", self.draft_vocab, 1)
        if self.steady and number == "auto":
            raise ValueError(
                "steady needs passes of one width, and num_draft 'auto' has several: "
                "give num_draft as a number"
            )
        if self.steady and self.delta > 0:
            raise ValueError(
                f"steady outputs are the same for any draft, and delta {self.delta} lets them "
                "depend on it: leave out one of the two"
            )

    @property
    def by_block(self) -> bool:
        """Whether a draft is verified as a whole."""
        return self.verify != "token" and self.delta == 0

    def rows(self, batch_size: int | None) -> int:
        """Return how many prompts to decode side by side, given the number asked for."""
        if batch_size is None:
            return 1 if self.steady else BATCH
        if check_integer("batch_size", batch_size, 1, MAX_BATCH) > 1 and self.steady:
            raise ValueError(
                f"steady decodes one prompt at a time, got batch_size {batch_size}: "
                "leave out one of the two"
            )
        return batch_size


class DraftingKeywords(TypedDict, total=False):
    """Keywords for `DraftingOptions`, less the three that everybody uses."""

    lookup: bool
    min_ngram: int
    max_ngram: int
    draft_vocab: int | None
    steady: bool


class PromptKeywords(TypedDict, total=False):
    """Keywords for `PromptEncoder`."""

    chat: bool
    prefix: str | None
    max_source_length: int | None
    truncate: bool


class DecoderKeywords(DraftingKeywords, PromptKeywords, total=False):
    """Keywords of `SpeculativeDecoder` besides those in its signature."""


def check_keywords(keywords: DecoderKeywords) -> None:
    """Refuse keywords that `SpeculativeDecoder` does not have, with a TypeError."""
    for name in keywords:
        if name not in DecoderKeywords.__optional_keys__:
            raise TypeError(f"SpeculativeDecoder got an unexpected keyword argument {name!r}")


def split_keywords(keywords: DecoderKeywords) -> tuple[DraftingKeywords, PromptKeywords]:
    """Split a decoder's keywords into those about drafting and those about prompts."""
    check_keywords(keywords)
    drafting, prompts = (
        {name: value for name, value in keywords.items() if name in part.__optional_keys__}
        for part in (DraftingKeywords, PromptKeywords)
    )
    return cast(DraftingKeywords, drafting), cast(PromptKeywords, prompts)


def as_pair(item: object) -> tuple[int, Prompt]:
    """Return an index and its prompt; refuse anything else in their place."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise ValueError(
        "each of prompts must be an index with its prompt, as enumerate makes them, got "
        f"{type(item).__name__}"
    )
