"""What a checkpoint's files say of themselves, and what is refused before weights are read."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.t5 import open_checkpoint
from speculative_t5.models.t5.config import T5Config
from speculative_t5.tokenizers import load_tokenizer

import mlx.core as mx
import pytest
import torch
from checkpoints import POINTER
from conftest import edit_json
from families import write_family
from messages import check_message
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    for name, form in (("flan_t5", "shards"), ("madlad400", "safetensors"), ("t5", "bin_shards")):
        write_family(root / f"{name}_{form}", name, form)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["flan_t5_shards"], tmp_path / "source"))


@pytest.fixture
def madlad(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["madlad400_safetensors"], tmp_path / "source"))


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = next(folder.glob("*.index.json"))
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: shard(s).unlink(), r"model-00002-of-\d+.safetensors, named by .*, is missing"),
        (lambda s: shard(s).write_bytes(shard(s).read_bytes()[:-9]), "truncated or damaged"),
        (lambda s: shutil.copy(shard(s, 0), shard(s)), "in model-00002.*, which does not have it"),
        (
            lambda s: edit_index(s, lambda m: m.update(more=shard(s).name)),
            "says that more is in model-00002.*, which does not have it",
        ),
        (
            lambda s: edit_index(s, lambda m: m.update(more="../outside.safetensors")),
            "names the shard '../outside.safetensors', expected a file's name alone",
        ),
        (
            lambda s: edit_index(s, lambda m: m.update(more="/etc/passwd")),
            "names the shard '/etc/passwd', expected a file's name alone",
        ),
        (lambda s: edit_index(s, lambda m: m.update(more=3)), "names the shard 3, expected"),
        (lambda s: edit_index(s, lambda m: m.clear()), "is not an index of shards"),
        (lambda s: next(s.glob("*.index.json")).write_text("[]"), "holds a list, expected an obj"),
        (lambda s: next(s.glob("*.index.json")).write_text("{"), "index.json is not JSON"),
    ],
)
def test_shards_that_do_not_add_up_are_refused(sharded: Path, spoil: Any, message: str) -> None:
    spoil(sharded)
    with pytest.raises(ValueError, match=message) as caught:
        convert(str(sharded), sharded.parent / "out")
    assert "\n" not in str(caught.value)
    assert [path.name for path in sharded.parent.iterdir()] == ["source"]


def test_a_missing_pickled_shard_is_named(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["t5_bin_shards"], tmp_path / "source"))
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ValueError, match="pytorch_model-00002-of-00002.bin, named by"):
        open_checkpoint(folder)


def test_weights_of_other_programs_are_named(sharded: Path) -> None:
    for path in sharded.glob("model*"):
        path.unlink()
    (sharded / "tf_model.h5").write_text("")
    with pytest.raises(ValueError, match="expected model.safetensors .*, found tf_model.h5"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("flan_t5_shards", "model-00002-of-*.safetensors"),
        ("madlad400_safetensors", "model.safetensors"),
        ("t5_bin_shards", "pytorch_model-00002-of-00002.bin"),
        ("t5_bin_shards", "spiece.model"),
    ],
)
def test_pointers_of_git_lfs_are_told(
    originals: dict[str, Path], tmp_path: Path, form: str, name: str
) -> None:
    folder = Path(shutil.copytree(originals[form], tmp_path / "source"))
    (path,) = folder.glob(name)
    path.write_bytes(POINTER)
    with pytest.raises(ValueError, match="is a Git LFS pointer.*: run git lfs pull in") as error:
        load(folder)
    check_message(str(error.value), str(path))


def test_a_converted_models_pointers_are_told(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = convert(str(originals["t5_bin_shards"]), tmp_path / "made")
    (folder / "weights.npz").write_bytes(POINTER)
    with pytest.raises(ValueError, match=r"weights\.npz is a Git LFS pointer.*: run git lfs pull"):
        load(folder)
    (folder / "spiece.model").unlink()
    (folder / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(ValueError, match=r"tokenizer\.json is a Git LFS pointer"):
        load_tokenizer(folder)


def test_an_adapter_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="it has no config.json, but an adapter's settings"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "longt5"}, "this is a longt5"),
        ({"model_type": "switch_transformers"}, "this is a switch_transformers"),
        ({"model_type": None}, "this is a model of unknown type"),
        ({"architectures": ["T5EncoderModel"]}, "this is a T5EncoderModel"),
        ({"architectures": ["T5ForQuestionAnswering"]}, "this is a T5ForQuestionAnswering"),
        ({"architectures": "T5Model"}, "this is a T5Model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantized by gptq"),
        ({"quantization_config": 4}, "its weights are quantized by another program"),
        ({"d_model": None}, "d_model in config.json is missing, expected a positive integer"),
        ({"num_layers": 2000}, "num_layers in config.json is 2000, expected at most 256"),
        ({"relative_attention_num_buckets": 1}, "has 1 buckets up to a distance of 128"),
        ({"relative_attention_num_buckets": 33}, "has 33 buckets up to a distance of 128"),
        ({"relative_attention_max_distance": 16}, "has 32 buckets up to a distance of 16"),
        ({"quantization": {"bits": 8.0}}, "quantization must be to 4 or 8 bits, got 8.0"),
        (
            {"quantization": {"bits": 8, "keep_wo": "no"}},
            "keep_wo and embeddings must be true or false, got 'no' and True",
        ),
        ({"num_heads": "12"}, "num_heads in config.json is '12', expected a positive integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in config.json is 'no', expected"),
        ({"quantization": {"bits": 3}}, "quantization must be to 4 or 8 bits, got 3"),
        ({"quantization": {"bits": 4, "group_size": 7}}, "32, 64 or 128 weights, got 7"),
        ({"quantization": {"bites": 4}}, "quantization in config.json is {'bites': 4}"),
        ({"quantization": [4]}, r"quantization in config.json is \[4\]"),
    ],
)
def test_other_models_are_refused_by_their_config_alone(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """There are no weights here, so that none can have been read."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"} | sizes | changes))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


