"""Conversion: what is read, quantized, refused, and written whole or not at all."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from speculative_t5 import load
from speculative_t5.checkpoints import ModelFolder, dequantizing
from speculative_t5.checkpoints.conversion import convert, is_finite, new_layout, quantized
from speculative_t5.checkpoints.loading import DTYPES
from speculative_t5.checkpoints.tensors import as_numpy, parameters_of
from speculative_t5.device import default_type
from speculative_t5.models import Quantization, T5Config

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import edit_tensors, opened, refused
from conftest import REPOSITORY, V1_0, V1_1, edit_json, write_checkpoint
from safetensors.torch import load_file, save_file

SOURCE, MADE, OUT = Path("source"), Path("made"), Path("out")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A checkpoint, and the model that it was converted to."""
    root = tmp_path_factory.mktemp("originals")
    write_checkpoint(root / SOURCE, V1_1, spiece)
    convert(str(root / SOURCE), root / MADE)
    return root


@pytest.fixture(autouse=True)
def here(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with both, which the test may spoil."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def left(folder: Path = Path()) -> list[str]:
    return sorted(os.listdir(folder))


def contents(folder: Path = MADE) -> bytes:
    return (folder / "weights.npz").read_bytes()


def logits(folder: Path) -> np.ndarray:
    model, _ = load(folder, dtype=mx.float32)
    return np.array(model(mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4]])))


def test_a_converted_model_needs_nothing_else() -> None:
    seen: list[tuple[int, int]] = []
    convert("source", OUT, progress=lambda *counts: seen.append(counts))
    assert left(OUT) == ["config.json", "generation_config.json", "spiece.model", "weights.npz"]
    assert seen[-1] == (seen[-1][1],) * 2 and sorted(seen) == seen
    assert seen[-1][1] == sum(t.nbytes for t in opened(SOURCE).tensors.values())
    shutil.rmtree(SOURCE)
    model, tokenizer = load(OUT)
    assert model.dtype == default_type().dtype
    assert model.info.vocabulary == tokenizer.vocabulary
    assert ModelFolder(OUT).model_config() == model.config


def test_checkpoints_of_two_runs_get_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("weights").mkdir()
    for run in ("runA", "runB"):
        shutil.copytree(SOURCE, f"{run}/checkpoint-500")
    assert convert("runA/checkpoint-500") == Path("weights/runA-checkpoint-500")
    monkeypatch.chdir("runB")  # named without the run
    monkeypatch.setenv("SPECULATIVE_T5_WEIGHTS", "../weights")
    assert convert("checkpoint-500") == Path("../weights/runB-checkpoint-500")


def test_our_own_settings_are_kept() -> None:
    good = {"draft": "small", "prefix": "do: ", "min_probability": 0.5}
    none = {"draft": "../small", "prefix": "", "min_probability": None}
    for folder, wanted, kept in ((Path("a"), good, good), (Path("b"), none, {})):
        edit_json(SOURCE / "config.json", **wanted)
        stored = json.loads((convert("source", folder) / "config.json").read_text())
        assert {key: stored[key] for key in good if key in stored} == kept
    assert load("a")[1].prefix == "do: "  # type: ignore[attr-defined]


def test_dtypes_are_stored_as_asked() -> None:
    """Also where the model was converted before."""
    expected = logits(MADE)
    for dtype in DTYPES:
        folder = convert("source", Path(dtype), dtype=dtype)
        assert {t.dtype for t in opened(folder).tensors.values()} == {DTYPES[dtype]}
        np.testing.assert_allclose(logits(folder), expected, atol=0.05 * np.abs(expected).max())
    convert("made", OUT, dtype="bfloat16")
    assert contents(OUT) == contents(Path("bfloat16"))


def test_tensors_correct_the_config() -> None:
    """Old configs say relu for gated-gelu, and lack depths and the kind of head."""
    expected, path = logits(MADE), SOURCE / "config.json"
    edit_json(
        path,
        feed_forward_proj="relu",
        num_layers=9,
        num_decoder_layers=None,
        tie_word_embeddings=True,
        scale_decoder_outputs=False,
    )
    assert (logits(convert("source", OUT)) == expected).all()
    assert (logits(SOURCE) == expected).all()
    # The scale of outputs is the config's; None stands for an entry that is missing.
    for tied, stored, scaled in (
        (None, None, True),
        (False, None, False),
        (True, False, False),
        (False, True, True),
    ):
        edit_json(path, tie_word_embeddings=tied, scale_decoder_outputs=stored)
        config = opened(SOURCE).config
        assert config.scale_decoder_outputs == scaled and config.own_head


