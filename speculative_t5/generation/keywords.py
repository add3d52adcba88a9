"""The options of decoders and of generation as keywords, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from ..decoding import EarlyStopping, LogitsProcessor
from .options import Words


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
        tokenizer gives it at the beginning of a text and after a space; others can spell it, too.
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
    num_beams: Above 1, the best output that a beam search over this number of sequences finds, by
        the target alone. Samples, drafts, stop strings and streams do not go with it.
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
