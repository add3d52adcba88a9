"""Options that change the target's distribution according to the tokens so far.

Target and draft go through the same transform, so that the output is distributed as the transformed
target's own. The tokens so far include the drafted ones before each position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import cached_property

import mlx.core as mx
import numpy as np

from ..options import OptionError, check_integer, check_number, option_error
from .history import NO_TOKEN, TokenHistory
from .results import read

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
MAX_BIAS = 1e9  # float32 can hold what it makes of logits
NOTHING_LEFT = (
    "the options forbid every token that could come next: leave out some that forbid tokens"
)


@dataclass(frozen=True)
class LogitsTransform:
    """Changes logits before temperature, top-k and top-p; the steps run in this order.

    They mean what they do in transformers' `generate` (`repetition_penalty`: 1909.05858, section
    4.1). `min_tokens` forbids `end_ids`; after a drafted one of them, processors are not called.
    `begin_suppress_tokens` are forbidden as the first token that is not forced.

    Raises:
        ValueError: If an option is out of its range, or a forced token is forbidden.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_tokens: tuple[int, ...] = ()
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for _, bias in self.logit_bias:
            value = check_number("a bias of {logit_bias}", bias)
            if not (value == -math.inf or abs(value) <= MAX_BIAS):
                expected = f"from -{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf"
                raise option_error("a bias of {logit_bias}", expected, bias)
        if not all(self.bad_words):
            raise OptionError("{bad_words} has a sequence without tokens: leave it out")
        for name, ids in self.ids.items():
            for token in ids:
                check_integer(f"an id of {{{name}}}", token, 0)
        if both := set(self.forced_tokens).intersection(self.suppress_tokens):
            raise OptionError(
                "the id {} is in {forced_tokens} and in {suppress_tokens}: leave out one",
                min(both),
            )
        for processor in self.processors:
            if not callable(processor):
                raise ValueError(
                    f"a logits processor must be a function of tokens and logits, got {processor!r}"
                )

    @property
    def ids(self) -> dict[str, Collection[int]]:
        """The ids that each option names."""
        return {
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "logit_bias": [token for token, _ in self.logit_bias],
            "forced_tokens": self.forced_tokens,
            "bad_words": [token for word in self.bad_words for token in word],
            "end_ids": self.end_ids,
        }

    @property
    def summary(self) -> str:
        """Names the options that are on, without their values."""
        on = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return " ".join(on)

    def __bool__(self) -> bool:
        """Whether it changes anything; `end_ids` alone do not."""
        return self.summary not in ("", "end_ids")

    def __call__(self, logits: mx.array, history: TokenHistory) -> mx.array:
        """Transform logits (B, L, V) of any float type; returns (B, L, V) float32."""
        logits = logits.astype(mx.float32)
        length, size = logits.shape[1:]
        if self.logit_bias:
            logits = logits + self._added("logit_bias", size)
        if self.repetition_penalty != 1:
            seen, penalty = _seen(history.tokens, logits), self.repetition_penalty
            penalized = mx.where(logits < 0, logits * penalty, logits / penalty)
            logits = mx.where(seen, penalized, logits)
        if self.no_repeat_ngram_size:
            repeating = _repeating(history.tokens, self.no_repeat_ngram_size, logits)
            logits = mx.where(repeating, -mx.inf, logits)
        if self._sequences:
            beginnings, last = self._sequences
            before = _before(history.tokens, length, beginnings.shape[1])[:, :, None]
            same = (before == mx.array(beginnings)) | mx.array(beginnings == NO_TOKEN)
            most = mx.where(mx.all(same, axis=-1), -mx.inf, mx.inf)
            logits = logits.at[:, :, mx.array(last)].minimum(most)
        if self.min_tokens:
            early = (history.positions(length) < self.min_tokens)[..., None]
            logits = mx.where(early, logits + self._added("end_ids", size), logits)
        if self._never:
            logits = logits + self._added("_never", size)
        if self.begin_suppress_tokens:
            first = (history.positions(length) == len(self.forced_tokens))[..., None]
            added = self._added("begin_suppress_tokens", size)
            logits = mx.where(first, logits + added, logits)
        if self.forced_tokens:
            forced = mx.array([*self.forced_tokens, NO_TOKEN], dtype=mx.int32)
            positions = mx.minimum(history.positions(length), len(self.forced_tokens))
            token = forced[positions][..., None]
            only = mx.where(mx.arange(size) == token, 0.0, -mx.inf)
            logits = mx.where(token == NO_TOKEN, logits, only)
        if self.processors:
            logits = self._processed(logits, history)
        return logits

    def _processed(self, logits: mx.array, history: TokenHistory) -> mx.array:
        """Call the processors for each row and position that follows no end."""
        length, tokens, rows = logits.shape[1], history.tokens, []
        drafts = read(history.drafted)  # a wait, but what follows an end is nothing to ask about
        for row, (context, drafted) in enumerate(zip(history.contexts, drafts, strict=True)):
            own = tokens[row, -len(context) - len(drafted) :]
            fewest = own.size - length + 1  # tokens before the first position
            end = next((i for i, t in enumerate(drafted) if t in self.end_ids), len(drafted))
            count = max(0, length + end - len(drafted))
            positions = [logits[row, i][None] for i in range(count)]
            for processor in self.processors:
                pairs = enumerate(positions, start=fewest)
                positions = [_called(processor, own[:before], found) for before, found in pairs]
            rows.append(mx.concatenate([*positions, logits[row, count:]]))
        return mx.stack(rows)

    @cached_property
    def _never(self) -> tuple[int, ...]:
        """Ids that are forbidden everywhere."""
        return (*self.suppress_tokens, *(word[0] for word in self.bad_words if len(word) == 1))

    @cached_property
    def _sequences(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Of bad words of several ids, if any: their beginnings (W, N) and last ids (W,), int32."""
        words = [word for word in self.bad_words if len(word) > 1]
        if not words:
            return None
        beginnings = np.full((len(words), max(map(len, words)) - 1), NO_TOKEN, np.int32)
        for row, word in zip(beginnings, words, strict=True):
            row[1 - len(word) :] = word[:-1]
        return beginnings, np.array([word[-1] for word in words], np.int32)

    @cached_property
    def _rows(self) -> dict[tuple[str, int], mx.array]:
        return {}  # of `_added`, made once for all rounds

    def _added(self, name: str, size: int) -> mx.array:
        """Return what an option adds to logits, (V,) float32: -inf at ids without a value."""
        if (name, size) not in self._rows:
            row = np.zeros(size, np.float32)
            for each in getattr(self, name):
                token, value = each if isinstance(each, tuple) else (each, -math.inf)
                row[token] += value
            self._rows[name, size] = mx.array(row)
        return self._rows[name, size]


def nothing_allowed(logits: mx.array) -> mx.array:
    """Return (...) bool: whether all of logits (..., V) are -inf."""
    return mx.max(logits, axis=-1) == -mx.inf


def _marked(ids: mx.array, size: int) -> mx.array:
    """Return (B, L, V) bool, True at each position's ids (B, L, N); `NO_TOKEN` marks nothing."""
    batch, length, _ = ids.shape
    where = mx.where(ids < 0, size, ids)  # one more column, for what marks nothing
    empty = mx.zeros((batch, length, size + 1), dtype=mx.bool_)
    return mx.put_along_axis(empty, where, mx.array(True), axis=-1)[..., :size]


def _seen(tokens: mx.array, logits: mx.array) -> mx.array:
    """Return (B, L, V) bool: the tokens of a history before each position."""
    length, size = logits.shape[1:]
    total = tokens.shape[1]
    # Position i follows all but the last L - 1 - i of them.
    before = mx.arange(total) < mx.arange(total - length + 1, total + 1)[:, None]
    return _marked(mx.where(before, tokens[:, None], NO_TOKEN), size)


def _before(tokens: mx.array, length: int, size: int) -> mx.array:
    """Return the last `size` tokens of a history before each of L positions, (B, L, size) int32."""
    batch, total = tokens.shape
    lacking = size - (total - length + 1)  # of the tokens before the first position
    if lacking > 0:
        tokens = mx.pad(tokens, [(0, 0), (lacking, 0)], constant_values=NO_TOKEN)
        total += lacking
    return mx.as_strided(tokens, (batch, length, size), (total, 1, 1), total - length + 1 - size)


def _repeating(tokens: mx.array, ngram: int, logits: mx.array) -> mx.array:
    """Return (B, L, V) bool: the tokens that would make an n-gram occur again at each position."""
    (length, size), (batch, total) = logits.shape[1:], tokens.shape
    if total < ngram:
        return mx.zeros(logits.shape, dtype=mx.bool_)
    # Occurrence j of an n-gram has its last token at j + n - 1: `same` compares the tokens before
    # that one with the last n - 1 tokens before each position.
    count = total - ngram + 1
    ends = mx.arange(total - length + 1, total + 1)  # tokens before each position, (L,)
    same = mx.broadcast_to(mx.arange(count) + ngram - 1 < ends[:, None], (batch, length, count))
    if ngram > 1:
        last = _before(tokens, length, ngram - 1)[:, :, None]
        occurred = mx.as_strided(tokens, (batch, 1, count, ngram - 1), (total, 0, 1, 1))
        # A window that begins before a row's first token occurs nowhere else.
        same = same & mx.all(occurred == last, axis=-1)
    followed = mx.where(same, tokens[:, None, ngram - 1 :], NO_TOKEN)
    return _marked(followed, size)


def _called(processor: LogitsProcessor, tokens: mx.array, logits: mx.array) -> mx.array:
    """Return a processor's result (1, V) as float32; refuse another."""
    found = processor(tokens, logits)
    if not isinstance(found, mx.array) or found.shape != logits.shape:
        shape = getattr(found, "shape", None)
        what = type(found).__name__ if shape is None else f"shape {tuple(shape)}"
        raise ValueError(
            f"what a logits processor returns must be {logits.shape} logits, got {what}"
        )
    return found.astype(mx.float32)
