"""`T5Session`: a batch of prompts being decoded by a T5 or T5Gemma, or by a sharing draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import mlx.core as mx

from .cache import EncodedPrompt, KVCache, SourceCache

Prompts = Sequence[Sequence[int]]  # source ids, EOS included
HeadOutput = Literal["logits", "argmax", "judged"]


class DecoderPasses(Protocol):
    """What a session asks of a decoder; see `encoder_decoder.CompiledDecoder`."""

    start_token: int
    depth: int  # number of its layers

    def new_cache(self, batch: int) -> list[mx.array]: ...

    def run(
        self,
        kind: HeadOutput,
        vocab_size: int | None,
        tokens: mx.array,
        offsets: mx.array,
        cache: list[mx.array],
        sources: list[mx.array],
        mask: mx.array | None,
    ) -> tuple[mx.array, list[mx.array]]: ...


class T5Session:
    """A batch of prompts being decoded by a compiled decoder; a `Session`.

    `encode` gives the keys and values of the decoder's layers, and then those of a draft's.
    """

    def __init__(
        self,
        decoder: DecoderPasses,
        encode: Callable[[Prompts], SourceCache],
        prompts: Prompts,
        width: int | None = None,
        first: int = 0,
    ) -> None:
        self._decoder = decoder
        self._encode = encode
        self._sources = encode(prompts)
        self._layers = slice(first, first + decoder.depth)  # of the sources, as `encode` gives them
        self._cache = KVCache(decoder.new_cache(len(self._sources.lengths)), width)
        self.contexts = [[decoder.start_token] for _ in self.lengths]  # that rows begin with

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("logits", tokens, vocab_size)

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("argmax", tokens, vocab_size)

    def step_logprobs(self, tokens: mx.array) -> mx.array:
        return self._run("judged", tokens, None)

    def _run(self, kind: HeadOutput, tokens: mx.array, vocab_size: int | None) -> mx.array:
        """Run the decoder over new tokens, in one pass or, if they have a width, in several."""
        cache, sources, found = self._cache, self._sources, []
        for part, count in cache.parts(tokens):
            offsets, layers = cache.hand_over(part.shape[1])
            scores, layers = self._decoder.run(
                kind,
                vocab_size,
                part,
                offsets,
                layers,
                sources.view(self._layers),
                sources.mask,
            )
            cache.take_back(layers, count)
            found.append(scores[:, :count])
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def encode(self, prompts: Prompts) -> list[EncodedPrompt]:
        sources = self._encode(prompts)
        context = [self._decoder.start_token]
        return [EncodedPrompt(sources, row, context) for row in range(len(prompts))]

    def replace(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        self._sources.give(rows, encoded)
        self._cache.clear(rows)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._sources.select(rows)


class SharingSession(T5Session):
    """A draft's decoding of prompts that its target's session has encoded for both, and keeps.

    Rows are replaced and selected there first.
    """

    def __init__(self, decoder: DecoderPasses, target: T5Session) -> None:
        super().__init__(decoder, lambda _: target._sources, [], first=target._layers.stop)

    def replace(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        self._cache.clear(rows)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
