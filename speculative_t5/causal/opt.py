"""OPT (Zhang et al., 2022, https://arxiv.org/abs/2205.01068) in MLX, which mlx-lm lacks.

Shapes: B rows, L new tokens, H heads of D, V ids. Modules have the names of transformers, so that
its checkpoints load as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import shown
from ..models import read_size

FIRST_POSITION = 2  # row of the table of positions for the first token
ACTIVATIONS = {"relu": nn.relu, "gelu": nn.gelu}


@dataclass
class OPTConfig:
    """The entries of config.json that the model depends on, by their names there."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    max_position_embeddings: int = 2048
    word_embed_proj_dim: int | None = None  # width of the embedding; None for `hidden_size`
    do_layer_norm_before: bool = True  # False in opt-350m
    _remove_final_layer_norm: bool = False  # in checkpoints of before transformers 4.20
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> OPTConfig:
        """Return the known entries of a config.json."""
        return cls(**{f.name: config[f.name] for f in fields(cls) if f.name in config})

    @property
    def embedding_size(self) -> int:
        """Width of the embedding."""
        return self.word_embed_proj_dim or self.hidden_size

    @property
    def is_normed_at_end(self) -> bool:
        """Whether a norm follows the last layer."""
        return self.do_layer_norm_before and not self._remove_final_layer_norm


def check_opt(config: Mapping[str, Any]) -> None:
    """Refuse a config.json of an OPT that is not computed here."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        read_size(config, name)
    heads, size = config["num_attention_heads"], config["hidden_size"]
    if size % heads:
        raise ValueError(
            f"num_attention_heads in config.json is {heads}, expected a divisor of hidden_size, "
            f"which is {size}"
        )
    activation = config.get("activation_function", "relu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"activation_function in config.json is {shown(activation)}, expected "
            f"{' or '.join(ACTIVATIONS)}"
        )
    if config.get("tie_word_embeddings") is False:
        raise ValueError("tie_word_embeddings in config.json is false, expected true for an OPT")


class OPTAttention(nn.Module):
    def __init__(self, args: OPTConfig) -> None:
        super().__init__()
        size, bias = args.hidden_size, args.enable_bias
        self.num_heads = args.num_attention_heads
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, size, bias=bias)
        self.v_proj = nn.Linear(size, size, bias=bias)
        self.out_proj = nn.Linear(size, size, bias=bias)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: Any) -> mx.array:
        def by_head(y: mx.array) -> mx.array:  # (B, L, H * D) -> (B, H, L, D)
            return y.reshape(*y.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)

        q, k, v = (by_head(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        scale = q.shape[-1] ** -0.5
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        found: mx.array = self.out_proj(y.transpose(0, 2, 1, 3).reshape(x.shape))
        return found


class OPTLayer(nn.Module):
    def __init__(self, args: OPTConfig) -> None:
        super().__init__()
        size, affine = args.hidden_size, args.layer_norm_elementwise_affine
        self.is_normed_before = args.do_layer_norm_before
        self.activation = ACTIVATIONS[args.activation_function]
        self.self_attn = OPTAttention(args)
        self.self_attn_layer_norm = nn.LayerNorm(size, affine=affine)
        self.fc1 = nn.Linear(size, args.ffn_dim, bias=args.enable_bias)
        self.fc2 = nn.Linear(args.ffn_dim, size, bias=args.enable_bias)
        self.final_layer_norm = nn.LayerNorm(size, affine=affine)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: Any) -> mx.array:
        if self.is_normed_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), mask, cache)
            return x + self._feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, mask, cache))
        y: mx.array = self.final_layer_norm(x + self._feed_forward(x))
        return y

    def _feed_forward(self, x: mx.array) -> mx.array:
        y: mx.array = self.fc2(self.activation(self.fc1(x)))
        return y


class OPTDecoder(nn.Module):
    def __init__(self, args: OPTConfig) -> None:
        super().__init__()
        size, width = args.hidden_size, args.embedding_size
        self.embed_tokens = nn.Embedding(args.vocab_size, width)
        self.embed_positions = nn.Embedding(args.max_position_embeddings + FIRST_POSITION, size)
        if width != size:
            self.project_in = nn.Linear(width, size, bias=False)
            self.project_out = nn.Linear(size, width, bias=False)
        self.layers = [OPTLayer(args) for _ in range(args.num_hidden_layers)]
        if args.is_normed_at_end:
            affine = args.layer_norm_elementwise_affine
            self.final_layer_norm = nn.LayerNorm(size, affine=affine)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        x, length = self.embed_tokens(tokens), tokens.shape[1]
        if "project_in" in self:
            x = self.project_in(x)
        mask: mx.array | str | None = "causal" if length > 1 else None
        start: int | mx.array = 0
        if cache[0] is not None:
            mask = cache[0].make_mask(length, return_array=False, window_size=None)
            start = cache[0].offset
        positions = mx.array(start)[..., None] + mx.arange(length) + FIRST_POSITION
        x = x + self.embed_positions(positions)
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, mask, own)
        if "final_layer_norm" in self:
            x = self.final_layer_norm(x)
        return self.project_out(x) if "project_out" in self else x


class OPTInner(nn.Module):
    def __init__(self, args: OPTConfig) -> None:
        super().__init__()
        self.decoder = OPTDecoder(args)


class OPT(nn.Module):
    """Called with tokens (B, L) int32 and mlx-lm's caches, returns logits (B, L, V)."""

    def __init__(self, args: OPTConfig) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = OPTInner(args)

    def __call__(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        decoder = self.model.decoder
        x = decoder(tokens, cache or [None] * len(decoder.layers))
        logits: mx.array = decoder.embed_tokens.as_linear(x)
        return logits

    @property
    def layers(self) -> list[OPTLayer]:
        layers: list[OPTLayer] = self.model.decoder.layers
        return layers

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return weights by this model's names: without the head's, which is the embedding."""
        return {
            name if name.startswith("model.") else f"model.{name}": weight
            for name, weight in weights.items()
            if not name.startswith("lm_head.")
        }
