"""`TextEncoder`: the encoder of a T5 or a T5Gemma alone, as embeddings and images are made of."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..decoding import ModelInfo
from .cache import additive
from .config import T5Config
from .encoder_decoder import EncoderDecoder, info_of
from .quantization import Steps, quantize
from .t5 import T5, EncoderStack
from .t5gemma import EncoderStack as GemmaEncoderStack
from .t5gemma import T5Gemma, scaled
from .t5gemma_config import ModelConfig


class TextEncoder(nn.Module):
    """An encoder, whose parameters have the names that they have in a whole model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        device.enter_thread()
        self.config = config
        self.name: str | None = None  # by which it was loaded
        self.quantization_steps: Steps = ()
        if isinstance(config, T5Config):
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
            self.encoder = EncoderStack(config)
        else:
            name = "encoder_shared" if config.generation == 1 else "shared"
            self[name] = nn.Embedding(config.vocab_size, config.encoder.hidden_size)
            self["encoder"] = GemmaEncoderStack(config)
        if config.quantization:
            quantize(self, config.quantization)

    @classmethod
    def of(cls, model: EncoderDecoder) -> TextEncoder:
        """Return the encoder of a whole model, which shares its weights."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.config, made.name, made.quantization_steps = model.config, None, ()
        for name in ("shared", "encoder_shared", "encoder"):
            if name in model and not (name == "shared" and "encoder_shared" in model):
                made[name] = model[name]
        return made

    @property
    def info(self) -> ModelInfo:
        """What it says of itself, as whole models do."""
        return info_of(self.config)

    @property
    def size(self) -> int:
        """Numbers of each vector."""
        norm: mx.array = self.encoder.norm.weight
        return norm.shape[0]

    @property
    def dtype(self) -> mx.Dtype:
        """The type of what it returns."""
        dtype: mx.Dtype = self.encoder.norm.weight.dtype
        return dtype

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        """Encode texts.

        Args:
            tokens: (B, S) int32, EOS included where a model reads it, padded at the end.
            mask: (B, S) bool, True at tokens; None if no row is padded.

        Returns:
            The last hidden states (B, S, D), whose values at padding mean nothing.
        """
        device.enter_thread()
        is_gemma = not isinstance(self.config, T5Config)
        embedding = self.encoder_shared if "encoder_shared" in self else self.shared
        x = scaled(embedding(tokens)) if is_gemma else embedding(tokens)
        memory: mx.array = self.encoder(x, None if mask is None else additive(mask, self.dtype))
        return memory


def new_model(config: ModelConfig) -> EncoderDecoder | TextEncoder:
    """Make a model of that shape, with random weights."""
    if config.encoder_only:
        return TextEncoder(config)
    return T5(config) if isinstance(config, T5Config) else T5Gemma(config)
