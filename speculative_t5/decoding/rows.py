"""Rows of a batch: the tokens of one output, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .protocols import LanguageModel
from .results import FinishReason, Round, Tally

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
class Proposal:
    """One row's draft and the verdict on it; `tokens` may be padded after `num_drafted`."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    next_token: int


@dataclass
class Row:
    """One prompt: its tokens so far and what they cost."""

    index: int
    context: list[int]
    start: int  # tokens of the context that are not output
    remaining: int  # tokens that it may still emit
    began: float
    stopper: Stopper | None = None
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0  # until the end of the last round
    finish_reason: FinishReason | None = None
    # Of the last round:
    emitted: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    end_id: int | None = None

    def take(self, proposal: Proposal, num_draft: int, ends: Ends, now: float) -> None:
        """Emit the tokens that stand; a cut may leave fewer than were accepted."""
        asked = min(num_draft, self.remaining - 1)
        tokens = [*proposal.tokens[: proposal.num_accepted], proposal.next_token]
        self.emitted, self.finish_reason = cut(tokens, ends, self.remaining)
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
        return Round(self.index, emitted, self.num_accepted, stats, reason, output, self.end_id)


def cut(tokens: list[int], ends: Ends, limit: int) -> tuple[list[int], FinishReason | None]:
    """End `tokens` after the first of `ends` or after `limit` tokens; return why, if they end."""
    tokens = tokens[:limit]
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1], ends[token]
    return tokens, "length" if len(tokens) == limit else None
