"""Folders of decoder-only models, whose config.json is checked, as mlx-lm believes what it says."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..decoding import Vocabulary
from ..errors import first_line, shown
from ..models import MAX_LAYERS, MAX_SIZE, DecoderOnlyModel, build, refuse_quantized, wrong
from ..tokenizers import DecoderOnlyTokenizer
from .model_folder import ModelFolder
from .tensors import StoredTensor, as_mlx, check_shapes, dtype_name, module_shapes, parameters_of

# Names in config.json of the most tokens that a model reads.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length",
            "max_seq_len", "seq_length")  # fmt: skip
# Sizes in config.json, and the largest sensible value of each; mlx-lm takes any.
SIZES = (*CONTEXTS, "hidden_size", "intermediate_size", "vocab_size", "head_dim", "n_embd",
         "n_head", "n_inner", "num_attention_heads", "num_key_value_heads")  # fmt: skip
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
BOUNDS = dict.fromkeys(SIZES, MAX_SIZE) | dict.fromkeys(DEPTHS, MAX_LAYERS)
# Settings of GPT-2 that mlx-lm assumes without reading them.
GPT2 = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def load_decoder_only(
    folder: ModelFolder, dtype: mx.Dtype | None
) -> tuple[DecoderOnlyModel, DecoderOnlyTokenizer]:
    """Load a decoder-only model and its tokenizer, see `load`."""
    config = read_config(folder)
    with _about(folder.path):
        module = build(config)
    weights = _parameters(folder, config, module)
    if config.get("quantization"):
        _quantize(folder.path, module, config["quantization"], weights)
    check_shapes(folder.path, module_shapes(module), weights, str(config["model_type"]))
    tokenizer = DecoderOnlyTokenizer(folder.path)
    ends = config["eos_token_id"]
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if not ends:
        raise ValueError(
            f"{folder.path} does not say what ends an output: put eos_token_id into its config.json"
        )
    wanted = dtype or device.default_type().dtype
    as_stored = dtype is None and _keeps_its_type(config)
    # Some models have parameters that must keep their type, such as those that choose experts.
    may_cast = getattr(module, "cast_predicate", lambda name: True)
    for name, weight in weights.items():
        if mx.issubdtype(weight.dtype, mx.floating) and not as_stored and may_cast(name):
            weights[name] = weight.astype(wanted)
    module.load_weights([*weights.items()])
    module.eval()
    del weights
    for weight in parameters_of(module).values():
        mx.eval(weight)  # one at a time, as this reads it and may cast it
    with _about(folder.path):
        model = DecoderOnlyModel(
            module, eos_token_id=ends[0], extra_eos_ids=ends[1:], max_context=max_context(config),
            vocabulary=tokenizer.vocabulary,
        )  # fmt: skip
    size, rows = tokenizer.vocabulary.size, model.info.vocab_size
    if size - len(tokenizer.vocabulary.special) > rows:
        raise ValueError(
            f"the tokenizer in {folder.path} has {size} pieces, the model {rows} rows for them: "
            "copy the tokenizer that belongs to the model there"
        )
    if (last := max(ends)) >= rows:
        raise ValueError(
            f"{folder.path}: eos_token_id in config.json is {last}, expected an id below {rows}"
        )
    return model, tokenizer


def _keeps_its_type(config: Mapping[str, Any]) -> bool:
    """Whether a model computes in the type that it is stored in, if none is asked for.

    Casting a quantized model's float16 scales to bfloat16 would lose bits.
    """
    return bool(config.get("quantization")) and not device.on_cpu()


class DecoderOnly(NamedTuple):
    """What a folder of a decoder-only model holds."""

    kind: str  # its model_type
    num_parameters: int
    stored: tuple[str, ...]  # the types of its tensors, or their bits
    default_type: device.DefaultType
    vocabulary: Vocabulary


def inspect_decoder_only(folder: ModelFolder) -> DecoderOnly:
    """Inspect a folder without reading its weights."""
    config = read_config(folder)
    with _about(folder.path):
        module = build(config)
    tensors, chosen = _open(folder), device.default_type()
    stored = tuple(sorted({dtype_name(tensor.dtype) for tensor in tensors.values()}))
    if settings := config.get("quantization"):
        stored = (f"{settings['bits']} bits",)
        if _keeps_its_type(config):
            scales = [t.dtype for name, t in tensors.items() if name.endswith("scales")]
            if not scales:
                raise ValueError(
                    f"config.json in {folder.path} has quantization, but the weights there are not "
                    "quantized: copy quantized ones there, or remove quantization"
                )
            chosen = device.DefaultType(scales[0], "as stored")
    count = sum(math.prod(shape) for shape in module_shapes(module).values())
    vocabulary = DecoderOnlyTokenizer(folder.path).vocabulary
    return DecoderOnly(config["model_type"], count, stored, chosen, vocabulary)


@contextmanager
def _about(folder: Path) -> Iterator[None]:
    """Put the folder's name before errors about its config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def read_config(folder: ModelFolder) -> dict[str, Any]:
    """Check config.json; generation_config.json's `eos_token_id`, if any, replaces its own."""
    config = dict(folder.config)
    with _about(folder.path):
        _check_quantization(config)
        for part in _parts(config):
            _check_sizes(part)
        if config.get("model_type") == "gpt2":
            config.setdefault("n_ctx", config.get("n_positions"))  # mlx-lm reads the older name
            for name, expected in GPT2.items():
                if config.get(name, expected) != expected:
                    raise wrong(name, config[name], f"{expected!r}, as all published GPT-2 have")
    config["eos_token_id"] = folder.ends
    return config


