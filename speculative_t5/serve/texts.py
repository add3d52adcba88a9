"""Whole texts: what works on them in a process of its own, with a stand-in for the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from ..documents import Breaks, Document, RewriteOptions, identifier
from ..errors import first_line
from ..generation import Generation, GenerationOptions
from ..tokenizers import PromptEncoder, Source
from .requests import MOST_FIELDS, Refused, parse_body, refuse

TOGETHER = 16  # sentences of a text that wait or are decoded at a time
SURE, WORDS = 0.9, 5  # of a text in another language: probability, and words

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
    Refused; see `text_routes.Conversation`.
    """

    is_steady = True  # and no beams are searched, which would hold up what others decode

    def __init__(self, facts: Facts, ask: Callable[..., Any]) -> None:
        self._prompts, self._together, self._ask = facts.prompts, facts.together, ask
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

    def document(self, text: str, options: RewriteOptions, breaks: Breaks = "wrapped") -> Document:
        """Return a text whose sentences this decoder decodes."""
        return Document(self, text, options, breaks)

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
        batch_size: int | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the output for each prompt with its index; see `SpeculativeDecoder.iter_batch`."""
        waiting, own = [*prompts], GenerationOptions(**options)

        def outputs() -> Iterator[tuple[int, Generation]]:
            for start in range(0, len(waiting), self._together):
                some = waiting[start : start + self._together]
                found = self._ask("outputs", [ids for _, ids in some], own)
                yield from zip((index for index, _ in some), found, strict=True)

        return outputs()

    def log_probabilities(
        self, source: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[float, dict[int, float]]]:
        """See `SpeculativeDecoder.log_probabilities`."""
        found: list[tuple[float, dict[int, float]]] = self._ask("log_probabilities", source, tokens)
        return found


def detected(text: str, codes: Iterable[str]) -> tuple[str, float]:
    """Return which of some languages a text is in, or which other one if it surely is.

    With it comes how probable that is.
    """
    asked = {code.partition("-")[0]: code for code in codes}
    found, probability = identifier().classify(text)
    if found in asked or (probability >= SURE and len(text.split()) >= WORDS):
        return asked.get(found, found), float(probability)
    known = [code for code in asked if code in identifier().labels] or [*asked]
    if len(known) > 1:
        found, probability = identifier(*known).classify(text)
        return asked[found], float(probability)
    return asked[known[0]], 1 - float(probability)


def parse_fields(body: bytes, kind: str) -> dict[str, Any]:
    """Return the fields of a form or a JSON object, whichever a body is by its content type."""
    if kind.casefold().startswith("application/json") or body.lstrip().startswith(b"{"):
        return parse_body(body)
    try:
        return dict(
            parse_qsl(
                body.decode(), keep_blank_values=True, errors="strict",
                max_num_fields=MOST_FIELDS,
            )
        )  # fmt: skip
    except ValueError as error:
        raise Refused(
            400, f"the form cannot be read ({first_line(error)}): send at most {MOST_FIELDS} "
            "fields, in UTF-8 and escaped",
        ) from error  # fmt: skip


def text_field(fields: dict[str, Any], name: str) -> str:
    """Return a field that has to be there, as text."""
    found = fields.get(name)
    if not isinstance(found, str):
        refuse(name, "text", found)
    return found
