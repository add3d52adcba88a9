"""`DecoderOnlySession`: a batch of sequences being decoded, with caches that rewind row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..decoding import best, best_logprobs, counters
from ..models import SMALLEST_CAPACITY, CompiledFunctions, EncodedPrompt, KVCache, write

PREFILL = 512  # tokens of prompts in a pass
COMPILED_TOKENS = 32  # of a pass: prompts have many lengths, each of which would be compiled
KeysValues = tuple[mx.array, mx.array]  # (B, H, T, D) each
LayerShape = tuple[int, tuple[int, int], mx.Dtype]  # H, the two D, and the type


class CausalModel(Protocol):
    """What a session asks of a model."""

    model: nn.Module  # called with tokens (B, L) and a cache for each layer
    shapes: list[LayerShape]
    passes: CompiledPasses | None  # None if the model cannot be compiled


class DecoderOnlySession:
    """One batch of sequences being decoded; a `Session`."""

    def __init__(self, model: CausalModel, batch: int, width: int | None = None) -> None:
        self._model = model
        layers = [
            tuple(mx.zeros((batch, heads, SMALLEST_CAPACITY, size), dtype) for size in sizes)
            for heads, sizes, dtype in model.shapes
        ]
        self._cache = KVCache(layers, width)
        self._whole = width is not None  # attend to whole buffers, whose sizes are few

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        parts = self._cache.parts(tokens)
        found = [self._run(part, count, whole=self._whole) for part, count in parts]
        logits = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
        return logits[..., :vocab_size] if vocab_size else logits

    def _run(self, tokens: mx.array, count: int, *, whole: bool) -> mx.array:
        """Run the model over tokens (B, L) of every row, of which the first `count` stay."""
        lengths, length = self._cache.lengths, tokens.shape[1]
        offsets, buffers = self._cache.hand_over(length)
        passes = self._model.passes if tokens.size <= COMPILED_TOKENS and not whole else None
        if passes is not None:
            logits, written = passes.run(tokens, offsets, buffers)
        else:
            logits, written = run_layers(
                self._model.model, tokens, offsets, buffers, lengths, whole=whole
            )
        self._cache.take_back(written, count)
        return logits[:, :count]

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return best(self.step(tokens, vocab_size))

    def step_logprobs(self, tokens: mx.array) -> mx.array:
        return best_logprobs(self.step(tokens))

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fill empty rows with prompts, except their last tokens."""
        counters.extra_work += 1
        lengths = [len(prompt) - 1 for prompt in prompts]
        longest = max(lengths)
        padded = [[*prompt[:-1], *[0] * (longest - len(prompt) + 1)] for prompt in prompts]
        for start in range(0, longest, PREFILL):
            part = mx.array([row[start : start + PREFILL] for row in padded], dtype=mx.int32)
            self._run(part, part.shape[1], whole=False)
            mx.eval(self._cache.layers)  # one part at a time, to bound the memory of attention
        self.truncate(lengths)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt]:
        together = DecoderOnlySession(self._model, len(prompts))
        together.read(prompts)
        cache = together._cache
        return [EncodedPrompt(cache, row, list(prompt)) for row, prompt in enumerate(prompts)]

    def replace(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        self._cache.give(rows, encoded)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)


class CompiledPasses:
    """A model's passes over few tokens, compiled with the weights as constants.

    They attend to whole buffers, whose sizes are few: each shape has a function of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._functions = CompiledFunctions()

    def __reduce__(self) -> tuple[type[CompiledPasses], tuple[nn.Module]]:
        """Become in a copy or a pickle of a model what compiles that one's passes."""
        return type(self), (self._model,)

    def run(
        self, tokens: mx.array, offsets: mx.array, buffers: list[KeysValues]
    ) -> tuple[mx.array, list[KeysValues]]:
        """Run over tokens (B, L); return logits (B, L, V), and the buffers with what was added."""
        shape = tokens.shape, offsets.size, buffers[0][0].shape
        logits, written = self._functions.of_shape(shape, self._pass)(tokens, offsets, buffers)
        return logits, written

    def _pass(
        self, tokens: mx.array, offsets: mx.array, buffers: list[KeysValues]
    ) -> tuple[mx.array, list[KeysValues]]:
        return run_layers(self._model, tokens, offsets, buffers, None, whole=True)


def run_layers(
    model: nn.Module,
    tokens: mx.array,
    offsets: mx.array,
    buffers: list[KeysValues],
    lengths: Sequence[int] | None,
    *,
    whole: bool,
) -> tuple[mx.array, list[KeysValues]]:
    """Run a model over tokens (B, L); return its logits, and the buffers with what was added."""
    length = tokens.shape[1]
    layers = [_Layer(pair, offsets, lengths, length, whole=whole) for pair in buffers]
    logits: mx.array = model(tokens, cache=layers)
    return logits, [layer.buffers for layer in layers]


class _Layer:
    """One layer's keys and values during one pass, with the interface of mlx-lm's caches.

    See `KVCache.hand_over` for `offsets`; `count` is L. `whole` attends to all C positions, with an
    array as the mask, and not only to those up to the longest row's end. Without `lengths`, which
    are unknown where a pass is compiled, that is all it can do.
    """

    def __init__(
        self,
        buffers: KeysValues,
        offsets: mx.array,
        lengths: Sequence[int] | None,
        count: int,
        *,
        whole: bool,
    ) -> None:
        self.buffers = buffers  # (B, H, C, D), with what this pass adds
        self._offsets = offsets
        rows, _, capacity, _ = buffers[0].shape
        self._plain = not whole  # a mask need not be an array
        self._end = capacity
        self.offset: int | mx.array = mx.broadcast_to(offsets, (rows,))  # of the first new tokens
        if lengths is not None:
            same = min(lengths) == max(lengths)
            self.offset = lengths[0] if same else offsets
            self._plain = same and not whole
            self._end = capacity if whole else max(lengths) + count

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Append (B, H, L, D) to every row; return (B, H, T, D), T being the longest row's end."""
        k, v = self.buffers
        k, v = self.buffers = write(k, keys, self._offsets), write(v, values, self._offsets)
        return k[:, :, : self._end], v[:, :, : self._end]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Make the mask of new tokens: None for no mask, "causal", or bool (B, 1, L, T)."""
        if self._plain and not return_array and (window_size is None or self._end <= window_size):
            return None if count == 1 else "causal"
        positions = mx.arange(self._end)
        own = (self._offsets[:, None] + mx.arange(count))[:, None, :, None]
        mask = positions <= own
        return mask if window_size is None else mask & (positions > own - window_size)
