"""Options as values: checked where they are made, and passed on whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

from ..decoding import BeamOptions, EarlyStopping, LogitsProcessor, Sampler, check_ngrams
from ..errors import check_integer, check_number
from ..tokenizers import Prompt

VerifyRule = Literal["auto", "token", "block"]
NumDraft = int | Literal["auto"]
Words = Sequence[str | Sequence[int]]

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
    max_new_tokens: int | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    suppress_tokens: Sequence[int] = ()
    bad_words: Words = ()
    logit_bias: Mapping[int, float] | None = None
    forced_tokens: str | Sequence[int] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    num_return_sequences: int = 1
    scores: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        _ = Sampler(self.temperature, self.top_k, self.top_p)  # which checks its own options
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_integer("max_tokens", self.max_tokens, 1)
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, 1)
            if self.max_tokens not in (GenerationOptions.max_tokens, self.max_new_tokens):
                raise ValueError(
                    f"max_tokens is {self.max_tokens} and max_new_tokens, another name for it, is "
                    f"{self.max_new_tokens}: give one of them"
                )
            object.__setattr__(self, "max_tokens", self.max_new_tokens)
            object.__setattr__(self, "max_new_tokens", None)
        for token in as_items("stop_token_ids", self.stop_token_ids):
            check_integer("an id of stop_token_ids", token, 0)
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"a stop string must be text that is not empty, got {string!r}")
        count = check_integer("num_return_sequences", self.num_return_sequences, 1)
        if self.num_beams != 1:
            self._check_beams()
        elif count > 1 and self.temperature == 0:
            raise ValueError(
                f"num_return_sequences is {count}, and greedy decoding has only one output: give a "
                "temperature above 0, or num_beams"
            )

    def _check_beams(self) -> None:
        """Refuse what a beam search does not go with."""
        _ = self.beams  # which checks its own options
        if self.temperature != 0:
            raise ValueError(
                f"num_beams is {self.num_beams} and temperature {self.temperature}, and a beam "
                "search does not sample: leave out one of them"
            )
        if self.stop_strings:
            raise ValueError(
                f"num_beams is {self.num_beams}, and a beam search has no stop strings: leave out "
                "one of them"
            )

    @property
    def beams(self) -> BeamOptions | None:
        """The options of a beam search; None for greedy decoding and sampling."""
        if self.num_beams == 1:
            return None
        return BeamOptions(
            self.num_beams, self.length_penalty, self.early_stopping, self.num_return_sequences
        )

    @property
    def can_stream(self) -> bool:
        """Whether tokens can be shown as they are chosen."""
        return self.num_return_sequences == self.num_beams == 1 and not self.scores

    def check_stream(self) -> None:
        """Refuse what only finished outputs can have."""
        if self.num_return_sequences > 1:
            raise ValueError(
                f"a stream has one output, got num_return_sequences {self.num_return_sequences}: "
                "leave it out, or use generate"
            )
        if self.num_beams != 1:
            raise ValueError(
                f"a stream shows tokens as they are chosen, and a beam search chooses at the end, "
                f"got num_beams {self.num_beams}: use generate"
            )
        if self.scores:
            raise ValueError("a stream has no scores, which need finished outputs: use generate")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return as_items("stop", self.stop)


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


class MoreKeywords(TypedDict, total=False):
    """Keywords for `GenerationOptions`, less those that everybody uses.

    max_new_tokens: Another name for `max_tokens`.
    repetition_penalty: Above 1, tokens that have occurred in the output (of a decoder-only model
        also in the prompt) become less probable: positive logits are divided by it, negative ones
        multiplied.
    no_repeat_ngram_size: No sequence of this many tokens occurs twice; 0 is off.
    min_tokens: The output does not end before it has this many tokens.
    suppress_tokens: Ids that never occur.
    bad_words: Texts, or sequences of ids, that never occur. A text stands for the ids that the
        tokenizer gives it, at the beginning of a word; other ids can spell it, too.
    logit_bias: Adds to the logits of ids; -inf forbids one.
    forced_tokens: What every output begins with: ids, or text.
    logits_processors: Functions of (tokens so far (T,) int32, logits (1, V) float32) that return
        logits (1, V), as mlx-lm's. They are called for each drafted token, too, and must depend
        on their arguments alone.
    stop: A text, or several, before which an output ends; they are not part of the text.
    stop_token_ids: Ids that end an output as EOS does.
    num_return_sequences: The number of outputs for each prompt, see `Generation.alternatives`.
        Output j of prompt i samples as prompt `num_return_sequences` * i + j would.
    scores: Add the logarithm of each output's probability, see `Generation.score`. This takes one
        more pass over the output.
    num_beams: Above 1, the best output that a beam search over so many sequences finds, by the
        target alone. Samples, drafts, stop strings and streams do not go with it.
    length_penalty: Of a beam search: an output's score is the sum of its tokens' log-probabilities
        divided by its length in tokens, EOS included, to this power.
    early_stopping: Of a beam search, once it has as many outputs as beams: True ends it, False
        goes on while the best sequence, if it ended now, would be better than the worst of them,
        "never" while it could be at any length.
    """

    max_new_tokens: int | None
    repetition_penalty: float
    no_repeat_ngram_size: int
    min_tokens: int
    suppress_tokens: Sequence[int]
    bad_words: Words
    logit_bias: Mapping[int, float] | None
    forced_tokens: str | Sequence[int]
    logits_processors: Sequence[LogitsProcessor]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    num_return_sequences: int
    scores: bool
    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping


class GenerationKeywords(MoreKeywords, total=False):
    """Keywords for `GenerationOptions`; `SpeculativeDecoder.generate` describes them."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    speculative: bool


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


def as_items(name: str, value: object) -> tuple[Any, ...]:
    """Return an option's items, of which a text is one; refuse what has none."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return tuple(value)


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
