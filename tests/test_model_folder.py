"""Folders of models: where they are, what they say, and what is refused before weights are read."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, PropertyMock

from speculative_t5 import SpeculativeDecoder, device, load
from speculative_t5.checkpoints import (
    ModelFolder,
    default_type_of,
    dtype_name,
    locate,
    model_folder,
    read_task,
    save_draft,
)
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.inspection import as_listing, inspect, list_models
from speculative_t5.distill import DistillOptions, new_draft
from speculative_t5.generation import process_facts
from speculative_t5.libraries import NATIVE_SWITCH
from speculative_t5.models import T5Config
from speculative_t5.tokenizers import load_tokenizer

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import POINTER, edit_tensors, opened, refused
from commands import Call
from conftest import REPOSITORY, V1_0, V1_1, edit_json, write_checkpoint
from families import write_family

SHIPPED = {"correct-base", "correct-draft", "correct-small"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of a current folder without models, for a user who has converted none."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    monkeypatch.delenv(model_folder.WEIGHTS_VARIABLE, raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path


def put(folder: Path, name: str = "model") -> Path:
    """Make a folder that looks like a model's."""
    folder = folder / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.npz").touch()
    return folder


def test_shipped_models_are_found(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout beside the package, in an installed package inside of it."""
    assert {folder.name for folder in model_folder.model_folders()} == SHIPPED
    package = elsewhere / "site-packages" / "speculative_t5"
    put(elsewhere / "site-packages" / "weights", "of-another-package")
    shutil.copytree(REPOSITORY / "weights", package / "weights")
    monkeypatch.setattr(model_folder, "PACKAGE_FOLDER", package)
    monkeypatch.setattr(model_folder, "CHECKOUT_FOLDER", None)
    assert {folder.name for folder in model_folder.model_folders()} == SHIPPED
    assert model_folder.find_folder("correct-base") == package / "weights" / "correct-base"


def test_a_name_is_looked_up_in_order(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = put(elsewhere / "named")
    (named / "weights.npz").rename(named / "model.safetensors")  # the kind of model is no matter
    here = put(Path("weights"))
    user = put(elsewhere / "user" / "speculative_t5" / "weights")
    monkeypatch.setenv(model_folder.WEIGHTS_VARIABLE, str(elsewhere / "named"))
    Path("model").mkdir()  # such as the checkpoint that a model was converted from
    for folder in (named, here, user):
        assert model_folder.find_folder("model") == folder
        shutil.rmtree(folder)
    put(Path("weights"))
    for name, found in (("model", Path("model")), ("other", None)):
        Path("model/weights.npz").touch()
        assert model_folder.find_folder(name) == found


def test_new_models_go_to_the_first_folder(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = elsewhere / "user" / "speculative_t5" / "weights"
    assert model_folder.new_folder("new") == user / "new"
    with monkeypatch.context() as homeless:
        homeless.setattr("platformdirs.user_data_path", Mock(side_effect=RuntimeError("no home")))
        assert model_folder.new_folder("new") == Path("weights/new")
        assert len(model_folder.weights_folders()) == 2
    monkeypatch.setenv(model_folder.WEIGHTS_VARIABLE, str(elsewhere / "named"))
    assert model_folder.new_folder("new") == elsewhere / "named" / "new"


def test_a_draft_is_looked_for_beside_its_target(elsewhere: Path) -> None:
    target = put(elsewhere / "copied", "correct-base")
    edit_json(target / "config.json", draft="correct-small")
    shipped = REPOSITORY / "weights" / "correct-small"
    assert model_folder.named_draft(ModelFolder(target)) == shipped
    beside = put(elsewhere / "copied", "correct-small")
    assert model_folder.named_draft(ModelFolder(target)) == beside
    assert model_folder.named_draft(locate("correct-base")) == shipped
    assert model_folder.named_draft(locate("correct-small")) is None
    for draft in ("not-here", "../correct-small", "", 3, None):
        edit_json(target / "config.json", draft=draft)
        assert model_folder.named_draft(ModelFolder(target)) is None


def test_a_model_may_have_a_least_probability(elsewhere: Path) -> None:
    config = put(elsewhere) / "config.json"
    for found in (None, 0, 0.25, 1):
        edit_json(config, min_probability=found)
        assert ModelFolder(config.parent).min_probability == found
    for wrong in (1.5, -1, "0.5", True, [0.5], float("nan")):
        edit_json(config, min_probability=wrong)
        with refused("min_probability"):
            _ = ModelFolder(config.parent).min_probability


def test_an_unreadable_folder_is_skipped(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (put(elsewhere / "user" / "speculative_t5" / "weights", "hidden") / "weights.npz").unlink()
    denied = PropertyMock(side_effect=PermissionError(13, "denied"))
    monkeypatch.setattr(ModelFolder, "weights", denied)
    assert {folder.name for folder in model_folder.model_folders()} == SHIPPED


# One of t5-small's, and two of our own.
TASKS: dict[str, Any] = {
    "summarization": {
        "early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30,
        "no_repeat_ngram_size": 3, "num_beams": 4, "prefix": "summarize: ",
    },
    "stories": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "forced_bos_token_id": 7},
    "groups": {"num_beam_groups": 2, "num_beams": 4},
}  # fmt: skip


def test_a_tasks_options_come_over_those_for_all_prompts(tmp_path: Path) -> None:
    """Lengths are counted without the start token; neutral values of other options are taken."""
    config = {"model_type": "t5", "is_encoder_decoder": True, "task_specific_params": TASKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder, defaults = tmp_path, tmp_path / "generation_config.json"
    defaults.write_text('{"eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 40, "top_k": 9}')
    assert read_task(folder).options == {"max_tokens": 40}
    found = read_task(folder, "stories")
    assert found.prefix is None
    assert found.options == {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "forced_tokens": (7,),
        "max_tokens": 40,
    }
    raw = {"min_p": 0.0, "sequence_bias": [], "top_h": None, "stop_strings": ["\n"]}
    defaults.write_text(json.dumps(raw))
    assert read_task(folder).options == {"stop": ["\n"]}
    defaults.unlink()
    found = read_task(folder, "summarization")
    assert found.prefix == "summarize: "
    assert found.options == {
        "num_beams": 4,
        "length_penalty": 2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 3,
        "max_tokens": 199,
        "min_tokens": 29,
    }
    for task, message in (("summarisation", "summarization"), ("groups", "num_beam_groups 2")):
        with refused(message):
            read_task(folder, task)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("umt5", {"max_tokens": 19}),
        ("t5gemma", {"max_tokens": 19}),
        ("t5gemma2", {"max_tokens": 19}),
        ("gpt2", {}),
    ],
)
def test_lengths_hold_unless_they_include_the_prompt(
    tmp_path: Path, kind: str, options: dict[str, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "generation_config.json").write_text('{"max_length": 20}')
    assert read_task(tmp_path).options == options


@pytest.mark.cpu
def test_a_command_takes_a_tasks_options_and_says_so(
    place: Path, tmp_path: Path, call: Call
) -> None:
    shutil.copytree(place / "weights" / "target", tmp_path, dirs_exist_ok=True)
    tasks = {"beams": {"num_beams": 3, "max_length": 8, "prefix": "correct: "}}
    edit_json(tmp_path / "config.json", task_specific_params=tasks)
    text = "The old man sat by the sea."
    typed = ("--model", str(tmp_path), "--task", "beams", "--prompt", text)
    done = call(*typed)
    assert done.err[0] == "task beams: num_beams 3, max_tokens 7, prefix 'correct: '"
    assert done.err[1].endswith("cut at --max-tokens 7")
    decoder = SpeculativeDecoder.from_pretrained(tmp_path)
    assert done.out == f"{decoder.generate(text, num_beams=3, max_tokens=7).text}\n"
    done = call(*typed, "--max-tokens", "9")
    assert done.err[0] == "task beams: num_beams 3, prefix 'correct: '"
    assert "cut at --max-tokens 7" not in done.err[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    source = tmp_path_factory.mktemp("source") / "source"
    write_checkpoint(source, V1_0 | {"d_model": 64, "d_ff": 128}, spiece)
    return source


def test_a_quantized_model_is_reported_with_all_its_parameters(
    source: Path, elsewhere: Path
) -> None:
    found = inspect(str(source))
    quantized = inspect(str(convert(str(source), Path("out"), quantize=4)))
    assert quantized.config.quantization and quantized.num_parameters == found.num_parameters
    assert f"  quantized   to {quantized.config.quantization}" in [*as_listing(quantized)]


def test_drafts_share_the_tokenizer_and_are_smaller(
    source: Path, spiece: bytes, elsewhere: Path
) -> None:
    """Those that the target's folder names, or that were distilled for it, come first."""
    one = {"num_layers": 1, "num_decoder_layers": 1}
    for name, shape in (("small", one), ("tiny", one | {"d_ff": 20})):
        write_checkpoint(Path(name), V1_0 | shape, spiece)
        convert(name)
    convert(str(source), Path("weights/itself"))
    write_family(Path("other"), "byt5")
    convert("other")
    Path("weights/broken").mkdir()
    Path("weights/broken/weights.npz").write_text("")
    found = inspect(str(source))
    assert [draft.folder.name for draft in found.drafts] == ["tiny", "small"]
    assert found.drafts[1].num_parameters == inspect("small").num_parameters < found.num_parameters
    target: Any = load("itself")[0]
    save_draft(Path("weights/shared"), new_draft(target, DistillOptions(layers=3)), "itself")
    edit_json(Path("weights/itself/config.json"), draft="small")
    listed = {model.folder.name: model.drafts for model in list_models()}
    assert listed["itself"] == ("small", "shared", "tiny")
    assert listed["small"] == ("tiny",) and listed["tiny"] == ()


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
DEEP = "encoder.block.9999999.layer.0.layer_norm.weight"
of_madlad, of_converted = (
    pytest.mark.parametrize("folder", [name], indirect=True) for name in ("madlad400", "converted")
)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = next(folder.glob("*.index.json"))
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def flip_a_byte(folder: Path) -> None:
    raw = (folder / "weights.npz").read_bytes()
    (folder / "weights.npz").write_bytes(raw[:2000] + bytes([raw[2000] ^ 255]) + raw[2001:])


CONFIGS = ("config.json", "generation_config.json")
# How each folder may be spoiled, and the message.
SPOILED: dict[str, list[tuple[Any, str]]] = {
    "flan_t5": [
        (lambda s: shard(s).unlink(), r"model-00002-of-\d+.safetensors, named by .*, is missing"),
        (lambda s: shard(s).write_bytes(shard(s).read_bytes()[:-9]), "truncated or damaged"),
        (lambda s: shard(s).write_bytes(POINTER), "model-00002-.* is a Git LFS pointer.*: run git"),
        (
            lambda s: edit_index(s, lambda m: m.update(more=shard(s).name)),
            "says that more is in model-00002.*, which does not have it",
        ),
        (
            lambda s: edit_index(s, lambda m: m.update(more="/etc/passwd")),
            "names the shard '/etc/passwd', expected a file's name alone",
        ),
        (lambda s: edit_index(s, lambda m: m.clear()), "is not an index of shards"),
        (lambda s: next(s.glob("*.index.json")).write_text("[]"), "holds a list, expected an obj"),
        (
            lambda s: [path.rename(s / "tf_model.h5") for path in s.glob("model*")],
            "expected model.safetensors .*, found tf_model.h5",
        ),
        (lambda s: (s / "config.json").unlink(), "is not a model folder: it has no config.json"),
        (lambda s: (s / "config.json").write_text("[" * 200_000), "config.json is not JSON"),
        (
            lambda s: (s / "tokenizer_config.json").write_text('{"extra_ids": 1000000000}'),
            "extra_ids in .* is 1000000000, expected an integer from 0 to 10000",
        ),
        (lambda s: (s / "spiece.model").unlink(), "no tokenizer in"),
        (
            lambda s: [edit_json(s / name, eos_token_id=5) for name in CONFIGS],
            "has the EOS id 1, the model 5",
        ),
    ],
    "converted": [
        (lambda f: (f / "weights.npz").unlink(), "no weights in .*: expected model.safetensors"),
        (lambda f: (f / "weights.npz").write_bytes(POINTER), "npz is a Git LFS pointer.*: run git"),
        (lambda f: np.save(f / "a.npy", 1) or (f / "a.npy").rename(f / "weights.npz"), "damaged"),
        (lambda f: np.savez(f / "weights.npz", words=np.array(["these"])), "of floats, found <U5"),
        (flip_a_byte, "weights.npz is truncated or damaged"),
        (lambda f: edit_json(f / "config.json", model_type="gpt2"), "for a GPT-2"),
        (lambda f: edit_json(f / "config.json", num_layers=256), "has no tensor encoder.layers"),
        *(
            (lambda f, name=name: edit_json(f / "config.json", **{name: 2**24}), "shape|in config.")
            for name in "d_model d_ff vocab_size num_heads relative_attention_num_buckets".split()
        ),
    ],
    "madlad400": [
        (
            lambda f: edit_tensors(
                f, lambda t: t.update(x=t.pop("encoder.final_layer_norm.weight"))
            ),
            "has no tensor encoder.final_layer_norm.weight, expected one of shape",
        ),
        (
            lambda f: edit_tensors(
                f, lambda t: t.update({DEEP: torch.ones(2)})
            ),  # nor is the depth
            r"has no tensor encoder.block.2.layer",
        ),
    ],
}
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
        (
            {"model_type": "bart", "is_encoder_decoder": True},
            "this is a bart .*, expected one of the T5 family",
        ),
        ({"architectures": ["T5ForTokenClassification"]}, "this is a T5ForTokenClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantized by gptq"),
        ({"d_model": None}, "d_model in config.json is missing, expected a positive integer"),
        ({"vocab_size": 10**12}, "vocab_size in config.json"),
        ({"num_layers": 2000}, "num_layers .* is 2000, expected a positive integer up to 256"),
        ({"feed_forward_proj": "x"}, "feed_forward_proj"),
        ({"eos_token_id": [1, 9]}, r"eos_token_id .* is \[1, 9\], expected an id from 0 to 8"),
        ({"decoder_start_token_id": 999}, "is 999, expected an id from 0 to 8"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in config.json is 'no', expected"),
        ({"relative_attention_num_buckets": 1}, "has 1 buckets up to a distance of 128"),
        ({"quantization": {"bits": 8.0}}, "must be to 2, 3, 4, 5, 6 or 8 bits, got 8.0"),
        ({"quantization": [4]}, r"quantization in config.json is \[4\]"),
    ]
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 9}
    for changes, message in bad:
        config = {"model_type": "t5"} | sizes | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        with refused(message, tmp_path):
            opened(tmp_path)


