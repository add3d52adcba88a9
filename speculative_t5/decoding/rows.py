"""Rows of a batch: the tokens of one output, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .protocols import LanguageModel
from .results import FinishReason, Round, Tally
from .sampling import Sampler
from .transform import NOTHING, NOTHING_LEFT

Ends = Mapping[int, FinishReason]  # ids that end an output, and why it has ended then
# Takes the tokens that an output goes on with; returns how many of them stand if it ends there.
Stopper = Callable[[Sequence[int]], int | None]


def ends_of(model: LanguageModel, stop_ids: Iterable[int]) -> Ends:
    """Return the ids that end a model's outputs; EOS prevails where an id is both."""
    stops: dict[int, FinishReason] = dict.fromkeys(stop_ids, "stop")
    return stops | dict.fromkeys(model.eos_token_ids, "eos")


def room(model: LanguageModel, context: Sequence[int], max_tokens: int) -> int:
    """Return how many tokens a row may emit; the last one is never fed to the model."""
    limit = model.max_context
    return max_tokens if limit is None else min(max_tokens, limit - len(context) + 1)


@dataclass(frozen=True)
class RowOptions:
    """The options of a row, which may differ from those of its neighbours.

    Attributes:
        sampler: Chooses the row's tokens, and those drafted for it.
        max_tokens: Upper bound on the row's tokens, EOS included.
        seed: Samples depend on it, on `number` and the row's round, and on nothing else; None
            where nothing is sampled.
        number: The number that the row samples under; None is the index of its prompt.
        stop_ids: Ids that end the output, besides those of EOS.
        stopper: Makes a `Stopper` for the output.
        drafts: Whether tokens are drafted for the row.
    """

    sampler: Sampler = field(default_factory=Sampler)
    max_tokens: int = 256
    seed: int | None = None
    number: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stopper: Callable[[], Stopper] | None = None
    drafts: bool = True


@dataclass(frozen=True)
class Proposal:
    """One row's draft and the verdict on it; `tokens` may be padded after `num_drafted`."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    next_token: int  # `NOTHING` if no token can follow the accepted ones


@dataclass
class Row:
    """One prompt: its tokens so far and what they cost."""

    index: int
    context: list[int]
    options: RowOptions
    ends: Ends
    remaining: int  # tokens that it may still emit
    began: float
    start: int = field(init=False)  # tokens of the context that are not output
    stopper: Stopper | None = field(init=False)
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0  # until the end of the last round
    finish_reason: FinishReason | None = None
    error: str | None = None  # why no token can follow
    stopped: bool = False  # ended from outside
    # Of the last round:
    emitted: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    end_id: int | None = None

    def __post_init__(self) -> None:
        self.start = len(self.context)
        make = self.options.stopper
        self.stopper = make() if make else None

    @property
    def ended(self) -> bool:
        return self.stopped or self.finish_reason is not None or self.error is not None

    @property
    def limit(self) -> int:
        """The most tokens to draft: a round emits one more."""
        return self.remaining - 1 if self.options.drafts else 0

    def seeds(self, later: int = 0) -> tuple[int, int, int] | None:
        """Return what `round_keys` makes keys of, `later` rounds on; None if nothing is sampled."""
        seed, number = self.options.seed, self.options.number
        if seed is None:
            return None
        return seed, self.index if number is None else number, self.tally.rounds + later

    def take(self, proposal: Proposal, num_draft: int, now: float) -> None:
        """Emit the tokens that stand; a cut may leave fewer than were accepted.

        What cannot go on fails in the round after its last token, as in plain decoding: the output
        may have ended before.
        """
        tokens = proposal.tokens[: proposal.num_accepted]
        if proposal.next_token != NOTHING:
            tokens = [*tokens, proposal.next_token]
        if not tokens:
            self.error = NOTHING_LEFT
            self.emitted, self.num_drafted, self.num_accepted = [], 0, 0
            return
        asked = min(num_draft, self.limit)
        self.emitted, self.finish_reason = cut(tokens, self.ends, self.remaining)
        by_id = self.finish_reason not in (None, "length")
        self.end_id = self.emitted[-1] if by_id else None
        if self.stopper:
            stand = self.stopper(self.emitted[:-1] if by_id else self.emitted)
            if stand is not None:
                self.emitted, self.finish_reason = self.emitted[:stand], "stop"
                self.end_id = None
        self.context += self.emitted
        self.remaining -= len(self.emitted)
        self.num_drafted = proposal.num_drafted
        self.num_accepted = min(proposal.num_accepted, len(self.emitted))
        self.tally.add(asked, self.num_drafted, self.num_accepted, len(self.emitted))
        self.seconds = now - self.began

    def round(self) -> Round:
        """Return the last round as the caller sees it."""
        final = self.finish_reason is not None
        output = self.context[len(self.context) - self.tally.emitted :] if final else []
        emitted = self.emitted
        if self.end_id is not None:
            output, emitted = output[:-1], emitted[:-1]
        stats = self.tally.stats(self.seconds, final=final)
        reason = self.finish_reason
        return Round(
            self.index, emitted, self.num_accepted, stats, reason, output, self.end_id, self.error
        )


def cut(tokens: list[int], ends: Ends, limit: int) -> tuple[list[int], FinishReason | None]:
    """End `tokens` after the first of `ends` or after `limit` tokens; return why, if they end."""
    tokens = tokens[:limit]
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1], ends[token]
    return tokens, "length" if len(tokens) == limit else None
