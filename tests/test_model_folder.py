"""Folders of models: where they are found, what they say of themselves, and what they take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, PropertyMock

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import ModelFolder, model_folder, read_task, save_draft
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.inspection import inspect, list_models
from speculative_t5.distill import DistillOptions, new_draft
from speculative_t5.models.t5_session import read_sources

import mlx.core as mx
import pytest
from checkpoints import opened, refused
from commands import caller
from conftest import REPOSITORY, V1_0, edit_json, write_checkpoint
from families import write_family
from messages import check_message

SHIPPED = {"correct-base", "correct-draft", "correct-small"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of a current folder without models, for a user who has converted none."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    monkeypatch.delenv(model_folder.VARIABLE, raising=False)
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
    monkeypatch.setattr(model_folder, "PACKAGE", package)
    monkeypatch.setattr(model_folder, "CHECKOUT", None)
    assert {folder.name for folder in model_folder.model_folders()} == SHIPPED
    assert model_folder.find_folder("correct-base") == package / "weights" / "correct-base"


def test_a_name_is_looked_up_in_order(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = put(elsewhere / "named")
    (named / "weights.npz").rename(named / "model.safetensors")  # the kind of model is no matter
    here = put(Path("weights"))
    user = put(elsewhere / "user" / "speculative_t5" / "weights")
    monkeypatch.setenv(model_folder.VARIABLE, str(elsewhere / "named"))
    for folder in (named, here, user):
        assert model_folder.find_folder("model") == folder
        shutil.rmtree(folder)
    assert model_folder.find_folder("model") is None


def test_new_models_go_to_the_first_folder(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as homeless:
        no_home = Mock(side_effect=RuntimeError("no home"))
        homeless.setattr(model_folder, "user_data_path", no_home)
        assert model_folder.new_folder("new") == Path("weights/new")
        assert len(model_folder.weights_folders()) == 2
    user = elsewhere / "user" / "speculative_t5" / "weights"
    assert model_folder.new_folder("new") == user / "new"
    Path("weights").mkdir()
    assert model_folder.new_folder("new") == Path("weights/new")
    monkeypatch.setenv(model_folder.VARIABLE, str(elsewhere / "named"))
    assert model_folder.new_folder("new") == elsewhere / "named" / "new"


def test_a_draft_is_looked_for_beside_its_target(elsewhere: Path) -> None:
    target = put(elsewhere / "copied", "correct-base")
    edit_json(target / "config.json", draft="correct-small")
    shipped = REPOSITORY / "weights" / "correct-small"
    assert model_folder.named_draft(target) == shipped
    beside = put(elsewhere / "copied", "correct-small")
    assert model_folder.named_draft(target) == beside
    assert model_folder.named_draft("correct-base") == shipped
    assert model_folder.named_draft("correct-small") is None
    for draft in ("not-here", "../correct-small", "", 3, None):
        edit_json(target / "config.json", draft=draft)
        assert model_folder.named_draft(target) is None


def test_a_model_may_have_a_least_probability(elsewhere: Path) -> None:
    config = elsewhere / "config.json"
    config.write_text("{}")
    assert ModelFolder(elsewhere).min_probability is None
    for found in (0, 0.25, 1):
        edit_json(config, min_probability=found)
        assert ModelFolder(elsewhere).min_probability == found
    for wrong in (1.5, -1, "0.5", True, [0.5], float("nan")):
        edit_json(config, min_probability=wrong)
        with refused("min_probability"):
            _ = ModelFolder(elsewhere).min_probability


def test_an_unreadable_folder_is_skipped(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (put(elsewhere / "user" / "speculative_t5" / "weights", "hidden") / "weights.npz").unlink()
    denied = PropertyMock(side_effect=PermissionError(13, "denied"))
    monkeypatch.setattr(ModelFolder, "weights", denied)
    assert {folder.name for folder in model_folder.model_folders()} == SHIPPED


def test_a_conversion_wins_over_its_checkpoint_in_the_current_folder(elsewhere: Path) -> None:
    Path("model").mkdir()
    assert model_folder.find_folder("model") == Path("model")
    converted = put(Path("weights"))
    assert model_folder.find_folder("model") == converted
    Path("model/weights.npz").touch()
    assert model_folder.find_folder("model") == Path("model")


# One of t5-small's, and two of our own.
TASKS: dict[str, Any] = {
    "summarization": {
        "early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30,
        "no_repeat_ngram_size": 3, "num_beams": 4, "prefix": "summarize: ",
    },
    "stories": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "forced_bos_token_id": 7},
    "groups": {"num_beam_groups": 2, "num_beams": 4},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "t5", "is_encoder_decoder": True, "task_specific_params": TASKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    defaults = {"eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": 40, "top_k": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    return tmp_path


def test_a_tasks_options_come_over_those_for_all_prompts(folder: Path) -> None:
    """Lengths are counted without the start token; neutral values of other options are taken."""
    assert read_task(folder).options == {"max_tokens": 40}
    found = read_task(folder, "stories")
    assert found.prefix is None
    assert found.options == {
        "temperature": 0.7, "top_k": 9, "top_p": 0.9, "forced_tokens": (7,), "max_tokens": 40,
    }  # fmt: skip
    raw = {"min_p": 0.0, "sequence_bias": [], "top_h": None, "stop_strings": ["\n"]}
    (folder / "generation_config.json").write_text(json.dumps(raw))
    assert read_task(folder).options == {"stop": ["\n"]}
    (folder / "generation_config.json").unlink()
    found = read_task(folder, "summarization")
    assert found.prefix == "summarize: "
    assert found.options == {
        "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3,
        "max_tokens": 199, "min_tokens": 29,
    }  # fmt: skip
    for task, message in (("summarisation", "summarization"), ("groups", "num_beam_groups 2")):
        with refused(message):
            read_task(folder, task)


@pytest.mark.cpu
def test_a_command_takes_a_tasks_options_and_says_so(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "weights" / "target", tmp_path, dirs_exist_ok=True)
    tasks = {"beams": {"num_beams": 3, "max_length": 8, "prefix": "correct: "}}
    edit_json(tmp_path / "config.json", task_specific_params=tasks)
    call = caller(tmp_path, monkeypatch, capfd)
    text, model = "The old man sat by the sea.", str(tmp_path)
    done = call("--model", model, "--task", "beams", "--prompt", text)
    assert done.err[0] == "task beams: num_beams 3, max_tokens 7, prefix 'correct: '"
    assert done.err[1].endswith("cut at --max-tokens 7")
    expected = SpeculativeDecoder.from_pretrained(tmp_path).generate(
        text, num_beams=3, max_tokens=7
    )
    assert done.out == f"{expected.text}\n"
    done = call("--model", model, "--task", "beams", "--prompt", text, "--max-tokens", "9")
    assert done.err[0] == "task beams: num_beams 3, prefix 'correct: '"
    assert "cut at --max-tokens 7" not in done.err[1]
    done = call("--model", model, "--task", "beam", "--prompt", text)
    check_message(done.err[0].removeprefix("error: "))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    source = tmp_path_factory.mktemp("source") / "source"
    write_checkpoint(source, V1_0 | {"d_model": 64, "d_ff": 128}, spiece)
    return source


def test_reported_sizes_are_those_written(source: Path, elsewhere: Path) -> None:
    ways = [{}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": 8}, {"quantize": 4}]
    found = inspect(str(source))
    for reported, arguments in zip(found.sizes, ways, strict=True):
        named = [f"--{name} {value}" for name, value in arguments.items()] or ["as it is"]
        assert reported.options == named[0]
        folder = convert(str(source), Path("out"), **arguments, force=True)  # type: ignore
        tensors = opened(folder).tensors.values()
        assert reported.file == sum(tensor.nbytes for tensor in tensors)
        overhead = (folder / "weights.npz").stat().st_size - reported.file
        assert 0 < overhead < 500 * len(tensors)
    quantized = inspect(str(folder))
    assert quantized.config.quantization and not quantized.sizes
    assert quantized.num_parameters == found.num_parameters

    # To run it takes weights and caches.
    model = load(source, dtype=mx.float32)[0]
    sources = read_sources(model, [model.decoder], [[5] * 512])
    cross = sum(k.nbytes + v.nbytes for k, v in sources.layers)
    caches = cross // 512 * (512 + 256)
    assert found.sizes[0].memory["float32"] == 4 * found.num_parameters + caches


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
