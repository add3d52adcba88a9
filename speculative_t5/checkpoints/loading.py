"""`load`: a model and its tokenizer, by path or by name."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, overload

import mlx.core as mx

from .. import device
from ..device import DefaultType
from ..errors import printable, shown
from ..kernels import accelerate, kept_types, takes_stored
from ..models import (
    T5,
    EncoderDecoder,
    ModelConfig,
    SharingDraft,
    T5Config,
    TextEncoder,
    is_t5gemma,
    new_model,
    parts_of,
    shard,
    split_of,
)
from ..options import option_error
from ..tokenizers import Tokenizer, read_languages
from .adapters import Adapter
from .dequantizing import for_this_device, steps_of
from .hub import download, find_cached, flat_name, look_up
from .model_folder import ADAPTER_CONFIG, ModelFolder, find_folder, model_folders, name_of_folder
from .nearest import nearest
from .registered import Family
from .t5 import Checkpoint, open_checkpoint
from .t5_draft import load_draft
from .tensors import as_mlx

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@overload
def load(
    name_or_path: str | Path,
    *,
    dtype: mx.Dtype | str | None = None,
    group: mx.distributed.Group | None = None,
    adapter: str | Path | None = None,
) -> tuple[EncoderDecoder, Tokenizer]: ...


@overload
def load(
    name_or_path: str | Path,
    *,
    dtype: mx.Dtype | str | None = None,
    adapter: str | Path | None = None,
    encoder_only: Literal[True],
) -> tuple[TextEncoder, Tokenizer]: ...


@overload
def load(
    name_or_path: str | Path,
    *,
    dtype: mx.Dtype | str | None = None,
    target: EncoderDecoder,
) -> tuple[EncoderDecoder | SharingDraft, Tokenizer | None]: ...


def load(
    name_or_path: str | Path,
    *,
    dtype: mx.Dtype | str | None = None,
    target: EncoderDecoder | None = None,
    group: mx.distributed.Group | None = None,
    adapter: str | Path | None = None,
    encoder_only: bool = False,
) -> tuple[EncoderDecoder | SharingDraft | TextEncoder, Tokenizer | None]:
    """Load a model and its tokenizer.

    The tokenizer's `prefix` and the model's `min_probability` are those in config.json, if any.
    All names and shapes are checked first; then weights are read and cast one tensor at a time.
    Models of other families, such as decoder-only ones, are read by what is registered for them.

    Args:
        name_or_path: A model folder or a Hugging Face folder; the name of a model folder (see
            `weights_folders`) or of the repository that one was converted from. Any other
            name is one on the Hugging Face Hub, which is downloaded to its own cache.
        dtype: Type of weights and of arithmetic, by its name or MLX's: float32, float16 or
            bfloat16. By default bfloat16 on Metal and CUDA, but a T5 v1.0 that is stored in float16
            keeps its type. On a CPU weights are float32 by default, and so is arithmetic. Where
            `kernels` takes matrices of 16 bits, those stay as they are stored by default, `dtype`
            is their type alone, and arithmetic is float32 in any case.
        target: The model that this one is to draft for. A draft that shares its target's encoder
            needs it; it computes in the target's type, and its tokenizer is None, as it is the
            target's.
        group: The processes to split a T5 among, see `models.shard`; each reads its part only, and
            the whole of one tensor at a time where a file is our own (.npz).
        adapter: A LoRA adapter of PEFT for this model, by path or name: its changes are merged into
            the weights, in float32, as they are read. An adapter alone, in place of the model, is
            merged into the model that it names.
        encoder_only: Whether to read an encoder alone, as T5EncoderModel is: a `TextEncoder`.

    Raises:
        ValueError: If there is no such folder or name, it is not a whole model or it is the draft
            of another target, it cannot compute in that type, or it cannot be split so.
    """
    device.enter_thread()
    device.limit_memory()
    # On a CPU, MLX looks for a C++ compiler before it first compiles. That takes some milliseconds,
    # more still in the first generation, whose threads are at work.
    mx.compile(lambda x: x)(mx.array(0))
    computed = as_dtype(dtype)
    folder = replace(locate(name_or_path, adapter), encoder_only=encoder_only)
    if group is not None and group.size() == 1:
        group = None
    _check_parts(folder, group)
    name = short_name(name_or_path)
    if folder.family:
        return _load_registered(folder, folder.family, computed, name)
    if folder.kind == "t5-draft":
        draft = load_draft(folder.path, target, computed)
        draft.name = name
        return draft, None
    model, tokenizer = _load_t5(folder, computed, group)
    model.name = name
    return model, tokenizer


def _check_parts(folder: ModelFolder, group: mx.distributed.Group | None) -> None:
    """Refuse to take apart what has no encoder, or cannot be split."""
    if folder.encoder_only and folder.kind != "t5":
        raise ValueError(f"{folder.path} has no encoder of its own: choose a T5 or a T5Gemma")
    is_whole_t5 = folder.kind == "t5" and not is_t5gemma(folder.config) and not folder.is_encoder
    if group is not None and not is_whole_t5:
        raise ValueError(
            f"only a T5 can be split among processes: load {folder.path} without a group"
        )


def _load_registered(
    folder: ModelFolder, family: Family, dtype: mx.Dtype | None, name: str
) -> tuple[EncoderDecoder, Tokenizer]:
    """Load a model of another family: a `LanguageModel`, which need not be an `EncoderDecoder`."""
    loaded, tokenizer = family.load(folder, dtype)
    model = cast(Any, loaded)
    model.name = name
    return model, _with_settings(tokenizer, folder)


def read_tokenizer(folder: ModelFolder) -> Any:
    """Load a model's tokenizer alone, with what `load` adds to it."""
    _ = folder.prefix, folder.corrects  # refused before files are read
    return _with_settings(folder.tokenizer(), folder)


