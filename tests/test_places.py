"""Where models are found by name, and where converted ones are written."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock, PropertyMock

from speculative_t5.checkpoints import ModelFolder, model_folder

import pytest
from conftest import REPOSITORY, edit_json
from messages import check_message

SHIPPED = {"correct-base", "correct-draft", "correct-small"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of a current folder without models, for a user who has converted none."""
    monkeypatch.setattr(model_folder, "_users_folder", lambda: tmp_path / "user" / "weights")
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
    user = put(elsewhere / "user" / "weights")
    monkeypatch.setenv(model_folder.VARIABLE, str(elsewhere / "named"))
    for folder in (named, here, user):
        assert model_folder.find_folder("model") == folder
        shutil.rmtree(folder)
    assert model_folder.find_folder("model") is None


def test_new_models_go_to_the_first_folder(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as homeless:
        homeless.setattr(model_folder, "_users_folder", lambda: None)
        assert model_folder.new_folder("new") == Path("weights/new")
        assert len(model_folder.weights_folders()) == 2
    assert model_folder.new_folder("new") == elsewhere / "user" / "weights" / "new"
    Path("weights").mkdir()
    assert model_folder.new_folder("new") == Path("weights/new")
    monkeypatch.setenv(model_folder.VARIABLE, str(elsewhere / "named"))
    assert model_folder.new_folder("new") == elsewhere / "named" / "new"


def test_the_users_folder_is_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert model_folder._users_folder() == tmp_path / "speculative_t5" / "weights"
    monkeypatch.setattr(model_folder, "user_data_path", Mock(side_effect=RuntimeError("no home")))
    assert model_folder._users_folder() is None


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
        with pytest.raises(ValueError) as raised:
            _ = ModelFolder(elsewhere).min_probability
        check_message(str(raised.value), "min_probability")


def test_an_unreadable_folder_is_skipped(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (put(elsewhere / "user" / "weights", "hidden") / "weights.npz").unlink()
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
