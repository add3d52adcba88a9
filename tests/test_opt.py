"""Parity with transformers in float32, whole sequences and step by step; sizes; refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5.models.opt import FIRST_POSITION, Model, ModelArgs, position_ids

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from messages import check_message
from mlx.utils import tree_flatten

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

# The paper's table 1: layers, heads and width; 350m's norm and embedding are its own.
PUBLISHED = {
    "125m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "1.3b": (24, 32, 2048),
    "2.7b": (32, 32, 2560),
    "6.7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "66b": (64, 72, 9216),
}
# Parameters, the head not counted again.
COUNTS = {"125m": 125_239_296, "350m": 331_196_416, "1.3b": 1_315_758_080, "66b": 65_719_701_504}


def published(name: str) -> dict[str, Any]:
    layers, heads, width = PUBLISHED[name]
    own = POST_NORM | {"word_embed_proj_dim": 512} if name == "350m" else {}
    return {
        "model_type": "opt", "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "ffn_dim": 4 * width, "vocab_size": 50272,
        "max_position_embeddings": 2048, **own,
    }  # fmt: skip


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


def assert_close(found: mx.array, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    largest = np.abs(np.array(found) - expected).max() / np.abs(expected).max()
    assert largest < 1e-4, largest


class Cache:
    """As mlx-lm's: all rows are as long."""

    def __init__(self) -> None:
        self.offset = 0
        self.held: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.held is not None:
            keys = mx.concatenate([self.held[0][:, :, : self.offset], keys], axis=2)
            values = mx.concatenate([self.held[1][:, :, : self.offset], values], axis=2)
        self.offset = keys.shape[2]
        self.held = keys, values
        return self.held

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        assert not return_array and window_size is None
        return "causal" if count > 1 else None


class RowCache:
    """Buffers in which each row goes on from a position of its own; what lies beyond is rubbish."""

    def __init__(self, offset: list[int], buffers: tuple[mx.array, mx.array]) -> None:
        self.offset = mx.array(offset, dtype=mx.int32)
        self.buffers = buffers

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        count = keys.shape[2]
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            for row, start in enumerate(self.offset.tolist()):
                end = min(start + count, buffer.shape[2])
                buffer[row, :, start:end] = new[row, :, : end - start]
        self.offset = self.offset + count
        return self.buffers

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        own = self.offset[:, None] + mx.arange(count)
        return (mx.arange(self.buffers[0].shape[2]) <= own[..., None])[:, None]


def row_caches(model: Model, offset: list[int], length: int) -> list[RowCache]:
    heads = SHAPE["num_attention_heads"]
    shape = (len(offset), heads, length, SHAPE["hidden_size"] // heads)
    return [RowCache(offset, (mx.full(shape, 9.0), mx.full(shape, 9.0))) for _ in model.layers]


def test_whole_sequences_match_transformers(pair: tuple[Any, Model]) -> None:
    reference, model = pair
    assert_close(model(mx.array(TOKENS)), reference_logits(reference, TOKENS))
    assert_close(model(mx.array(TOKENS[:, :1])), reference_logits(reference, TOKENS[:, :1]))


def test_steps_through_caches_match_transformers(pair: tuple[Any, Model]) -> None:
    """Steps of several lengths, with tokens taken back in between."""
    reference, model = pair
    expected = reference_logits(reference, TOKENS)
    caches = [Cache() for _ in model.layers]
    for start, end in ((0, 5), (5, 6), (6, 9)):
        found = model(mx.array(TOKENS[:, start:end]), cache=caches)
        assert_close(found, expected[:, start:end])
    model(mx.array(TOKENS[:, :4]), cache=caches)
    for cache in caches:
        assert cache.offset == 13
        cache.offset = 7
    assert_close(model(mx.array(TOKENS[:, 7:]), cache=caches), expected[:, 7:])


def test_rows_of_different_lengths_match_transformers(pair: tuple[Any, Model]) -> None:
    """Each row has positions of its own, and sees its own tokens only."""
    reference, model = pair
    expected = [reference_logits(reference, TOKENS[row : row + 1])[0] for row in range(2)]
    caches = row_caches(model, [0, 0], 16)
    model(mx.array(TOKENS[:, :7]), cache=caches)
    at = [3, 7]
    for cache in caches:
        cache.offset = mx.array(at, dtype=mx.int32)
    for count in (1, 4, 1):
        step = np.stack([TOKENS[row, at[row] : at[row] + count] for row in range(2)])
        found = model(mx.array(step), cache=caches)
        for row in range(2):
            assert_close(found[row], expected[row][at[row] : at[row] + count])
            at[row] += count


def test_padding_behind_the_last_position_is_harmless(pair: tuple[Any, Model]) -> None:
    """Row 1 has two tokens left and is padded to four."""
    reference, model = pair
    expected = reference_logits(reference, TOKENS)
    caches = row_caches(model, [0, 0], 16)
    model(mx.array(TOKENS[:, :14]), cache=caches)
    for cache in caches:
        cache.offset = mx.array([5, 14], dtype=mx.int32)
    step = np.stack([TOKENS[0, 5:9], [*TOKENS[1, 14:], 0, 0]])
    found = model(mx.array(step), cache=caches)
    assert_close(found[0], expected[0, 5:9])
    assert_close(found[1, :2], expected[1, 14:])
    assert np.isfinite(np.array(found)).all()


def test_positions_stay_within_the_table() -> None:
    assert position_ids(0, 3, 8).tolist() == [0, 1, 2]
    assert position_ids(7, 2, 8).tolist() == [7, 7]
    ids = position_ids(mx.array([-2, 4, 100]), 3, 8)
    assert ids.tolist() == [[0, 0, 0], [4, 5, 6], [7, 7, 7]] and ids.dtype == mx.int32
    assert mx.compile(lambda at: position_ids(at, 2, 8))(mx.array([3, 7])).tolist() == [
        [3, 4],
        [7, 7],
    ]
    table = Model(args("pre_norm")).model.decoder.embed_positions.weight
    assert len(table) == 16 + FIRST_POSITION


def args(kind: str) -> ModelArgs:
    return ModelArgs.from_dict({"model_type": "opt"} | SHAPE | KINDS[kind])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_of_both_classes_are_accepted(prefix: str) -> None:
    """OPTModel's have no prefix; the head, and a number of fairseq's, are no parameters."""
    reference = make_reference("post_norm_projected")
    named = {
        name.replace("model.", prefix, 1): tensor for name, tensor in tensors(reference).items()
    }
    named[f"{prefix}decoder.version"] = mx.array([3.0])
    assert "lm_head.weight" in named and f"{prefix}decoder.project_in.weight" in named
    model = Model(args("post_norm_projected"))
    ours = model.sanitize(named)
    assert model.sanitize(ours).keys() == ours.keys()
    model.load_weights(list(ours.items()), strict=True)
    assert_close(model(mx.array(TOKENS)), reference_logits(reference, TOKENS))


def test_quantized_models_run() -> None:
    mx.random.seed(0)
    model = Model(dataclasses.replace(args("pre_norm"), hidden_size=64, word_embed_proj_dim=64))
    exact = model(mx.array(TOKENS))
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, m: fits(m))
    found = model(mx.array(TOKENS))
    assert 0 < mx.abs(found - exact).max() < 0.1 * mx.abs(exact).max()


