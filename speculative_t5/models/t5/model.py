"""T5 (arXiv 1910.10683): encoder, decoder, output head, and its decoding session.

Shapes: B batch, S source length, L query length, T cached length, H heads, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ... import device
from ...cpu import blocks
from ...decoding import Vocabulary, argmax, fingerprint
from ..cache import (
    EncodedPrompt,
    KeysValues,
    KVCache,
    LayerShape,
    SourceCache,
    additive,
    padding_mask,
    replace_rows,
    source_width,
)
from .config import Quantization, T5Config
from .layers import (
    Decoder,
    Embedding,
    Encoder,
    Linear,
    embed,
    forget_transposed,
    fused,
    keep_transposed,
    transposed,
)
from .positions import PositionBias, position_biases

ENCODED_TOKENS = 512  # of a pass of the encoder, padding included, unless one prompt has more

MAX_SHAPES = 100  # that a thread compiles a model for at a time
PREPARING = threading.Lock()  # held while any model's `_prepared` is made, checked or dropped


Step = Callable[..., tuple[mx.array, list[KeysValues]]]
Link = tuple[Any, Any, Any]  # a dictionary or list, a key or index, and what is there


class Compiled(threading.local):
    """A thread's own compiled functions, and the shapes that it has called them with.

    MLX traces and keeps a function for each thread that calls it, and forgets it in one of them
    only: shared with other threads it would stay there for good, with the weights in it, and be
    run for a later function at the same address.
    """

    def __init__(self) -> None:
        self.functions: dict[str, Step] = {}
        self.shapes: set[tuple[Any, ...]] = set()


class Prepared:
    """A model's compiled functions, and what they were compiled of."""

    def __init__(self, model: T5) -> None:
        # What is not evaluated before would be a part of every step.
        mx.eval(model.parameters())
        for module in model.modules():
            if isinstance(module, (Linear, Embedding)):
                keep_transposed(module)
            elif isinstance(module, PositionBias):
                module.keep_tables()
        self._links = list(links(model))
        self._functions: dict[str, Step] = {"step": model.step, "step_argmax": model.step_argmax}
        self._compiled = Compiled()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Leave copies of a model without one: each makes its own."""
        return _nothing, ()

    def is_of(self, model: T5) -> bool:
        """Whether the model still is what was compiled."""
        return self._links[0][0] is model and all(
            parent[key] is child for parent, key, child in self._links
        )

    def run(
        self,
        name: str,
        vocab_size: int | None,
        tokens: mx.array,
        at: mx.array,
        cache: list[KeysValues],
        sources: list[KeysValues],
        *others: Any,
    ) -> tuple[mx.array, list[KeysValues]]:
        """`T5.step` or `T5.step_argmax`, compiled.

        MLX keeps what it traced for each shape, a third of a megabyte for a small model, and never
        forgets: when there are too many they are dropped, and compiled again as they are needed.
        """
        own = self._compiled
        place = cache[0][0].shape[2], sources[0][0].shape[2], others[0] is None
        shape = name, vocab_size, tokens.shape, at.size, *place
        if shape not in own.shapes:
            if len(own.shapes) == MAX_SHAPES:
                own.shapes, own.functions = set(), {}
            own.shapes.add(shape)
        if name not in own.functions:
            own.functions[name] = mx.compile(self._functions[name])
        return own.functions[name](vocab_size, tokens, at, cache, sources, *others)


def _nothing() -> None:
    return None


def links(node: Any) -> Iterator[Link]:
    """Every weight, layer and list of them in a module, and where it is."""
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(child, (mx.array, dict, list)) and not str(key).startswith("_"):
            yield node, key, child
            if not isinstance(child, mx.array):
                yield from links(child)


class T5(nn.Module):
    """An encoder-decoder; a `LanguageModel` by way of `start`."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        device.enter_thread()
        self.config = config
        self.vocabulary: Vocabulary | None = None
        self._prepared: Prepared | None = None
        self.shared = Embedding(config.vocab_size, config.d_model)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        if config.own_head:
            self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
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
        return False  # the encoder has it

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
            encoder_mask: (B, S) bool, True at real tokens; by default what is not padding.

        Returns:
            Logits (B, L, V) of the token after each of `decoder_tokens`.
        """
        device.enter_thread()
        if encoder_mask is None:
            encoder_mask = encoder_tokens != self.config.pad_token_id
        encoder_mask = mx.broadcast_to(encoder_mask, encoder_tokens.shape)
        mask = additive(encoder_mask, self.dtype)
        sources = self.encode(encoder_tokens, mask)
        config, (batch, length) = self.config, decoder_tokens.shape
        empty = mx.zeros((batch, config.num_heads, length, config.d_kv), self.dtype)
        cache = [(empty, empty)] * config.num_decoder_layers
        tables = self.decoder.position_bias.tables()
        start = mx.zeros(1, dtype=mx.int32)
        return self.step(None, decoder_tokens, start, cache, sources, mask, tables)[0]

    def step(
        self, vocab_size: int | None, tokens: mx.array, *others: Any
    ) -> tuple[mx.array, list[KeysValues]]:
        """`decode`, and the logits (B, L, V) of what follows each token; of the first ids or all.

        As `decode` and `step_argmax` it is a pure function of arrays.
        """
        hidden, cache = self.decode(tokens, *others)
        return self.logits(hidden, vocab_size).reshape(*tokens.shape, -1), cache

    def step_argmax(
        self, vocab_size: int | None, tokens: mx.array, *others: Any
    ) -> tuple[mx.array, list[KeysValues]]:
        """As `step`, with the best id in the place of logits, (B, L) int32."""
        hidden, cache = self.decode(tokens, *others)
        return self.best(hidden, vocab_size).reshape(tokens.shape), cache

    def decode(
        self,
        tokens: mx.array,
        at: mx.array,
        cache: list[KeysValues],
        sources: list[KeysValues],
        mask: mx.array | None,
        tables: list[mx.array],
    ) -> tuple[mx.array, list[KeysValues]]:
        """The decoder's layers over new positions of every row.

        Args:
            tokens: (B, L) int32.
            at: Position of each row's first, (B,) int32, or (1,) if all are the same.
            cache: Keys and values of positions so far, (B, H, C, D) for each layer; there must be
                room for L more.
            sources: Those of the encoder's memory, (B, H, T, D).
            mask: Additive, of the sources' padding, (B, 1, 1, T).
            tables: `PositionBias.tables()` of the decoder.

        Returns:
            What the last layer gives, (B * L, d_model), and the cache with the new positions.
        """
        biases = position_biases(tables, at, tokens.shape[1], cache[0][0].shape[2])
        hidden = embed(self.shared, tokens)
        written: list[KeysValues] = []
        for layer, bias, pair, cross in zip(
            self.decoder.layers, cycle(biases), cache, sources, strict=False
        ):
            hidden, pair = layer(hidden, bias, pair, at, cross, mask)
            written.append(pair)
        return hidden, written

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[T5Session, list[list[int]]]:
        """Encode prompts (source ids, EOS included) and begin decoding them as one batch."""
        device.enter_thread()
        prepared = self.prepared  # transposes and tables, which encoding uses, too
        session = T5Session(self, self.sources(prompts), prepared)
        return session, [[self.config.decoder_start_token_id] for _ in prompts]

    @property
    def prepared(self) -> Prepared:
        """What decoding runs: compiled anew when weights or layers have been replaced since.

        They are constants of the compiled functions: as inputs each would have to be looked at in
        every step, and its transpose taken.
        """
        with PREPARING:
            if self._prepared is None or not self._prepared.is_of(self):
                self._prepared = Prepared(self)
            return self._prepared

    def forget(self) -> None:
        """Compile anew: needed after weights were changed in place, as by `weight *= 2`.

        Weights that are assigned, updated or loaded are noticed without it.
        """
        with PREPARING:
            self._prepared = None
            for module in self.modules():
                if isinstance(module, (Linear, Embedding)):
                    forget_transposed(module)
                elif isinstance(module, PositionBias):
                    module.forget()

    def sources(self, prompts: Sequence[Sequence[int]]) -> SourceCache:
        """Prompts as cross-attention sees them.

        Encoded a few at a time, those of like length together: past a few hundred tokens a pass
        gains nothing by more of them, and loses by padding.
        """
        groups = _groups(prompts)
        if len(groups) == 1:
            return self._encoded(prompts)
        cache = None
        for group in groups:
            new = self._encoded([prompts[i] for i in group])
            if cache is None:
                longest = max(map(len, prompts))
                cache = SourceCache.empty_like(new, len(prompts), longest)
            cache.replace(group, new, range(len(group)))
            mx.eval(cache.layers)
        assert cache is not None
        return cache

    def _encoded(self, prompts: Sequence[Sequence[int]]) -> SourceCache:
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        pad = self.config.pad_token_id
        tokens = mx.array([[*p, *[pad] * (longest - len(p))] for p in prompts], dtype=mx.int32)
        mask = padding_mask(lengths, longest, self.dtype)
        layers = self.encode(tokens, mask, source_width(lengths))
        sources = SourceCache(layers, lengths)
        mx.async_eval(sources.layers)
        return sources

    def encode(
        self, tokens: mx.array, mask: mx.array | None, width: int | None = None
    ) -> list[KeysValues]:
        """Encode sources for cross-attention.

        Args:
            tokens: (B, S) int32.
            mask: Additive, of padding, (B, 1, 1, S).
            width: T; by default S.

        Returns:
            Each layer's keys and values, (B, H, T, D), zeros behind S.
        """
        batch, length = tokens.shape
        memory = self.encoder(embed(self.shared, tokens), batch, mask)
        return [
            layer.cross_attention.keys_values(memory, batch, width or length)
            for layer in self.decoder.layers
        ]

    def logits(self, hidden: mx.array, vocab_size: int | None = None) -> mx.array:
        """What the last layer gives, (N, d_model) -> logits (N, V), of the first ids or all."""
        norm, layer, scale, size = (
            self.decoder.norm,
            self._head,
            self._scale,
            self._size(vocab_size),
        )
        if fused((norm, layer), hidden):
            logits: mx.array = blocks.library.logits(
                hidden, norm.weight, layer.weight, scale, norm.eps, size
            )
            return logits
        hidden = norm(hidden) * scale if scale != 1 else norm(hidden)
        if size < self.vocab_size and isinstance(layer, (Linear, Embedding)):
            return hidden @ transposed(layer)[:, :size]
        logits = layer(hidden) if self.config.own_head else layer.as_linear(hidden)
        return logits[:, :size]

    def best(self, hidden: mx.array, vocab_size: int | None = None) -> mx.array:
        """As `logits`, but the best id of each, (N,) int32."""
        norm, layer = self.decoder.norm, self._head
        if fused((norm, layer), hidden):
            ids: mx.array = blocks.library.best(
                hidden, norm.weight, layer.weight, self._scale, norm.eps, self._size(vocab_size)
            )
            return ids
        return argmax(self.logits(hidden, vocab_size))

    def _size(self, vocab_size: int | None) -> int:
        return min(vocab_size or self.vocab_size, self.vocab_size)

    @property
    def _head(self) -> nn.Module:
        return self.lm_head if self.config.own_head else self.shared

    @property
    def _scale(self) -> float:
        """Of the last hidden states."""
        return self.config.d_model**-0.5 if self.config.scale_decoder_outputs else 1.0


def _groups(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of prompts to encode together: all in order, or by length if they are many tokens."""
    order = list(range(len(prompts)))
    if len(prompts) * max(map(len, prompts)) <= ENCODED_TOKENS:
        return [order]
    groups: list[list[int]] = [[]]
    for i in sorted(order, key=lambda i: len(prompts[i])):
        if groups[-1] and (len(groups[-1]) + 1) * len(prompts[i]) > ENCODED_TOKENS:
            groups.append([])
        groups[-1].append(i)
    return groups


