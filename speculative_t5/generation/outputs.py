"""From rounds of ids to the values that users get: texts, their stops, several outputs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..decoding import (
    NOTHING_LEFT,
    BeamResult,
    FinishReason,
    Indexed,
    Logprob,
    Origin,
    Round,
    Stats,
    origins_of_round,
)
from ..tokenizers import Detokenizer, Tokenizer, pieces
from .tokens import Token


@dataclass(frozen=True)
class Chunk:
    """One round of a stream; its `text` continues that of the chunks before it."""

    text: str
    tokens: list[int] = field(hash=False)
    num_accepted: int
    stats: Stats
    finish_reason: FinishReason | None = None
    pieces: tuple[str, ...] = ()  # of each token; empty where a character is not complete yet
    end_id: int | None = None  # the EOS or stop id that ended the output, in the last chunk
    # Of each of `tokens`, and then of `end_id`, if the option `logprobs` was set.
    logprobs: tuple[Logprob, ...] | None = field(default=None, hash=False)

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` came from."""
        emitted = len(self.tokens) + (self.end_id is not None)
        _, num_drafted, num_accepted = self.stats.last_round
        return origins_of_round(num_drafted, num_accepted, emitted)[: len(self.tokens)]


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished output; notebooks display it through `_repr_html_`."""

    text: str  # up to a stop string; empty without a tokenizer
    # Without EOS or the stop id; the last may complete a stop string.
    tokens: list[int] = field(hash=False)
    finish_reason: FinishReason  # "length" also where the context ends
    stats: Stats
    pieces: tuple[str, ...] = ()  # the text of each token; none without a tokenizer
    # p and q of each token if `probabilities` was set, see `Token`.
    probabilities: tuple[tuple[float, float | None], ...] | None = None
    # The natural logarithm of its probability if `scores` was set, EOS included, by the target
    # alone: at temperature 1, and without options that change the distribution. After a beam
    # search, what beams were ranked by.
    score: float | None = None
    # Of each of `tokens`, and then of EOS or the stop id that ended it, if `logprobs` or `scores`
    # was set.
    logprobs: tuple[Logprob, ...] | None = field(default=None, hash=False)
    # The other outputs if `num_return_sequences` is above 1: samples in their order, beams from
    # better to worse.
    alternatives: tuple[Generation, ...] = ()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"Generation({text!r}, {self.finish_reason!r}, {self.stats!r})"

    @property
    def trace(self) -> list[Token]:
        """Each token with where it came from."""
        count = len(self.tokens)
        pieces = self.pieces or [""] * count
        probabilities = self.probabilities or [(None, None)] * count
        # Origins include that of EOS.
        found = zip(self.tokens, pieces, self.stats.origins(), probabilities, strict=False)
        return [Token(token, piece, origin, n, p, q) for token, piece, (n, origin), (p, q) in found]

    def _repr_html_(self) -> str:
        """Return the text shaded by origin, and the totals."""
        from .html import as_html

        return as_html(self.trace, self.stats.summary())


class _StopString:
    """Looks for a string in text that comes in parts, as Knuth, Morris and Pratt (1977) do."""

    def __init__(self, string: str) -> None:
        self.string = string  # not empty
        self.begun = 0  # characters of it with which the text ends, fewer than all
        # For each beginning of it, how long a shorter one is with which that one ends.
        self._shorter = [0]
        for char in string[1:]:
            length = self._shorter[-1]
            while length and string[length] != char:
                length = self._shorter[length - 1]
            self._shorter.append(length + (string[length] == char))

    def ends_with(self, char: str) -> bool:
        """Take the next character; return whether the string ends with it."""
        while self.begun and self.string[self.begun] != char:
            self.begun = self._shorter[self.begun - 1]
        self.begun += self.string[self.begun] == char
        if self.begun < len(self.string):
            return False
        self.begun = self._shorter[-1]
        return True


class StoppedText(Detokenizer):
    """Makes text of the ids of one output, up to the string that ends first of some.

    Text that may be the beginning of one is held back until it is known not to be. A string that
    ends before the output has `min_tokens` is text like any other.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], min_tokens: int = 0) -> None:
        super().__init__(tokenizer)
        self.stopped = False  # whether one of the strings has come
        self._strings = [*map(_StopString, strings)]  # none is empty
        self._early = min_tokens  # above 0 as long as no string counts
        self._held: deque[str] = deque()  # in parts, as a string to stop at may be long
        self._size = 0  # of all parts, in characters

    def add(self, token: int) -> str:
        """Return the text that can be shown now; after a stop there is none."""
        self._early -= 1
        return self._passed(super().add(token))

    def finish(self) -> str:
        text = self._passed(super().finish()) + "".join(self._held)
        self._held.clear()
        self._size = 0
        return text

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the next tokens stand if one completes a string; see `StopChecker`."""
        for count, token in enumerate(tokens, start=1):
            self.add(token)
            if self.stopped:
                return count
        return None

    def _passed(self, piece: str) -> str:
        if self.stopped:
            return ""
        before = self._size
        self._held.append(piece)
        self._size += len(piece)
        for end, char in enumerate(piece, before + 1):
            found = [len(each.string) for each in self._strings if each.ends_with(char)]
            if found and self._early <= 0:
                text = self._taken(end - max(found))
                self.stopped = True
                self._held.clear()
                self._size = 0
                return text
        # The longest end of the text that begins a string is held back.
        return self._taken(self._size - max((each.begun for each in self._strings), default=0))

    def _taken(self, size: int) -> str:
        """Take so many characters from the beginning of what is held back."""
        self._size -= size
        parts = []
        while size:
            part = self._held.popleft()
            parts.append(part[:size])
            if len(part) > size:
                self._held.appendleft(part[size:])
            size -= len(parts[-1])
        return "".join(parts)


def as_chunk(done: Round, detokenizer: Detokenizer | None) -> Chunk:
    """Return a round as a chunk; the detokenizer has seen the rounds before."""
    ends = done.finish_reason is not None
    parts = pieces(done.tokens, detokenizer, end=ends) if detokenizer else ()
    return Chunk(
        "".join(parts),
        done.tokens,
        done.num_accepted,
        done.stats,
        done.finish_reason,
        parts,
        done.end_id,
        None if done.logprobs is None else tuple(done.logprobs),
    )


def as_generation(
    done: Round, detokenizer: Detokenizer | None, *, scores: bool = False
) -> Generation:
    """Return the output that has ended with a round; without a detokenizer its text is empty."""
    assert done.finish_reason is not None
    parts = pieces(done.output, detokenizer, end=True) if detokenizer else ()
    text, found = "".join(parts), done.output_logprobs
    made = Generation(text, done.output, done.finish_reason, done.stats, parts)
    if found is None:
        return made
    score = math.fsum(each.value for each in found) if scores else None
    return replace(made, logprobs=tuple(found), score=score)


class Several:
    """Asks for several outputs of each prompt, and puts them together.

    Output j of prompt i gets the index `count` * i + j, which its samples depend on.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: dict[int, dict[int, Generation]] = {}  # by index, outputs that have come

    def repeated(self, prompts: Iterable[Indexed]) -> Iterator[Indexed]:
        """Yield each prompt as often as outputs are wanted."""
        for index, source in prompts:
            if index in self._waiting:
                raise ValueError(
                    f"two prompts have the index {index}, and outputs could be mixed up: give each "
                    "its own"
                )
            self._waiting[index] = {}
            for j in range(self._count):
                yield self._count * index + j, source

    def gathered(self, done: Round, made: Generation) -> Iterator[tuple[int, Generation]]:
        """Yield the first output of a prompt, which has the others with it, when all have come."""
        index, place = divmod(done.index, self._count)
        group = self._waiting[index]
        group[place] = made
        if len(group) == self._count:
            del self._waiting[index]
            first, *others = (group[place] for place in range(self._count))
            yield index, replace(first, alternatives=tuple(others))


def best_beam(result: BeamResult, tokenizer: Tokenizer | None) -> Generation:
    """Return the best output of a search, with the others as its alternatives."""
    outputs = []
    for found in result.hypotheses:
        stats = replace(result.stats, emitted=found.emitted)
        done = Round(result.index, [], 0, stats, found.finish_reason, found.tokens)
        made = as_generation(done, Detokenizer(tokenizer) if tokenizer else None)
        outputs.append(replace(made, score=found.score))
    if not outputs:
        raise ValueError(NOTHING_LEFT)
    return replace(outputs[0], alternatives=tuple(outputs[1:]))
