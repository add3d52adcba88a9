"""Decoder-only models of mlx-lm in the same loop, with a length per row.

The only file that imports mlx-lm. Its models accept any cache with the interface of its own caches.
Those rewind all rows of a batch alike; the one here has rows of different lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..decoding import ModelInfo, Vocabulary, argmax, counters, fingerprint
from ..errors import first_line
from .cache import SMALLEST, EncodedPrompt, KVCache, write
from .config import model_type

MLX_LM = "mlx-lm>=0.32,<0.33"  # as in pyproject.toml
PREFILL = 512  # tokens of prompts in a pass

KeysValues = tuple[mx.array, mx.array]  # (B, H, T, D) each
LayerShape = tuple[int, tuple[int, int], mx.Dtype]  # H, the two D, and the type


class DecoderOnlyModel:
    """A `LanguageModel` over a model of mlx-lm, or over any that accepts its caches.

    Contexts begin with the prompt, and outputs continue it.

    Args:
        model: Called with tokens (B, L) and a cache for each layer; returns logits (B, L, V).
            Refused if its own cache cannot be rewound, or it cannot read rows of different lengths.
        eos_token_id: The id that ends an output, as do `extra_eos_ids`.
        max_context: Largest number of tokens of prompt and output together; None for no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_id: int,
        max_context: int | None,
        extra_eos_ids: Iterable[int] = (),
        vocabulary: Vocabulary | None = None,
    ) -> None:
        device.enter_thread()
        check_cache(model)
        _clamp_positions(model)
        self.model = model
        self.shapes, vocab_size = _shapes(model)
        ends = frozenset({eos_token_id, *extra_eos_ids})
        self.info = ModelInfo(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            eos_token_ids=ends,
            special_tokens=ends,
            is_decoder_only=True,
            max_source_length=max_context or sys.maxsize,
            max_context=max_context,
        ).with_vocabulary(vocabulary)
        # Not the parameters alone: another thread could not evaluate an array begun in this one.
        mx.eval(model)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of its shapes and of a sample of every weight."""
        return fingerprint(repr(self.shapes), self.model.parameters())

    def start(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[DecoderOnlySession, list[list[int]]]:
        """Read the prompts except their last tokens, with which decoding begins."""
        device.enter_thread()
        session = DecoderOnlySession(self, len(prompts), width)
        session.read(prompts)
        return session, [list(prompt) for prompt in prompts]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Score whole sequences (B, L): logits (B, L, V) of what follows each token."""
        device.enter_thread()
        logits: mx.array = self.model(tokens)
        return logits


class DecoderOnlySession:
    """One batch of sequences being decoded; a `Session`."""

    def __init__(self, model: DecoderOnlyModel, batch: int, width: int | None = None) -> None:
        self._model = model
        layers = [
            tuple(mx.zeros((batch, heads, SMALLEST, size), dtype) for size in sizes)
            for heads, sizes, dtype in model.shapes
        ]
        self._cache = KVCache(layers, width)
        self._whole = width is not None  # attend to whole buffers, whose sizes are few

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        logits = self._cache.extend(tokens, partial(self._run, whole=self._whole))
        return logits[..., :vocab_size] if vocab_size else logits

    def _run(
        self, tokens: mx.array, offsets: mx.array, buffers: list[KeysValues], *, whole: bool
    ) -> tuple[mx.array, list[KeysValues]]:
        lengths, count = self._cache.lengths, tokens.shape[1]
        layers = [_Layer(pair, offsets, lengths, count, whole=whole) for pair in buffers]
        logits: mx.array = self._model.model(tokens, cache=layers)
        return logits, [layer.buffers for layer in layers]

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return argmax(self.step(tokens, vocab_size))

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
            self._cache.append(part, part.shape[1], partial(self._run, whole=False))
            mx.eval(self._cache.layers)  # one part at a time, to bound the memory of attention
        self.truncate(lengths)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt]:
        together = DecoderOnlySession(self._model, len(prompts))
        together.read(prompts)
        return [
            EncodedPrompt(together._cache, row, list(prompt)) for row, prompt in enumerate(prompts)
        ]

    def replace(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        self._cache.give(rows, encoded)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)


