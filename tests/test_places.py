"""Where models are found by name, from any folder, and where converted ones go."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from speculative_t5 import load
from speculative_t5.checkpoints import places

import pytest
from conftest import REPOSITORY, V1_0, edit_json, write_checkpoint

SHIPPED = {"correct-base", "correct-small"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder without models, of a user who has converted none."""
    monkeypatch.setattr(places, "_users_folder", lambda: tmp_path / "user" / "weights")
    monkeypatch.delenv(places.VARIABLE, raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path


def put(folder: Path, name: str = "model") -> Path:
    """What looks like a model folder."""
    folder = folder / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "weights.npz").touch()
    return folder


def test_shipped_models_are_found_from_any_folder(elsewhere: Path) -> None:
    assert {folder.name for folder in places.model_folders()} == SHIPPED


def test_an_installed_package_has_its_models_inside(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = elsewhere / "site-packages" / "speculative_t5"
    put(elsewhere / "site-packages" / "weights", "of-another-package")
    shutil.copytree(REPOSITORY / "weights", package / "weights")
    monkeypatch.setattr(places, "PACKAGE", package)
    monkeypatch.setattr(places, "CHECKOUT", None)
    assert {folder.name for folder in places.model_folders()} == SHIPPED
    assert places.find_folder("correct-base") == package / "weights" / "correct-base"


def test_a_name_is_looked_up_in_order(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = put(elsewhere / "named")
    here = put(Path("weights"))
    user = put(elsewhere / "user" / "weights")
    monkeypatch.setenv(places.VARIABLE, str(elsewhere / "named"))
    for folder in (named, here, user):
        assert places.find_folder("model") == folder
        shutil.rmtree(folder)
    assert places.find_folder("model") is None


def test_new_models_go_where_later_commands_look(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert places.new_folder("new") == elsewhere / "user" / "weights" / "new"
    Path("weights").mkdir()
    assert places.new_folder("new") == Path("weights/new")
    monkeypatch.setenv(places.VARIABLE, str(elsewhere / "named"))
    assert places.new_folder("new") == elsewhere / "named" / "new"


def test_a_user_without_a_home_has_the_current_folder(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_users_folder", lambda: None)
    assert places.new_folder("new") == Path("weights/new")
    assert len(places.weights_folders()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no XDG_DATA_HOME")
def test_the_users_folder_is_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert places._users_folder() == tmp_path / "speculative_t5" / "weights"


def test_without_a_home_there_is_no_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(places, "user_data_path", fail)
    assert places._users_folder() is None


def test_a_converted_model_is_found_from_another_folder(
    elsewhere: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculative_t5.checkpoints.conversion import convert

    write_checkpoint(elsewhere / "tiny", V1_0, spiece)
    folder = convert(str(elsewhere / "tiny"))
    (elsewhere / "second").mkdir()
    monkeypatch.chdir(elsewhere / "second")
    assert places.find_folder("tiny") == folder
    assert load("tiny")[0].config.d_model == V1_0["d_model"]


def test_a_draft_is_looked_for_beside_its_target(elsewhere: Path) -> None:
    target = put(elsewhere / "copied", "correct-base")
    edit_json(target / "config.json", draft="correct-small")
    shipped = REPOSITORY / "weights" / "correct-small"
    assert places.named_draft(target) == shipped
    beside = put(elsewhere / "copied", "correct-small")
    assert places.named_draft(target) == beside
    assert places.named_draft("correct-base") == shipped
    assert places.named_draft("correct-small") is None
    assert places.named_draft("google/flan-t5-small") is None


@pytest.mark.parametrize("draft", ["not-here", "../correct-small", "", 3, None])
def test_a_draft_that_is_not_here_is_none(elsewhere: Path, draft: object) -> None:
    target = put(elsewhere / "copied", "target")
    edit_json(target / "config.json", draft=draft)
    assert places.named_draft(target) is None


def test_the_command_to_convert_is_named_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.convert_command() == "python convert.py --model NAME_OR_PATH"
    monkeypatch.setattr(places, "CHECKOUT", None)
    assert places.convert_command(["--model", "x"]) == "speculative-t5 convert --model x"


def test_a_folder_that_may_not_be_read_is_passed_over(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = put(elsewhere / "user" / "weights", "hidden")
    (hidden / "weights.npz").unlink()

    def refuse(folder: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(places, "find_weights", refuse)
    assert {folder.name for folder in places.model_folders()} == SHIPPED


def test_an_earlier_folder_wins_whatever_kind_of_model_it_has(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(Path("weights"))
    named = put(elsewhere / "named")
    (named / "weights.npz").rename(named / "model.safetensors")
    monkeypatch.setenv(places.VARIABLE, str(elsewhere / "named"))
    assert places.find_folder("model") == named


def test_a_conversion_wins_over_its_checkpoint_in_the_current_folder(elsewhere: Path) -> None:
    Path("model").mkdir()
    assert places.find_folder("model") == Path("model")
    converted = put(Path("weights"))
    assert places.find_folder("model") == converted
    Path("model/weights.npz").touch()
    assert places.find_folder("model") == Path("model")
