"""What a folder of sentence-transformers does with an encoder's vectors: pooling, matrices, length.

`modules.json` lists the steps, each with a folder of its own. Sentence-t5, gtr and instructor have
a T5's encoder, its mean over tokens, a matrix and a division by the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import printable, read_json, read_json_list, shown
from ..models import read_size
from .loading import short_name
from .model_folder import LENGTH_FILE, MODULES_FILE, PROMPTS_FILE, ModelFolder
from .packed import read_in_float32
from .tensors import GET_MODEL_AGAIN

SETTINGS_FILE = "tokenizer_config.json"
MOST_TOKENS = 2**20
# The settings that older files have instead of pooling_mode, each true or false.
LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "eos",
}
POOLINGS = ("mean", "eos", "cls", "max")
DENSE_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
}
# Of the first instructors sentence-transformers itself knows that they leave the prompt out.
INSTRUCTORS = ("instructor-base", "instructor-large", "instructor-xl")


@dataclass(frozen=True)
class Dense:
    """A matrix (out, in) that vectors are multiplied by, with a bias (out,) if there is one."""

    weight: mx.array
    bias: mx.array | None
    activation: str

    def __call__(self, x: mx.array) -> mx.array:
        """(N, in) -> (N, out)."""
        y = x @ self.weight.T
        return DENSE_ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)


@dataclass(frozen=True)
class SentenceModules:
    """What is done with an encoder's vectors, and how texts are read."""

    pooling: str = "mean"  # one of `POOLINGS`
    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    max_length: int | None = None  # tokens of a text, EOS included; None for any
    lower_case: bool = False
    includes_prompt: bool = True  # whether a prompt's tokens are pooled
    prompts: Mapping[str, str] | None = None  # by name


def encodes_alone(folder: ModelFolder) -> bool:
    """Whether a folder has an encoder alone, or one of sentence-transformers."""
    return (folder.path / MODULES_FILE).is_file() or folder.is_encoder


def encoder_folder(folder: ModelFolder) -> ModelFolder:
    """Return the folder of the encoder itself, where there is one of sentence-transformers."""
    if not (folder.path / MODULES_FILE).is_file():
        return folder
    return ModelFolder(read_sentence_modules(folder.path)[0])


def read_sentence_modules(folder: Path) -> tuple[Path, SentenceModules]:
    """Return the folder of the encoder itself, and what is done with its vectors.

    Raises:
        ValueError: If a step is not offered here, or its files cannot be read.
    """
    if not (folder / MODULES_FILE).is_file():
        return folder, SentenceModules()
    steps = read_json_list(folder / MODULES_FILE, GET_MODEL_AGAIN)
    encoder, found = folder, dict[str, Any](normalize=False)
    dense: list[Dense] = []
    for step in steps:
        place, kind = _step(folder, step)
        if kind == "Transformer":
            encoder = place
        elif kind == "Pooling":
            found |= _pooling(place)
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            found["normalize"] = True
        else:
            raise ValueError(
                f"{folder / MODULES_FILE} has the step {printable(kind)}, expected Transformer, "
                "Pooling, Dense or Normalize: choose another model"
            )
    if short_name(folder.resolve()) in INSTRUCTORS:
        found.setdefault("includes_prompt", False)
    return encoder, SentenceModules(**found, **_reading(folder, encoder), dense=tuple(dense))


def _step(folder: Path, step: Any) -> tuple[Path, str]:
    """Return a step's folder and the name of its class."""
    kind, path = (step.get("type"), step.get("path")) if isinstance(step, dict) else (None, None)
    plain = isinstance(kind, str) and isinstance(path, str) and path in ("", Path(path).name)
    if not plain or path == "..":
        raise ValueError(
            f"{folder / MODULES_FILE} has the step {shown(step)}, expected one with a type and a "
            f"folder's name as its path: {GET_MODEL_AGAIN}"
        )
    return folder / str(path), str(kind).rpartition(".")[2]


def _pooling(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_json(path, GET_MODEL_AGAIN)
    named = [name for key, name in LEGACY_POOLING.items() if config.get(key)] or ["mean"]
    mode = config.get("pooling_mode", named[0] if len(named) == 1 else named)
    mode = "eos" if mode == "lasttoken" else mode
    if mode not in POOLINGS:
        raise ValueError(
            f"the pooling in {path} is {shown(mode)}, expected one of {', '.join(POOLINGS)}: "
            "choose another model, or give pooling"
        )
    found: dict[str, Any] = {"pooling": mode}
    if "include_prompt" in config:
        found["includes_prompt"] = bool(config["include_prompt"])
    return found


def _dense(folder: Path) -> Dense:
    """Read a matrix, whose file is safetensors or torch's."""
    config = read_json(folder / "config.json", GET_MODEL_AGAIN)
    sizes = read_size(config, "out_features"), read_size(config, "in_features")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    tensors = ModelFolder(folder).tensors()
    expected = {"linear.weight": sizes} | (
        {"linear.bias": sizes[:1]} if config.get("bias", True) else {}
    )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != expected or activation not in DENSE_ACTIVATIONS:
        raise ValueError(
            f"{folder} has {shown(shapes)} and {printable(activation)}, expected {expected} and "
            f"{' or '.join(DENSE_ACTIVATIONS)}: {GET_MODEL_AGAIN}"
        )
    read = {name: read_in_float32(tensor) for name, tensor in tensors.items()}
    mx.eval(read)
    return Dense(read["linear.weight"], read.get("linear.bias"), activation)


def _reading(folder: Path, encoder: Path) -> dict[str, Any]:
    """Return how texts are read."""
    found: dict[str, Any] = {}
    for path in (encoder / LENGTH_FILE, folder / LENGTH_FILE):
        if path.is_file() and "max_length" not in found:
            config = read_json(path, GET_MODEL_AGAIN)
            if config.get("max_seq_length") is not None:
                found["max_length"] = read_size(config, "max_seq_length")
            found["lower_case"] = config.get("do_lower_case") is True
    settings = encoder / SETTINGS_FILE
    if "max_length" not in found and settings.is_file():
        most = read_json(settings, GET_MODEL_AGAIN).get("model_max_length")
        if type(most) is int and 2 <= most <= MOST_TOKENS:  # transformers writes 10 ** 30 for any
            found["max_length"] = most
    if (folder / PROMPTS_FILE).is_file():
        prompts = read_json(folder / PROMPTS_FILE, GET_MODEL_AGAIN).get("prompts") or {}
        found["prompts"] = {str(name): str(text) for name, text in dict(prompts).items()}
    return found
