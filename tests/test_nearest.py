"""The name that was probably meant is in the error for one that no model has."""

import shutil
from pathlib import Path

from speculative_t5 import load
from speculative_t5.checkpoints import convert
from speculative_t5.checkpoints.nearest import nearest

import pytest
from checkpoints import refused
from commands import Call
from conftest import edit_json
from families import write_family
from huggingface_hub import constants

MEANT = {
    "corect-base": "correct-base",
    "correct_base": "correct-base",
    "Correct-Base": "correct-base",
    "correctbase": "correct-base",
    "weights/my-modle": "weights/my-model",
    "my-modl": "my-model",
    "someone/origin": "someone/original",
    "orignal": "someone/original",
    "someone/cahced": "someone/cached",
    "google/flan-t5-smal": "google/flan-t5-small",
    "flan-t5-small": "google/flan-t5-small",
    "my-tt5-": "my-t5",
    "google/coedit-large": "grammarly/coedit-large",
    "t5gemma-2-4b": "google/t5gemma-2-4b-4b",
}
OTHERS = ("gpt2", "google/flan-t5-small", "my-model", "someone/cached", "", "x" * 5000, "../../a")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model under weights/, and a cache of the Hub with another."""
    write_family(tmp_path / "weights" / "my-model", "flan_t5")
    converted = tmp_path / "weights" / "third"
    shutil.copytree(tmp_path / "weights" / "my-model", converted)
    edit_json(converted / "config.json", converted_from={"repository": "someone/original"})
    shutil.copytree(converted, tmp_path / "my-t5")
    (tmp_path / "cache" / "models--someone--cached").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("models")
def test_a_slip_finds_the_name_that_is_meant() -> None:
    assert {name: nearest(name) for name in MEANT} == MEANT
    assert [nearest(name) for name in OTHERS] == [None] * len(OTHERS)


@pytest.mark.usefixtures("models")
def test_errors_have_the_nearest_name() -> None:
    for run in (load, convert):
        with refused("write correct-base if you meant that, or check the name", "'corect-base'"):
            run("corect-base")
        with refused("write my-model if you meant that", "'./my-modell'"):
            run("./my-modell")
    with refused("found: correct-base, .*HF_HUB_OFFLINE", "'nothing-like-it'"):
        load("nothing-like-it")


@pytest.mark.usefixtures("models")
def test_commands_have_the_nearest_name(call: Call) -> None:
    for command in ("--prompt=a", "doctor", "repl"):
        for option in ("--model", "--draft-model"):
            done = call(command, option, "corect-small")
            done.check_error("'corect-small'")
            assert "write correct-small if you meant that" in done.err[0]
