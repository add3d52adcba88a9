"""`SharingDraft`: a draft that consists of decoder layers on its target's encoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import device
from .config import T5Config
from .encoder_decoder import (
    COMPILE_LOCK,
    CompiledDecoder,
    CompiledModel,
    EncoderDecoder,
    read_sources,
)
from .quantization import plain_weight
from .session import SharingSession, T5Session

MOST_BLOCK = 16  # tokens
MEASURED_TOKENS = 1000  # whose embeddings tell how large those of masks should be


@dataclass(frozen=True)
class SharingConfig:
    """The sizes of a sharing draft's own part, and the ids that it may propose."""

    num_decoder_layers: int
    d_ff: int  # sizes that are not here are the target's
    draft_vocab: int | None = None  # it proposes only ids below this; None for all
    block: int = 1  # tokens that a pass proposes
    d_model: int | None = None  # the width of narrower layers; None for the target's


class SharingDraft(CompiledModel):
    """A draft model for one target, whose encoder, embedding and output head it shares.

    Of its own it has decoder layers, their position bias and their last normalization, as
    distil-whisper's models for speech (arXiv 2311.00430); random until they are loaded, trained or
    copied (`copy_layers`). In the decoding loop it reads the encoding that the target has made of
    each prompt (`start_both`); alone (`start`), it has the target's encoder read the prompts.

    The layers may be narrower than the target's: one matrix then leads from its embeddings to their
    width, another one back to what its output head reads. A compiled draft has the product of the
    second and the output matrix, not quantized, so that its head is as narrow as its layers.

    A draft of blocks proposes several tokens in a pass (PARD, arXiv 2504.18583): masks follow the
    last token. It has embeddings for them, and their ids come after those of tokens.
    """

    target: EncoderDecoder  # the model that this draft belongs to

    def __init__(self, target: EncoderDecoder, config: SharingConfig) -> None:
        super().__init__()
        device.enter_thread()
        self.own = config
        self.config = target.config.of_draft(config.num_decoder_layers, config.d_ff, config.d_model)
        object.__setattr__(self, "target", target)  # MLX would take it for a part of the draft
        self.info = replace(target.info, block=config.block)
        self._compiled_with: CompiledDecoder | None = None  # the target's, of the same weights
        stack: Any = type(target.decoder)
        self.decoder = stack(self.config)
        if config.d_model:
            wide = target.config.d_model
            if config.d_model >= wide:
                raise ValueError(
                    f"d_model must be below {wide}, the target's, got {config.d_model}"
                )
            if isinstance(self.config, T5Config):
                for layer in self.decoder.layers:
                    attention = layer.cross_attention
                    attention.kv = nn.Linear(wide, len(attention.kv.weight), bias=False)
            self.narrow = nn.Linear(wide, config.d_model, bias=False)
            self.widen = nn.Linear(config.d_model, wide, bias=False)
        self.set_dtype(target.dtype)
        if config.block > 1:  # random masks, as large as tokens are
            tokens = target.embed(mx.arange(min(MEASURED_TOKENS, self.config.vocab_size))[None])
            size = mx.sqrt(mx.mean(mx.square(tokens.astype(mx.float32))))
            noise = mx.random.normal((config.block - 1, tokens.shape[2]), key=mx.random.key(0))
            self.masks = (size * noise).astype(target.dtype)

    def encode(self, tokens: mx.array, mask: mx.array | None) -> mx.array:
        """Encode sources as the target does."""
        return self.target.encode(tokens, mask)

    @property
    def head(self) -> nn.Module:
        """The target's step from hidden states to logits."""
        head: nn.Module = self.target.head
        return head

    @property
    def output(self) -> nn.Module:
        """The output matrix, as wide as the draft's layers; each use computes a narrow one."""
        matrix = self.target.output
        if self.own.d_model is None:
            return matrix
        narrow = nn.Linear(self.own.d_model, self.config.vocab_size, bias=False)
        wide = (plain_weight(each, dtype=self.dtype) for each in (matrix, self.widen))
        narrow.weight = mx.matmul(*wide)
        return narrow

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed tokens, and masks among them: (B, L) int32 -> (B, L, d_model of its layers)."""
        embedded = self._embed(tokens)
        return self.narrow(embedded) if self.own.d_model else embedded

    def _embed(self, tokens: mx.array) -> mx.array:
        if self.own.block == 1:
            return self.target.embed(tokens)
        size = self.config.vocab_size
        masks = self.masks[mx.maximum(tokens - size, 0)]
        embedded = self.target.embed(mx.minimum(tokens, size - 1))
        return mx.where((tokens < size)[..., None], embedded, masks)

    @property
    def fingerprint(self) -> str:
        """Digest of the draft's own weights, its type, and the target's fingerprint."""
        return f"{self._digest(repr(self.own))} {self.target.fingerprint}"

    def start_both(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[T5Session, SharingSession, list[list[int]]]:
        """Encode prompts once, and begin decoding them by the target and by this draft."""
        device.enter_thread()
        target = self.target
        decoder, own = target.compiled, self.compiled
        encode = partial(read_sources, target, [decoder.decoder, own.decoder])
        session = T5Session(decoder, encode, prompts, width)
        return session, SharingSession(own, session), session.contexts

    @property
    def compiled(self) -> CompiledDecoder:
        """The compiled decoder, made by the first use, and anew once the target is recompiled."""
        target = self.target.compiled  # evaluates the weights that are shared
        with COMPILE_LOCK:
            if self._compiled is None or self._compiled_with is not target:
                self._compiled, self._compiled_with = CompiledDecoder(self), target
            return self._compiled
