"""`DecoderOnlyModel`: a `LanguageModel` over a model of mlx-lm, or over any with its interface."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..decoding import ModelInfo, Vocabulary, fingerprint
from ..errors import first_line
from .session import CompiledPasses, DecoderOnlySession, KeysValues, LayerShape

ROW_LENGTHS = 2, 5, 3  # of the rows that are tried out
ALIKE = 0.1  # how far logits may differ of the largest, as they do by rounding in 16 bits
POSITION_TABLES = ("wpe", "embed_positions")  # names of tables of learned positions


class DecoderOnlyModel:
    """A `LanguageModel` over a model of mlx-lm, or over any that accepts its caches.

    Contexts begin with the prompt, and outputs continue it.

    Args:
        model: Called with tokens (B, L) and a cache for each layer; returns logits (B, L, V).
            Refused if its own cache cannot be rewound, or it cannot read rows of different lengths.
        eos_token_id: The id that ends an output, as do `extra_eos_ids`.
        max_context: Largest number of tokens of prompt and output together; None for no limit.
        vocabulary: That of its tokenizer, which a draft's must equal; None if unknown.
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
        clamp_positions(model)
        self.model = model
        self.passes: CompiledPasses | None = CompiledPasses(model)
        self.name: str | None = None  # by which it was loaded
        self.shapes, vocab_size = shapes_of(model)
        ends = frozenset({eos_token_id, *extra_eos_ids})
        self.info = ModelInfo(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            eos_token_ids=ends,
            special_tokens=ends,
            is_decoder_only=True,
            max_context=max_context,
            max_source_length=max_context or sys.maxsize,
        ).with_vocabulary(vocabulary)
        # Not the parameters alone: another thread could not evaluate an array begun in this one.
        mx.eval(model)
        check_rows(self)

    def recompile(self) -> None:
        """Compile passes anew at their next use; needed after weights or layers were changed.

        The first generation compiles them with the weights as they are then.
        """
        if self.passes is not None:
            self.passes = CompiledPasses(self.model)

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


def check_rows(model: DecoderOnlyModel) -> None:
    """Refuse a model that reads rows of different lengths otherwise than each by itself.

    Masks and positions by row are no part of what mlx-lm's models promise.
    """
    size = model.info.vocab_size
    rows = [[(7 * row + i) % size for i in range(n)] for row, n in enumerate(ROW_LENGTHS)]
    if model.info.max_context is not None and model.info.max_context < max(ROW_LENGTHS) + 1:
        return
    try:
        difference = _difference(model, rows)
    except Exception:  # some models cannot be compiled, as they look at numbers
        model.passes = None
        try:
            difference = _difference(model, rows)
        except Exception as error:  # masks of shapes that a model does not take
            raise _unlike_rows(first_line(error)) from error
    if difference > ALIKE:
        raise _unlike_rows("their logits differ from those of single rows")
    model.recompile()  # what was tried out holds the weights as they were


def _difference(model: DecoderOnlyModel, rows: Sequence[Sequence[int]]) -> float:
    """Return how far the logits of rows side by side are from those of each alone, relatively."""
    found = _last_logits(model, rows)
    alone = mx.concatenate([_last_logits(model, [row]) for row in rows])
    difference, scale = mx.abs(found - alone).max().item(), mx.abs(alone).max().item()
    return cast(float, difference) / (cast(float, scale) or 1.0)


def _last_logits(model: DecoderOnlyModel, rows: Sequence[Sequence[int]]) -> mx.array:
    """Return the logits (B, 1, V) float32 that follow each row."""
    session, contexts = model.start(rows)
    last = mx.array([context[-1:] for context in contexts], dtype=mx.int32)
    return session.step(last).astype(mx.float32)


def _unlike_rows(found: str) -> ValueError:
    return ValueError(
        f"the model cannot read rows of different lengths side by side ({found}): choose another"
    )


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
        found: mx.array = self.table(mx.minimum(positions, self.table.weight.shape[0] - 1))
        return found


def clamp_positions(model: nn.Module) -> None:
    """Put `ClampedPositions` in the place of tables of learned positions."""
    for module in model.modules():
        for name in POSITION_TABLES:
            if name in module and not isinstance(module[name], ClampedPositions):
                module[name] = ClampedPositions(module[name])


class _Probe:
    """A cache of two rows of different lengths that records the shapes of keys and values."""

    def __init__(self) -> None:
        self.offset = mx.array([0, 1])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        self.seen: LayerShape = (keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def shapes_of(model: nn.Module) -> tuple[list[LayerShape], int]:
    """Return the shapes of the layers' keys and values, and the width of the logits."""
    probes = [_Probe() for _ in model.layers]
    try:  # a graph that is never evaluated
        logits = model(mx.zeros((2, 1), dtype=mx.int32), cache=probes)
        shapes = [probe.seen for probe in probes]
    except Exception as error:  # models that take the offset for a number raise anything
        raise _unlike_rows(first_line(error)) from error
    return shapes, int(logits.shape[-1])
