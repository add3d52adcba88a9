"""OPT's parity with transformers in float32, its sizes, and the configs that it refuses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from speculative_t5.models.opt import Model, ModelArgs

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import refused
from families import assert_close

# Shapes that tell a wrong reshape from a right one.
SHAPE: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 40,
    "vocab_size": 90, "max_position_embeddings": 16,
}  # fmt: skip
POST_NORM = {"do_layer_norm_before": False}
PROJECTED = {"word_embed_proj_dim": 10}
KINDS: dict[str, dict[str, Any]] = {
    "pre_norm": {},
    "pre_norm_projected": PROJECTED,
    "post_norm": POST_NORM,
    "post_norm_projected": POST_NORM | PROJECTED,
    "no_final_norm": {"_remove_final_layer_norm": True},
    "no_biases": {"enable_bias": False},
    "plain_norms": {"layer_norm_elementwise_affine": False},
    "gelu": {"activation_function": "gelu"},
}
TOKENS = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 16))


def make_reference(kind: str) -> Any:
    """A random model (torch)."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**SHAPE, **KINDS[kind])).eval()
    roughen(model)
    return model


def roughen(model: Any) -> None:
    """Draw all anew: transformers makes norms and biases flat, and matrices next to nothing."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.5 if weight.ndim == 1 else weight.shape[1] ** -0.5)
        # Positions that are alike would hide a wrong offset.
        model.model.decoder.embed_positions.weight.normal_()


def tensors(model: Any) -> dict[str, mx.array]:
    return {name: mx.array(tensor.numpy()) for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: Any) -> tuple[Any, Model]:
    """The same model in transformers (torch), and here, by way of a config.json."""
    reference = make_reference(request.param)
    model = Model(ModelArgs.from_dict(json.loads(reference.config.to_json_string())))
    model.load_weights(list(model.sanitize(tensors(reference)).items()), strict=True)
    return reference, model


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(torch.tensor(tokens)).logits.numpy()


def test_whole_sequences_match_transformers(pair: tuple[Any, Model]) -> None:
    reference, model = pair
    assert_close(model(mx.array(TOKENS)), reference_logits(reference, TOKENS))
    assert_close(model(mx.array(TOKENS[:, :1])), reference_logits(reference, TOKENS[:, :1]))


def args(kind: str) -> ModelArgs:
    return ModelArgs.from_dict(SHAPE | KINDS[kind])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_of_both_classes_are_accepted(prefix: str) -> None:
    """OPTModel's have no prefix; the head, and a number of fairseq's, are no parameters."""
    reference = make_reference("post_norm_projected")
    stored = tensors(reference).items()
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in stored}
    named[f"{prefix}decoder.version"] = mx.array([3.0])
    assert "lm_head.weight" in named and f"{prefix}decoder.project_in.weight" in named
    model = Model(args("post_norm_projected"))
    model.load_weights(list(model.sanitize(model.sanitize(named)).items()), strict=True)
    assert_close(model(mx.array(TOKENS)), reference_logits(reference, TOKENS))


def test_quantized_models_run() -> None:
    mx.random.seed(0)
    model = Model(dataclasses.replace(args("pre_norm"), hidden_size=64, word_embed_proj_dim=64))
    exact = model(mx.array(TOKENS))

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[1] % 32 == 0

    nn.quantize(model, 32, 8, class_predicate=fits)
    found = model(mx.array(TOKENS))
    assert 0 < mx.abs(found - exact).max() < 0.1 * mx.abs(exact).max()


def test_defaults_are_those_of_transformers() -> None:
    from transformers import OPTConfig

    ours = ModelArgs.from_dict({**SHAPE, "word_embed_proj_dim": None})
    theirs = OPTConfig(**SHAPE)
    for field in dataclasses.fields(ModelArgs):
        name = field.name if hasattr(theirs, field.name) else f"_{field.name}"
        assert getattr(ours, field.name) == getattr(theirs, name)


def test_other_configs_are_refused() -> None:
    wrong: dict[str, Any] = {
        "activation_function": "silu", "tie_word_embeddings": False, "do_layer_norm_before": "yes",
        "_remove_final_layer_norm": 1, "layer_norm_elementwise_affine": "no", "hidden_size": 25,
        "word_embed_proj_dim": 0, "num_hidden_layers": 257,
    }  # fmt: skip
    cases = [
        ({name: value}, f"{name} in config.json is {value!r}") for name, value in wrong.items()
    ]
    cases += [({name: 2.5}, f"{name} in config.json is 2.5") for name in SHAPE]
    cases += [({name: None}, f"{name} in config.json is missing") for name in SHAPE]
    cases.append(({"activation_function": ["relu"]}, "is ['relu']"))
    cases.append(({"architectures": ["OPTForQuestionAnswering"]}, "OPTForQuestionAnswering"))
    for changed, found in cases:
        with refused(".", found):
            ModelArgs.from_dict(SHAPE | changed)
