"""What the models of all families share: compiled passes of the decoder, and sessions' beginnings.

Shapes have the letters that they have in `t5`.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import device
from ..decoding import Broadcast, ModelInfo, counters, fingerprint, identity
from .cache import SMALLEST_CAPACITY, SourceCache, additive, padding_mask, source_width
from .quantization import Steps
from .session import HeadOutput, Prompts, T5Session
from .t5gemma_config import ModelConfig

COMPILE_LOCK = threading.Lock()  # held while any model's compiled decoder is made or dropped

# Tokens in one pass of the encoder, padding included, unless one prompt has more. On a CPU larger
# products gain nothing, and smaller groups have sources of more similar length, so less padding.
ENCODED_TOKENS, ENCODED_TOKENS_CPU = 512, 128

MAX_SHAPES = 100  # that a thread keeps compiled for a model at a time

# Sizes of heads for which Metal has a kernel of attention to few queries (read in MLX's sources):
# on a GPU smaller heads are padded to the next.
HEAD_SIZES = 64, 96, 128

CompiledPass = Callable[..., tuple[mx.array, list[mx.array]]]


class DecoderStack(nn.Module, ABC):
    """The decoder's layers of a family; its last normalization is applied by `t5.Head`."""

    head_size: int
    layers: list[Any]
    norm: nn.RMSNorm

    def padded(self, head_size: int) -> "DecoderStack":
        """Return a decoder that computes the same with heads of a larger size, padded by zeros.

        It is this one where that is not possible.
        """
        return self

    def as_run(self) -> "DecoderStack":
        """Return the decoder that is compiled, on a GPU perhaps with padded heads."""
        wider = next((each for each in HEAD_SIZES if each >= self.head_size), self.head_size)
        return self if wider == self.head_size or device.on_cpu() else self.padded(wider)

    def tables(self) -> list[mx.array]:
        """Return what passes have in common, if anything."""
        return []

    @abstractmethod
    def read(self, memory: mx.array, width: int) -> list[mx.array]:
        """Return each layer's keys and values of the encoder's memory (B, S, d_model).

        They are (2, B, H, T, D), T being `width`, with zeros from S on.
        """

    @abstractmethod
    def __call__(
        self,
        x: mx.array,
        offsets: mx.array,
        cache: Sequence[mx.array],
        sources: Sequence[mx.array],
        mask: mx.array | None,
        tables: Sequence[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        """Run all layers over new positions of every row.

        Args:
            x: Embedded tokens, (B, L, d_model).
            offsets: The position of each row's first token, (B,) int32, or (1,) if all are the
                same.
            cache: Each layer's keys and values, (2, B, H, T, D), with room for L more.
            sources: What `read` has returned, for B / P consecutive rows each.
            mask: Additive, of the sources' padding, (P, 1, 1, T).
            tables: What `tables` has returned.

        Returns:
            The last layer's output, as `x`, and the cache with the new positions.
        """

    @abstractmethod
    def whole(
        self, x: mx.array, memory: mx.array, mask: mx.array | None, block: int = 1
    ) -> mx.array:
        """Run all layers over whole sequences (B, L, d_model), so that gradients can be taken.

        With a block, these are tokens and masks as in `position_bias.block_places`.
        """


class CompiledFunctions(threading.local):
    """One thread's compiled functions by shape, the least recently used first.

    MLX keeps a function's trace in each thread that called it, but drops it in one thread only, and
    would run it in the others, with the wrong weights, for a later function at its address.
    """

    def __init__(self) -> None:
        self.by_shape: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of_shape(self, shape: tuple[Any, ...], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for a shape, which is all that changes its graph, compiled."""
        compiled = self.by_shape.pop(shape, None)
        if compiled is None:
            counters.extra_work += 1
            compiled = mx.compile(function)
            if len(self.by_shape) >= MAX_SHAPES:
                del self.by_shape[next(iter(self.by_shape))]
        self.by_shape[shape] = compiled  # the last, as it was used last
        return compiled


class CompiledDecoder:
    """A model's decoder, compiled with weights as constants, as inputs are checked in each pass.

    Each shape has a function of its own, so that its trace, a third of a megabyte for a small
    model, is freed with it.
    """

    def __init__(self, model: "CompiledModel") -> None:
        self._model = model
        self.decoder = model.decoder.as_run()
        self.start_token = model.config.decoder_start_token_id
        self.depth = model.config.num_decoder_layers
        self._num_heads, self._dtype = model.num_key_heads, model.dtype
        self._tables, self._output = self.decoder.tables(), model.output
        # What has not been evaluated would be computed again in every pass.
        weights = model.parameters(), self.decoder.parameters(), self._output.parameters()
        mx.eval(*weights, self._tables)
        self._functions = CompiledFunctions()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Become None in copies and pickles of a model, which compile for themselves."""
        return type(None), ()

    def new_cache(self, batch: int) -> list[mx.array]:
        """Return each layer's keys and values, of the smallest capacity, with nothing in them."""
        shape = 2, batch, self._num_heads, SMALLEST_CAPACITY, self.decoder.head_size
        return [mx.zeros(shape, self._dtype) for _ in range(self.depth)]

    def run(
        self,
        kind: HeadOutput,
        vocab_size: int | None,
        tokens: mx.array,
        offsets: mx.array,
        cache: list[mx.array],
        sources: list[mx.array],
        mask: mx.array | None,
    ) -> tuple[mx.array, list[mx.array]]:
        """Run the decoder over new tokens (B, L) int32; the arrays are as in `DecoderStack`.

        Returned are the logits (B, L, V) of what follows each token, the best ids (B, L) int32, or
        those as `best_logprobs` has them, (B, L, 2) int32, over the first `vocab_size` ids or all;
        and the cache with the new positions.
        """
        _, num_sources, _, source_width, _ = sources[0].shape
        widths = cache[0].shape[-2], num_sources, source_width
        # All that changes the graph: one offset is written as a slice, several by index.
        shape = kind, vocab_size, tokens.shape, offsets.size, widths, mask is None
        run: CompiledPass = self._functions.of_shape(shape, partial(self._pass, kind, vocab_size))
        return run(tokens, offsets, cache, sources, mask)

    def _pass(
        self,
        kind: HeadOutput,
        vocab_size: int | None,
        tokens: mx.array,
        offsets: mx.array,
        cache: list[mx.array],
        sources: list[mx.array],
        mask: mx.array | None,
    ) -> tuple[mx.array, list[mx.array]]:
        """Compute what `run` returns; compiled, this happens once, to trace it."""
        x = self._model.embed(tokens)
        x, cache = self.decoder(x, offsets, cache, sources, mask, self._tables)
        return self._model.score(kind, x, vocab_size, self._output), cache


class CompiledModel(nn.Module):
    """A model whose decoder MLX compiles: an encoder-decoder, or a draft that shares its encoder.

    The first generation compiles the decoder with the weights as they are then. Whoever changes
    weights or layers later must call `recompile` for the change to take effect.
    """

    config: ModelConfig
    decoder: DecoderStack
    num_processes = 1  # that share the layers, see `t5_parallel`
    most_encoded: int | None = None  # tokens of prompts to encode at once; None for what is usual
    _compiled: CompiledDecoder | None = None

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values of each of the decoder's attentions in this process."""
        of_all: int = self.config.num_key_heads
        return of_all // self.num_processes

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.decoder.norm.weight.dtype
        return dtype

    def _digest(self, description: str) -> str:
        """Return a digest of a description, a sample of every weight, and the types of both."""
        weights = cast(list[tuple[str, mx.array]], tree_flatten(self.parameters()))
        other = sorted(map(str, {weight.dtype for _, weight in weights} - {self.dtype, mx.uint32}))
        return " ".join([fingerprint(description, self.parameters()), str(self.dtype), *other])

    def logits(self, x: mx.array, vocab_size: int | None = None) -> mx.array:
        """Decoder's output (B, L, d_model) -> logits (B, L, V), of the first ids or all."""
        return self.score("logits", x, vocab_size)

    def score(
        self, kind: HeadOutput, x: mx.array, vocab_size: int | None, output: nn.Module | None = None
    ) -> mx.array:
        """Return logits or the best ids, see `Head`, by the model's matrix or by `output`."""
        output = self.output if output is None else output
        size = min(vocab_size or self.config.vocab_size, self.config.vocab_size)
        scores: mx.array = self.head(kind, x, self.decoder.norm, output, size)
        return scores

    @property
    def compiled(self) -> CompiledDecoder:
        """The compiled decoder, which the first use makes."""
        with COMPILE_LOCK:
            if self._compiled is None:
                self._compiled = CompiledDecoder(self)
            return self._compiled

    def recompile(self) -> None:
        """Compile the decoder anew at its next use; needed after weights or layers were changed."""
        with COMPILE_LOCK:
            self._compiled = None

    def start(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[T5Session, list[list[int]]]:
        """Encode prompts (source ids, EOS included) and begin decoding them as one batch."""
        device.enter_thread()
        compiled = self.compiled  # first, as it evaluates the weights
        encode = partial(read_sources, self, [compiled.decoder])
        session = T5Session(compiled, encode, prompts, width)
        return session, session.contexts


def info_of(config: ModelConfig) -> ModelInfo:
    """Return what a model of that shape says of itself."""
    ends = frozenset(config.eos_token_ids)
    return ModelInfo(
        vocab_size=config.vocab_size,
        eos_token_id=config.eos_token_id,
        eos_token_ids=ends,
        special_tokens=ends
        | {config.eos_token_id, config.pad_token_id, config.decoder_start_token_id},
        is_decoder_only=False,
        max_source_length=config.n_positions,  # positions are relative: more is no error
    )


class EncoderDecoder(CompiledModel):
    """A model with an encoder of its own; a `LanguageModel` by way of `start`.

    A subclass adds `encoder`, `decoder`, `head`, and `lm_head` where the output is not `shared`,
    the embedding.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        device.enter_thread()
        self.config = config
        self.info = info_of(config)
        self.quantization_steps: Steps = ()  # drafts know it by them if it is read dequantized
        self.broadcast: Broadcast = identity  # where processes share the layers, see `t5_parallel`
        self.shared = nn.Embedding(config.vocab_size, config.d_model)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed the decoder's tokens: (B, L) int32 -> (B, L, d_model)."""
        embedded: mx.array = self.shared(tokens)
        return embedded

    def encode(self, tokens: mx.array, mask: mx.array | None) -> mx.array:
        """Encode sources (B, S) int32, with the additive mask (B, 1, 1, S): (B, S, d_model)."""
        memory: mx.array = self.encoder(self.shared(tokens), mask)
        return memory

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the configuration and of a sample of every weight."""
        return self._digest(repr(self.config))

    @property
    def output(self) -> nn.Module:
        """The output matrix, which may be the embedding."""
        matrix: nn.Module = self.lm_head if self.config.own_head else self.shared
        return matrix

    def __call__(self, encoder_tokens: mx.array, decoder_tokens: mx.array) -> mx.array:
        """Return logits (B, L, V) of what follows each of `decoder_tokens`.

        Sources (B, S) int32 are padded at the end; targets (B, L) int32 begin with the start token.
        """
        device.enter_thread()
        mask = additive(encoder_tokens != self.config.pad_token_id, self.dtype)
        return self.logits(self.decode(self.encode(encoder_tokens, mask), decoder_tokens, mask))

    def decode(self, memory: mx.array, tokens: mx.array, mask: mx.array | None) -> mx.array:
        """Run the decoder over whole sequences of tokens (B, L) int32, the start token first.

        The encoder's memory (B, S, d_model) and the additive mask (B, 1, 1, S) of its padding ->
        the last layer's output, (B, L, d_model), for `logits`.
        """
        batch, length = tokens.shape
        # A cache with room for exactly these tokens: nothing comes before them.
        shape = 2, batch, self.num_key_heads, length, self.decoder.head_size
        cache = [mx.zeros(shape, self.dtype)] * self.config.num_decoder_layers
        sources = self.decoder.read(memory, memory.shape[1])
        start, tables = mx.zeros(1, dtype=mx.int32), self.decoder.tables()
        x, _ = self.decoder(self.embed(tokens), start, cache, sources, mask, tables)
        return x


def read_sources(
    model: CompiledModel, decoders: Sequence[DecoderStack], prompts: Prompts
) -> SourceCache:
    """Encode prompts for the cross-attention of decoders, those of similar length together."""
    cache: SourceCache | None = None
    for group in _encoded_together(prompts, model.most_encoded):
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
    model: CompiledModel, decoders: Sequence[DecoderStack], prompts: Prompts
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


def _encoded_together(prompts: Prompts, most: int | None) -> list[list[int]]:
    """Indices of prompts to encode together: all, or the longest first if they are many tokens."""
    order = list(range(len(prompts)))
    if most is None:
        most = ENCODED_TOKENS_CPU if device.on_cpu() else ENCODED_TOKENS
    if len(prompts) * max(map(len, prompts)) <= most:
        return [order]
    groups: list[list[int]] = [[]]
    for i in sorted(order, key=lambda i: len(prompts[i])):
        if groups[-1] and (len(groups[-1]) + 1) * len(prompts[i]) > most:
            groups.append([])
        groups[-1].append(i)
    return groups[::-1]
