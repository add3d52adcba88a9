"""Model folders: config.json, weights.npz and tokenizer files, read and written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .backend import default_dtype
from .config import T5Config
from .t5 import T5
from .tokenizer import Tokenizer, load_tokenizer

_BFLOAT16 = np.dtype("V2")  # numpy has no such type: it comes as two bytes

WEIGHTS_DIRS = (Path("weights"), Path(__file__).parent.parent / "weights")


def load(name_or_path: str | Path, *, dtype: mx.Dtype | None = None) -> tuple[T5, Tokenizer]:
    """Load a converted model and its tokenizer.

    Args:
        name_or_path: A model folder, or the name of one under weights/.
        dtype: Type to compute in; by default float32 on a CPU, bfloat16 on Metal and CUDA.

    Raises:
        ValueError: If there is no such folder, or what is in it is not a whole T5 model.
    """
    folder = find_folder(name_or_path)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    model = T5(config)
    expected = {name: array.shape for name, array in _parameters(model)}
    dtype = dtype or default_dtype()
    if dtype == mx.float16 and config.gated:
        warnings.warn(
            "float16 overflows in the feed-forward of T5 v1.1 and flan models; use bfloat16",
            stacklevel=2,
        )
    tensors = _read_npz(folder / "weights.npz", dtype)
    check_shapes(folder / "weights.npz", expected, {n: a.shape for n, a in tensors.items()})
    model.load_weights(list(tensors.items()))
    model.vocabulary = tokenizer.vocabulary
    return model, tokenizer


def find_folder(name_or_path: str | Path) -> Path:
    """The model folder of that path, or of that name under weights/.

    Raises:
        ValueError: If there is none; the message says which there are.
    """
    candidates = [Path(name_or_path), *(folder / name_or_path for folder in WEIGHTS_DIRS)]
    folders = [candidate for candidate in candidates if candidate.is_dir()]
    # A checkpoint may lie beside weights/ under the name of its conversion, which is meant then.
    folders.sort(key=lambda folder: not (folder / "weights.npz").exists())
    if folders:
        return folders[0]
    names = sorted({c.parent.name for d in WEIGHTS_DIRS for c in d.glob("*/config.json")})
    raise ValueError(
        f"no model folder {str(name_or_path)!r}, and none of that name under weights/ "
        f"(there: {', '.join(names) or 'none'}); "
        f"to convert one: python convert.py --model {name_or_path}"
    )


def read_config(folder: Path) -> T5Config:
    """The T5Config of a model folder or a Hugging Face checkpoint.

    Raises:
        ValueError: If config.json is missing, is not JSON, or is not of a T5.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected an object")
    try:
        return T5Config.from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def check_shapes(
    where: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    """Check the names and shapes of tensors.

    Raises:
        ValueError: Naming the first tensor that is missing, misshapen or unknown.
    """
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{where} has no tensor {name}, expected one of shape {shape}")
        if tuple(found[name]) != tuple(shape):
            raise ValueError(f"{where}: {name} has shape {found[name]}, expected {shape}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(f"{where} has tensors that a T5 does not: {unknown[0]}{more}")


def write_folder(
    folder: Path,
    config: T5Config,
    tensors: Iterable[tuple[str, mx.array]],
    tokenizer_files: Iterable[Path],
) -> None:
    """Write a model folder, whole or not at all; one that is there is replaced at the end.

    Tensors are taken and stored one at a time.

    Raises:
        ValueError: If `folder` exists and is no model folder.
        OSError: If it cannot be written.
    """
    if folder.exists() and not (folder / "weights.npz").exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not a converted model: choose another --output")
    with _replacing(folder) as new:
        with zipfile.ZipFile(new / "weights.npz", "w", zipfile.ZIP_STORED) as archive:
            for name, array in tensors:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    mx.save(cast(BinaryIO, file), array)
        for path in tokenizer_files:
            shutil.copyfile(path, new / path.name)
        text = json.dumps(config.to_dict(), indent=2) + "\n"
        (new / "config.json").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, put in its place if the body succeeds, else removed."""
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        new = workplace / "new"
        new.mkdir()
        yield new
        old = workplace / "old"
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        finally:
            if old.exists() and not folder.exists():
                os.rename(old, folder)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _cannot_write(folder: Path, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot be written: {error.strerror}", str(folder))


def _parameters(model: T5) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def _read_npz(path: Path, dtype: mx.Dtype) -> dict[str, mx.array]:
    """All tensors of a weights.npz, each cast as it comes."""
    if not path.is_file():
        raise ValueError(
            f"{path.parent} has no weights.npz; "
            f"to convert a Hugging Face checkpoint: python convert.py --model {path.parent}"
        )
    tensors = {}
    # Not by mx.load: its threads let go of Python's files late, which aborts a process that ends
    # meanwhile; nor does it say which file is damaged.
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for member in archive.namelist():
                with archive.open(member) as stored:
                    array = _as_array(np.lib.format.read_array(stored)).astype(dtype)
                mx.eval(array)
                tensors[member.removesuffix(".npy")] = array
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is truncated or damaged ({error}); convert the model again"
        ) from error
    return tensors


def _as_array(stored: np.ndarray) -> mx.array:
    if stored.dtype == _BFLOAT16:
        return mx.array(stored.view(np.uint16)).view(mx.bfloat16)
    if stored.dtype.kind != "f":
        raise ValueError(f"expected tensors of floats, found {stored.dtype}")
    return mx.array(stored)
