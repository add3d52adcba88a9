from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import loading
from speculative_t5.checkpoints.conversion import convert

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
from conftest import V1_0, V1_1, edit_json, write_checkpoint


@pytest.fixture(params=[V1_0])
def folder(request: Any, tmp_path: Path, spiece: bytes) -> Path:
    write_checkpoint(tmp_path / "source", request.param, spiece)
    return convert(str(tmp_path / "source"), tmp_path / "weights" / "tiny")


def spoil_weights(folder: Path, change: Any) -> None:
    tensors = mx.load(str(folder / "weights.npz"))
    assert isinstance(tensors, dict)
    change(tensors)
    mx.eval(tensors)
    mx.savez(str(folder / "weights.npz"), **tensors)


def flip_a_byte(folder: Path) -> None:
    raw = bytearray((folder / "weights.npz").read_bytes())
    raw[2000] ^= 255
    (folder / "weights.npz").write_bytes(raw)


def store_an_array(folder: Path) -> None:
    with (folder / "weights.npz").open("wb") as file:
        np.save(file, np.ones(3))


def store_words(folder: Path) -> None:
    np.savez(folder / "weights.npz", words=np.array(["these"]))


def misshape(tensors: dict[str, mx.array]) -> None:
    tensors["encoder.norm.weight"] = mx.ones((3,))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "weights.npz").unlink(), "no weights in .*: expected model.safetensors"),
        (lambda f: os.truncate(f / "weights.npz", 5000), "weights.npz is truncated or damaged"),
        (lambda f: (f / "weights.npz").write_bytes(b""), "weights.npz is truncated or damaged"),
        (store_an_array, "weights.npz is truncated or damaged"),
        (store_words, "expected tensors of floats, found <U5"),
        (flip_a_byte, "weights.npz is truncated or damaged"),
        (lambda f: edit_json(f / "config.json", model_type="gpt2"), "this is a gpt2"),
        (lambda f: (f / "spiece.model").unlink(), "no tokenizer in"),
        (
            lambda f: spoil_weights(f, misshape),
            r"encoder.norm.weight has shape \(3,\), expected \(24,\)",
        ),
        (
            lambda f: spoil_weights(f, lambda t: t.pop("decoder.norm.weight")),
            r"has no tensor decoder.norm.weight, expected one of shape \(24,\)",
        ),
        (
            lambda f: spoil_weights(f, lambda t: t.update(extra=mx.ones(1))),
            "has tensors that a T5 does not: extra",
        ),
    ],
)
def test_bad_folders_are_refused(folder: Path, spoil: Any, message: str) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_names_are_looked_up_under_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("tiny")[0].config == load(folder)[0].config
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = r"no model here \(found: .*tiny\) is named 'tinny'"
    with pytest.raises(ValueError, match=message):
        load("tinny")


def test_dtype_defaults_to_the_device_and_can_be_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(folder, dtype=mx.float16)[0].dtype == mx.float16
    monkeypatch.setattr(loading, "default_dtype", lambda: mx.bfloat16)
    assert load(folder)[0].dtype == mx.bfloat16


@pytest.mark.parametrize("folder", [V1_1], indirect=True)
def test_float16_warns_where_the_family_overflows(folder: Path) -> None:
    with pytest.warns(UserWarning, match="float16 overflows"):
        load(folder, dtype=mx.float16)


def test_pairs_with_different_tokenizers_are_refused(folder: Path, spiece: bytes) -> None:
    other = convert(str(folder.parent.parent / "source"), folder.parent / "other")
    SpeculativeDecoder.from_pretrained(folder, other)
    (other / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    message = "must share a tokenizer: the target's has 220 pieces.*the draft's has 123 pieces"
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder.from_pretrained(folder, other)


def test_text_goes_in_and_comes_out(folder: Path) -> None:
    engine = SpeculativeDecoder.from_pretrained(folder, folder, num_draft=3)
    out = engine.generate("The old man sat on the bench.", max_tokens=12)
    assert out.tokens and out.text == load(folder)[1].decode(out.tokens)
    assert "".join(c.text for c in engine.stream("The old man.", max_tokens=12)) == (
        engine.generate("The old man.", max_tokens=12).text
    )
    ids = load(folder)[1].encode("The old man sat on the bench.")
    assert engine.generate(np.array(ids), max_tokens=12).tokens == out.tokens


@pytest.mark.parametrize("name", [None, 1, b"tiny", ""])
def test_what_is_neither_a_name_nor_a_path_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="a model must be given by its name or path, got"):
        load(name)