def _with_settings(tokenizer: Any, folder: ModelFolder) -> Any:
    """Return a tokenizer with what config.json says of texts."""
    prefix, corrects = folder.prefix, folder.corrects
    tokenizer.prefix, tokenizer.corrects = prefix, corrects
    tokenizer.languages = read_languages(folder.config, tokenizer.vocabulary)
    # Of madlad400, which alone has such tokens, its authors say so.
    known = 128 if tokenizer.vocabulary.languages else None
    tokenizer.trained_length = folder.trained_length or known
    return tokenizer


def default_type_of(folder: ModelFolder) -> DefaultType:
    """Return the type that `load` chooses for a model; a sharing draft has its target's."""
    if folder.family:
        return folder.family.default_type(folder)
    return open_checkpoint(folder).default_type


def as_dtype(dtype: mx.Dtype | str | None) -> mx.Dtype | None:
    """Return MLX's type of that name; refuse types that models cannot compute in."""
    if dtype is None:
        return None
    for name, kind in DTYPES.items():
        if dtype in (name, kind):
            return kind
    raise option_error("dtype", "float32, float16 or bfloat16", dtype)


def locate(name_or_path: str | Path, adapter: str | Path | None = None) -> ModelFolder:
    """Find the folder of a model, or download it; see `load`.

    An adapter that is given alone, or as both, is for the model that it names.
    """
    changed_by = ModelFolder(_find(name_or_path if adapter is None else adapter))
    if not changed_by.is_adapter:
        if adapter is None:
            return changed_by
        raise ValueError(
            f"{adapter} is not an adapter: give a folder with {ADAPTER_CONFIG} and no model"
        )
    settings = Adapter(changed_by)
    if adapter is None or adapter == name_or_path:
        folder = ModelFolder(_find_base(settings))
    else:
        _check_base(settings, name_or_path)
        folder = ModelFolder(_find(name_or_path, to_merge=True))
    if folder.kind != "t5":
        raise ValueError(f"{folder.path} takes no adapter, as it is no T5 or T5Gemma: give one")
    return ModelFolder(folder.path, changed_by)


def _find_base(adapter: Adapter) -> Path:
    """Find the model that an adapter names."""
    path, base, revision = adapter.folder.path, adapter.base, adapter.config.get("revision")
    if base is None:
        raise ValueError(
            f"{path} is an adapter that names no model: give the model that it was trained on, and "
            "this as its adapter"
        )
    if revision not in (None, "main"):
        raise ValueError(
            f"{path} is an adapter for revision {shown(revision)} of {printable(base)}: download "
            "that, and give its folder as the model"
        )
    # What was trained on a folder elsewhere is here by its name alone.
    is_elsewhere = base.count("/") != 1 and not find_folder(base)
    try:
        return _find(short_name(base) if is_elsewhere else base, to_merge=True)
    except ValueError as error:
        error.args = (f"the model of the adapter {path} is missing: {error}",)
        raise


def _check_base(adapter: Adapter, name_or_path: str | Path) -> None:
    """Refuse an adapter that names another model."""
    names, found = {str(name_or_path)}, find_folder(name_or_path)
    if found:
        repository = ModelFolder(found).origin.get("repository")
        names |= {str(found.resolve())} | ({repository} if isinstance(repository, str) else set())
    if adapter.base and short_name(adapter.base) not in map(short_name, names):
        base, path = printable(adapter.base), adapter.folder.path
        raise ValueError(
            f"{path} is an adapter for {base}, and the model is {name_or_path}: give {base} as the "
            f"model, or write this one's name in {ADAPTER_CONFIG}"
        )


