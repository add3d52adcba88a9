"""The options of decoders and of generation as keywords, for type checkers and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar, cast

from ..checkpoints import RENAMED
from ..decoding import EarlyStopping, LogitsProcessor
from .options import Words

P = ParamSpec("P")
R = TypeVar("R")
# What else has another name in transformers.
OTHERS = {
    "do_sample": "temperature", "max_length": "max_tokens", "min_length": "min_tokens",
    "forced_bos_token_id": "forced_tokens", "eos_token_id": "stop_token_ids",
    "logits_processor": "logits_processors", "sequence_bias": "logit_bias",
    "output_scores": "scores", "assistant_model": "draft", "num_assistant_tokens": "num_draft",
    "prompt_lookup_num_tokens": "lookup", "torch_dtype": "dtype",
}  # fmt: skip


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


def with_hints(*more: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function say what to use instead of a keyword that it does not have.

    `more` are the TypedDicts of its keywords besides those in its signature.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = set(inspect.signature(function).parameters)
        known.update(*(each.__optional_keys__ for each in more))

        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords.keys() - known:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                    f"{_hint(name, known)}"
                )
            return function(*args, **keywords)

        return call

    return decorate


def _hint(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown keyword: what was probably meant, if known."""
    ours = (RENAMED | OTHERS).get(name, name)
    places = {
        "generate": GenerationKeywords.__optional_keys__,
        "SpeculativeDecoder": {*DecoderKeywords.__optional_keys__, "draft", "num_draft", "delta"},
        "from_pretrained": {"dtype", "group"},
    }
    if ours in known:
        return f": use {ours}"
    for place, names in places.items():
        if ours in names:
            return f": {ours} is an option of {place}"
    close = get_close_matches(name, known, 1)
    return f": did you mean {close[0]}?" if close else ""


def split_keywords(keywords: DecoderKeywords) -> tuple[DraftingKeywords, PromptKeywords]:
    """Split a decoder's keywords into those about drafting and those about prompts."""
    drafting, prompts = (
        {name: value for name, value in keywords.items() if name in part.__optional_keys__}
        for part in (DraftingKeywords, PromptKeywords)
    )
    return cast(DraftingKeywords, drafting), cast(PromptKeywords, prompts)
