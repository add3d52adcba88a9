"""`T5Session`: a batch of prompts being decoded by a T5, or by a draft that shares its encoder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from .. import device
from ..decoding import counters
from .cache import SMALLEST, EncodedPrompt, KVCache, SourceCache, padding_mask, source_width

if TYPE_CHECKING:
    from .t5 import CompiledModel, Decoder

# Tokens in one pass of the encoder, padding included, unless one prompt has more. On a CPU larger
# products gain nothing, and smaller groups have sources of more similar length, so less padding.
ENCODED_TOKENS, ENCODED_TOKENS_CPU = 512, 128

MAX_SHAPES = 100  # that a thread keeps compiled for a model at a time

# Sizes of heads for which Metal has a kernel of attention to few queries (read in MLX's sources):
# on a GPU smaller heads are padded to the next.
HEAD_SIZES = 64, 96, 128

Prompts = Sequence[Sequence[int]]  # source ids, EOS included
HeadOutput = Literal["logits", "argmax"]
Pass = Callable[..., tuple[mx.array, list[mx.array]]]


class T5Session:
    """A batch of prompts being decoded by a compiled decoder; a `Session`.

    `encode` gives the keys and values of the decoder's layers, and then those of a draft's.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        encode: Callable[[Prompts], SourceCache],
        prompts: Prompts,
        width: int | None = None,
        first: int = 0,
    ) -> None:
        model = decoder.model
        depth = model.config.num_decoder_layers
        self._start = model.config.decoder_start_token_id
        self._encode = encode
        self._sources = encode(prompts)
        self._decoder = decoder
        self._layers = slice(first, first + depth)  # of the sources, as `encode` gives them
        batch, size = len(self._sources.lengths), decoder.decoder.head_size
        shape = 2, batch, model.num_key_heads, SMALLEST, size
        self._cache = KVCache([mx.zeros(shape, model.dtype) for _ in range(depth)], width)

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    @property
    def contexts(self) -> list[list[int]]:
        return [[self._start] for _ in self.lengths]

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("logits", tokens, vocab_size)

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("argmax", tokens, vocab_size)

    def _run(self, output: HeadOutput, tokens: mx.array, vocab_size: int | None) -> mx.array:
        sources = self._sources.view(self._layers)
        run = partial(self._decoder.run, output, vocab_size, sources, self._sources.mask)
        return self._cache.extend(tokens, run)

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def encode(self, prompts: Prompts) -> list[EncodedPrompt]:
        sources = self._encode(prompts)
        return [EncodedPrompt(sources, row, [self._start]) for row in range(len(prompts))]

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

    def __init__(self, decoder: CompiledDecoder, target: T5Session) -> None:
        super().__init__(decoder, lambda _: target._sources, [], first=target._layers.stop)

    def replace(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        self._cache.clear(rows)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)


def read_sources(
    model: CompiledModel, decoders: Sequence[Decoder], prompts: Prompts
) -> SourceCache:
    """Encode prompts for the cross-attention of decoders, those of similar length together."""
    cache: SourceCache | None = None
    for group in _groups(prompts):
        new = _read_together(model, decoders, [prompts[i] for i in group])
        if len(group) == len(prompts):
            return new
        if cache is None:  # the group of the longest prompt, whose width serves all
            cache = SourceCache(new.layers, new.lengths)
            cache.select([0] * len(prompts))
        cache.replace(group, new, range(len(group)))
        mx.eval(cache.layers)
    assert cache is not None
    return cache


def _read_together(
    model: CompiledModel, decoders: Sequence[Decoder], prompts: Prompts
) -> SourceCache:
    counters.extra_work += 1
    lengths = [len(prompt) for prompt in prompts]
    longest, pad = max(lengths), model.config.pad_token_id
    tokens = mx.array([[*p, *[pad] * (longest - len(p))] for p in prompts], dtype=mx.int32)
    memory = model.encode(tokens, padding_mask(lengths, longest, model.dtype))
    width = source_width(lengths)
    layers = [layer for decoder in decoders for layer in decoder.read(memory, width)]
    sources = SourceCache(layers, lengths)
    mx.async_eval(sources.layers)
    return sources


def _groups(prompts: Prompts) -> list[list[int]]:
    """Indices of prompts to encode together: all, or the longest first if they are many tokens."""
    order = list(range(len(prompts)))
    most = ENCODED_TOKENS_CPU if device.on_cpu() else ENCODED_TOKENS
    if len(prompts) * max(map(len, prompts)) <= most:
        return [order]
    groups: list[list[int]] = [[]]
    for i in sorted(order, key=lambda i: len(prompts[i])):
        if groups[-1] and (len(groups[-1]) + 1) * len(prompts[i]) > most:
            groups.append([])
        groups[-1].append(i)
    return groups[::-1]


class _Functions(threading.local):
    """One thread's compiled functions by shape, the least recently used first.

    MLX keeps a function's trace in each thread that called it, but drops it in one thread only, and
    would run it in the others, with the wrong weights, for a later function at its address.
    """

    def __init__(self) -> None:
        self.by_shape: dict[tuple[Any, ...], Pass] = {}


class CompiledDecoder:
    """A model's decoder, compiled with its weights as constants: inputs are checked in each pass.

    Each shape has a function of its own, so that its trace, a third of a megabyte for a small
    model, is freed with it.
    """

    def __init__(self, model: CompiledModel) -> None:
        self.model = model
        self.decoder = model.decoder  # what runs
        size = self.decoder.head_size
        wider = next((each for each in HEAD_SIZES if each >= size), size)
        if wider > size and not device.on_cpu():
            self.decoder = self.decoder.padded(wider)
        self._tables, self._output = self.decoder.tables(), model.output
        # What has not been evaluated would be computed again in every pass.
        constants = model.parameters(), self.decoder.parameters(), self._output.parameters()
        mx.eval(*constants, self._tables)
        self._functions = _Functions()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Become None in copies and pickles of a model, which compile for themselves."""
        return type(None), ()

    def run(
        self,
        output: HeadOutput,
        vocab_size: int | None,
        sources: list[mx.array],
        mask: mx.array | None,
        tokens: mx.array,
        offsets: mx.array,
        cache: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        """Run the decoder over new tokens (B, L) int32; the others are as in `Decoder`.

        Returned are the logits (B, L, V) of what follows each token, or their argmax (B, L) int32,
        over the first `vocab_size` ids or all; and the cache with the new positions.
        """
        functions = self._functions.by_shape
        _, num_sources, _, source_width, _ = sources[0].shape
        widths = cache[0].shape[-2], num_sources, source_width
        # All that changes the graph: one offset is written as a slice, several by index.
        shape = output, vocab_size, tokens.shape, offsets.size, widths, mask is None
        function = functions.pop(shape, None)
        if function is None:
            counters.extra_work += 1
            function = mx.compile(partial(self._pass, output, vocab_size))
            if len(functions) >= MAX_SHAPES:
                del functions[next(iter(functions))]
        functions[shape] = function  # the last, as it was used last
        return function(tokens, offsets, cache, sources, mask)

    def _pass(
        self, output: HeadOutput, vocab_size: int | None, tokens: mx.array, *others: Any
    ) -> tuple[mx.array, list[mx.array]]:
        model, inputs = self.model, (*others, self._tables)
        x, cache = self.decoder(model.embed(tokens), *inputs)
        return model.score(output, x, vocab_size, self._output), cache
