"""Beam search over sessions: its outputs and scores are those of transformers.

The device picks the best continuations of all beams, and the host, after the step's only wait,
decides which of them are finished and which go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from .. import device
from ..options import OptionError, option_error
from .faults import RowError, not_a_number
from .history import TokenHistory
from .loop import Request, first_context, stop_reasons, token_budget
from .protocols import LanguageModel, Session
from .ranking import best_continuations
from .results import Broadcast, FinishReason, Stats, identity, read
from .sampling import Groups

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class BeamOptions:
    """The options of a beam search, as transformers has them."""

    num_beams: int  # sequences that are extended side by side
    # A finished sequence has the score sum / n**length_penalty, of its n tokens' log-probabilities,
    # EOS included. Above 0 it favors long outputs, below 0 short ones.
    length_penalty: float = 1.0
    # When to stop, once `num_beams` sequences are finished. True: at once. False: when the best
    # beam, if it ended now, would score no better than the worst of them. "never": when it would
    # not even at the length that favors it most.
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1  # finished sequences to return

    def __post_init__(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise option_error("early_stopping", "True, False or 'never'", self.early_stopping)
        if self.num_return_sequences > self.num_beams:
            raise OptionError(
                "{num_return_sequences} {} is more than the {} of {num_beams}: raise {num_beams}",
                self.num_return_sequences,
                self.num_beams,
            )


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence."""

    tokens: list[int]  # without EOS
    finish_reason: FinishReason
    score: float  # sum of the log-probabilities / length**length_penalty

    @property
    def emitted(self) -> int:
        """Number of its tokens, the one that ended it included."""
        return len(self.tokens) + (self.finish_reason != "length")


@dataclass(frozen=True)
class BeamResult:
    """What a search found for one prompt."""

    index: int  # of the prompt
    hypotheses: list[Hypothesis]  # the best first; fewer than asked for only if there are no more
    stats: Stats  # passes of the target as rounds, and the best hypothesis' tokens, EOS included


def beam_search(
    model: LanguageModel,
    requests: Iterable[Request],
    options: BeamOptions,
    batch_size: int,
    broadcast: Broadcast = identity,
) -> Iterator[BeamResult]:
    """Search for the most probable outputs of prompts, and yield each prompt's result as it ends.

    Up to `batch_size` prompts are searched side by side, `num_beams` rows of a pass each; the next
    ones begin when all of them have ended. Of a request's options the length, the stop ids and the
    sampler's transform count; a transform is applied to log-probabilities, whose exponentials need
    not sum to 1 then. `broadcast` is applied to what a pass has found.
    """
    waiting = iter(requests)
    while group := list(islice(waiting, batch_size)):
        yield from _search(model, group, options, broadcast)


def _search(
    model: LanguageModel, requests: Sequence[Request], options: BeamOptions, broadcast: Broadcast
) -> Iterator[BeamResult]:
    # Rows i * num_beams and on of the session are those of search i.
    began, width = time.perf_counter(), options.num_beams
    with device.turn():
        session, contexts = model.start([request.source for request in requests])
        session.select([row for row in range(len(requests)) for _ in range(width)])
    pairs = zip(requests, contexts, strict=True)
    searches = [_Search(model, request, context, options) for request, context in pairs]
    seconds = 0.0  # without the caller's time
    while searches:
        with device.turn():  # a stream may have begun in another thread
            read_now = read(broadcast(_continuations(session, searches, width)))
            found = [
                _candidates(search, row, model)
                for search, row in zip(searches, read_now, strict=True)
            ]
            rows: list[int] = []
            for i, (search, candidates) in enumerate(zip(searches, found, strict=True)):
                parents = search.extend(candidates)
                rows += [] if search.done else [i * width + parent for parent in parents]
            if rows and rows != list(range(len(searches) * width)):
                session.select(rows)
        seconds += time.perf_counter() - began
        yield from [search.result(seconds) for search in searches if search.done]
        searches = [search for search in searches if not search.done]
        began = time.perf_counter()


