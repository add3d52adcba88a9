"""Folders of T5s: what is read, and what is refused before any weights are."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import loading
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.models import T5Config
from speculative_t5.tokenizers import load_tokenizer

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import POINTER, edit_tensors, opened, refused
from conftest import edit_json
from families import write_family

FORMS = {"flan_t5": "shards", "madlad400": "safetensors"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    for name, form in FORMS.items():
        write_family(root / name, name, form)
    convert(str(root / "flan_t5"), root / "converted")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def folder(request: pytest.FixtureRequest, originals: dict[str, Path], tmp_path: Path) -> Path:
    """A folder that the test may spoil: flan_t5's shards, or the one that the test asks for."""
    name = getattr(request, "param", "flan_t5")
    return Path(shutil.copytree(originals[name], tmp_path / "weights" / "tiny"))


ENCODERS, DECODERS = (f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder"))


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", [name], indirect=True)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = next(folder.glob("*.index.json"))
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def edit_weights(folder: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    tensors = mx.load(str(folder / "weights.npz"))
    assert isinstance(tensors, dict)
    change(tensors)
    mx.eval(tensors)
    mx.savez(str(folder / "weights.npz"), **tensors)


def flip_a_byte(folder: Path) -> None:
    raw = (folder / "weights.npz").read_bytes()
    (folder / "weights.npz").write_bytes(raw[:2000] + bytes([raw[2000] ^ 255]) + raw[2001:])


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


# How each folder may be spoiled, and the message.
SPOILED: dict[str, list[tuple[Any, str]]] = {
    "flan_t5": [
        (lambda s: shard(s).unlink(), r"model-00002-of-\d+.safetensors, named by .*, is missing"),
        (lambda s: shard(s).write_bytes(shard(s).read_bytes()[:-9]), "truncated or damaged"),
        (lambda s: shard(s).write_bytes(POINTER), "model-00002-.* is a Git LFS pointer.*: run git"),
        (lambda s: edit_index(s, lambda m: m.update(more=shard(s).name)),
         "says that more is in model-00002.*, which does not have it"),
        (lambda s: edit_index(s, lambda m: m.update(more="/etc/passwd")),
         "names the shard '/etc/passwd', expected a file's name alone"),
        (lambda s: edit_index(s, lambda m: m.clear()), "is not an index of shards"),
        (lambda s: next(s.glob("*.index.json")).write_text("[]"), "holds a list, expected an obj"),
        (lambda s: [path.rename(s / "tf_model.h5") for path in s.glob("model*")],
         "expected model.safetensors .*, found tf_model.h5"),
        (lambda s: (s / "config.json").rename(s / "adapter_config.json"),
         "it has no config.json, but an adapter's settings"),
        (lambda s: (s / "config.json").write_text("[" * 200_000), "config.json is not JSON"),
        (lambda s: (s / "tokenizer_config.json").write_text('{"extra_ids": 1000000000}'),
         "extra_ids in .* is 1000000000, expected an integer from 0 to 10000"),
        (lambda s: (s / "spiece.model").unlink(), "no tokenizer in"),
        (lambda s: edit_json(s / "config.json", eos_token_id=5), "has the EOS id 1, the model 5"),
    ],
    "converted": [
        (lambda f: (f / "weights.npz").unlink(), "no weights in .*: expected model.safetensors"),
        (lambda f: (f / "weights.npz").write_bytes(POINTER), "npz is a Git LFS pointer.*: run git"),
        (lambda f: ((f / "spiece.model").unlink(), (f / "tokenizer.json").write_bytes(POINTER)),
         r"tokenizer\.json is a Git LFS pointer"),
        (lambda f: np.save(f / "a.npy", 1) or (f / "a.npy").rename(f / "weights.npz"), "damaged"),
        (lambda f: np.savez(f / "weights.npz", words=np.array(["these"])), "of floats, found <U5"),
        (flip_a_byte, "weights.npz is truncated or damaged"),
        (lambda f: edit_json(f / "config.json", model_type="gpt2"), "this is a gpt2"),
        (lambda f: edit_json(f / "config.json", num_layers=256), "has no tensor encoder.layers"),
        (lambda f: edit_weights(f, lambda t: t.update({"encoder.norm.weight": mx.ones(3)})),
         r"encoder.norm.weight has shape \(3,\), expected \(24,\)"),
        (lambda f: edit_weights(f, lambda t: t.update(extra=mx.ones(1))),
         "has tensors that a T5 does not: extra"),
        *((lambda f, name=name: edit_json(f / "config.json", **{name: 2**24}), "shape|in config.")
          for name in "d_model d_ff vocab_size num_heads relative_attention_num_buckets".split()),
    ],
    "madlad400": [
        (changed(lambda t: t.update({"encoder.x": t.pop("encoder.final_layer_norm.weight")})),
         "has no tensor encoder.final_layer_norm.weight, expected one of shape"),
        (changed(lambda t: t.update({ENCODERS: t[ENCODERS][:-1], DECODERS: t[DECODERS][:-1]})),
         r"shared.weight has shape \(319, 24\), expected \(320, 24\)"),
        # The depth is not believed either.
        (changed(lambda t: t.update({"encoder.block.9999999.layer.0.layer_norm.weight":
                                     torch.ones(2)})),
         r"has no tensor encoder.block.2.layer"),
    ],
}  # fmt: skip
CASES = [(folder, *case) for folder, cases in SPOILED.items() for case in cases]


@pytest.mark.parametrize(("folder", "spoil", "message"), CASES, indirect=["folder"])
def test_spoiled_folders_are_refused_at_once(folder: Path, spoil: Any, message: str) -> None:
    """Also where config.json asks for more memory, or layers, than there could be."""
    spoil(folder)
    started = time.perf_counter()
    with refused(message):
        load(folder)
    assert time.perf_counter() - started < 3


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "longt5"}, "this is a longt5"),
        ({"model_type": "t5gemma"}, "this is a t5gemma .*, expected one of the T5 family"),
        ({"architectures": ["T5EncoderModel"]}, "this is a T5EncoderModel"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantized by gptq"),
        ({"d_model": None}, "d_model in config.json is missing, expected a positive integer"),
        ({"vocab_size": 10**12}, "vocab_size in config.json"),
        ({"num_layers": 2000}, "num_layers in config.json is 2000, expected at most 256"),
        ({"feed_forward_proj": "x"}, "feed_forward_proj"),
        ({"eos_token_id": [1]}, r"eos_token_id .* is \[1\]"),
        ({"decoder_start_token_id": 999}, "is 999, expected an id from 0 to 8"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in config.json is 'no', expected"),
        ({"relative_attention_num_buckets": 1}, "has 1 buckets up to a distance of 128"),
        ({"quantization": {"bits": 8.0}}, "quantization must be to 4 or 8 bits, got 8.0"),
        ({"quantization": [4]}, r"quantization in config.json is \[4\]"),
    ]
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 9}
    for changes, message in bad:
        config = {"model_type": "t5"} | sizes | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        with refused(message, tmp_path):
            opened(tmp_path)