def test_embeddings_of_two_kinds_are_refused(madlad: Path) -> None:
    path = madlad / "model.safetensors"
    tensors = load_file(path)
    tensors["decoder.embed_tokens.weight"][3, 3] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match="decoder.embed_tokens.weight differs from encoder.embed"):
        open_checkpoint(madlad)


def test_the_decoders_embedding_alone_will_do(madlad: Path) -> None:
    path = madlad / "model.safetensors"
    before = open_checkpoint(madlad).tensors["shared.weight"].read().copy()
    tensors = load_file(path)
    del tensors["encoder.embed_tokens.weight"]
    save_file(tensors, path)
    assert (open_checkpoint(madlad).tensors["shared.weight"].read() == before).all()
    del tensors["decoder.embed_tokens.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match="has no tensor shared.weight, expected one of shape"):
        open_checkpoint(madlad)


def test_depths_out_of_proportion_are_refused_at_once(sharded: Path, tmp_path: Path) -> None:
    """Whether they come from a config of our own, or from the name of a tensor."""
    folder = convert(str(sharded), tmp_path / "out")
    edit_json(folder / "config.json", num_layers=256)
    started = time.perf_counter()
    with pytest.raises(ValueError, match="has no tensor encoder.layers"):
        open_checkpoint(folder)
    path = tmp_path / "source" / "model.safetensors"
    tensors = {"encoder.block.999999999.layer.0.layer_norm.weight": mx.zeros(2)}
    for piece in sharded.glob("model*"):
        piece.unlink()
    mx.save_safetensors(str(path), tensors)
    with pytest.raises(ValueError, match="has no tensor shared.weight"):
        open_checkpoint(sharded)
    assert time.perf_counter() - started < 5


def test_the_index_says_which_shard_a_tensor_is_in(sharded: Path) -> None:
    before = open_checkpoint(sharded).tensors["shared.weight"].read().copy()
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    tensors = load_file(last)
    save_file(tensors | {"shared.weight": torch.zeros(320, 24)}, last)
    assert (open_checkpoint(sharded).tensors["shared.weight"].read() == before).all()
    assert before.any()


def test_embeddings_without_a_shape_are_refused(madlad: Path) -> None:
    path = madlad / "model.safetensors"
    scalars = dict.fromkeys(("shared.weight", "encoder.embed_tokens.weight"), torch.tensor(1.0))
    save_file(load_file(path) | {n: t.clone() for n, t in scalars.items()}, path)
    with pytest.raises(ValueError, match="differs from shared.weight"):
        open_checkpoint(madlad)
    tensors = load_file(path)
    del tensors["decoder.embed_tokens.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"shared.weight has shape \(\), expected \(320, 24\)"):
        open_checkpoint(madlad)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_of_any_depth_is_refused(sharded: Path, name: str) -> None:
    (sharded / name).write_text("[" * 200_000)
    with pytest.raises(ValueError, match=f"{name} is not JSON"):
        convert(str(sharded), sharded.parent / "out")


def test_sizes_out_of_proportion_take_no_memory(sharded: Path, tmp_path: Path) -> None:
    folder = convert(str(sharded), tmp_path / "out")
    for name in ("d_model", "d_ff", "vocab_size", "num_heads", "relative_attention_num_buckets"):
        edited = Path(shutil.copytree(folder, tmp_path / name))
        edit_json(edited / "config.json", **{name: 2**24})
        with pytest.raises(ValueError, match="shape|in config.json"):
            open_checkpoint(edited)


def test_config_goes_to_json_and_back() -> None:
    config = T5Config(
        d_model=64, d_kv=4, d_ff=64, num_heads=2, num_layers=1, num_decoder_layers=2,
        vocab_size=9, bias_per_layer=True, n_positions=77,
    )  # fmt: skip
    assert T5Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