def resolved(name_or_path: str) -> str:
    """Return the absolute path of a folder, so that no model of its name is taken; or the name."""
    return str(Path(name_or_path).resolve()) if Path(name_or_path).is_dir() else name_or_path


def short_name(name_or_path: str | Path) -> str:
    """Return the last part of a model's name, or of its path, which may be in the Hub's cache."""
    cached = re.search(r"(?<![^/])models--([\w.-]+)/snapshots/", str(name_or_path))
    return cached[1].rpartition("--")[2] if cached else name_of_folder(Path(name_or_path))


def _find(name_or_path: str | Path, *, to_merge: bool = False) -> Path:
    """Find a folder of a model or an adapter by its path or name, or download it.

    Where an adapter is `to_merge` into it, it is not one that was quantized from a repository.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise ValueError(f"a model must be given by its name or path, got {name_or_path!r}")
    name = str(name_or_path)
    found = find_folder(name_or_path)
    if found and not (
        to_merge
        and ModelFolder(found).origin.get("repository") == name
        and ModelFolder(found).is_quantized
    ):
        return found
    try:
        flat_name(name)  # refused here, if it cannot be one
        return find_cached(name) or download(name, *look_up(name))
    except ValueError as error:
        known = ", ".join(sorted({folder.name for folder in model_folders()})) or "none"
        listed = "" if nearest(name) else f" (found: {known})"
        raise ValueError(
            f"no model on this machine is named {name!r}{listed}; {error}"
        ) from error.__cause__


def _load_t5(
    folder: ModelFolder, asked: mx.Dtype | None, group: mx.distributed.Group | None
) -> tuple[EncoderDecoder | TextEncoder, Tokenizer]:
    tokenizer, least = read_tokenizer(folder), folder.min_probability
    checkpoint, constraints = open_checkpoint(folder), folder.constraints
    dtype = asked or checkpoint.default_type.dtype
    keeps_types = group is None and takes_stored()
    if dtype == mx.float16 and checkpoint.config.gated and not keeps_types:
        warnings.warn(
            "float16 overflows in gated feed-forwards, as of flan-t5 and T5Gemma; use bfloat16",
            stacklevel=3,
        )
    processes = group.size() if group is not None else 1
    read = for_this_device(folder.path, checkpoint, dtype, processes=processes)
    model = new_model(_with_end_of(tokenizer, read.config))
    if read is not checkpoint:
        model.quantization_steps = steps_of(checkpoint)
    checkpoint = read
    if group is not None:
        assert isinstance(model, T5)
        shard(model, group)
    types = dict.fromkeys(checkpoint.parameters, dtype)
    if keeps_types:
        types = kept_types(model, checkpoint.dtypes, asked)
    model.load_weights(
        [(name, _read_parameter(checkpoint, name, kind, group)) for name, kind in types.items()]
    )
    if isinstance(model, EncoderDecoder):
        info = model.info.with_vocabulary(tokenizer.vocabulary)
        model.info = replace(info, constraints=constraints)
        model.min_probability = least or 0.0
    accelerate(model)
    return model, tokenizer


def _with_end_of(tokenizer: Tokenizer, config: ModelConfig) -> ModelConfig:
    """Return a T5's config with the EOS of its tokenizer, if config.json names it among others."""
    end = getattr(tokenizer, "eos_token_id", None)
    if isinstance(config, T5Config) and end in config.eos_token_ids:
        ends = () if config.eos_token_ids == (end,) else config.eos_token_ids
        return replace(config, eos_token_id=end, end_ids=ends)
    return config


def _read_parameter(
    checkpoint: Checkpoint, name: str, dtype: mx.Dtype, group: mx.distributed.Group | None
) -> mx.array:
    """Read a parameter, or this process's part of it."""
    split, sources = split_of(name, checkpoint.config), checkpoint.parameters[name]
    parts = []
    for source in sources:
        tensor = checkpoint.tensors[source]
        pieces = [tensor.read()]
        if split is not None and group is not None:
            pieces = parts_of(pieces[0], split, group.rank(), group.size(), tensors=len(sources))
        for piece in pieces:
            part = as_mlx(piece, tensor.dtype)
            if checkpoint.is_from_zero(name):
                part = part.astype(mx.float32) + 1
            # Quantized weights, packed into integers, are not cast.
            parts.append(part if tensor.dtype == mx.uint32 else part.astype(dtype))
        mx.eval(parts)
    whole = mx.concatenate(parts) if len(parts) > 1 else parts[0]
    mx.eval(whole)
    return whole
