"""`T5Session`: a batch of prompts being decoded by a T5, or by a draft that shares its encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ..cache import EncodedPrompt, KVCache, LayerShape, SourceCache, replace_rows
from .compiled import CompiledDecoder, Output

if TYPE_CHECKING:
    from .model import T5
    from .sharing import SharingDraft

Encode = Callable[[Sequence[Sequence[int]]], SourceCache]


class T5Session:
    """A batch of prompts being decoded; a `Session`.

    Args:
        model: Whose decoder runs.
        encode: Encodes prompts as `sources` were.
        sources: The keys and values of the model's layers, and then of those that read the same
            sources in a session of their own.
        decoder: The model's decoder, compiled.
        width: See `KVCache.passes`.
    """

    def __init__(
        self,
        model: T5 | SharingDraft,
        encode: Encode,
        sources: SourceCache,
        decoder: CompiledDecoder,
        width: int | None,
    ) -> None:
        config, batch = model.config, len(sources.lengths)
        self._start = config.decoder_start_token_id
        self._encode = encode
        self._sources = sources
        self._decoder = decoder
        self._layers = slice(config.num_decoder_layers)
        shape = LayerShape(model.num_heads, config.d_kv, config.d_kv, model.dtype)
        self._cache = KVCache([shape] * config.num_decoder_layers, batch, width)

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("logits", tokens, vocab_size)

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("argmax", tokens, vocab_size)

    def _run(self, output: Output, tokens: mx.array, vocab_size: int | None) -> mx.array:
        cache, sources = self._cache, self._sources
        results = []
        for part, count in cache.passes(tokens):
            offsets = cache.reserve(part.shape[1])
            result, layers = self._decoder.run(
                output, vocab_size, part, offsets, cache.take(), sources.view(self._layers),
                sources.mask,
            )  # fmt: skip
            cache.put(layers, count)
            results.append(result if count == part.shape[1] else result[:, :count])
        return results[0] if len(results) == 1 else mx.concatenate(results, axis=1)

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt[SourceCache]]:
        sources = self._encode(prompts)
        return [EncodedPrompt(sources, row, [self._start]) for row in range(len(prompts))]

    def replace(
        self, rows: Sequence[int], encoded: Sequence[EncodedPrompt[SourceCache]]
    ) -> list[list[int]]:
        replace_rows(self._sources, rows, encoded)
        self._cache.clear(rows)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._sources.select(rows)


class SharingSession(T5Session):
    """A draft's decoding of the prompts that its target's session has encoded for both.

    The target's session keeps the sources: it replaces and selects rows there before the draft
    does so here.
    """

    def __init__(self, model: SharingDraft, target: T5Session, decoder: CompiledDecoder) -> None:
        super().__init__(model, target._encode, target._sources, decoder, None)
        self._layers = slice(target._layers.stop, None)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt[SourceCache]]:
        """Return the contexts to begin with: the target's session has encoded the prompts."""
        return [EncodedPrompt(self._sources, row, [self._start]) for row in range(len(prompts))]

    def replace(
        self, rows: Sequence[int], encoded: Sequence[EncodedPrompt[SourceCache]]
    ) -> list[list[int]]:
        self._cache.clear(rows)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