def _continuations(session: Session, searches: Sequence[_Search], width: int) -> mx.array:
    """Run the target over each beam's last token, and find the best continuations of each search.

    Returned is for each whether logits of a beam are NaN, as 1 or 0, and then what
    `best_continuations` finds: (P, 1 + 3 K) int32.
    """
    rows = [(search, beam) for search in searches for beam in search.beams]
    last = [(beam.tokens or search.context)[-1:] for search, beam in rows]
    scores = mx.array([beam.score for _, beam in rows], dtype=mx.float32)
    logits = session.step(mx.array(last, dtype=mx.int32)).astype(mx.float32)
    log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    is_broken = mx.any(mx.isnan(log_probs[..., 0]).reshape(len(searches), -1), axis=1)
    groups = Groups([search.request.options.sampler for search, _ in rows])
    if groups.transforms:
        contexts = [[*search.context, *beam.tokens] for search, beam in rows]
        starts = [len(search.context) for search, _ in rows]
        nothing = mx.zeros((len(rows), 0), dtype=mx.int32)
        log_probs = groups.transformed(log_probs, TokenHistory(contexts, starts, nothing))
    # At most n continuations of n beams end by each id: this leaves n that do not end.
    count = max(2, *(1 + len(search.ends) for search in searches)) * width
    totals = (scores[:, None] + log_probs[:, 0]).reshape(len(searches), -1, log_probs.shape[2])
    found = best_continuations(totals, count)
    return mx.concatenate([is_broken[:, None].astype(mx.int32), found], axis=1)


Candidate = tuple[float, int, int]  # a continuation's score, its beam and its last token


def _candidates(search: _Search, found: Sequence[int], model: LanguageModel) -> list[Candidate]:
    """Return what `_continuations` found for one search; refuse NaN."""
    is_broken, *others = found
    if is_broken:
        reason = not_a_number("the logits", getattr(model, "dtype", None))
        raise RowError(search.request.index, reason)
    bits, beams, tokens = np.array(others, dtype=np.int32).reshape(3, -1)
    scores = bits.view(np.float32).tolist()
    return list(zip(scores, beams.tolist(), tokens.tolist(), strict=True))


class _Beam(NamedTuple):
    """A sequence that is being extended; one with the score -inf only fills a row."""

    tokens: list[int]
    score: float = -math.inf  # sum of its tokens' log-probabilities


class _Search:
    """One prompt: its beams, by row, and the best sequences that have ended."""

    def __init__(
        self, model: LanguageModel, request: Request, context: list[int], options: BeamOptions
    ) -> None:
        self.request, self.options = request, options
        self.context = first_context(context, request.options.start)
        self.ends = stop_reasons(model, request.options.stop_ids)
        self.budget = token_budget(model, context, request.options.max_tokens)
        self.num_tokens = 0  # of each beam
        self.done = False
        # All would have the same continuations: only the first one's count.
        self.beams = [_Beam([], 0.0), *(_Beam([]) for _ in range(options.num_beams - 1))]
        self.finished: list[Hypothesis] = []  # at most num_beams, the best first

    def extend(self, candidates: Sequence[Candidate]) -> list[int]:
        """Replace the beams by their best continuations, which come in order.

        Return each row's former row. One that ends is kept if it is among the `num_beams` best.
        """
        self.num_tokens += 1
        going_on: list[tuple[int, _Beam]] = []
        for rank, (score, row, token) in enumerate(candidates):
            if score == -math.inf:
                break
            beam = _Beam([*self.beams[row].tokens, token], score)
            if token in self.ends or self.num_tokens == self.budget:
                if rank < self.options.num_beams:
                    self._finish(beam, self.ends.get(token, "length"))
            elif len(going_on) < self.options.num_beams:
                going_on.append((row, beam))
        self.done = not going_on or self._is_decided(going_on[0][1])
        if self.done:
            return []
        going_on.sort(key=lambda each: each[0])  # in the order of rows: where all go on, none moves
        # What fills a row has to have as many tokens as the others.
        row, beam = going_on[0]
        going_on += [(row, _Beam(beam.tokens))] * (self.options.num_beams - len(going_on))
        self.beams = [beam for _, beam in going_on]
        return [row for row, _ in going_on]

    def _finish(self, beam: _Beam, reason: FinishReason) -> None:
        tokens = beam.tokens if reason == "length" else beam.tokens[:-1]
        self.finished.append(Hypothesis(tokens, reason, self._score(beam, self.num_tokens)))
        self.finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)  # stable
        del self.finished[self.options.num_beams :]

    def _score(self, beam: _Beam, length: int) -> float:
        return beam.score / float(length**self.options.length_penalty)

    def _is_decided(self, best: _Beam) -> bool:
        """Whether the search stops although the best beam could go on; see `BeamOptions`."""
        options = self.options
        if len(self.finished) < options.num_beams:
            return False
        if options.early_stopping is True:
            return True
        at_best = options.early_stopping == "never" and options.length_penalty > 0
        length = self.budget if at_best else self.num_tokens
        return self._score(best, length) <= self.finished[-1].score

    def result(self, seconds: float) -> BeamResult:
        found = self.finished[: self.options.num_return_sequences]
        emitted = found[0].emitted if found else 0
        none = (0,) * self.num_tokens
        return BeamResult(self.request.index, found, Stats(none, none, none, emitted, seconds))
