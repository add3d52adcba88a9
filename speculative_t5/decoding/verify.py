"""Verification: one pass of the target over a draft, and what it says of each row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from .draft import Draft
from .faults import BROKEN_DRAFT
from .history import NO_TOKEN, TokenHistory
from .keys import Keys
from .logits import nothing_allowed
from .logprobs import judged
from .protocols import Session
from .results import Broadcast, Logprob, as_logprobs, identity, read
from .rules import (
    Rule,
    Verdict,
    at_tokens,
    block_acceptance,
    decide,
    token_acceptance,
)
from .sampling import Groups


class Verified(NamedTuple):
    """What a round gives a row."""

    # Those accepted, and the next one, which is missing where no token can follow. A row whose
    # logits are NaN has what marks them alone, in the round that begins there.
    tokens: list[int]
    num_accepted: int
    logprobs: list[Logprob] | None = None  # of `tokens`, if the row wants them


@dataclass(frozen=True)
class Verifier:
    """The rule in use, from the target's session to the tokens that a round emits."""

    delta: float = 0.0  # leniency; 0 is exact
    rule: Rule = "coupled"  # where tokens are sampled; only "token" allows a delta
    broadcast: Broadcast = identity  # applied to what a round has found

    def verify(
        self,
        session: Session,
        history: TokenHistory,
        draft: Draft,
        groups: Groups,
        keys: Keys,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Verified]:
        """Run the target over each row's last token and its draft, and read the verdicts.

        `keys` are one for each drafted token and one for the next, (B, K + 1, 2): by the coupled
        rule those of their positions in the output, which the draft was sampled with as well; by
        the others `verdict_keys`. The host does something `meanwhile`, in its wait.
        """
        session.truncate([len(context) - 1 for context in history.contexts])
        tokens = mx.array([[context[-1]] for context in history.contexts], dtype=mx.int32)
        if draft.tokens.shape[1]:
            tokens = mx.concatenate([tokens, draft.tokens], axis=1)
        parts, said = self._run(session, tokens, history, draft, groups, keys)
        width, size = draft.tokens.shape[1], 0
        if said is not None:
            size = said.shape[2]
            parts.append(said.flatten(1))
        # A single wait for all that the host has to know.
        rows, found = read(self.broadcast(mx.concatenate(parts, axis=1)), meanwhile), []
        start = len(rows[0]) - (width + 1) * size  # of what is said of probabilities
        for row, length, is_greedy, wanted in zip(
            rows, draft.lengths, groups.greedy_rows, groups.tops, strict=True
        ):
            if is_greedy or self.is_coupled:
                choices = row[width : 2 * width + 1]
                num_accepted = num_agreed(row[:length], choices)
                next_token = choices[num_accepted]
            else:
                num_accepted, next_token = row[start - 2 : start]
            if next_token == BROKEN_DRAFT:  # what was accepted would not be exact
                num_accepted = 0
            emitted = row[:num_accepted]
            # What marks NaN waits for the round that begins there.
            if next_token > NO_TOKEN or (next_token < NO_TOKEN and not emitted):
                emitted.append(next_token)
            logprobs = None
            if wanted is not None:
                places = range(start, start + size * len(emitted), size)
                logprobs = as_logprobs([row[at : at + size] for at in places], wanted)
            found.append(Verified(emitted, num_accepted, logprobs))
        return found

    def _run(
        self,
        session: Session,
        tokens: mx.array,
        history: TokenHistory,
        draft: Draft,
        groups: Groups,
        keys: Keys,
    ) -> tuple[list[mx.array], mx.array | None]:
        """Run the target over `tokens`, and return what the host has to know, all of it int32.

        The first are, of each row, its draft (B, K), the choices (B, K + 1) if any row goes by
        those, and a verdict (B, 2) if any row goes by that. The second is what `judged` has of what
        is emitted at each position, (B, K + 1, N), if any row wants to know.
        """
        if groups.greedy and self.delta == 0 and not (groups.transforms or groups.top):
            if groups.top is None:
                return [draft.tokens, session.step_argmax(tokens)], None
            best = session.step_logprobs(tokens)
            return [draft.tokens, best[..., 0]], best[..., 1:]
        own = session.step(tokens)
        logits, parts = groups.transformed(own, history), [draft.tokens]
        choices = verdict = None
        if self.is_coupled or any(groups.greedy_rows):
            choices = self.choices(draft, logits, groups, keys)
            parts.append(choices)
        if keys is not None and not self.is_coupled:
            verdict = self.verdict(draft, logits, groups, keys)
            parts.append(mx.stack([*verdict], axis=1))
        if groups.top is None:
            return parts, None
        tokens = tokens_emitted(draft, choices, verdict, groups.greedy_rows)
        return parts, judged(own, tokens, groups.top)

    @property
    def is_coupled(self) -> bool:
        return self.rule == "coupled"

    def choices(self, draft: Draft, logits: mx.array, groups: Groups, keys: Keys) -> mx.array:
        """Return the target's own choices (B, K + 1) int32, given its logits (B, K + 1, V).

        Drafted tokens stand as far as they agree with the choices, see `num_agreed`. By the coupled
        rule rows that sample choose, too: a position's choice is the best id once noise is added,
        which depends on the position alone and which the draft was chosen with as well (Daliri et
        al. 2408.07978). So the output is the same with any draft or none. In greedy rows a drafted
        token counts as the choice if its probability (at temperature 1) is at least (1 - delta)
        times the largest (2211.17192, appendix A.5, with l = 1 - delta). Where no token is allowed
        the choice is `NO_TOKEN`.
        """
        num_draft = draft.tokens.shape[1]
        choices = groups.choose(logits, keys if self.is_coupled else None)
        if self.delta > 0 and num_draft > 0:
            drafted = logits[:, :num_draft].astype(mx.float32)
            margin = math.log1p(-self.delta) if self.delta < 1 else -math.inf
            own = at_tokens(drafted, draft.tokens)
            near = (own >= mx.max(drafted, axis=-1) + margin) & (own > -mx.inf)
            near = near & (draft.tokens >= 0)
            if draft.mask is not None:
                near = near & draft.mask
            kept = mx.where(near, draft.tokens, choices[:, :num_draft])
            choices = mx.concatenate([kept, choices[:, num_draft:]], axis=1)
        return mx.where(nothing_allowed(logits), NO_TOKEN, choices)

    def verdict(self, draft: Draft, logits: mx.array, groups: Groups, keys: mx.array) -> Verdict:
        """Judge a sampled draft by the target's logits (B, K + 1, V), given `verdict_keys`."""
        nothing = allowed = None
        if groups.transforms:
            # A draft ends where no token is allowed, and what p is there does not matter.
            nothing = nothing_allowed(logits)
            dense = draft.dense(logits.shape[-1])
            draft = replace(draft, probs=mx.where(nothing[:, :-1, None], 0, dense))
            allowed = at_tokens(logits[:, : draft.tokens.shape[1]], draft.tokens) > -mx.inf
            logits = mx.where(nothing[..., None], 0, logits)
        probs = groups.probs(logits)
        if self.rule == "block":
            acceptance = block_acceptance(draft, probs)
        else:
            acceptance = token_acceptance(draft, probs, delta=self.delta, allowed=allowed)
        num_accepted, next_token = decide(acceptance, draft, probs, keys)
        if nothing is not None:
            none_left = mx.take_along_axis(nothing, num_accepted[:, None], axis=1)[:, 0]
            next_token = mx.where(none_left, NO_TOKEN, next_token)
        if draft.probs is not None:
            is_broken = mx.any(mx.isnan(draft.probs[..., 0]), axis=1)
            next_token = mx.where(is_broken, BROKEN_DRAFT, next_token)
        return Verdict(num_accepted, next_token)


def num_agreed(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """Count the first tokens that agree: all rules, where all distributions are one-hot.

    Marks of NaN (`faults`) agree with nothing.
    """
    pairs = zip(drafted, choices, strict=False)
    return next(
        (i for i, (token, best) in enumerate(pairs) if token != best or token < 0), len(drafted)
    )


def tokens_emitted(
    draft: Draft, choices: mx.array | None, verdict: Verdict | None, greedy_rows: list[bool]
) -> mx.array:
    """Return what is emitted at each position, (B, K + 1) int32, as far as a row's output goes.

    Rows go by the choices if there is no verdict, or if they are greedy; by a verdict the next
    token comes after those accepted of the draft.
    """
    if verdict is None:
        assert choices is not None
        return choices
    positions = mx.arange(draft.tokens.shape[1] + 1)
    tokens = mx.pad(draft.tokens, [(0, 0), (0, 1)])
    is_next = positions == verdict.num_accepted[:, None]
    sampled = mx.where(is_next, verdict.next_token[:, None], tokens)
    if choices is None:
        return sampled
    return mx.where(mx.array(greedy_rows)[:, None], choices, sampled)
