"""Writes model folders: config.json, weights.npz and tokenizer files, whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..files import replacing_folder
from .tensors import NPY, NUMPY, Shape

BUSY = "another conversion is at work on it: wait for it to end, or choose another --output"


def check_replaceable(folder: Path) -> None:
    """Refuse to write where there is anything but a model folder."""
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{folder} is the current folder: choose another --output")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "weights.npz").exists():
        raise ValueError(f"{folder} exists and is not a converted model: choose another --output")
    if others := sorted(path.name for path in folder.iterdir() if path.is_dir()):
        raise ValueError(f"{folder} also holds {others[0]}: choose another --output")


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[NewTensor],
    tokenizer_files: Iterable[Path],
    *,
    num_bytes: int = 0,
) -> None:
    """Write a model folder, whole or not at all; an existing one is replaced at the end.

    The tensors are made and stored one at a time, and files are copied. Nothing is written where
    fewer than `num_bytes` are free, or over anything but a model folder.
    """
    check_replaceable(folder)
    with replacing_folder(folder, BUSY) as new:
        free = shutil.disk_usage(new).free
        if free < num_bytes:
            lack = f"it takes {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
            advice = "free some, or choose another --output"
            raise OSError(errno.ENOSPC, f"No space left on device: {lack}; {advice}")
        write_npz(new / "weights.npz", tensors)
        for path in tokenizer_files:
            shutil.copyfile(path, new / path.name)
        text = json.dumps(config, indent=2) + "\n"
        (new / "config.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write; its blocks are C-contiguous arrays of its rows, in order."""

    name: str
    shape: Shape
    dtype: mx.Dtype
    blocks: Iterable[np.ndarray]


def write_npz(path: Path, tensors: Iterable[NewTensor]) -> None:
    """Write a .npz file one tensor at a time; the same weights give the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for tensor in tensors:
            member = zipfile.ZipInfo(f"{tensor.name}.npy")  # in 1980, so that times do not differ
            size = member.file_size = math.prod(tensor.shape) * tensor.dtype.size
            with archive.open(member, "w") as stream:
                described = {"descr": NPY[tensor.dtype], "fortran_order": False}
                np.lib.format.write_array_header_1_0(stream, described | {"shape": tensor.shape})
                for block in tensor.blocks:
                    assert block.dtype == NUMPY[tensor.dtype]
                    stream.write(block.data)
                    size -= block.nbytes
            assert size == 0, (tensor.name, size)