def quantize(model: T5, how: Quantization) -> None:
    """Put quantized layers in the places of those that `how` names."""

    def chosen(path: str, module: nn.Module) -> bool:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how.group_size:
            return False
        if path in ("shared", "lm_head"):
            return how.embeddings
        return not (how.keep_wo and path.endswith(".wo"))

    nn.quantize(model, how.group_size, how.bits, class_predicate=chosen)


class T5Session:
    """One batch of prompts being decoded; a `Session`."""

    def __init__(self, model: T5, sources: SourceCache, prepared: Prepared) -> None:
        config, batch = model.config, len(sources.lengths)
        self._model = model
        self._sources = sources
        self._prepared = prepared
        self._bias_tables = model.decoder.position_bias.tables()
        shape = LayerShape(config.num_heads, config.d_kv, config.d_kv, model.dtype)
        self._cache = KVCache([shape] * config.num_decoder_layers, batch)

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("step", vocab_size, tokens)

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return self._run("step_argmax", vocab_size, tokens)

    def _run(self, name: str, vocab_size: int | None, tokens: mx.array) -> mx.array:
        cache, sources, count = self._cache, self._sources, tokens.shape[1]
        at = cache.reserve(count)
        result, layers = self._prepared.run(
            name, vocab_size, tokens, at, cache.take(), sources.view(), sources.mask,
            self._bias_tables,
        )  # fmt: skip
        cache.put(layers, count)
        return result

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
