"""Folders that MLX's programs have quantized, with Hugging Face's names: read and refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import inspect
from speculative_t5.checkpoints.dequantizing import KEEP_VARIABLE
from speculative_t5.checkpoints.tensors import parameters_of
from speculative_t5.kernels import takes_stored
from speculative_t5.libraries import NATIVE_SWITCH
from speculative_t5.models import same_weights, sample_weights

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import opened, refused
from conftest import V1_0, V1_1, edit_json, write_checkpoint
from families import (
    FAMILIES,
    SHAPE,
    assert_close,
    write_gemma,
    write_model,
    write_tokenizer,
)
from mlx.utils import tree_flatten, tree_unflatten

WIDE = {"d_model": 64, "d_ff": 128, "d_kv": 32}
GEMMA = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
KINDS = ["t5", "flan-t5", "umt5", "madlad400", "t5gemma", "t5gemma2"]
Choice = bool | dict[str, int]
Chosen = Callable[[str], Choice]


def write_kind(folder: Path, kind: str, spiece: bytes) -> None:
    """Save a random model of a kind, as transformers does."""
    if kind.startswith("t5gemma"):
        write_gemma(folder, 2 if kind == "t5gemma2" else 1, encoder=GEMMA, decoder=GEMMA)
    elif kind in FAMILIES:
        family = FAMILIES[kind]
        config = SHAPE | family.config | family.tokens | WIDE
        write_model(folder, config, own_head=family.own_head, model_type=family.model_type)
        write_tokenizer(folder, family.tokenizer)
    else:
        write_checkpoint(folder, (V1_0 if kind == "t5" else V1_1) | WIDE, spiece)


class Holder(nn.Module):
    """A module of any parts."""


def as_modules(weights: Mapping[str, mx.array]) -> nn.Module:
    """Return modules with weights by their names: embeddings, matrices and vectors."""

    def build(tree: Any) -> Any:
        if isinstance(tree, list):
            return [build(each) for each in tree]
        if isinstance(tree, dict) and set(tree) == {"weight"} and tree["weight"].ndim == 2:
            rows, columns = tree["weight"].shape
            made: Any = nn.Linear(columns, rows, bias=False)
            made.weight = tree["weight"]
            return made
        if not isinstance(tree, dict):
            return tree
        holder = Holder()
        for name, each in tree.items():
            holder[name] = build(each)
        return holder

    return build(tree_unflatten([*weights.items()]))


def quantize_folder(
    source: Path,
    folder: Path,
    bits: int = 8,
    group_size: int = 32,
    *,
    chosen: Chosen = lambda name: True,
    entry: str = "quantization",
    shards: int = 1,
) -> dict[str, mx.array]:
    """Write what mlx-lm-like programs write of a checkpoint; return what its weights stand for."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights: Any = mx.load(str(source / "model.safetensors"))
    model, others, meant = as_modules(weights), {}, dict(weights)

    def predicate(name: str, module: nn.Module) -> Choice:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        choice = chosen(name) if fits else False
        if fits and choice is not True:
            others[name] = choice
        return choice

    nn.quantize(model, group_size, bits, class_predicate=predicate)
    stored = dict(tree_flatten(model.parameters()))
    for name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if "scales" in module:
            parts = module.weight, module.scales, module.biases
            meant[f"{name}.weight"] = mx.dequantize(*parts, module.group_size, module.bits)
    how = {"group_size": group_size, "bits": bits, "mode": "affine"} | others
    edit_json(folder / "config.json", **{entry: how})
    names = sorted(stored)
    parts = [names[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    for file, part in zip(files, parts, strict=True):
        mx.save_safetensors(str(folder / file), {name: stored[name] for name in part})
    if shards > 1:
        places = {n: file for file, part in zip(files, parts, strict=True) for n in part}
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(index)
    return meant


def write_meant(source: Path, folder: Path, meant: Mapping[str, mx.array]) -> None:
    """Write a checkpoint with other weights."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(meant))


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4, 3]])))


@pytest.fixture
def source(tmp_path: Path, spiece: bytes) -> Path:
    write_kind(tmp_path / "source", "flan-t5", spiece)
    return tmp_path / "source"


@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (4, 64), (8, 64), (3, 32), (6, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantized_weights(
    kind: str,
    bits: int,
    group_size: int,
    tmp_path: Path,
    spiece: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_kind(tmp_path / "source", kind, spiece)
    meant = quantize_folder(tmp_path / "source", tmp_path / "small", bits, group_size)
    write_meant(tmp_path / "source", tmp_path / "whole", meant)
    small, _ = load(tmp_path / "small", dtype="float32")
    whole, _ = load(tmp_path / "whole", dtype="float32")
    how = opened(tmp_path / "small").config.quantization
    assert how is not None and how.packings == {(bits, group_size)}
    assert (small.config.quantization == how) == (takes_stored() and bits in (4, 8))
    expected = logits(whole)
    # Products of packed matrices round rows to 16 bits, see docs/exactness.md.
    assert np.abs(logits(small) - expected).max() < 1e-3 * np.abs(expected).max()
    assert same_weights(sample_weights(small), sample_weights(whole))
    monkeypatch.setenv(NATIVE_SWITCH, "0")  # it is read dequantized
    with pytest.warns(UserWarning, match="it is read as float32"):
        dense, _ = load(tmp_path / "small", dtype="float32")
    assert np.array_equal(logits(dense), logits(load(tmp_path / "whole", dtype="float32")[0]))


def test_matrices_stay_packed_as_they_are(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of Hugging Face's are one of ours, with the bits that its rows would be packed into."""
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    meant = quantize_folder(source, source.with_name("small"), 8)
    found = parameters_of(load(source.with_name("small"), dtype="float32")[0])
    names = [f"encoder.block.0.layer.0.SelfAttention.{part}.weight" for part in "qkv"]
    weights: Any = mx.load(str(source / "model.safetensors"))
    whole = mx.concatenate([weights[name] for name in names])
    ours = [found[f"encoder.layers.0.self_attention.qkv.{p}"] for p in ("weight", "scales")]
    assert all(mx.array_equal(a, b) for a, b in zip(ours, mx.quantize(whole, 32, 8), strict=False))
    assert not mx.array_equal(meant[names[0]], weights[names[0]])


MIXED: dict[str, Chosen] = {
    "a layer in other bits": lambda name: (
        {"bits": 4, "group_size": 32} if ".block.1." in name else True
    ),
    "values in other bits": lambda name: (
        {"bits": 4, "group_size": 32} if name.endswith(".v") else True
    ),
    "some left alone": lambda name: ".block.0." not in name,
    "attention alone": lambda name: "Attention" in name,
    "embeddings alone": lambda name: name in ("shared", "lm_head"),
    "bits that only MLX reads": lambda name: (
        {"bits": 6, "group_size": 32} if name.endswith("wo") else True
    ),
}


@pytest.mark.parametrize("entry", ["quantization", "quantization_config"])
@pytest.mark.parametrize("case", MIXED)
def test_layers_of_other_bits_are_read_as_they_are(
    case: str, entry: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, whole = source.with_name("small"), source.with_name("whole")
    meant = quantize_folder(source, small, chosen=MIXED[case], entry=entry, shards=3)
    write_meant(source, whole, meant)
    for keep in ("0", "1"):
        monkeypatch.setenv(KEEP_VARIABLE, keep)
        found = load(small, dtype="float32")[0]
        assert_close(mx.array(logits(found)), logits(load(whole, dtype="float32")[0]))
    decoders = [SpeculativeDecoder.from_pretrained(path) for path in (small, whole)]
    first, second = (each.generate("1, 2, 3", temperature=0, max_tokens=12) for each in decoders)
    assert first.tokens == second.tokens


def test_a_quantized_folder_is_listed_with_all_its_parameters(source: Path) -> None:
    quantize_folder(source, source.with_name("small"), 4, 64)
    small, whole = (inspect(str(path)) for path in (source.with_name("small"), source))
    assert small.num_parameters == whole.num_parameters
    assert small.family == whole.family


def spoil_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def spoil_tensors(change: Callable[[dict[str, mx.array]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = str(folder / "model.safetensors")
        tensors: Any = dict(mx.load(path))
        change(tensors)
        mx.save_safetensors(path, tensors)

    return spoil


SHARED = "shared.weight"
MXFP4 = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "says nothing": (spoil_config(quantization=None), "has no quantization with its bits"),
    "other bits": (spoil_config(quantization={"bits": 4, "group_size": 32}), "no matrix of 4 bits"),
    "other groups": (
        spoil_config(quantization={"bits": 8, "group_size": 64}),
        "no matrix of 8 bits in groups of 64",
    ),
    "other modes": (spoil_config(quantization=MXFP4), "the mode is 'mxfp4', expected affine"),
    "mode of a layer": (
        spoil_config(quantization={"bits": 8, "group_size": 32, "shared": MXFP4}),
        "the mode is 'mxfp4', expected affine",
    ),
    "bits of a layer": (
        spoil_config(quantization={"bits": 8, "group_size": 32, "shared": {"bits": 7}}),
        "must be to 2, 3, 4, 5, 6 or 8 bits, got 7",
    ),
    "no object": (spoil_config(quantization=[8]), "quantization in config.json is .8.: expected"),
    "no entry of a layer": (
        spoil_config(quantization={"bits": 8, "group_size": 32, "shared": "q8"}),
        "shared is 'q8', expected false or its bits and group_size",
    ),
    "of bitsandbytes": (
        spoil_config(quantization_config={"quant_method": "bitsandbytes", "bits": 8}),
        "quantized by bitsandbytes",
    ),
    "no scales": (spoil_tensors(lambda t: t.pop("shared.scales")), r"integers \(U32\) and has no"),
    "no biases": (spoil_tensors(lambda t: t.pop("shared.biases")), "which are no matrix of 8 bits"),
    "fewer rows": (
        spoil_tensors(lambda t: t.update({"shared.scales": t["shared.scales"][:9]})),
        "which are no matrix of 8 bits",
    ),
    "integers elsewhere": (
        spoil_tensors(lambda t: t.update({"a.weight": mx.array([1], dtype=mx.uint32)})),
        r"a.weight is of integers \(U32\)",
    ),
    "another size": (spoil_config(d_model=128), "has shape .*, expected"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_does_not_fit_is_refused(case: str, source: Path) -> None:
    folder = source.with_name("small")
    quantize_folder(source, folder)
    spoil, message = SPOILT[case]
    spoil(folder)
    with refused(message):
        load(folder)
