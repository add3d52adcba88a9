"""Conversion: what is read, what is written and quantized, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import ModelFolder
from speculative_t5.checkpoints.conversion import convert, is_finite, new_layout, quantized
from speculative_t5.checkpoints.loading import DTYPES
from speculative_t5.checkpoints.tensors import as_numpy
from speculative_t5.device import default_dtype
from speculative_t5.models import Quantization, T5Config

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import edit_tensors, opened, refused
from conftest import V1_0, V1_1, edit_json, write_checkpoint
from mlx.utils import tree_flatten
from safetensors.torch import load_file, save_file

SOURCE, TARGET = mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4]])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_checkpoint(folder, V1_1, spiece)
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def logits(folder: Path) -> np.ndarray:
    return np.array(load(folder, dtype=mx.float32)[0](SOURCE, TARGET))


def test_a_converted_model_needs_nothing_else(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = convert(str(source), tmp_path / "out", progress=lambda *counts: seen.append(counts))
    own = {"config.json", "generation_config.json", "spiece.model", "weights.npz"}
    assert {p.name for p in folder.iterdir()} == own
    assert seen[-1] == (seen[-1][1],) * 2 and sorted(seen) == seen
    assert seen[-1][1] == sum(t.nbytes for t in opened(source).tensors.values())
    shutil.rmtree(source)
    model, tokenizer = load(folder)
    assert model.dtype == default_dtype()
    assert model.info.vocabulary == tokenizer.vocabulary
    assert ModelFolder(folder).t5_config() == model.config


def test_checkpoints_of_two_runs_get_names_of_their_own(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    for run in ("runA", "runB"):
        shutil.copytree(original, tmp_path / run / "checkpoint-500")
    monkeypatch.chdir(tmp_path)
    assert convert("runA/checkpoint-500") == Path("weights/runA-checkpoint-500")
    monkeypatch.chdir("runB")  # named without the run
    monkeypatch.setenv("SPECULATIVE_T5_WEIGHTS", "../weights")
    assert convert("checkpoint-500") == Path("../weights/runB-checkpoint-500")


def test_our_own_settings_are_kept(source: Path, tmp_path: Path) -> None:
    good = {"draft": "small", "prefix": "do: ", "min_probability": 0.5}
    none = {"draft": "../small", "prefix": "", "min_probability": None}
    for name, wanted, kept in (("a", good, good), ("b", none, {})):
        edit_json(source / "config.json", **wanted)
        stored = json.loads((convert(str(source), tmp_path / name) / "config.json").read_text())
        assert {key: stored[key] for key in good if key in stored} == kept
    assert load(tmp_path / "a")[1].prefix == "do: "  # type: ignore[attr-defined]


def test_dtypes_are_stored_as_asked(source: Path, tmp_path: Path) -> None:
    """Also where the model was converted before."""
    whole = convert(str(source), tmp_path / "whole")
    expected = logits(whole)
    for dtype in DTYPES:
        folder = convert(str(source), tmp_path / dtype, dtype=dtype)
        assert {t.dtype for t in opened(folder).tensors.values()} == {DTYPES[dtype]}
        np.testing.assert_allclose(logits(folder), expected, atol=0.05 * np.abs(expected).max())
        again = convert(str(whole), tmp_path / "again", dtype=dtype, force=True)
        assert (again / "weights.npz").read_bytes() == (folder / "weights.npz").read_bytes()


def test_tensors_correct_the_config(source: Path, tmp_path: Path) -> None:
    """Old configs say relu for gated-gelu, and lack depths and the kind of head."""
    expected = logits(convert(str(source), tmp_path / "right"))
    edit_json(
        source / "config.json", feed_forward_proj="relu", num_layers=9, num_decoder_layers=None,
        tie_word_embeddings=True, scale_decoder_outputs=False,
    )  # fmt: skip
    assert (logits(convert(str(source), tmp_path / "corrected")) == expected).all()
    assert (logits(source) == expected).all()
    # The scale of outputs is the config's; None stands for an entry that is missing.
    for tied, stored, scaled in (
        (None, None, True), (False, None, False), (True, False, False), (False, True, True),
    ):  # fmt: skip
        edit_json(source / "config.json", tie_word_embeddings=tied, scale_decoder_outputs=stored)
        config = opened(source).config
        assert config.scale_decoder_outputs == scaled and config.own_head


def test_a_stored_head_that_equals_the_embedding_is_tied(tmp_path: Path, spiece: bytes) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, V1_0, spiece)
    tied = convert(str(source), tmp_path / "tied")
    copies = ("lm_head.weight", "encoder.embed_tokens.weight")
    edit_tensors(source, lambda t: t.update(dict.fromkeys(copies, t["shared.weight"])))
    again = ModelFolder(convert(str(source), tmp_path / "again")).t5_config()
    assert again == ModelFolder(tied).t5_config()
    assert not again.own_head and again.scale_decoder_outputs


def change(source: Path, name: str, value: float) -> None:
    edit_tensors(source, lambda tensors: tensors[name][1].__setitem__(2, value))


def test_nonfinite_weights_are_named(source: Path, tmp_path: Path) -> None:
    name = "encoder.block.1.layer.0.SelfAttention.k.weight"
    for value, dtype in ((np.nan, None), (-np.inf, "float16"), (np.inf, "bfloat16")):
        change(source, name, value)
        output = tmp_path / f"out-{dtype}"
        with refused(f"{name} has weights that are NaN or infinite; use --allow-"):
            convert(str(source), output, dtype=dtype)
        assert not output.exists()
        folder = convert(str(source), output, dtype=dtype, allow_nonfinite=True)
        stored = load(folder, dtype=mx.float32)[0].encoder.layers[1].self_attention.qkv.weight
        assert np.array_equal(np.array(stored[80 + 1, 2]), value, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_one_nonfinite_number_among_many_is_found(dtype: mx.Dtype) -> None:
    numbers = mx.linspace(-60000, 60000, 200_000).astype(dtype)
    assert is_finite(as_numpy(numbers), dtype)
    for i, value in zip((0, 70_000, 199_999), (np.nan, np.inf, -np.inf), strict=True):
        spoiled = mx.where(mx.arange(len(numbers)) == i, value, numbers)
        assert not is_finite(as_numpy(spoiled), dtype)


def test_weights_too_large_for_float16_are_named(source: Path, tmp_path: Path) -> None:
    name = "decoder.block.0.layer.2.DenseReluDense.wo.weight"
    change(source, name, 65519.0)  # rounds down to the largest there is
    convert(str(source), tmp_path / "holds", dtype="float16")
    change(source, name, 65520.0)
    with refused(f"{name} has weights too large for float16: use bfloat16"):
        convert(str(source), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    convert(str(source), tmp_path / "out", dtype="bfloat16")


def test_sixteen_bit_weights_are_kept_to_the_bit(source: Path, tmp_path: Path) -> None:
    """Through conversion without a type, a second one of the result, and `load`."""
    import torch

    halves = {n: t.to(torch.bfloat16) for n, t in load_file(source / "model.safetensors").items()}
    save_file(halves, source / "model.safetensors")
    first = convert(str(source), tmp_path / "first")
    second = convert(str(first), tmp_path / "second")
    assert (first / "weights.npz").read_bytes() == (second / "weights.npz").read_bytes()
    assert {t.dtype for t in opened(second).tensors.values()} == {mx.bfloat16}
    ours = load(second, dtype=mx.float32)[0].decoder.layers[0].feed_forward.wo.weight
    theirs = halves["decoder.block.0.layer.2.DenseReluDense.wo.weight"]
    assert (np.array(ours) == theirs.float().numpy()).all()


T5_FIELDS = {field.name for field in dataclasses.fields(T5Config)}
WIDE = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A gated checkpoint whose matrices can be quantized."""
    folder = tmp_path_factory.mktemp("source")
    write_checkpoint(folder, V1_1 | WIDE, spiece)
    return folder


