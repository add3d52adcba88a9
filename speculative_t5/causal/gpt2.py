"""GPT-2 of mlx-lm, from the folders that transformers saves as well."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt2

from ..errors import shown

# What transformers' GPT-2 can be, and mlx-lm's is not: entries of config.json and what they may be.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}


def changes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what mlx-lm needs beside a config.json; refuse a GPT-2 that it computes otherwise."""
    for name, expected in EXPECTED.items():
        if name in config and config[name] not in expected:
            raise ValueError(
                f"{name} in config.json is {shown(config[name])}, expected "
                f"{' or '.join(map(repr, expected))} for a GPT-2"
            )
    return {} if config.get("n_ctx") else {"n_ctx": config.get("n_positions")}


class GPT2(gpt2.Model):
    """Takes the names of the first checkpoints, and those that `save_pretrained` writes."""

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return weights by mlx-lm's names: without masks, and the head, which is the embedding."""
        known = {
            name.removeprefix("transformer."): weight
            for name, weight in weights.items()
            if not name.endswith((".attn.masked_bias", ".attn.bias")) and name != "lm_head.weight"
        }
        found: dict[str, mx.array] = super().sanitize(known)
        return found
