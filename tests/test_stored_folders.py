"""Folders of 16 bits, loaded as they are stored: half the memory of float32, and its bits."""

from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.tensors import parameters_of
from speculative_t5.kernels import kept_types
from speculative_t5.libraries import NATIVE_SWITCH
from speculative_t5.models import new_model

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import edit_tensors, opened
from conftest import V1_0, V1_1, needs_layers, write_checkpoint
from families import write_gemma

pytestmark = [
    pytest.mark.cpu,
    needs_layers,
]
WIDE = {"d_model": 64, "d_ff": 128, "d_kv": 32}
NAMES = {mx.float16: torch.float16, mx.bfloat16: torch.bfloat16}


def write(folder: Path, family: str, spiece: bytes) -> None:
    if family == "T5Gemma":
        write_gemma(folder, 1)
    else:
        write_checkpoint(folder, (V1_0 if family == "T5 v1.0" else V1_1) | WIDE, spiece)


def in_16_bits(tensors: dict[str, torch.Tensor], dtype: mx.Dtype) -> None:
    tensors.update({name: tensor.to(NAMES[dtype]) for name, tensor in tensors.items()})


def types(model: Any) -> dict[str, mx.Dtype]:
    return {name: weight.dtype for name, weight in parameters_of(model).items()}


def is_small(name: str) -> bool:
    """Whether a parameter is a norm or a table of biases, which stay float32."""
    return name.endswith("norm.weight") or "position_bias" in name


def check_kept(model: Any, dtype: mx.Dtype) -> None:
    assert model.dtype == mx.float32
    for name, kind in types(model).items():
        assert kind == (mx.float32 if is_small(name) else dtype), name


def logits(model: Any) -> mx.array:
    found: mx.array = model(mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4, 3]]))
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("family", ["T5 v1.0", "T5 v1.1", "T5Gemma"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_folder_of_16_bits_has_the_bits_of_float32(
    family: str, converted: bool, dtype: mx.Dtype, tmp_path: Path, spiece: bytes
) -> None:
    write(tmp_path / "source", family, spiece)
    edit_tensors(tmp_path / "source", lambda tensors: in_16_bits(tensors, dtype))
    folder = tmp_path / "source"
    if converted:
        folder = convert(str(folder), tmp_path / "converted")
    (wide, tokenizer), (model, _) = load(folder, dtype="float32"), load(folder)
    check_kept(wide, mx.float32)
    check_kept(model, dtype)
    assert mx.array_equal(logits(wide), logits(model))
    assert wide.fingerprint != model.fingerprint  # passes take other times
    prompts = ["The old man sat.", "A dog.", "He go home."]
    expected = SpeculativeDecoder(wide, None, tokenizer).generate_batch(prompts, max_tokens=20)
    for draft, options in ((None, {}), (model, {"num_draft": 5}), ("lookup", {"num_draft": 9})):
        decoder = SpeculativeDecoder(model, draft, tokenizer, **options)
        found = decoder.generate_batch(prompts, max_tokens=20)
        assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_matrices_may_be_kept_in_another_type(tmp_path: Path, spiece: bytes) -> None:
    """A float32 folder asked to be in 16 bits is one that was converted to them."""
    write(tmp_path / "source", "T5 v1.1", spiece)
    halves = load(convert(str(tmp_path / "source"), tmp_path / "halves", dtype="bfloat16"))[0]
    model = load(tmp_path / "source", dtype="bfloat16")[0]
    check_kept(load(tmp_path / "source")[0], mx.float32)
    check_kept(model, mx.bfloat16)
    same = {name: mx.array_equal(w, parameters_of(halves)[name]) for name, w in matrices(model)}
    assert all(same.values())


def matrices(model: Any) -> list[tuple[str, mx.array]]:
    return [(name, each) for name, each in parameters_of(model).items() if not is_small(name)]


def test_a_matrix_of_tensors_in_unlike_types_is_float32(tmp_path: Path, spiece: bytes) -> None:
    write(tmp_path / "source", "T5 v1.1", spiece)
    name = "encoder.block.0.layer.0.SelfAttention.%s.weight"
    edit_tensors(
        tmp_path / "source",
        lambda t: t.update({name % part: t[name % part].half() for part in "qk"}),
    )
    model = load(tmp_path / "source")[0]
    assert {*types(model).values()} == {mx.float32}
    edit_tensors(tmp_path / "source", lambda t: t.update({name % "v": t[name % "v"].half()}))
    kept = load(tmp_path / "source")[0]
    assert kept.encoder.layers[0].self_attention.qkv.weight.dtype == mx.float16
    assert kept.encoder.layers[1].self_attention.qkv.weight.dtype == mx.float32


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_keep_their_type(dtype: str, tmp_path: Path, spiece: bytes) -> None:
    write(tmp_path / "source", "T5 v1.0", spiece)
    stored = convert(str(tmp_path / "source"), tmp_path / "stored", quantize=4, dtype=dtype)
    model, (wide, _) = load(stored)[0], load(stored, dtype="float32")
    found = types(model)
    scales = {kind for name, kind in found.items() if name.endswith((".scales", ".biases"))}
    assert scales == {getattr(mx, dtype)} and model.dtype == mx.float32
    assert mx.array_equal(logits(wide), logits(model))


def test_scales_and_biases_of_unlike_types_are_float32(tmp_path: Path, spiece: bytes) -> None:
    """As folders that other programs quantized may have them."""
    write(tmp_path / "source", "T5 v1.0", spiece)
    stored = convert(str(tmp_path / "source"), tmp_path / "stored", quantize=4, dtype="float16")
    path = stored / "weights.npz"
    arrays = dict(np.load(path))
    unlike = {n: a.astype(np.float32) if n.endswith(".biases") else a for n, a in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, **unlike)
    model = load(stored)[0]
    for name, kind in types(model).items():
        assert kind == mx.float32 or name.endswith(".weight"), name
    assert np.isfinite(np.array(logits(model))).all()


def test_what_is_no_matrix_is_float32(tmp_path: Path, spiece: bytes) -> None:
    write(tmp_path / "source", "T5 v1.0", spiece)
    config = opened(tmp_path / "source").config
    model = new_model(config)
    stored = dict.fromkeys(parameters_of(model), mx.float16)
    for name, kind in kept_types(model, stored).items():
        assert kind == (mx.float32 if is_small(name) else mx.float16), name
    assert {*kept_types(model, stored, mx.float32).values()} == {mx.float32}


def test_without_the_c_parts_all_is_in_one_type(
    tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "source", "T5 v1.0", spiece)
    edit_tensors(tmp_path / "source", lambda tensors: in_16_bits(tensors, mx.bfloat16))
    monkeypatch.setenv(NATIVE_SWITCH, "0")
    assert {*types(load(tmp_path / "source")[0]).values()} == {mx.float32}
    assert {*types(load(tmp_path / "source", dtype="float16")[0]).values()} == {mx.float16}


def test_a_sharing_draft_is_kept_as_it_is_stored() -> None:
    weights = Path(__file__).parents[1] / "weights"
    target, tokenizer = load(weights / "correct-base")
    draft, _ = load(weights / "correct-draft", target=target)
    wide, _ = load(weights / "correct-draft", target=target, dtype="float32")
    check_kept(draft, mx.float16)
    check_kept(wide, mx.float32)
    prompts = ["She go to school every days.", "I has a apple."]
    found = [
        SpeculativeDecoder(target, each, tokenizer, num_draft=4).generate_batch(prompts)
        for each in (draft, wide)
    ]
    halves, whole = ([(out.tokens, out.stats.accepted) for out in each] for each in found)
    assert halves == whole