def quantized_names(tensors: Iterable[str]) -> set[str]:
    return {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64)])
def test_weights_are_quantized_by_mlx(
    wide: Path, tmp_path: Path, bits: int, group_size: int
) -> None:
    folder = convert(str(wide), tmp_path / "out", quantize=bits, group_size=group_size)
    models = [load(path, dtype=mx.float32)[0] for path in (folder, wide)]
    small, whole = (dict(tree_flatten(model.parameters())) for model in models)
    names = quantized_names(small)
    assert "encoder.layers.0.self_attention.qkv" in names and "shared" in names
    for name in names:
        parts = (small[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        expected = mx.quantize(whole[f"{name}.weight"], group_size, bits)
        assert all(mx.array_equal(a, b) for a, b in zip(parts, expected, strict=True))
    for name in whole.keys() & small.keys() - {f"{name}.weight" for name in names}:
        assert mx.array_equal(whole[name], small[name])


def test_quantization_is_recorded_and_read_back(wide: Path, tmp_path: Path) -> None:
    folder = convert(str(wide), tmp_path / "out", quantize=4, group_size=32, dtype="bfloat16")
    recorded = json.loads((folder / "config.json").read_text())["quantization"]
    assert recorded["bits"] == 4 and recorded["group_size"] == 32
    stored = opened(folder).tensors
    assert {tensor.dtype for tensor in stored.values()} == {mx.uint32, mx.bfloat16}
    model = load(folder, dtype=mx.float32)[0]
    assert model.dtype == mx.float32 and model.shared.scales.dtype == mx.float32
    assert model.shared.weight.dtype == mx.uint32 and model.config.quantization.keep_wo
    with pytest.raises(ValueError, match="quantized already, to 4 bits in groups of 32: convert"):
        convert(str(folder), tmp_path / "again", quantize=8)
    edit_json(folder / "config.json", quantization={"bits": 8, "group_size": 32})
    with pytest.raises(ValueError, match=r"has shape \(\d+, 8\), expected \(\d+, 16\)"):
        load(folder)


def test_more_bits_give_nearer_logits(wide: Path, tmp_path: Path) -> None:
    whole = logits(wide)
    errors = []
    for bits in (8, 4):
        folder = convert(str(wide), tmp_path / str(bits), quantize=bits)
        errors.append(np.abs(logits(folder) - whole).mean() / np.abs(whole).mean())
    assert errors[0] < 0.03 < errors[1] < 0.6
    decoder = SpeculativeDecoder.from_pretrained(tmp_path / "8", tmp_path / "4", dtype=mx.float32)
    out = decoder.generate("The old man sat.", max_tokens=12)
    assert (
        out.tokens == decoder.generate("The old man sat.", max_tokens=12, speculative=False).tokens
    )


@pytest.mark.parametrize(
    ("changes", "keep_wo", "left"),
    [
        ({}, None, "feed_forward.wo"),
        ({}, False, None),
        ({"gated": False}, None, None),
        ({"gated": False}, True, "feed_forward.wo"),
        ({"d_ff": 100, "gated": False}, None, "feed_forward.wo"),  # not of whole groups
        # Below a hundredth of the weights it gains nothing, as in byt5.
        ({"d_ff": 4096, "num_layers": 4}, False, "shared"),
    ],
)
def test_what_gains_nothing_is_not_quantized(
    changes: dict[str, Any], keep_wo: bool | None, left: str | None
) -> None:
    """`wo` of gated models, unless it is asked for, matrices without groups, small embeddings."""
    sizes = V1_1 | WIDE | {"gated": True, "num_decoder_layers": 1}
    known = {name: value for name, value in (sizes | changes).items() if name in T5_FIELDS}
    config = quantized(T5Config(**known), Quantization(8), keep_wo)
    names = quantized_names(new_layout(config, mx.float32))
    found = {"feed_forward.wo": "encoder.layers.0.feed_forward.wo", "shared": "shared"}
    assert {each for each, name in found.items() if name not in names} == {left} - {None}
    assert "encoder.layers.0.feed_forward.wi" in names


def test_impossible_quantizations_are_refused(original: Path, tmp_path: Path) -> None:
    for bits, group_size, message in (
        (3, 64, "quantization must be to 4 or 8 bits, got 3"),
        (4, 48, "a group must be of 32, 64 or 128 weights, got 48"),
        (8, 64, "no matrix can be quantized in groups of 64, as d_model is 32"),
    ):
        with refused(message):
            convert(str(original), tmp_path / "out", quantize=bits, group_size=group_size)
        assert not (tmp_path / "out").exists()
