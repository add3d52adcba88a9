"""Whole texts: what works on them in a process of its own, with a stand-in for the decoder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..decoding import Logprob
from ..documents import PLAIN_LINES, Document, FileLines, RewriteOptions, identifier
from ..generation import BatchOptions, Generation, GenerationOptions
from ..tokenizers import PromptEncoder, Source

SENTENCES_TOGETHER = 16  # sentences of a text that wait or are decoded at a time
# Of a text in another language: words, its probability, and that of all others beside it.
MIN_WORDS, SURE_PROBABILITY, OTHERS_PROBABILITY = 3, 0.9, 0.001
FIRST_UNSPACED = "\u0e00"  # of Thai; from it on many scripts have no blanks between words

Partly = Callable[[dict[str, Any]], None]  # is told of parts of an answer as they are made


def ignore(part: dict[str, Any]) -> None:
    """Do without the parts of an answer."""


@dataclass(frozen=True)
class Facts:
    """What a process that works on texts has of a model."""

    prompts: PromptEncoder  # without the model's weights
    min_probability: float
    together: int  # sentences to ask for at a time


class Remote:
    """A decoder for `Document`, in a process without weights: the server is asked for outputs.

    `ask` sends the name of what is asked and its arguments, and returns the answer, or raises
    Refused; see `text_routes.TextConversation`.
    """

    is_steady = True  # and no beams are searched, which would hold up what others decode

    def __init__(self, facts: Facts, ask: Callable[..., Any], served: Collection[str] = ()) -> None:
        self._prompts, self._together, self._ask = facts.prompts, facts.together, ask
        self.served = served  # codes of the languages that the server corrects or translates
        self.tokenizer: Any = facts.prompts.tokenizer
        self.min_probability = facts.min_probability

    @property
    def prefix(self) -> str:
        """What goes before each prompt."""
        return self._prompts.prefix or ""

    @property
    def languages(self) -> tuple[str, str] | None:
        """The languages to translate from and to, if any."""
        return self._prompts.languages

    @property
    def trained_length(self) -> int | None:
        """How many tokens the model was trained on at most, if it says so."""
        return self._prompts.trained_length

    def translate(self, to: str, from_: str | None) -> None:
        """Let prompts be translated from now on; see `SpeculativeDecoder.translating`."""
        self._prompts = self._prompts.translating(to, from_)

    def document(
        self,
        text: str,
        options: RewriteOptions,
        lines: FileLines = PLAIN_LINES,
    ) -> Document:
        """Return a text whose sentences this decoder decodes; see `Document`."""
        return Document(self, text, options, lines)

    def check_batch(self, options: BatchOptions) -> None:
        """See `SpeculativeDecoder.check_batch`: the server has its own number of rows."""

    def encode(self, prompt: str) -> list[int]:
        """See `SpeculativeDecoder.encode`."""
        return self._prompts.ids(prompt)

    def fit(self, prompt: str) -> Source:
        """See `SpeculativeDecoder.fit`."""
        return self._prompts.fit(prompt)

    def iter_batch(
        self,
        prompts: Iterable[tuple[int, list[int]]],
        *,
        max_tokens: int = GenerationOptions.max_tokens,
        batch_size: int | None = None,
        speculative: bool = True,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        logprobs: int | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the output for each prompt with its index; see `SpeculativeDecoder.iter_batch`."""
        own = GenerationOptions(
            max_tokens=max_tokens,
            speculative=speculative,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            logprobs=logprobs,
        )
        waiting = [*prompts]

        def outputs() -> Iterator[tuple[int, Generation]]:
            for start in range(0, len(waiting), self._together):
                some = waiting[start : start + self._together]
                found = self._ask("outputs", [ids for _, ids in some], own)
                yield from zip((index for index, _ in some), found, strict=True)

        return outputs()

    def log_probabilities(self, source: Sequence[int], tokens: Sequence[int]) -> list[Logprob]:
        """See `SpeculativeDecoder.log_probabilities`."""
        found: list[Logprob] = self._ask("log_probabilities", source, tokens)
        return found


def detected(text: str, codes: Iterable[str]) -> tuple[str, float]:
    """Return which of some languages a text is in, or which other one if it surely is.

    With it comes how probable that is. Without any languages it is one of all that are known.
    """
    asked = {code.partition("-")[0]: code for code in codes}
    known = [code for code in asked if code in identifier().labels] or [*asked]
    if not asked or is_surely_other(text, asked):
        found, probability = identifier().classify(text)
        return found, float(probability)
    if len(known) > 1:
        found, probability = identifier(*known).classify(text)
        return asked[found], float(probability)
    return asked[known[0]], float(dict(identifier().rank(text)).get(known[0], 0.0))


def is_surely_other(text: str, codes: Container[str]) -> bool:
    """Whether a text is long and clear enough to say that it is in none of some languages.

    Of 1,167 beginnings of English sentences, learners' among them, and 1,572 of these docs, of
    three words and more, none seemed to be in another language.
    """
    if number_of_words(text) < MIN_WORDS:
        return False
    found = dict(identifier().rank(text))
    best = max(found, key=lambda code: found[code])
    rest = sum(p for code, p in found.items() if code in codes)
    return bool(
        best not in codes
        and found[best] >= SURE_PROBABILITY
        and rest <= OTHERS_PROBABILITY * found[best]
    )


def number_of_words(text: str) -> int:
    """Return how many words a text has; where scripts have no blanks, a letter counts as one."""
    return len(text.split()) + sum(each >= FIRST_UNSPACED and each.isalpha() for each in text)