@of_madlad
def test_different_embeddings_are_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[DECODERS][3].add_(1))
    with refused("decoder.embed_tokens.weight differs from encoder.embed"):
        opened(folder)
    edit_tensors(folder, lambda t: t.pop(ENCODERS))
    assert embedding(folder).any(), "the decoder's alone suffices"
    edit_tensors(folder, lambda t: t.pop(DECODERS))
    with refused("has the tensor lm_head.weight and no embedding"):
        opened(folder)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
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


@of_converted
def test_float16_warns_where_it_overflows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NATIVE_SWITCH, "0")  # the C parts compute in float32
    with pytest.warns(UserWarning, match="float16 overflows"):
        assert load(folder, dtype=mx.float16)[0].dtype == mx.float16


WIDE = V1_0 | {"d_model": 32, "d_kv": 16, "d_ff": 64}  # which can be quantized


@pytest.mark.cpu  # it says itself which device there is
@pytest.mark.parametrize(
    ("shape", "stored", "quantize", "expected", "reason"),
    [
        (V1_0, "float16", None, mx.float16, "as stored"),
        (WIDE, "float16", 8, mx.float16, "as stored"),
        (V1_0, "bfloat16", None, mx.bfloat16, "half the size"),
        (V1_0, "float32", None, mx.bfloat16, "half the size"),
        (V1_1, "float16", None, mx.bfloat16, "float16 overflows"),
    ],
)
def test_a_gpu_keeps_float16_where_it_does_not_overflow(
    elsewhere: Path,
    spiece: bytes,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    stored: str,
    quantize: int | None,
    expected: mx.Dtype,
    reason: str,
) -> None:
    write_checkpoint(Path("source"), shape, spiece)
    convert("source", Path("weights/model"), dtype=stored, quantize=quantize, group_size=32)
    folder = ModelFolder(Path("weights/model"))
    assert load("model")[0].dtype == default_type_of(folder).dtype == mx.float32
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    found = default_type_of(folder)
    assert found.dtype == load("model")[0].dtype == expected and reason in found.reason
    assert process_facts("model", None)["the type to compute in"] == dtype_name(expected)
    assert load("model", dtype=mx.float32)[0].dtype == mx.float32
    listed = {model.folder.name: model.default_type for model in list_models()}
    assert listed["model"] == found and listed["correct-draft"] is None
    computes = f"  computes    in {dtype_name(expected)} on this device by default: "
    assert any(line.startswith(computes) for line in as_listing(inspect("weights/model")))
