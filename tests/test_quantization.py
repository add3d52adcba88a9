"""Quantized models: which matrices are quantized, and how this is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.conversion import convert

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import opened
from conftest import V1_0, V1_1, edit_json, write_checkpoint
from mlx.utils import tree_flatten

WIDE = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128}
SOURCE, TARGET = mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4]])


@pytest.fixture(scope="module", params=[V1_0, V1_1], ids=["v1_0", "v1_1"])
def source(request: Any, tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_checkpoint(folder, request.param | WIDE, spiece)
    return folder


def quantized_names(folder: Path) -> set[str]:
    stored = opened(folder).tensors
    return {name.removesuffix(".scales") for name in stored if name.endswith(".scales")}


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_weights_are_quantized_by_mlx(
    source: Path, tmp_path: Path, bits: int, group_size: int
) -> None:
    folder = convert(str(source), tmp_path / "out", quantize=bits, group_size=group_size)
    models = [load(path, dtype=mx.float32)[0] for path in (folder, source)]
    small, whole = (dict(tree_flatten(model.parameters())) for model in models)
    names = quantized_names(folder)
    assert "encoder.layers.0.self_attention.qkv" in names and "shared" in names
    for name in names:
        parts = (small[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        expected = mx.quantize(whole[f"{name}.weight"], group_size, bits)
        assert all(mx.array_equal(a, b) for a, b in zip(parts, expected, strict=True))
    for name in whole.keys() & small.keys() - {f"{name}.weight" for name in names}:
        assert mx.array_equal(whole[name], small[name])


def test_wo_is_kept_in_gated_families_by_default(source: Path, tmp_path: Path) -> None:
    gated = "gated" in json.loads((source / "config.json").read_text())["feed_forward_proj"]
    wo = "decoder.layers.0.feed_forward.wo"
    for keep_wo, kept in ((None, gated), (True, True), (False, False)):
        name = f"keep_{keep_wo}"
        folder = convert(str(source), tmp_path / name, quantize=8, keep_wo=keep_wo)
        assert (wo not in quantized_names(folder)) == kept
        assert load(folder)[0].config.quantization.keep_wo == kept


def test_quantization_is_recorded_and_read_back(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "out", quantize=4, group_size=32, dtype="bfloat16")
    recorded = json.loads((folder / "config.json").read_text())["quantization"]
    assert recorded["bits"] == 4 and recorded["group_size"] == 32
    stored = opened(folder).tensors
    assert {tensor.dtype for tensor in stored.values()} == {mx.uint32, mx.bfloat16}
    model = load(folder, dtype=mx.float32)[0]
    assert model.dtype == mx.float32 and model.shared.scales.dtype == mx.float32
    assert model.shared.weight.dtype == mx.uint32
    with pytest.raises(ValueError, match="quantized already, to 4 bits in groups of 32: convert"):
        convert(str(folder), tmp_path / "again", quantize=8)
    edit_json(folder / "config.json", quantization={"bits": 8, "group_size": 32})
    with pytest.raises(ValueError, match=r"has shape \(\d+, 8\), expected \(\d+, 16\)"):
        load(folder)


def test_more_bits_give_nearer_logits_and_speculation_stays_exact(
    source: Path, tmp_path: Path
) -> None:
    whole = np.array(load(source, dtype=mx.float32)[0](SOURCE, TARGET))
    errors = []
    for bits in (8, 4):
        folder = convert(str(source), tmp_path / str(bits), quantize=bits)
        logits = np.array(load(folder, dtype=mx.float32)[0](SOURCE, TARGET))
        errors.append(np.abs(logits - whole).mean() / np.abs(whole).mean())
    assert errors[0] < 0.03 < errors[1] < 0.6
    decoder = SpeculativeDecoder.from_pretrained(
        tmp_path / "8", tmp_path / "4", num_draft=3, dtype=mx.float32
    )
    for prompt in ("The old man sat.", "A dog barks at the moon."):
        out = decoder.generate(prompt, max_tokens=30)
        assert out.tokens == decoder.generate(prompt, max_tokens=30, speculative=False).tokens


def test_a_small_embedding_is_left_alone(tmp_path: Path, spiece: bytes) -> None:
    """Below a hundredth of the weights it gains nothing, as in byt5."""
    shape = V1_1 | WIDE | {"d_ff": 4096, "num_layers": 4}
    write_checkpoint(tmp_path / "source", shape, spiece)
    names = quantized_names(convert(str(tmp_path / "source"), tmp_path / "out", quantize=8))
    assert "shared" not in names and "lm_head" not in names
    assert "encoder.layers.0.feed_forward.wi" in names


def test_matrices_without_whole_groups_are_left_alone(tmp_path: Path, spiece: bytes) -> None:
    write_checkpoint(tmp_path / "source", V1_0 | WIDE | {"d_ff": 100}, spiece)
    names = quantized_names(convert(str(tmp_path / "source"), tmp_path / "out", quantize=8))
    assert "encoder.layers.0.feed_forward.wi" in names
    assert "encoder.layers.0.feed_forward.wo" not in names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": 3}, "quantization must be to 4 or 8 bits, got 3"),
        ({"quantize": 4, "group_size": 48}, "a group must be of 32, 64 or 128 weights, got 48"),
        ({"quantize": 8}, "no matrix can be quantized in groups of 64, as d_model is 24"),
    ],
)
def test_impossible_quantizations_are_refused(
    tmp_path: Path, spiece: bytes, options: dict[str, int], message: str
) -> None:
    write_checkpoint(tmp_path / "narrow", V1_0, spiece)
    with pytest.raises(ValueError, match=message):
        convert(str(tmp_path / "narrow"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