def test_a_stored_head_that_equals_the_embedding_is_tied(spiece: bytes) -> None:
    write_checkpoint(Path("untied"), V1_0, spiece)
    tied = convert("untied", Path("tied"))
    copies = ("lm_head.weight", "encoder.embed_tokens.weight")
    edit_tensors(Path("untied"), lambda t: t.update(dict.fromkeys(copies, t["shared.weight"])))
    again = ModelFolder(convert("untied", Path("again"))).model_config()
    assert again == ModelFolder(tied).model_config()
    assert not again.own_head and again.scale_decoder_outputs


def change(name: str, value: float) -> None:
    edit_tensors(SOURCE, lambda tensors: tensors[name][1].__setitem__(2, value))


def test_nonfinite_weights_are_named() -> None:
    name = "encoder.block.1.layer.0.SelfAttention.k.weight"
    for value, dtype in ((np.nan, None), (-np.inf, "float16"), (np.inf, "bfloat16")):
        change(name, value)
        with refused(f"{name} has weights that are NaN or infinite; use --allow-"):
            convert("source", Path(f"out-{dtype}"), dtype=dtype)
        assert left() == ["made", *(["out"] if OUT.exists() else []), "source"]
        convert("source", OUT, dtype=dtype, allow_nonfinite=True, force=True)
        stored = load(OUT, dtype=mx.float32)[0].encoder.layers[1].self_attention.qkv.weight
        assert np.array_equal(np.array(stored[80 + 1, 2]), value, equal_nan=True)


def test_one_nonfinite_number_among_many_is_found() -> None:
    for dtype in DTYPES.values():
        numbers = mx.linspace(-60000, 60000, 200_000).astype(dtype)
        assert is_finite(as_numpy(numbers), dtype)
        for i, value in zip((0, 70_000, 199_999), (np.nan, np.inf, -np.inf), strict=True):
            spoiled = mx.where(mx.arange(len(numbers)) == i, value, numbers)
            assert not is_finite(as_numpy(spoiled), dtype)


def test_weights_too_large_for_float16_are_named() -> None:
    name = "decoder.block.0.layer.2.DenseReluDense.wo.weight"
    change(name, 65519.0)  # rounds down to the largest there is
    convert("source", Path("holds"), dtype="float16")
    change(name, 65520.0)
    with refused(f"{name} has weights too large for float16: use bfloat16"):
        convert("source", OUT, dtype="float16")
    assert not OUT.exists() and convert("source", OUT, dtype="bfloat16")


def test_sixteen_bit_weights_are_kept_to_the_bit() -> None:
    """Through conversion without a type, a second one of the result, and `load`."""
    path = SOURCE / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(halves, path)
    first = convert("source", Path("first"))
    second = convert("first", Path("second"))
    assert contents(first) == contents(second)
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


