"""T5 (arXiv 1910.10683): encoder, decoder and output head.

Shapes: B batch, S source length, L query length, T cached length, H heads, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ... import device, distributed
from ...decoding import Vocabulary, fingerprint
from ..cache import KeysValues, SourceCache, additive, padding_mask, source_width
from .compiled import CompiledDecoder
from .config import Quantization, T5Config
from .layers import Decoder, Encoder, Head
from .session import T5Session
from .sharding import shard

# Tokens in one pass of the encoder, padding included, unless one prompt has more. On a CPU larger
# products gain nothing, and smaller groups have sources of more similar length, so less padding.
ENCODED_TOKENS, ENCODED_TOKENS_CPU = 512, 128

COMPILING = threading.Lock()  # held while any model's compiled decoder is made or dropped


class T5(nn.Module):
    """An encoder-decoder; a `LanguageModel` by way of `start`.

    The first generation compiles the decoder with the weights as they are then. Whoever changes
    weights or layers later, in place or by assigning others, must call `recompile` for the change
    to take effect; before the first generation anything may be changed freely.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        device.enter_thread()
        self.config = config
        self.num_processes = 1  # that share the layers, see `shard`
        self._group: mx.distributed.Group | None = None  # of these processes
        self.vocabulary: Vocabulary | None = None
        self._compiled: CompiledDecoder | None = None
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.head = Head(config)
        if config.own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.quantization:
            quantize(self, config.quantization)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_id(self) -> int:
        return self.config.eos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.eos_token_id})

    @property
    def max_source_length(self) -> int:
        return self.config.n_positions

    @property
    def max_context(self) -> None:
        return None  # positions are relative

    @property
    def is_decoder_only(self) -> bool:
        return False

    @property
    def special_tokens(self) -> frozenset[int]:
        config = self.config
        named = self.vocabulary.special if self.vocabulary else frozenset()
        return named | {config.pad_token_id, config.eos_token_id, config.decoder_start_token_id}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the configuration and of a sample of every weight."""
        return f"{fingerprint(repr(self.config), self.parameters())} {self.dtype}"

    @property
    def dtype(self) -> mx.Dtype:
        return self.encoder.norm.weight.dtype

    def __call__(
        self,
        encoder_tokens: mx.array,
        decoder_tokens: mx.array,
        *,
        encoder_mask: mx.array | None = None,
    ) -> mx.array:
        """Score whole sequences.

        Args:
            encoder_tokens: (B, S) int32, padded at the end.
            decoder_tokens: (B, L) int32, the start token first.
            encoder_mask: (B, S) bool, True at real tokens; by default, where no padding is.

        Returns:
            Logits (B, L, V) of the token after each of `decoder_tokens`.
        """
        device.enter_thread()
        if encoder_mask is None:
            encoder_mask = encoder_tokens != self.config.pad_token_id
        encoder_mask = mx.broadcast_to(encoder_mask, encoder_tokens.shape)
        mask = additive(encoder_mask, self.dtype)
        memory = self.encoder(self.shared(encoder_tokens), mask)
        return self.logits(self.decode(memory, decoder_tokens, mask))

    def decode(self, memory: mx.array, tokens: mx.array, mask: mx.array | None) -> mx.array:
        """Run the decoder over whole sequences.

        Args:
            memory: The encoder's output, (B, S, d_model).
            tokens: (B, L) int32, the start token first.
            mask: Additive padding mask of the sources, (B, 1, 1, S).

        Returns:
            The last layer's output, (B, L, d_model), for `logits`.
        """
        config, (batch, length) = self.config, tokens.shape
        # A cache with room for exactly these tokens: nothing comes before them.
        empty = mx.zeros((batch, self.num_heads, length, config.d_kv), self.dtype)
        cache = [(empty, empty)] * config.num_decoder_layers
        sources = self.decoder.read(memory, memory.shape[1])
        start, tables = mx.zeros(1, dtype=mx.int32), self.decoder.position_bias.tables()
        x, _ = self.decoder(self.shared(tokens), start, cache, sources, mask, tables)
        return x

    def encode(
        self,
        tokens: mx.array,
        mask: mx.array | None,
        width: int | None = None,
        decoders: Sequence[Decoder] | None = None,
    ) -> list[KeysValues]:
        """Encode sources (B, S) int32 for cross-attention, with an additive mask (B, 1, 1, S).

        Returns:
            The keys and values of each layer of each of `decoders`, this model's own by default,
            (B, H, T, D), zeros from S on; T is `width`, or else S.
        """
        memory = self.encoder(self.shared(tokens), mask)
        width = width or tokens.shape[1]
        return [pair for each in decoders or [self.decoder] for pair in each.read(memory, width)]

    def logits(self, x: mx.array, vocab_size: int | None = None) -> mx.array:
        """Decoder's output (B, L, d_model) -> logits (B, L, V), of the first ids or all."""
        return self.head.logits(x, self.decoder.norm, self.output, self._size(vocab_size))

    def argmax(self, x: mx.array, vocab_size: int | None = None) -> mx.array:
        """Return the best ids, (B, L) int32, where `logits` would return logits."""
        return self.head.argmax(x, self.decoder.norm, self.output, self._size(vocab_size))

    def _size(self, vocab_size: int | None) -> int:
        return min(vocab_size or self.vocab_size, self.vocab_size)

    @property
    def output(self) -> nn.Module:
        """The output matrix, which may be the embedding."""
        return self.lm_head if self.config.own_head else self.shared

    def start(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[T5Session, list[list[int]]]:
        """Encode prompts (source ids, EOS included) and begin decoding them as one batch."""
        device.enter_thread()
        decoder = self.compiled  # first, as it evaluates the weights
        session = T5Session(self, self.sources, self.sources(prompts), decoder, width)
        return session, [[self.config.decoder_start_token_id] for _ in prompts]

    @property
    def compiled(self) -> CompiledDecoder:
        """The compiled decoder, which the first use makes."""
        with COMPILING:
            if self._compiled is None:
                self._compiled = CompiledDecoder(self)
            return self._compiled

    def recompile(self) -> None:
        """Compile the decoder anew at its next use; needed after weights or layers were changed."""
        with COMPILING:
            self._compiled = None

    def shard(self, group: mx.distributed.Group) -> None:
        """Split the layers among the processes of a group, each keeping its part (see `sharding`).

        From then on every process has to run the same passes; `agreed` makes their choices the
        same. Weights that are loaded later have to be parts, as `checkpoints.load` reads them.

        Raises:
            ValueError: If the processes cannot share heads, units or groups of quantized weights
                evenly.
        """
        if self.num_processes > 1:
            raise ValueError(
                f"the model is split among {self.num_processes} processes: load it again to "
                "split it in another way"
            )
        shard(self, group)
        self.num_processes, self._group = group.size(), group
        self.recompile()

    def agreed(self, ids: mx.array) -> mx.array:
        """Return the ids that the first of the processes has found, an array of int32, in all.

        What each computes by itself, after the last sum, has the same bits on equal machines only.
        """
        return ids if self._group is None else distributed.broadcast(ids, self._group)

    @property
    def num_heads(self) -> int:
        """Heads of each attention in this process."""
        return self.config.num_heads // self.num_processes

    def sources(
        self, prompts: Sequence[Sequence[int]], decoders: Sequence[Decoder] | None = None
    ) -> SourceCache:
        """Encode prompts for `decoders` (see `encode`), those of similar length together.

        Past a few hundred tokens, on CPUs 128, a larger pass gains nothing, and loses by padding.
        """
        groups = _groups(prompts)
        if len(groups) == 1:
            return self._encoded(prompts, decoders)
        cache = None
        for group in groups:
            new = self._encoded([prompts[i] for i in group], decoders)
            if cache is None:
                longest = max(map(len, prompts))
                cache = SourceCache.empty_like(new, len(prompts), longest)
            cache.replace(group, new, range(len(group)))
            mx.eval(cache.layers)
        assert cache is not None
        return cache

    def _encoded(
        self, prompts: Sequence[Sequence[int]], decoders: Sequence[Decoder] | None
    ) -> SourceCache:
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        pad = self.config.pad_token_id
        tokens = mx.array([[*p, *[pad] * (longest - len(p))] for p in prompts], dtype=mx.int32)
        mask = padding_mask(lengths, longest, self.dtype)
        layers = self.encode(tokens, mask, source_width(lengths), decoders)
        sources = SourceCache(layers, lengths)
        mx.async_eval(sources.layers)
        return sources


def _groups(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of prompts to encode together: all in order, or by length if they are many tokens."""
    order = list(range(len(prompts)))
    most = ENCODED_TOKENS_CPU if device.on_cpu() else ENCODED_TOKENS
    if len(prompts) * max(map(len, prompts)) <= most:
        return [order]
    groups: list[list[int]] = [[]]
    for i in sorted(order, key=lambda i: len(prompts[i])):
        if groups[-1] and (len(groups[-1]) + 1) * len(prompts[i]) > most:
            groups.append([])
        groups[-1].append(i)
    return groups


def quantize(model: T5, how: Quantization) -> None:
    """Replace the layers that `how` names by quantized ones."""

    def chosen(path: str, module: nn.Module) -> bool:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how.group_size:
            return False
        if path in ("shared", "lm_head"):
            return how.embeddings
        return not (how.keep_wo and path.endswith(".wo"))

    nn.quantize(model, how.group_size, how.bits, class_predicate=chosen)
