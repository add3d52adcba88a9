"""OPT (arXiv 2205.01068) in the style of mlx-lm's models, with any caches that work like theirs.

Parameters have Hugging Face's names. Shapes: B batch, L query length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from .config import MAX_LAYERS, check_architectures, read_flag, read_size, wrong

Activation = Literal["relu", "gelu"]
Mask = mx.array | str | None

ARCHITECTURES = ("OPTForCausalLM", "OPTModel")
ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {"relu": nn.relu, "gelu": nn.gelu}
FIRST_POSITION = 2  # row of the position table for position 0
# Stored, but not parameters: the head is the embedding, and fairseq numbered its formats.
NO_PARAMETERS = ("lm_head.weight", "model.decoder.version")


@dataclass(frozen=True)
class ModelArgs:
    """An OPT's shape, in the names of Hugging Face's config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    vocab_size: int
    max_position_embeddings: int  # tokens of prompt and output together, at most
    word_embed_proj_dim: int  # of the embedding and head; projected if not the hidden size
    do_layer_norm_before: bool = True  # whether layers normalize inputs, or else sums (350m)
    activation_function: Activation = "relu"

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelArgs:
        """Read an OPT's config.json; refuse one that does not generate, and sizes out of range."""
        check_architectures(config, ARCHITECTURES)
        names = ("hidden_size", "num_attention_heads", "ffn_dim", "vocab_size",
                 "max_position_embeddings")  # fmt: skip
        sizes = {name: read_size(config, name) for name in names}
        width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if width % heads:
            raise wrong("hidden_size", width, f"a multiple of num_attention_heads, {heads}")
        activation = config.get("activation_function", "relu")
        if activation not in ("relu", "gelu"):
            raise wrong("activation_function", activation, f"one of {', '.join(ACTIVATIONS)}")
        if not read_flag(config, "tie_word_embeddings", True):
            raise wrong("tie_word_embeddings", False, "true")
        return cls(
            **sizes,
            num_hidden_layers=read_size(config, "num_hidden_layers", MAX_LAYERS),
            word_embed_proj_dim=read_size(config, "word_embed_proj_dim", default=width),
            do_layer_norm_before=read_flag(config, "do_layer_norm_before", True),
            activation_function=activation,
        )


class Attention(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size = args.hidden_size
        self.num_heads = args.num_attention_heads
        self.scale = (size // self.num_heads) ** -0.5
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)

    def __call__(self, x: mx.array, mask: Mask, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        queries, keys, values = (
            project(x).reshape(batch, length, self.num_heads, -1).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        joined: mx.array = self.out_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        return joined


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.norm_before = args.do_layer_norm_before
        self.activation = ACTIVATIONS[args.activation_function]
        self.self_attn = Attention(args)
        self.self_attn_layer_norm = nn.LayerNorm(args.hidden_size)
        self.fc1 = nn.Linear(args.hidden_size, args.ffn_dim)
        self.fc2 = nn.Linear(args.ffn_dim, args.hidden_size)
        self.final_layer_norm = nn.LayerNorm(args.hidden_size)

    def __call__(self, x: mx.array, mask: Mask, cache: Any) -> mx.array:
        if self.norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), mask, cache)
            return x + self._feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, mask, cache))
        out: mx.array = self.final_layer_norm(x + self._feed_forward(x))
        return out

    def _feed_forward(self, x: mx.array) -> mx.array:
        out: mx.array = self.fc2(self.activation(self.fc1(x)))
        return out


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        size, embedded = args.hidden_size, args.word_embed_proj_dim
        self.embed_tokens = nn.Embedding(args.vocab_size, embedded)
        count = args.max_position_embeddings + FIRST_POSITION
        self.embed_positions = nn.Embedding(count, size)
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        self.final_layer_norm: nn.Module = nn.Identity()
        if embedded != size:
            self.project_in = nn.Linear(embedded, size, bias=False)
            self.project_out = nn.Linear(size, embedded, bias=False)
        if args.do_layer_norm_before:
            self.final_layer_norm = nn.LayerNorm(size)
        self.layers = [DecoderLayer(args) for _ in range(args.num_hidden_layers)]

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Tokens (B, L) -> (B, L, word_embed_proj_dim)."""
        length, first = inputs.shape[1], cache[0]
        # Both come before the layers, which move the caches' offsets.
        offset = mx.array(0 if first is None else first.offset)
        positions = offset[..., None] + mx.arange(length)  # (L,), or (B, L)
        mask: Mask = "causal" if length > 1 else None
        if first is not None:
            mask = first.make_mask(length, return_array=False, window_size=None)
        x = self.project_in(self.embed_tokens(inputs))
        x = x + self.embed_positions(positions + FIRST_POSITION)
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, mask, own)
        out: mx.array = self.project_out(self.final_layer_norm(x))
        return out


class Model(nn.Module):
    """OPT; its head is the embedding."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model = nn.Module()  # Hugging Face's `model.`, which holds only the decoder
        self.model.decoder = Decoder(args)

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Tokens (B, L) -> logits (B, L, V); without caches it reads whole sequences."""
        x = self.model.decoder(inputs, [None] * len(self.layers) if cache is None else cache)
        logits: mx.array = self.model.decoder.embed_tokens.as_linear(x)
        return logits

    @property
    def layers(self) -> list[DecoderLayer]:
        layers: list[DecoderLayer] = self.model.decoder.layers
        return layers

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Rename a checkpoint's tensors as in OPTForCausalLM, and drop what is not a parameter."""
        named = {  # those of OPTModel lack `model.`
            f"model.{name}" if name.startswith("decoder.") else name: weight
            for name, weight in weights.items()
        }
        return {name: weight for name, weight in named.items() if name not in NO_PARAMETERS}