@of("madlad400")
def test_different_embeddings_are_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[DECODERS][3].add_(1))
    with refused("decoder.embed_tokens.weight differs from encoder.embed"):
        opened(folder)
    edit_tensors(folder, lambda t: t.pop(ENCODERS))
    assert embedding(folder).any(), "the decoder's alone suffices"
    edit_tensors(folder, lambda t: t.pop(DECODERS))
    with refused("has no tensor shared.weight, expected one of shape"):
        opened(folder)
    edit_tensors(folder, lambda t: t.update({"shared.weight": torch.tensor(1.0)}))
    with refused(r"shared.weight has shape \(\), expected \(320, 24\)"):
        opened(folder)


def embedding(folder: Path) -> np.ndarray:
    return opened(folder).tensors["shared.weight"].read().copy()


def test_a_vocabulary_with_fewer_rows_than_pieces_is_refused(folder: Path) -> None:
    config = opened(folder).config
    assert load_tokenizer(folder, dataclasses.replace(config, vocab_size=120))
    with refused("has 220 pieces, the model 119 rows for them"):
        load_tokenizer(folder, dataclasses.replace(config, vocab_size=119))
    stored = dataclasses.replace(config, bias_per_layer=True, n_positions=7)
    assert T5Config.from_dict(json.loads(json.dumps(stored.to_dict()))) == stored


def test_the_index_says_which_shard_holds_a_tensor(folder: Path) -> None:
    before = embedding(folder)
    edit_tensors(folder, lambda t: t.update({"shared.weight": torch.zeros(320, 24)}), -1)
    assert (embedding(folder) == before).all() and before.any()


@of("converted")
def test_names_are_looked_up_under_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    assert load("tiny")[0].config == load(folder)[0].config
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with refused(
        r"no model on this machine is named 'tinny' \(found: .*tiny\); there is no folder"
    ):
        load("tinny")
    for name in (None, 1, b"tiny", ""):
        with refused("a model must be given by its name or path, got"):
            load(name)  # type: ignore[arg-type]


@of("converted")
def test_dtype_is_the_devices_or_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="float16 overflows"):
        assert load(folder, dtype=mx.float16)[0].dtype == mx.float16
    edit_json(folder / "config.json", gated=False)
    monkeypatch.setattr(loading, "default_dtype", lambda: mx.bfloat16)
    assert load(folder)[0].dtype == mx.bfloat16