class _Layer:
    """One layer's keys and values during one pass, with the interface of mlx-lm's caches.

    See `KVCache.append` for `offsets`; `count` is L. `whole` attends to all C positions, with an
    array as the mask, and not only to those up to the longest row's end.
    """

    def __init__(
        self,
        buffers: KeysValues,
        offsets: mx.array,
        lengths: Sequence[int],
        count: int,
        *,
        whole: bool,
    ) -> None:
        self.buffers = buffers  # (B, H, C, D), with what this pass adds
        self._offsets = offsets
        same = min(lengths) == max(lengths)
        self._end = buffers[0].shape[2] if whole else max(lengths) + count
        self._plain = same and not whole  # a mask need not be an array
        self.offset: int | mx.array = lengths[0] if same else offsets  # of the first new tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Append (B, H, L, D) to every row; return (B, H, T, D), T being the longest row's end."""
        k, v = self.buffers
        self.buffers = (write(k, keys, self._offsets), write(v, values, self._offsets))
        k, v = self.buffers
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


def build(config: Mapping[str, Any]) -> nn.Module:
    """Make the model of mlx-lm that a config.json describes, with random weights."""
    kind = model_type(config)
    try:
        from mlx_lm import utils

        find = utils._get_classes  # private, as nothing else of it is: a model_type's file
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"a {kind} (model_type in config.json) is not of the T5 family, and if it is a "
            f"decoder-only model it needs mlx-lm, which cannot be imported ({first_line(error)}): "
            f"run pip install '{MLX_LM}'"
        ) from error
    try:
        kind_of_model, settings = find(dict(config))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"this is a {kind} (model_type in config.json), which is neither of the T5 family nor "
            f"among the decoder-only models of mlx-lm {version('mlx-lm')}: choose another"
        ) from error
    try:
        model: nn.Module = kind_of_model(settings.from_dict(dict(config)))
    except Exception as error:  # mlx-lm checks little, and bad sizes raise anything
        raise ValueError(
            f"config.json does not make a {kind} ({type(error).__name__}: {first_line(error)}): "
            "download the model again"
        ) from error
    return model


def check_cache(model: nn.Module) -> None:
    """Refuse a model whose cache cannot be rewound row by row: only keys and values can be."""
    make: Any = getattr(model, "make_cache", list)  # a list of mlx-lm's caches
    others = sorted({type(cache).__name__ for cache in make()} - {"KVCache"})
    if others:
        raise ValueError(
            f"the model keeps its context in {', '.join(others)}, which cannot be rewound row by "
            "row: use a model with plain keys and values"
        )


class ClampedPositions(nn.Module):
    """A table of learned positions whose last row stands for all beyond it.

    Rows near their end are fed tokens beyond it, as their neighbours are; MLX does not check.
    """

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def __call__(self, positions: mx.array) -> mx.array:
        rows: mx.array = self.table(mx.minimum(positions, self.table.weight.shape[0] - 1))
        return rows


def _clamp_positions(model: nn.Module) -> None:
    """Put `ClampedPositions` in the place of a table of learned positions, `wpe` in mlx-lm."""
    for module in model.modules():
        if "wpe" in module and not isinstance(module["wpe"], ClampedPositions):
            module["wpe"] = ClampedPositions(module["wpe"])


class _Probe:
    """A cache of two rows of different lengths that records the shapes of keys and values."""

    def __init__(self) -> None:
        self.offset = mx.array([0, 1])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        self.seen: LayerShape = (keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def _shapes(model: nn.Module) -> tuple[list[LayerShape], int]:
    """Return the shapes of the layers' keys and values, and the width of the logits."""
    probes = [_Probe() for _ in model.layers]
    try:  # a graph that is never evaluated
        logits = model(mx.zeros((2, 1), dtype=mx.int32), cache=probes)
    except Exception as error:  # models that take the offset for a number raise anything
        raise ValueError(
            f"the model cannot read rows of different lengths side by side ({first_line(error)}): "
            "choose another"
        ) from error
    return [probe.seen for probe in probes], int(logits.shape[-1])
