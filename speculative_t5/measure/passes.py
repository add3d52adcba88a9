"""What passes cost here: the target's by their number of tokens, and a step of the draft."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ..decoding import LanguageModel, Session
from ..generation import SpeculativeDecoder

DRAFT_STEPS = 16  # that are timed together
OUTPUT_LENGTH = 36  # tokens before a timed pass, in the middle of a capacity of the cache
FILLER_ID = 5  # that timed passes read, if the vocabulary has it
PASS_LENGTHS = (*range(1, 18), 33, 64)  # tokens in timed passes
SECONDS_AT_A_TIME, SECONDS_IN_ALL = 0.03, 5.0  # for each cost, and for all of them


@dataclass(frozen=True)
class PassCosts:
    """The least seconds of the target's passes, by their tokens, and of a step of the draft."""

    passes: dict[int, float]
    draft_step: float  # 0.0 without a draft


class Stepper:
    """A model's session that steps from the same length of output again and again.

    Ids that the model does not have are replaced by its last.
    """

    def __init__(self, model: LanguageModel, prompt: list[int]) -> None:
        last = model.info.vocab_size - 1
        self._filler = min(FILLER_ID, last)
        self._session: Session = model.start([[min(i, last) for i in prompt]])[0]
        self._length = self._session.lengths[0] + OUTPUT_LENGTH
        while (missing := self._length - self._session.lengths[0]) > 0:
            mx.eval(self._session.step(self._fill(min(16, missing))))

    def step(self, length: int) -> None:
        """Run a pass over `length` tokens, and wait for its argmax."""
        mx.eval(self._session.step_argmax(self._fill(length)))
        self._session.truncate([self._length])

    def draft(self, vocab_size: int) -> None:
        """Draft DRAFT_STEPS tokens greedily, and wait for the last."""
        token = self._fill(1)
        for _ in range(DRAFT_STEPS):
            token = self._session.step_argmax(token, vocab_size)
        mx.eval(token)
        self._session.truncate([self._length])

    def _fill(self, count: int) -> mx.array:
        return mx.array([[self._filler] * count], dtype=mx.int32)


def measure_passes(decoder: SpeculativeDecoder, prompt: list[int]) -> PassCosts:
    """Time passes of a decoder's models after a prompt, interleaved."""
    target = Stepper(decoder.model, prompt)
    runs: dict[object, Callable[[], object]] = {
        length: partial(target.step, length) for length in PASS_LENGTHS
    }
    if decoder.draft:
        ids = min(each.info.vocab_size for each in (decoder.model, decoder.draft))
        drafter = Stepper(decoder.draft, prompt)
        runs["steps"] = partial(drafter.draft, min(ids, decoder.draft_vocab or ids))
    turns: list[dict[object, float]] = []
    began = time.perf_counter()
    while len(turns) < 2 or time.perf_counter() - began < SECONDS_IN_ALL:
        turns.append({key: _least_seconds(run, SECONDS_AT_A_TIME) for key, run in runs.items()})
    least = {key: min(turn[key] for turn in turns) for key in runs}
    # A longer pass that took less time counts as well: a shorter one could be padded to it.
    passes = {
        length: min(least[longer] for longer in PASS_LENGTHS if longer >= length)
        for length in PASS_LENGTHS
    }
    return PassCosts(passes, least.get("steps", 0.0) / DRAFT_STEPS)


def _least_seconds(run: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of at least two runs: the first follows one of another shape."""
    found: list[float] = []
    first = time.perf_counter()
    while len(found) < 2 or time.perf_counter() - first < seconds:
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)
