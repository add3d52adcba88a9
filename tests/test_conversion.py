"""Conversion: what is read, what is written, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import ModelFolder
from speculative_t5.checkpoints.conversion import convert, is_finite
from speculative_t5.checkpoints.loading import DTYPES
from speculative_t5.checkpoints.tensors import as_numpy
from speculative_t5.device import default_dtype

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import opened, refused
from conftest import V1_0, V1_1, edit_json, write_checkpoint
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


def edit_tensors(source: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: t.clone() for name, t in tensors.items()}, source / "model.safetensors")


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
    assert model.vocabulary == tokenizer.vocabulary
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_stored_as_asked(source: Path, tmp_path: Path, dtype: str) -> None:
    """Also where the model was converted before."""
    folder = convert(str(source), tmp_path / "out", dtype=dtype)
    assert {t.dtype for t in opened(folder).tensors.values()} == {DTYPES[dtype]}
    whole = convert(str(source), tmp_path / "whole")
    expected = logits(whole)
    np.testing.assert_allclose(logits(folder), expected, atol=0.05 * np.abs(expected).max())
    again = convert(str(whole), tmp_path / "again", dtype=dtype)
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


def test_a_stored_head_that_equals_the_embedding_is_tied(tmp_path: Path, spiece: bytes) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, V1_0, spiece)
    tied = convert(str(source), tmp_path / "tied")
    copies = ("lm_head.weight", "encoder.embed_tokens.weight")
    edit_tensors(source, lambda t: t.update(dict.fromkeys(copies, t["shared.weight"])))
    again = ModelFolder(convert(str(source), tmp_path / "again")).t5_config()
    assert again == ModelFolder(tied).t5_config()
    assert not again.own_head and again.scale_decoder_outputs


def test_scaling_follows_the_config(source: Path) -> None:
    """None stands for an entry that is missing."""
    for tied, stored, scaled in (
        (None, None, True), (False, None, False), (True, False, False), (False, True, True),
    ):  # fmt: skip
        edit_json(source / "config.json", tie_word_embeddings=tied, scale_decoder_outputs=stored)
        config = opened(source).config
        assert config.scale_decoder_outputs == scaled and config.own_head


def change(source: Path, name: str, value: float) -> None:
    edit_tensors(source, lambda tensors: tensors[name][1].__setitem__(2, value))


@pytest.mark.parametrize(
    ("value", "dtype"), [(np.nan, None), (-np.inf, "float16"), (np.inf, "bfloat16")]
)
def test_nonfinite_weights_are_named(
    source: Path, tmp_path: Path, value: float, dtype: str | None
) -> None:
    name = "encoder.block.1.layer.0.SelfAttention.k.weight"
    change(source, name, value)
    with refused(f"{name} has weights that are NaN or infinite; use --allow-"):
        convert(str(source), tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()
    folder = convert(str(source), tmp_path / "out", dtype=dtype, allow_nonfinite=True)
    stored = load(folder, dtype=mx.float32)[0].encoder.layers[1].self_attention.qkv.weight
    assert np.array_equal(np.array(stored[80 + 1, 2]), value, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_nonfinite_number_among_many_is_found(dtype: mx.Dtype, value: float) -> None:
    numbers = mx.linspace(-60000, 60000, 200_000).astype(dtype)
    assert is_finite(as_numpy(numbers), dtype)
    for i in (0, 70_000, 199_999):
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_weights_are_kept_to_the_bit(source: Path, tmp_path: Path, dtype: str) -> None:
    """Through conversion without a type, a second one of the result, and `load`."""
    import torch

    kind = getattr(torch, dtype)
    halves = {n: t.to(kind) for n, t in load_file(source / "model.safetensors").items()}
    save_file(halves, source / "model.safetensors")
    first = convert(str(source), tmp_path / "first")
    second = convert(str(first), tmp_path / "second")
    assert (first / "weights.npz").read_bytes() == (second / "weights.npz").read_bytes()
    assert {t.dtype for t in opened(second).tensors.values()} == {DTYPES[dtype]}
    ours = load(second, dtype=mx.float32)[0].decoder.layers[0].feed_forward.wo.weight
    theirs = halves["decoder.block.0.layer.2.DenseReluDense.wo.weight"]
    assert (np.array(ours) == theirs.float().numpy()).all()
