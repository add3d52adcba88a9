"""Hugging Face folders: config.json, and tensors in one file or in shards with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import first_line, printable, refuse_pointer, shown
from .tensors import Shape, StoredTensor, read_safetensors
from .torch_bin import read_bin

# Names of a Hugging Face checkpoint's weights, in order of preference.
TASKS = "task_specific_params"  # of a config.json
WEIGHTS = ("model.safetensors", "model.safetensors.index.json",
           "pytorch_model.bin", "pytorch_model.bin.index.json")  # fmt: skip
AGAIN = "download or convert the model again"


def read_json(path: Path, *, again: str = AGAIN) -> dict[str, Any]:
    """Read the object in a JSON file; refuse anything else, and say to do what `again` says."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; {again}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected an object: {again}")
    return raw


def check_shapes(
    where: Path,
    expected: Mapping[str, Shape],
    found: Mapping[str, Shape],
    kind: str,
    *,
    again: str = AGAIN,
) -> None:
    """Refuse tensors that are missing, misshapen or unknown to a model of that `kind`.

    The message says to do what `again` says.
    """
    advice = f"{again}, with its config.json"
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(
                f"{where} has no tensor {name}, expected one of shape {shape}: {advice}"
            )
        if tuple(found[name]) != tuple(shape):
            raise ValueError(f"{where}: {name} has shape {found[name]}, expected {shape}: {advice}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(
            f"{where} has tensors that a {kind} does not: {printable(unknown[0])}{more}; "
            "merge adapters into the model, or leave out what was added to it"
        )


def find_weights(folder: Path) -> Path | None:
    """Return the file of a Hugging Face checkpoint's weights, or their index, if there is one."""
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def read_index(path: Path) -> dict[str, str]:
    """Read the weight map of an index, names of tensors to names of files; refuse other paths."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(
            f"{path} is not an index of shards, as it has no weight_map: download it again"
        )
    for shard in shards.values():
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w.-]*", shard):
            raise ValueError(
                f"{path} names the shard {shown(shard)}, expected a file's name alone: "
                "put the shards beside it, and name them so"
            )
    return shards


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors; refuse a folder that lacks one."""
    path = find_weights(folder)
    if path is None:
        raise ValueError(_no_weights(folder))
    refuse_pointer(path)
    if path.suffix != ".json":
        return [path]
    shards = sorted({*read_index(path).values()})
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ValueError(f"{missing[0]}, named by {path}, is missing: download it to that folder")
    for shard in shards:
        refuse_pointer(folder / shard)
    return [folder / shard for shard in shards]


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Open all tensors of a Hugging Face checkpoint, by name; none is read yet."""
    read = {path.name: _read_file(path) for path in weight_files(folder)}
    index = find_weights(folder)
    assert index is not None
    if index.suffix != ".json":
        return read[index.name]
    shards = read_index(index)
    for name, shard in shards.items():
        if name not in read[shard]:
            raise ValueError(
                f"{index} says that {name} is in {shard}, which does not have it: "
                "download both again"
            )
    return {name: read[shard][name] for name, shard in shards.items()}


def _read_file(path: Path) -> dict[str, StoredTensor]:
    return read_bin(path) if path.suffix == ".bin" else read_safetensors(path)


def _no_weights(folder: Path) -> str:
    suffixes = (".safetensors", ".bin", ".npz", ".h5", ".msgpack", ".gguf", ".pt", ".ckpt")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    return (
        f"no weights in {folder}: expected model.safetensors or pytorch_model.bin, or one of them "
        f"in shards with its index.json, found {', '.join(others[:3]) or 'neither'}; "
        "download them, or save the model in that form"
    )
