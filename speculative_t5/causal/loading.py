"""Decoder-only models from folders: by mlx-lm's classes, or by those here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from .. import device
from ..checkpoints import ModelFolder, as_mlx, dtype_name
from ..device import DefaultType
from ..errors import first_line, printable, shown
from ..kernels import accelerate_modules, kept_types, takes_stored
from ..models import read_size
from ..tokenizers import Tokenizer, TransformersTokenizer
from .model import DecoderOnlyModel, check_cache, shapes_of

# Names in config.json of the most tokens that a model reads.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
LAYERS, MOST_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 512
PARTIAL_ROTATION = "partial_rotary_factor", "rotary_pct", "rope_pct"  # names of one setting
# What mlx-lm does not read, by model_type.
DIFFERENT = {"glm": "whose heads mlx-lm rotates as a whole"}
GATED_BY_SILU = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "olmo2", "granite")
GATED_BY_GELU = ("gemma", "gemma2", "gemma3_text")
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

    def describe(self, folder: ModelFolder) -> tuple[int, tuple[str, ...]]:
        """Return the number of parameters, and the types that they are stored in, by name."""
        weights, how = _stored(folder), folder.setting("quantization")
        bits = how.get("bits") if isinstance(how, dict) else None
        if type(bits) is int and 0 < bits <= 8:  # packed into integers
            packed = sum(each.size for each in weights if each.dtype == mx.uint32)
            others = sum(each.size for each in weights if each.dtype != mx.uint32)
            return packed * 32 // bits + others, (f"{bits} bits",)
        kinds = sorted({dtype_name(each.dtype) for each in weights})
        return sum(each.size for each in weights), tuple(kinds)

    def default_type(self, folder: ModelFolder) -> DefaultType:
        """Return the type that a model computes in by default."""
        if device.on_cpu():
            return device.default_type()
        stored = {each.dtype for each in _stored(folder)}
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
        module = _read_module(folder, classes, missing)
        _set_types(module, dtype)
        if takes_stored():
            accelerate_modules(module)
        with _named(path):
            check_cache(module)
            size = shapes_of(module)[1]  # ids beyond the embedding never end an output
            ends = [each for each in folder.ends if each < size]
            ends = ends or [each for each in tokenizer.ends if each < size]
            if not ends:
                raise ValueError("nothing ends an output: put eos_token_id into its config.json")
            model = DecoderOnlyModel(
                module,
                eos_token_id=ends[0],
                extra_eos_ids=ends[1:],
                vocabulary=tokenizer.vocabulary,
                max_context=max_context,
            )
        # transformers forces a first token only after a prompt of one token; here none is forced.
        constraints = replace(folder.constraints_below(size), forced_tokens=())
        model.info = replace(model.info, constraints=constraints)
        return model, tokenizer


decoder_only = DecoderOnlyFamily()  # what the entry point names


def _own_classes(folder: ModelFolder) -> tuple[Classes | None, dict[str, Any]]:
    """Return a model's classes if they are ours, and what config.json lacks."""
    kind = folder.config["model_type"]
    try:
        from mlx_lm.utils import MODEL_REMAPPING

        from . import gpt2, opt  # the former builds upon mlx-lm's
    except ImportError as error:
        raise ValueError(
            f"{folder.path} is a {kind}, and decoder-only models need a package that is not "
            f"installed ({first_line(error)}): run pip install '{EXTRA}'"
        ) from error
    with _named(folder.path):
        for name in LAYERS:
            if name in folder.config:
                read_size(folder.config, name, MOST_LAYERS)
        if kind == "opt":
            opt.check_opt(folder.config)
            return (opt.OPT, opt.OPTConfig), {}
        if kind == "gpt2":
            return (gpt2.GPT2, gpt2.gpt2.ModelArgs), gpt2.changes_of(folder.config)
        file = MODEL_REMAPPING.get(kind, kind)
        if not file.isidentifier() or find_spec(f"mlx_lm.models.{file}") is None:
            raise ValueError(
                f"this is a {printable(kind)} (model_type in config.json), which mlx-lm does not "
                "have: choose another model"
            )
        _check_known(folder.config)
    return None, _rope_settings(folder.config)


def _check_known(config: Mapping[str, Any]) -> None:
    """Refuse a model that mlx-lm is known to compute otherwise than transformers."""
    kind = config["model_type"]
    if kind in DIFFERENT:
        raise ValueError(f"this is a {kind}, {DIFFERENT[kind]}: choose another model")
    activation = config.get("hidden_activation") or config.get("hidden_act")
    known: tuple[str, ...] | None = ("silu", "swish") if kind in GATED_BY_SILU else None
    if kind in GATED_BY_GELU:
        known = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")
    if known and activation is not None and activation not in known:
        raise ValueError(
            f"hidden_act in config.json is {shown(activation)}, expected {' or '.join(known)} for "
            f"a {kind}"
        )


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how positions turn keys by the names that mlx-lm's models know.

    transformers 5 has put them together; most of mlx-lm's models would take their defaults.
    """
    found = config.get("rope_parameters")
    if not isinstance(found, dict) or "rope_theta" not in found:
        return {}
    known = {"rope_theta": found["rope_theta"]}
    if found.get("rope_type") not in (None, "default"):
        known["rope_scaling"] = found
    if "partial_rotary_factor" in found:
        known |= dict.fromkeys(PARTIAL_ROTATION, found["partial_rotary_factor"])
    return {name: value for name, value in known.items() if config.get(name) is None}


def _read_module(
    folder: ModelFolder, classes: Classes | None, missing: dict[str, Any]
) -> nn.Module:
    """Make a model of mlx-lm's kind and read its weights, which are evaluated later."""
    from mlx_lm.utils import load_model

    options: dict[str, Any] = {"model_config": missing, "lazy": True}
    if classes is not None:
        options["get_model_classes"] = lambda config: classes
    files = {path.name for path in folder.weight_files()}
    in_safetensors = all(name.endswith(".safetensors") for name in files)  # else read here
    others = {path.name for path in folder.path.glob("model*.safetensors")} - files
    if in_safetensors and others:  # mlx-lm would mix them in
        raise ValueError(
            f"{folder.path} holds other weights beside its own, {min(others)}: put them elsewhere"
        )
    try:
        module: Any = load_model(folder.path, strict=in_safetensors, **options)[0]
        if not in_safetensors:
            stored = {name: as_mlx(t.read(), t.dtype) for name, t in folder.tensors().items()}
            module.load_weights([*module.sanitize(stored).items()])
    except (Exception, SystemExit) as error:  # models do anything with what is not theirs
        raise ValueError(
            f"mlx-lm cannot make a model of {folder.path} ({type(error).__name__}: "
            f"{first_line(error)}): choose a decoder-only model that it has"
        ) from error
    return cast(nn.Module, module)


def _stored(folder: ModelFolder) -> list[mx.array]:
    """Return the stored weights, which are not read: only their shapes and types are known."""
    files = folder.weight_files()
    if all(path.suffix == ".safetensors" for path in files):
        read = [cast(dict[str, mx.array], mx.load(str(path))) for path in files]
        return [weight for each in read for weight in each.values()]
    return [mx.zeros(t.shape, t.dtype) for t in folder.tensors().values()]


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
        if mx.issubdtype(weight.dtype, mx.floating):
            weight = weight.astype(types[name])
        # A matrix that is stored transposed would be copied in each pass.
        return mx.contiguous(weight)

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
