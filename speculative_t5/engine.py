"""The one loop: draft, one pass of the target, verify. Integers only; text is for others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .draft import Draft, Drafter
from .results import FinishReason, Round, Seconds, Stats
from .schedule import Outcome, Schedule
from .session import LanguageModel, Session
from .verify import Verifier


def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    schedule: Schedule,
    verifier: Verifier,
    max_tokens: int,
    key: mx.array | None,
) -> Iterator[Round]:
    """Decode a batch until its last row ends, a `Round` for each row and pass of the target.

    Args:
        model: The target.
        prompts: Source ids, EOS included.
        drafter: Proposes tokens; not started yet.
        schedule: Says how many.
        verifier: Judges them.
        max_tokens: Upper bound on each row's tokens, EOS included.
        key: Of all draws; None where nothing is left to chance.
    """
    started = time.perf_counter()
    draft_seconds = verify_seconds = 0.0
    session, contexts = model.start(prompts)
    drafter.start(prompts)
    rows = [_Row(i, context) for i, context in enumerate(contexts)]  # still open, in session order
    while rows:
        draft_key = verify_key = None
        if key is not None:
            key, draft_key, verify_key = mx.random.split(key, 3)
        contexts = [row.context for row in rows]
        num_draft = schedule.next(max_tokens - min(row.stats.emitted for row in rows))
        began = time.perf_counter()
        draft = drafter.propose(contexts, num_draft, draft_key)
        mx.eval(draft.tokens)  # a wait of its own, to tell drafting's time from verifying's
        drafted = time.perf_counter()
        proposals = verify(session, contexts, draft, verifier, verify_key)
        ended = time.perf_counter()
        draft_seconds += drafted - began
        verify_seconds += ended - drafted
        for row, proposal in zip(rows, proposals, strict=True):
            row.take(proposal, model.eos_token_id, max_tokens, num_draft)
        schedule.observe(
            Outcome(
                num_draft,
                [row.stats.num_drafted[-1] for row in rows],
                [row.stats.num_accepted[-1] for row in rows],
                drafted - began,
                ended - drafted,
            )
        )
        paused = time.perf_counter()
        seconds = Seconds(paused - started, draft_seconds, verify_seconds)
        yield from [row.round(seconds) for row in rows]
        started += time.perf_counter() - paused  # what the caller does in between is not ours
        kept = [i for i, row in enumerate(rows) if row.finish_reason is None]
        if 0 < len(kept) < len(rows):
            session.select(kept)
            drafter.select(kept)
        rows = [rows[i] for i in kept]


@dataclass(frozen=True)
class Proposal:
    """One row's draft and the verdict on it."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    next_token: int


def verify(
    session: Session,
    contexts: list[list[int]],
    draft: Draft,
    verifier: Verifier,
    key: mx.array | None,
) -> list[Proposal]:
    """One pass of the target over the last token and the draft, and the verdicts on it."""
    session.truncate([len(context) - 1 for context in contexts])
    last = mx.array([context[-1:] for context in contexts], dtype=mx.int32)
    logits = session.step(mx.concatenate([last, draft.tokens], axis=1))
    verdict = verifier.verdict(draft, logits, key)
    outcome = (draft.tokens, draft.num_drafted, verdict.num_accepted, verdict.next_token)
    mx.eval(outcome)
    return [Proposal(*row) for row in zip(*(array.tolist() for array in outcome), strict=True)]


@dataclass
class _Row:
    """One prompt of the batch: the target's tokens so far, and what they cost."""

    index: int
    context: list[int]
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    emitted: list[int] = field(default_factory=list)  # in the last round

    def take(self, proposal: Proposal, eos: int, max_tokens: int, num_draft: int) -> None:
        """Emit what stands of a proposal; a cut may leave fewer tokens than were accepted."""
        tokens = [*proposal.tokens[: proposal.num_accepted], proposal.next_token]
        self.emitted, self.finish_reason = cut(tokens, eos, max_tokens - self.stats.emitted)
        self.context += self.emitted
        self.stats = self.stats.after_round(
            num_draft,
            proposal.num_drafted,
            min(proposal.num_accepted, len(self.emitted)),
            len(self.emitted),
        )

    def round(self, seconds: Seconds) -> Round:
        """The last round, as the caller sees it."""
        self.stats = self.stats.timed(seconds)
        shown = self.emitted[:-1] if self.finish_reason == "eos" else self.emitted
        accepted = self.stats.num_accepted[-1]
        return Round(self.index, shown, accepted, self.stats, self.finish_reason)


def cut(tokens: list[int], eos: int, limit: int) -> tuple[list[int], FinishReason | None]:
    """End `tokens` after the first EOS or after `limit` tokens, and say which, if either."""
    tokens = tokens[:limit]
    if eos in tokens:
        return tokens[: tokens.index(eos) + 1], "eos"
    return tokens, "length" if len(tokens) == limit else None
