"""`T5Session`: a batch of prompts being decoded by a T5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ..cache import EncodedPrompt, KVCache, LayerShape, SourceCache, replace_rows
from .compiled import CompiledDecoder, Output

if TYPE_CHECKING:
    from .model import T5


class T5Session:
    """A batch of prompts being decoded; a `Session`."""

    def __init__(
        self, model: T5, sources: SourceCache, decoder: CompiledDecoder, width: int | None
    ) -> None:
        config, batch = model.config, len(sources.lengths)
        self._model = model
        self._sources = sources
        self._decoder = decoder
        shape = LayerShape(config.num_heads, config.d_kv, config.d_kv, model.dtype)
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
                output, vocab_size, part, offsets, cache.take(), sources.view(), sources.mask
            )
            cache.put(layers, count)
            results.append(result if count == part.shape[1] else result[:, :count])
        return results[0] if len(results) == 1 else mx.concatenate(results, axis=1)

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt[SourceCache]]:
        sources, start = self._model.sources(prompts), self._model.config.decoder_start_token_id
        return [EncodedPrompt(sources, row, [start]) for row in range(len(prompts))]

    def replace(
        self, rows: Sequence[int], encoded: Sequence[EncodedPrompt[SourceCache]]
    ) -> list[list[int]]:
        replace_rows(self._sources, rows, encoded)
        self._cache.clear(rows)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._sources.select(rows)