def test_weights_are_quantized_by_mlx_and_read_back(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dequantizing.KEEP_VARIABLE, "1")
    folder = convert(str(wide), OUT, quantize=4, group_size=32)
    small, whole = (parameters_of(load(path, dtype="float32")[0]) for path in (folder, wide))
    names = quantized_names(small)
    assert "encoder.layers.0.self_attention.qkv" in names and "shared" in names
    for name in names:
        parts = (small[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        expected = mx.quantize(whole[f"{name}.weight"], 32, 4)
        assert all(mx.array_equal(a, b) for a, b in zip(parts, expected, strict=True))
    for name in whole.keys() & small.keys() - {f"{name}.weight" for name in names}:
        kind = mx.bfloat16 if name.endswith(".wo.weight") else mx.float32
        assert mx.array_equal(whole[name].astype(kind).astype(mx.float32), small[name])
    with refused("quantized already, to 4 bits in groups of 32: convert"):
        convert(str(folder), Path("again"), quantize=8)
    folder = convert(str(wide), Path("halves"), quantize=4, group_size=32, dtype="bfloat16")
    assert {tensor.dtype for tensor in opened(folder).tensors.values()} == {mx.uint32, mx.bfloat16}
    model = load(folder, dtype=mx.float32)[0]
    assert model.config.quantization == Quantization(4, 32, keep_wo=True)
    assert model.dtype == model.shared.scales.dtype == mx.float32
    edit_json(folder / "config.json", quantization={"bits": 8, "group_size": 32})
    with refused(r"has shape \(\d+, 8\), expected \(\d+, 16\)"):
        load(folder)


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


def test_matrices_left_whole_are_stored_in_16_bits(wide: Path) -> None:
    """Those of float32, unless a type is asked for; scales, norms and position biases are not."""
    found = {}
    for dtype in (None, "float32", "float16"):
        tensors = opened(
            convert(str(wide), OUT, quantize=4, group_size=32, dtype=dtype, force=True)
        ).tensors
        found[dtype] = {name: tensor.dtype for name, tensor in tensors.items()}
    whole = {name for name in found[None] if name.endswith(".wo.weight")}
    assert whole and {found[None][name] for name in whole} == {mx.bfloat16}
    assert {name: found["float32"][name] for name in whole} == dict.fromkeys(whole, mx.float32)
    others = {name: kind for name, kind in found[None].items() if name not in whole}
    assert {*others.values()} == {mx.uint32, mx.float32}
    assert others == {name: found["float32"][name] for name in others}
    assert {*found["float16"].values()} == {mx.uint32, mx.float16}


def test_impossible_quantizations_are_refused() -> None:
    for bits, group_size, message in (
        (3, 64, "quantization must be to 4 or 8 bits, got 3"),
        (4, 48, "a group must be of 32, 64 or 128 weights, got 48"),
        (8, 64, "no matrix can be quantized in groups of 64, as d_model is 32"),
    ):
        with refused(message):
            convert("source", OUT, quantize=bits, group_size=group_size)
        assert not (OUT).exists()


def test_an_interrupted_run_leaves_nothing_behind() -> None:
    before = contents()
    for failure in (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        for output in (MADE, Path("some", "where", "new")):
            with pytest.raises(type(failure)):
                convert(
                    "source",
                    output,
                    dtype="float16",
                    force=True,
                    progress=Mock(side_effect=failure),
                )
            assert left() == ["made", "source"] and contents() == before


KILLED = """
import os, signal
from pathlib import Path
from speculative_t5.checkpoints import convert
rename = os.rename
def die(old, new):
    os.kill(os.getpid(), signal.SIGKILL) if Path(old).name == "new" else rename(old, new)
os.rename = die
convert("source", Path("made"), force=True)
"""


def test_the_remains_of_a_killed_run_are_cleared_away_by_the_next() -> None:
    """Of one killed while it writes, and of one killed between the two renames at its end."""
    before = contents()
    Path(".made.partial", "new").mkdir(parents=True)
    seen: list[bytes] = []
    convert("source", MADE, force=True, progress=lambda *_: seen.append(contents()))
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL and left() == [".made.partial", "source"]
    convert("source", MADE, force=True, progress=lambda *_: seen.append(contents()))
    assert {*seen} == {before}, "whole all the time, or brought back"
    assert left() == ["made", "source"] and load(MADE)


def test_two_conversions_to_one_folder_are_refused() -> None:
    with pytest.raises(OSError, match="another conversion is at work"):
        convert("source", MADE, progress=lambda *_: convert("source", MADE, force=True), force=True)
    assert left() == ["made", "source"]


def test_a_lack_of_space_is_reported_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    seen: list[tuple[int, int]] = []
    with pytest.raises(OSError, match="No space left on device: it takes 0.01 GB") as caught:
        convert("source", Path("new"), progress=lambda *counts: seen.append(counts))
    assert not seen, "nothing was read"
    assert caught.value.errno == errno.ENOSPC and left() == ["made", "source"]


def test_a_failed_swap_brings_the_old_folder_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename, calls = contents(), os.rename, iter([False, True, False])

    def fail_second(a: Path, b: Path) -> None:
        if next(calls):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(KeyboardInterrupt):
        convert("source", MADE, dtype="float16", force=True)
    assert left() == ["made", "source"] and contents() == before


def test_an_existing_model_is_replaced_only_when_forced() -> None:
    before = contents()
    with refused("made exists: use --force to replace it, or --output to"):
        convert("source", MADE, dtype="float16")
    assert contents() == before
    convert("source", MADE, dtype="float16", force=True)
    assert len(contents()) < 0.6 * len(before)
    Path("disk").mkdir()
    Path("link").symlink_to("disk/model")
    convert("source", Path("link"))
    assert Path("link").is_symlink() and load(Path("disk/model")), "a link is followed"


def test_nothing_but_a_model_folder_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("source", "thesis")
    shutil.copytree("source", "made/inner")
    for model, output, message in (
        ("source", "source", "is or holds the checkpoint itself"),
        ("source", "thesis", "thesis exists and is not a converted model"),
        ("source", "made", "also holds inner"),
        ("made/inner", "made", "is or holds the checkpoint"),
    ):
        before = left(Path(output))
        with refused(message):
            convert(model, Path(output), force=True)
        assert left(Path(output)) == before
    monkeypatch.chdir("thesis")
    with refused("is the current folder: choose another --output"):
        convert("../source", Path("."))
