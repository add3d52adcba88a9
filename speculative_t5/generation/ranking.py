"""`rank`: documents by how probably they answer a query, as monoT5 and its kind say it.

The model reads a query with one document, and its first token is one of two words; what counts is
the probability of the one, beside that of the other (Nogueira et al., arXiv 2003.06713).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import check_utf8
from ..options import check_integer, option_error
from .decoder import SpeculativeDecoder

MONOT5 = "Query: {query} Document: {document} Relevant:"
USUAL_BATCH = 16


@dataclass(frozen=True)
class Ranked:
    """A document's place among others."""

    index: int  # of the document, as it was given
    score: float  # the probability that it is relevant, from 0 to 1
    document: str


def rank(
    decoder: SpeculativeDecoder,
    query: str,
    documents: Sequence[str],
    *,
    template: str = MONOT5,
    positive: str = "true",
    negative: str = "false",
    top_n: int | None = None,
    batch_size: int = USUAL_BATCH,
) -> list[Ranked]:
    """Return documents, the most relevant first; of equals the earlier one.

    Args:
        decoder: Of a model that was trained for it, such as castorini/monot5-base-msmarco.
        query: The text that is asked.
        documents: The texts that may answer it. What a model cannot read is cut if the decoder has
            `truncate`, and refused otherwise.
        template: How both are put into a prompt, by {query} and {document}.
        positive: The word by which the model says that a document is relevant: one token.
        negative: And that it is not.
        top_n: The most to return; None for all.
        batch_size: Documents that are read side by side.

    Raises:
        ValueError: If something is no text, or a word is not one token of the model's.
    """
    for name, text in (("query", query), *(("documents", each) for each in documents)):
        if not isinstance(text, str):
            raise option_error(name, "text", text)
        check_utf8(name, text)
    batch_size = check_integer("batch_size", batch_size, 1)
    words = ranking_words(decoder, positive, negative)
    prompts = ranking_prompts(query, documents, template)
    # All are checked before the first is read.
    sources = [decoder.prompts.fit(prompt).ids for prompt in prompts]
    scores: dict[int, float] = {}
    # Those of similar length are read together.
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        found = word_probabilities(decoder, [sources[i] for i in group], words)
        scores |= zip(group, found, strict=True)
    ranked = [Ranked(i, scores[i], documents[i]) for i in range(len(documents))]
    ranked.sort(key=lambda each: -each.score)
    return ranked if top_n is None else ranked[: check_integer("top_n", top_n, 1)]


def ranking_prompts(query: str, documents: Sequence[str], template: str) -> list[str]:
    """Return the prompt for each document; refuse a template without one place for either."""
    if not template.count("{query}") == template.count("{document}") == 1:
        raise option_error("template", "a text with {query} and {document}, each once", template)
    # What stands in a text is no place in the template.
    before, after = (part.split("{document}") for part in template.split("{query}"))
    return [query.join([each.join(before), each.join(after)]) for each in documents]


def ranking_words(decoder: SpeculativeDecoder, positive: str, negative: str) -> tuple[int, int]:
    """Return the ids of the words by which a model judges; each has to be one token."""
    words = ("positive", positive), ("negative", negative)
    first, second = (_token_of_word(decoder, name, word) for name, word in words)
    return first, second


def _token_of_word(decoder: SpeculativeDecoder, name: str, word: str) -> int:
    """Return the id of a word that is one token, with the blank before it."""
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise ValueError("documents are ranked by words, which need a tokenizer: give one")
    ids = [i for i in tokenizer.encode(word) if i not in decoder.model.info.special_tokens]
    if len(ids) != 1:
        raise option_error(name, f"a word of one token of the model, not of {len(ids)}", word)
    return ids[0]


def word_probabilities(
    decoder: SpeculativeDecoder, sources: Sequence[Sequence[int]], words: tuple[int, int]
) -> list[float]:
    """Return the probability of the first of two tokens, beside the other, as outputs begin."""
    session, contexts = decoder.model.start(sources)
    logits = session.step(mx.array([context[-1:] for context in contexts], dtype=mx.int32))
    chosen = np.array(logits[:, 0].astype(mx.float32)[:, mx.array(words)], np.float64)
    odds = chosen[:, 1] - chosen[:, 0]
    return [float(each) for each in np.exp(-np.logaddexp(0, odds))]