def fits(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[1] % 32 == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_transformers_parameters(name: str) -> None:
    """By name and shape; on neither side does a weight take memory."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    with torch.device("meta"):
        reference = OPTForCausalLM(OPTConfig(**published(name)))
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in reference.state_dict().items()
        if name != "lm_head.weight"
    }
    parameters = tree_flatten(Model(ModelArgs.from_dict(published(name))).parameters())
    assert {name: tensor.shape for name, tensor in parameters} == expected
    if name in COUNTS:
        assert sum(tensor.size for _, tensor in parameters) == COUNTS[name]


def test_defaults_are_those_of_transformers() -> None:
    from transformers import OPTConfig

    ours = ModelArgs.from_dict({"model_type": "opt", **SHAPE, "word_embed_proj_dim": None})
    theirs = OPTConfig(**SHAPE)
    for field in dataclasses.fields(ModelArgs):
        name = field.name if hasattr(theirs, field.name) else f"_{field.name}"
        assert getattr(ours, field.name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"model_type": "gpt2"}, "this is a gpt2"),
        ({"model_type": None}, "model of unknown type"),
        ({"architectures": ["OPTForQuestionAnswering"]}, "OPTForQuestionAnswering"),
        ({"architectures": "OPTForX"}, "OPTForX"),
        ({"activation_function": "silu"}, "activation_function in config.json is 'silu'"),
        ({"activation_function": None}, "activation_function in config.json is None"),
        ({"activation_function": ["relu"]}, "activation_function in config.json is ['relu']"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings in config.json is False"),
        ({"do_layer_norm_before": "yes"}, "do_layer_norm_before in config.json is 'yes'"),
        ({"_remove_final_layer_norm": 1}, "_remove_final_layer_norm in config.json is 1"),
        ({"enable_bias": 0}, "enable_bias in config.json is 0"),
        ({"layer_norm_elementwise_affine": "no"}, "layer_norm_elementwise_affine in config"),
        ({"hidden_size": 25}, "hidden_size in config.json is 25"),
        ({"word_embed_proj_dim": 0}, "word_embed_proj_dim in config.json is 0"),
        ({"num_hidden_layers": 257}, "num_hidden_layers in config.json is 257"),
        *(({name: None}, f"{name} in config.json is missing") for name in SHAPE),
        *(({name: 2.5}, f"{name} in config.json is 2.5") for name in SHAPE),
    ],
)
def test_other_configs_are_refused(changed: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError) as raised:
        ModelArgs.from_dict({"model_type": "opt"} | SHAPE | changed)
    check_message(str(raised.value), found)


def test_mlx_lm_is_not_imported() -> None:
    code = "import sys, speculative_t5.models.opt; sys.exit('mlx_lm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
