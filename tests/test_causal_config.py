"""config.json of decoder-only models: what is refused by it alone, before any weights are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import ModelFolder
from speculative_t5.checkpoints.decoder_only import max_context, read_config

import pytest
from checkpoints import SHAPES, refused

QWEN3 = SHAPES["qwen3"] | {"vocab_size": 320, "architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
POSITIVE = (
    "layer_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar", "final_logit_softcapping",
    "embedding_multiplier",
)  # fmt: skip
LLAMA3 = YARN | {"rope_type": "llama3"}
NOT_POSITIVE = (0, -1, float("nan"), float("inf"), "1e-5", True, {})


def write(folder: Path, **settings: Any) -> Path:
    """Write a config.json, a Qwen3's if nothing else is said; the folder has nothing else."""
    base = {"model_type": "qwen3"} | QWEN3 if "model_type" not in settings else {}
    (folder / "config.json").write_text(json.dumps(base | settings))
    return folder


def test_context_length() -> None:
    assert max_context({"n_positions": 32, "n_ctx": 16}) == 32
    assert max_context({"text_config": {"max_position_embeddings": 9}}) == 9
    assert max_context({"text_config": [1]}) is None
    for stored, scaling, expected in ((64, YARN, 256), (256, YARN, 256), (99, LLAMA3, 99)):
        settings = {"max_position_embeddings": stored, "rope_scaling": scaling}
        assert max_context(settings) == expected


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rms_norm_eps", (*NOT_POSITIVE, 2.0)),
        ("rope_theta", (*NOT_POSITIVE, 10**400)),
        ("partial_rotary_factor", (*NOT_POSITIVE, 1.5)),
        *((name, NOT_POSITIVE) for name in POSITIVE),
        ("logit_scale", (float("nan"), float("-inf"))),
        ("head_dim", (0, -1, 2.5, "10", True, 2**31)),
        ("num_key_value_heads", (0, -1, 2.0)),
        ("num_hidden_layers", (0, 10**9)),
        ("max_position_embeddings", (0, -1, float("inf"), 1e9)),
    ],
)
def test_senseless_numbers_are_refused(tmp_path: Path, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with refused(f"{name} in config.json is .*, expected ", tmp_path):
            load(write(tmp_path, **{name: value}))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_senseless_rotations_are_refused(tmp_path: Path, name: str) -> None:
    for found, wrong in (
        ("rope_theta", -1.0), ("factor", 0.0), ("low_freq_factor", float("nan")),
        ("original_max_position_embeddings", 1e30), ("short_factor", [1.0, float("inf")]),
        ("mscale", float("nan")),
    ):  # fmt: skip
        for scaling in ({found: wrong}, {"full_attention": {found: wrong}}):
            with refused(f"{found} in config.json is .*, expected"):
                load(write(tmp_path, **{name: YARN | scaling}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "qwen77", "architectures": QWEN3["architectures"]}, "a qwen77 .*neither"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]},
         "^(?!.*mlx-lm).*BertForMaskedLM.*expected one of the T5 .*decoder-only"),
        ({"hidden_size": None}, "does not make a qwen3"),
        ({"num_key_value_heads": 3}, "num_attention_heads in .* is 4, .* multiple of"),
        ({"quantization": True}, "quantization in .* True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "are quantized by gptq"),
        ({"eos_token_id": "</s>"}, "eos_token_id .* '</s>'"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer in"),
        ({"model_type": "opt"} | QWEN3, "Qwen3ForCausalLM .*generates"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_.* is 'relu'"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_.* is True"),
    ],
    ids=str,
)  # fmt: skip
def test_other_configs_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with refused(message, tmp_path):
        load(write(tmp_path, **settings))


def test_published_numbers_are_accepted(tmp_path: Path) -> None:
    """Lists for the layers, null for what follows from others, 0 for what is left out."""
    write(
        tmp_path, model_type="llama4", rope_theta=1e11, rms_norm_eps=1e-5, head_dim=None,
        max_position_embeddings=10485760, initializer_factor=1, attention_dropout=0.0,
        rope_scaling={"mscale_all_dim": 0, "factor": 8, "attention_factor": None,
                      "long_factor": [1, 2.5], "rope_type": "longrope"},
        intermediate_size=[8, 16], num_attention_heads=40, num_key_value_heads=8,
        layer_norm_epsilon=None, partial_rotary_factor=1, quantization=None,
    )  # fmt: skip
    assert read_config(ModelFolder(tmp_path))["rope_theta"] == 1e11


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, "a\nb", "cache", "../x", "", "x" * 5000])
def test_a_senseless_model_type_is_refused(tmp_path: Path, kind: Any) -> None:
    with refused("this is a .{0,400}$", tmp_path):
        load(write(tmp_path, **QWEN3, model_type=kind))


def test_a_missing_mlx_lm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    for named in (["Qwen3ForCausalLM"], ["GPT2LMHeadModel"], None):
        with refused(r"run pip install 'mlx-lm>=0.32,<0.33'", "qwen3"):
            load(write(tmp_path, architectures=named))
    with refused("^(?!.*pip).*this is a qwen77 .*choose", tmp_path):
        load(write(tmp_path, model_type="qwen77", architectures=["QwenModel"]))
