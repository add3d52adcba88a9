"""Where model folders are found by name, and where new ones are written."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from ..errors import shown
from ..models import DRAFT_TYPE
from .folder import find_weights, read_json

VARIABLE = "SPECULATIVE_T5_WEIGHTS"  # names the folder that comes before all others
PACKAGE = Path(__file__).parent.parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "convert.py").is_file() else None


def weights_folders() -> list[Path]:
    """Return the folders of model folders, in the order in which a name is looked up.

    They are the one in the environment variable SPECULATIVE_T5_WEIGHTS, `weights` in the current
    folder, the user's own, and the one with the shipped models.
    """
    named = os.environ.get(VARIABLE)
    users = _users_folder()
    shipped = (CHECKOUT or PACKAGE) / "weights"
    first = [Path(named)] if named else []
    return [*first, Path("weights"), *([users] if users else []), shipped]


def new_folder(name: str) -> Path:
    """Return where a model of that name is written, so that any later command finds it.

    That is in the folder of SPECULATIVE_T5_WEIGHTS, or else in `weights` if the current folder has
    one, or else in the user's own.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named) / name
    users = _users_folder()
    return (users if users and not Path("weights").is_dir() else Path("weights")) / name


def name_of_folder(folder: Path) -> str:
    """Return the name of a model in an absolute path: that of its folder.

    Every run of transformers' Trainer has a checkpoint-500, so there the run's folder comes first.
    """
    of_a_run = re.fullmatch(r"checkpoint-\d+", folder.name) and folder.parent.name
    return f"{folder.parent.name}-{folder.name}" if of_a_run else folder.name


def find_folder(name_or_path: str | Path) -> Path | None:
    """Return the model folder with that path, or that name in `weights_folders`, if any."""
    path, found = Path(name_or_path), model_folders()
    candidates = {weights / name_or_path for weights in weights_folders()}
    named = [folder for folder in found if folder in candidates]
    # A checkpoint may lie beside weights/ under the name of its conversion, which then wins.
    if path.is_dir() and ((path / "weights.npz").exists() or not named):
        return path
    if named:
        return named[0]
    for folder in found:
        if str(name_or_path) == origin(folder).get("repository"):
            return folder
    return None


def model_folders() -> list[Path]:
    """Return all model folders in `weights_folders`."""
    found: dict[Path, Path] = {}
    for weights in weights_folders():
        try:
            for folder in sorted(path.parent for path in weights.glob("*/config.json")):
                if (folder / "weights.npz").is_file() or find_weights(folder):
                    found.setdefault(folder.resolve(), folder)
        except PermissionError:  # the home of another user, as in some containers
            continue
    return list(found.values())


def origin(folder: Path) -> dict[str, Any]:
    """Return what a model folder was converted from, and how; {} if it does not say."""
    stored = _from_config(folder, "converted_from")
    return stored if isinstance(stored, dict) else {}


def named_draft(model: str | Path) -> Path | None:
    """Find the draft that a target's config.json names, beside the target or by name, if any."""
    folder = find_folder(model)
    name = draft_name(folder) if folder else None
    if folder is None or name is None:
        return None
    beside = folder.resolve().parent / name
    return beside if beside.is_dir() else find_folder(name)


def is_draft(folder: Path) -> bool:
    """Whether a folder holds a sharing draft, no model of its own; False if it cannot be read."""
    return bool(_from_config(folder, "model_type") == DRAFT_TYPE)


def draft_name(folder: Path) -> str | None:
    """Return the name of a draft in a folder's config.json, its `draft`; never a path."""
    name = _from_config(folder, "draft")
    plain = isinstance(name, str) and name not in ("", "..") and name == Path(name).name
    return name if plain else None


def min_probability(folder: Path) -> float | None:
    """Return the `min_probability` in a folder's config.json, if any; see `rewrite`.

    Raises:
        ValueError: If it is not a number from 0 to 1.
    """
    found = _from_config(folder, "min_probability")
    if found is not None and (type(found) not in (int, float) or not 0 <= found <= 1):
        raise ValueError(
            f"min_probability in {folder / 'config.json'} is {shown(found)}, expected a number "
            "from 0 to 1"
        )
    return None if found is None else float(found)


def known_names() -> str:
    """List the names of all model folders for a message."""
    return ", ".join(sorted({folder.name for folder in model_folders()})) or "none"


def convert_command(arguments: Sequence[str] = ("--model", "NAME_OR_PATH")) -> str:
    """Return the command that converts a model, as the user would type it here."""
    program = "python convert.py" if CHECKOUT else "speculative-t5 convert"
    return " ".join((program, *arguments))


def _users_folder() -> Path | None:
    """Return the user's own folder; None for a user without a home, as in some containers."""
    try:
        return user_data_path("speculative_t5", appauthor=False) / "weights"
    except RuntimeError:
        return None


def _from_config(folder: Path, key: str) -> Any:
    try:
        return read_json(folder / "config.json").get(key)
    except (OSError, ValueError):  # opening the folder will raise it
        return None
