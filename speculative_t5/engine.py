"""The one loop: draft, one pass of the target, verify. Integers only; text is for others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .draft import Drafter
from .results import FinishReason, Round, Seconds, Stats
from .schedule import Outcome, Schedule
from .session import LanguageModel
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
    seconds = Seconds()
    session, contexts = model.start(prompts)
    drafter.start(prompts)
    rows = [_Row(i, context) for i, context in enumerate(contexts)]  # still open, in session order
    while rows:
        draft_key = verify_key = None
        if key is not None:
            key, draft_key, verify_key = mx.random.split(key, 3)
        contexts = [row.context for row in rows]
        num_draft = schedule.next(max_tokens - min(row.stats.emitted for row in rows))
        began = drafted = time.perf_counter()
        draft = drafter.propose(contexts, num_draft, draft_key)
        session.truncate([len(context) - 1 for context in contexts])
        last = mx.array([context[-1:] for context in contexts], dtype=mx.int32)
        logits = session.step(mx.concatenate([last, draft.tokens], axis=1))
        verdict = verifier.verdict(draft, logits, verify_key)
        outcome = (draft.tokens, draft.num_drafted, verdict.num_accepted, verdict.next_token)
        if draft.tokens.size:
            # Told apart from the target's pass, which is ready to follow without a gap.
            mx.eval(draft.tokens)
            drafted = time.perf_counter()
        mx.eval(outcome)
        ended = time.perf_counter()
        seconds = Seconds(
            seconds.total + ended - started,
            seconds.draft + drafted - began,
            seconds.verify + ended - drafted,
        )
        proposals = zip(*(array.tolist() for array in outcome), strict=True)
        emitted = []
        for row, (tokens, num_drafted, num_accepted, next_token) in zip(
            rows, proposals, strict=True
        ):
            limit = max_tokens - row.stats.emitted
            new, row.finish_reason = cut(
                [*tokens[:num_accepted], next_token], model.eos_token_id, limit
            )
            emitted.append(row.emit(new, num_draft, num_drafted, num_accepted, seconds))
        schedule.observe(
            Outcome(
                num_draft,
                [row.stats.num_drafted[-1] for row in rows],
                [row.stats.num_accepted[-1] for row in rows],
                drafted - began,
                ended - drafted,
            )
        )
        yield from emitted
        started = time.perf_counter()
        kept = [i for i, row in enumerate(rows) if row.finish_reason is None]
        if 0 < len(kept) < len(rows):
            session.select(kept)
            drafter.select(kept)
        rows = [rows[i] for i in kept]


@dataclass
class _Row:
    """One prompt of the batch: the target's tokens so far, and what they cost."""

    index: int
    context: list[int]
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None

    def emit(
        self,
        tokens: list[int],
        num_draft: int,
        num_drafted: int,
        num_accepted: int,
        seconds: Seconds,
    ) -> Round:
        """Take in a round's tokens; of the accepted ones a cut may have left fewer."""
        num_accepted = min(num_accepted, len(tokens))
        self.context += tokens
        self.stats = self.stats.after_round(
            num_draft, num_drafted, num_accepted, len(tokens), seconds
        )
        shown = tokens[:-1] if self.finish_reason == "eos" else tokens
        return Round(self.index, shown, num_accepted, self.stats, self.finish_reason)


def cut(tokens: list[int], eos: int, limit: int) -> tuple[list[int], FinishReason | None]:
    """End `tokens` after the first EOS or after `limit` tokens, and say which, if either."""
    tokens = tokens[:limit]
    if eos in tokens:
        return tokens[: tokens.index(eos) + 1], "eos"
    return tokens, "length" if len(tokens) == limit else None