def max_context(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of prompt and output that a model reads; None if it does not say."""
    for part in _parts(config):
        for name in CONTEXTS:
            if type(limit := part.get(name)) is int:
                return max(limit, _stretched(part))
    return None


def _stretched(part: Mapping[str, Any]) -> int:
    """Return the context that YaRN stretches a shorter one to; 0 without YaRN."""
    rope = part.get("rope_scaling") or part.get("rope_parameters")
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    numbers: list[Any] = [rope.get("factor"), rope.get("original_max_position_embeddings")]
    known = all(type(n) in (int, float) and 0 < n <= MAX_SIZE for n in numbers)
    return int(math.prod(numbers)) if known else 0


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the config, and the one of its text model if there is one."""
    yield config
    if isinstance(nested := config.get("text_config"), Mapping):
        yield nested


def _check_quantization(config: Mapping[str, Any]) -> None:
    if ours := config.get("quantization"):  # mlx-lm writes it under both names
        sizes = ours if isinstance(ours, dict) else {}
        if not all(type(n := sizes.get(key)) is int and n > 0 for key in ("bits", "group_size")):
            raise wrong("quantization", ours, "an object with bits and group_size")
    else:
        refuse_quantized(config, "use the original, or one that mlx-lm has converted")


def _check_sizes(part: Mapping[str, Any]) -> None:
    for name, limit in BOUNDS.items():
        value = part.get(name)
        if value is None or isinstance(value, list):  # some models have one for each layer
            continue
        if type(value) is not int or not 0 < value <= limit:
            raise wrong(name, value, f"an integer from 1 to {limit}")


def _open(folder: ModelFolder) -> dict[str, Any]:
    """Open the stored tensors, by name; none is read before it is evaluated or asked for."""
    files = folder.weight_files()
    if any(path.suffix == ".bin" for path in files):
        return dict(folder.tensors())
    stored: dict[str, Any] = {}
    for path in files:
        try:
            stored |= cast(dict[str, mx.array], mx.load(str(path)))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path} is truncated or damaged: {first_line(error)}; download it again"
            ) from error
    return stored


def _parameters(
    folder: ModelFolder, config: Mapping[str, Any], module: nn.Module
) -> dict[str, mx.array]:
    """Return the stored tensors by the module's names; those of safetensors are not read yet."""
    stored = {
        name: as_mlx(each.read(), each.dtype) if isinstance(each, StoredTensor) else each
        for name, each in _open(folder).items()
    }
    if config.get("model_type") == "gpt2":  # named as in the first checkpoints, and without masks
        named = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
        unused = ("lm_head.weight", ".attn.bias", ".attn.masked_bias")
        stored = {name: tensor for name, tensor in named.items() if not name.endswith(unused)}
    try:
        sanitize = getattr(module, "sanitize", dict)
        return dict(sanitize(stored))
    except Exception as error:  # a missing tensor raises anything
        raise ValueError(
            f"{folder.path}: the weights are not those of a {config['model_type']} "
            f"({type(error).__name__}: {first_line(error)}): download or convert the model again"
        ) from error


def _quantize(
    folder: Path, module: nn.Module, settings: Any, weights: Mapping[str, mx.array]
) -> None:
    """Quantize the module's matrices that are stored quantized, as config.json says."""

    def wanted(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        own: bool | dict[str, Any] | None = settings.get(path)
        if own is not None:
            return own
        return hasattr(layer, "to_quantized") and f"{path}.scales" in weights

    try:
        nn.quantize(
            module, group_size=settings["group_size"], bits=settings["bits"],
            mode=settings.get("mode", "affine"), class_predicate=wanted,
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}: quantization in config.json is {shown(settings)} ({first_line(error)}): "
            "convert the model again"
        ) from error
