"""Decoder-only models from folders: by mlx-lm's classes, or by those here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from .. import device
from ..checkpoints import ModelFolder, as_mlx
from ..device import DefaultType
from ..errors import first_line
from ..kernels import accelerate_modules, kept_types, takes_stored
from ..models import read_size
from ..tokenizers import Tokenizer, TransformersTokenizer
from .model import DecoderOnlyModel

# Names in config.json of the most tokens that a model reads.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
Classes = tuple[type[nn.Module], type]  # a model's, and its settings'
EXTRA = "speculative-t5[causal]"


class DecoderOnlyFamily:
    """Reads decoder-only models; see `checkpoints.Family`."""

    def name(self, config: Mapping[str, Any]) -> str:
        """Return the family's name for people."""
        return f"{config['model_type']} (decoder-only)"

    def check(self, folder: ModelFolder) -> None:
        """Refuse a folder by its config.json, before weights are read or downloaded."""
        _own_classes(folder)
        _max_context(folder)

    def read_tokenizer(self, folder: ModelFolder) -> TransformersTokenizer:
        """Read a folder's tokenizer."""
        return TransformersTokenizer(folder.tokenizer_path)

    def default_type(self, folder: ModelFolder) -> DefaultType:
        """Return the type that a model computes in by default."""
        if device.on_cpu():
            return DefaultType(mx.float32, "CPUs compute in it")
        stored = {tensor.dtype for tensor in folder.tensors().values()}
        kind = next((each for each in (mx.bfloat16, mx.float16) if each in stored), mx.float32)
        return DefaultType(kind, "it is stored in it")

    def load(
        self, folder: ModelFolder, dtype: mx.Dtype | None = None
    ) -> tuple[DecoderOnlyModel, Tokenizer]:
        """Load a model and its tokenizer.

        Args:
            folder: As transformers or mlx-lm write it, quantized by mlx-lm or not.
            dtype: Type of weights and of arithmetic; by default that of `default_type`. Where
                `kernels` takes matrices of 16 bits, those stay as they are stored, and arithmetic
                is float32.

        Raises:
            ValueError: If mlx-lm has no such model, files do not fit it, or its context cannot be
                rewound row by row.
        """
        classes, missing = _own_classes(folder)
        max_context = _max_context(folder)
        tokenizer, path = self.read_tokenizer(folder), folder.path
        ends = folder.ends or tokenizer.ends
        if not ends:
            raise ValueError(
                f"{path} does not say what ends an output: put eos_token_id into its config.json"
            )
        module = _read_module(folder, classes, missing)
        _set_types(module, dtype)
        if takes_stored():
            accelerate_modules(module)
        with _named(path):
            model = DecoderOnlyModel(
                module,
                eos_token_id=ends[0],
                extra_eos_ids=ends[1:],
                vocabulary=tokenizer.vocabulary,
                max_context=max_context,
            )
        return model, tokenizer


decoder_only = DecoderOnlyFamily()  # what the entry point names


def _own_classes(folder: ModelFolder) -> tuple[Classes | None, dict[str, Any]]:
    """Return a model's classes if they are ours, and what config.json lacks."""
    kind = folder.config["model_type"]
    try:
        from . import gpt2, opt  # the former builds upon mlx-lm's
    except ImportError as error:
        raise ValueError(
            f"{folder.path} is a {kind}, and decoder-only models need a package that is not "
            f"installed ({first_line(error)}): run pip install '{EXTRA}'"
        ) from error
    with _named(folder.path):
        if kind == "opt":
            opt.check_opt(folder.config)
            return (opt.OPT, opt.OPTConfig), {}
        if kind == "gpt2":
            return (gpt2.GPT2, gpt2.gpt2.ModelArgs), gpt2.changes_of(folder.config)
    return None, _rope_settings(folder.config)


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how positions turn keys by the names that all of mlx-lm's models know.

    transformers 5 has put them together; most of mlx-lm's models would take their defaults.
    """
    found = config.get("rope_parameters")
    if not isinstance(found, dict) or "rope_theta" not in found or "rope_theta" in config:
        return {}
    scaling = {} if found.get("rope_type") in (None, "default") else {"rope_scaling": found}
    return {"rope_theta": found["rope_theta"], **scaling}


def _read_module(
    folder: ModelFolder, classes: Classes | None, missing: dict[str, Any]
) -> nn.Module:
    """Make a model of mlx-lm's kind and read its weights, which are evaluated later."""
    from mlx_lm.utils import load_model

    options: dict[str, Any] = {"model_config": missing, "lazy": True}
    if classes is not None:
        options["get_model_classes"] = lambda config: classes
    is_known = folder.weight_files()[0].suffix == ".safetensors"  # else we read them
    try:
        module: Any = load_model(folder.path, strict=is_known, **options)[0]
        if not is_known:
            stored = {name: as_mlx(t.read(), t.dtype) for name, t in folder.tensors().items()}
            module.load_weights([*module.sanitize(stored).items()])
    except Exception as error:  # models raise anything for a config.json that is not theirs
        raise ValueError(
            f"mlx-lm cannot make a model of {folder.path} ({type(error).__name__}: "
            f"{first_line(error)}): choose a decoder-only model that it has"
        ) from error
    return cast(nn.Module, module)


def _set_types(module: nn.Module, dtype: mx.Dtype | None) -> None:
    """Cast weights as the device is to compute with them."""
    stored: dict[str, mx.array] = dict(cast(Any, tree_flatten(module.parameters())))
    types = {name: weight.dtype for name, weight in stored.items()}
    if takes_stored():
        types = kept_types(module, types, dtype)
    elif dtype or device.on_cpu():
        types = dict.fromkeys(types, dtype or mx.float32)

    def as_kept(name: str, weight: mx.array) -> mx.array:
        # Quantized weights are packed into integers.
        return weight.astype(types[name]) if mx.issubdtype(weight.dtype, mx.floating) else weight

    module.update(tree_map_with_path(as_kept, module.parameters()))


def _max_context(folder: ModelFolder) -> int | None:
    """Return the most tokens that a model reads, none of them outside of a window of attention."""
    config = folder.config
    with _named(folder.path):
        known = [name for name in CONTEXTS if config.get(name) is not None]
        found = [read_size(config, name) for name in known[:1]]
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            found.append(read_size(config, "sliding_window"))
    return min(found, default=None)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the folder in errors of what is in it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
