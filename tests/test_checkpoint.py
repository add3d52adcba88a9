"""Conversion: what is read, what is written, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import checkpoint, load
from speculative_t5.checkpoint import convert
from speculative_t5.weights import read_config

import mlx.core as mx
import numpy as np
import pytest
from conftest import V1_0, V1_1, edit_json, write_checkpoint

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


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_converted_model_needs_nothing_else(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = convert(str(source), tmp_path / "out", progress=lambda *counts: seen.append(counts))
    assert left(folder) == ["config.json", "spiece.model", "weights.npz"]
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(seen) - 1
    assert left(tmp_path) == ["out", "source"]
    shutil.rmtree(source)
    model, tokenizer = load(folder)
    assert model.dtype == mx.float32
    assert model.vocabulary == tokenizer.vocabulary
    assert read_config(folder) == model.config


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_are_stored_as_asked(source: Path, tmp_path: Path, dtype: str) -> None:
    folder = convert(str(source), tmp_path / "out", dtype=checkpoint.DTYPES[dtype])
    stored = mx.load(str(folder / "weights.npz"))
    assert isinstance(stored, dict)
    assert {array.dtype for array in stored.values()} == {checkpoint.DTYPES[dtype]}
    whole = logits(convert(str(source), tmp_path / "whole"))
    np.testing.assert_allclose(logits(folder), whole, rtol=0, atol=0.05 * np.abs(whole).max())


def test_shards_and_pickles_give_the_same_model(source: Path, tmp_path: Path) -> None:
    import torch
    from transformers import T5ForConditionalGeneration

    expected = logits(convert(str(source), tmp_path / "single"))
    sharded = tmp_path / "sharded"
    shutil.copytree(source, sharded)
    (sharded / "model.safetensors").unlink()
    model = T5ForConditionalGeneration.from_pretrained(source)
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert (logits(convert(str(sharded), tmp_path / "from_shards")) == expected).all()

    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    assert (logits(convert(str(pickled), tmp_path / "from_pickle")) == expected).all()
    old = {"_use_new_zipfile_serialization": False}
    torch.save(model.state_dict(), pickled / "pytorch_model.bin", **old)
    assert (logits(convert(str(pickled), tmp_path / "from_old_pickle")) == expected).all()
    halves = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    torch.save(halves, pickled / "pytorch_model.bin")
    found = logits(convert(str(pickled), tmp_path / "from_bfloat16"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * np.abs(expected).max())


def test_pickles_without_torch_say_what_to_do(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="takes torch to read: pip install torch"):
        convert(str(source), tmp_path / "out")


def test_tensors_are_believed_over_the_config(source: Path, tmp_path: Path) -> None:
    """Old configs say relu for gated-gelu, and know nothing of depths or of the head."""
    expected = logits(convert(str(source), tmp_path / "right"))
    edit_json(
        source / "config.json", feed_forward_proj="relu", num_layers=9, num_decoder_layers=None,
        tie_word_embeddings=True, scale_decoder_outputs=False,
    )  # fmt: skip
    assert (logits(convert(str(source), tmp_path / "corrected")) == expected).all()


def test_a_stored_head_that_equals_the_embedding_is_tied(tmp_path: Path, spiece: bytes) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    write_checkpoint(source, V1_0, spiece)
    tied = convert(str(source), tmp_path / "tied")
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "encoder.embed_tokens.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    again = convert(str(source), tmp_path / "again")
    assert read_config(again) == read_config(tied)
    assert not read_config(again).own_head and read_config(again).scale_decoder_outputs


@pytest.mark.parametrize(
    ("raw", "scaled"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    ],
)
def test_scaling_follows_the_config(
    source: Path, tmp_path: Path, raw: dict[str, Any], scaled: bool
) -> None:
    stored = json.loads((source / "config.json").read_text())
    for name in ("tie_word_embeddings", "scale_decoder_outputs"):
        stored.pop(name, None)
    (source / "config.json").write_text(json.dumps(stored | raw))
    folder = convert(str(source), tmp_path / "out")
    assert read_config(folder).scale_decoder_outputs == scaled
    assert read_config(folder).own_head


def spoil_shape(source: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    name = "decoder.block.0.layer.1.EncDecAttention.k.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, source / "model.safetensors")


def spoil_names(source: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["encoder.adapter.weight"] = tensors.pop("encoder.final_layer_norm.weight")
    save_file(tensors, source / "model.safetensors")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: (s / "config.json").unlink(), "not a model folder: it has no config.json"),
        (lambda s: (s / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda s: (s / "config.json").write_text("[]"), "holds a list, expected an object"),
        (lambda s: edit_json(s / "config.json", model_type="bert"), "this is a bert"),
        (lambda s: edit_json(s / "config.json", d_kv=0), "d_kv in config.json is 0, expected a"),
        (lambda s: edit_json(s / "config.json", feed_forward_proj="x"), "feed_forward_proj"),
        (lambda s: edit_json(s / "config.json", vocab_size=10**12), "vocab_size in config.json"),
        (lambda s: edit_json(s / "config.json", eos_token_id=[1]), r"eos_token_id .* is \[1\]"),
        (
            lambda s: edit_json(s / "config.json", decoder_start_token_id=999),
            "is 999, expected an id from 0 to 319",
        ),
        (lambda s: edit_json(s / "config.json", layer_norm_epsilon="x"), "layer_norm_epsilon"),
        (
            lambda s: edit_json(s / "config.json", relative_attention_num_buckets="32"),
            "relative_attention_num_buckets in config.json is '32'",
        ),
        (lambda s: (s / "spiece.model").unlink(), "no tokenizer in"),
        (lambda s: (s / "model.safetensors").unlink(), "no weights in .*: expected model.safet"),
        (lambda s: truncate(s / "model.safetensors"), "truncated or damaged"),
        (spoil_shape, r"EncDecAttention.k.weight has shape \(79, 32\), expected \(80, 32\)"),
        (spoil_names, r"has no tensor encoder.final_layer_norm.weight, expected one of shape"),
        (
            lambda s: (s / "model.safetensors").rename(s / "pytorch_model.bin"),
            "pytorch_model.bin is truncated or damaged",
        ),
    ],
)
def test_bad_checkpoints_are_refused_and_leave_nothing(
    source: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    spoil(source)
    with pytest.raises(ValueError, match=message):
        convert(str(source), tmp_path / "out")
    assert left(tmp_path) == ["source"]


def test_a_missing_shard_is_named(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    index = {"weight_map": {"shared.weight": "model-00001-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors, named by"):
        convert(str(source), tmp_path / "out")


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_interrupted_run_keeps_the_old_folder_and_leaves_nothing_else(
    source: Path, tmp_path: Path, failure: BaseException
) -> None:
    convert(str(source), tmp_path / "out")
    before = (tmp_path / "out" / "weights.npz").read_bytes()

    def interrupt(done: int, total: int) -> None:
        if done == total // 2:
            raise failure

    for output in ("out", "new"):
        with pytest.raises(type(failure)):
            convert(str(source), tmp_path / output, dtype=mx.float16, progress=interrupt)
        assert left(tmp_path) == ["out", "source"]
    assert (tmp_path / "out" / "weights.npz").read_bytes() == before
    convert(str(source), tmp_path / "out", dtype=mx.float16)
    assert (tmp_path / "out" / "weights.npz").stat().st_size < len(before)
    assert left(tmp_path) == ["out", "source"]


def test_a_failed_swap_brings_the_old_folder_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(source), tmp_path / "out")
    rename, calls = os.rename, iter([False, True, False])

    def fail_second(a: Path, b: Path) -> None:
        if next(calls):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "out", dtype=mx.float16)
    assert left(tmp_path) == ["out", "source"]
    assert load(tmp_path / "out")


def test_a_checkpoint_is_never_replaced(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    for output, message in ((source, "is the checkpoint itself"), (other, "not a converted")):
        with pytest.raises(ValueError, match=message):
            convert(str(source), output)
        assert (output / "model.safetensors").exists()


def test_a_folder_of_something_else_is_not_replaced(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("words")
    with pytest.raises(ValueError, match="thesis exists and is not a converted model"):
        convert(str(source), other)
    assert left(other) == ["chapter.txt"]


def test_names_on_the_hub_are_downloaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's own client, with its two calls answered from a folder."""
    import huggingface_hub

    asked: dict[str, Any] = {}

    class Hub:
        def list_repo_files(self, name: str, revision: str | None) -> list[str]:
            return [*left(source), "pytorch_model.bin"]

    def download(name: str, **options: Any) -> str:
        asked.update(name=name, **options)
        return str(source)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert convert("someone/tiny-t5", revision="v2") == Path("weights/tiny-t5")
    assert asked["name"] == "someone/tiny-t5" and asked["revision"] == "v2"
    assert "*.safetensors*" in asked["allow_patterns"]
    assert "*.bin*" not in asked["allow_patterns"]


def test_a_name_that_cannot_be_had_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    def offline(*_: Any, **__: Any) -> Any:
        raise OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(HfApi, "list_repo_files", offline)
    with pytest.raises(ValueError, match="no folder 'no-such-model', and it could not be had"):
        convert("no-such-model")
    for name in ("./missing", "/missing/model", "a/b/c"):
        with pytest.raises(ValueError, match="no checkpoint folder"):
            convert(name)
