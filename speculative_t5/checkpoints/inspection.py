"""Reports what a checkpoint is, without converting it, and which models are here."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ..decoding import Vocabulary
from ..device import DefaultType, default_type
from ..errors import printable
from ..models import ModelConfig, T5Config
from ..tokenizers import ByteTokenizer, Tokenizer
from .adapters import Adapter
from .conversion import num_parameters
from .hub import look_up
from .loading import locate, resolved
from .model_folder import ModelFolder, model_folders
from .registered import Family
from .t5 import open_checkpoint
from .t5_draft import inspect_draft
from .tensors import dtype_name


@dataclass(frozen=True)
class Listed:
    """A model folder, which may be damaged."""

    folder: Path
    family: str | None = None  # None if it cannot be loaded
    num_parameters: int = 0  # each counted once
    stored: tuple[str, ...] = ()  # the types of its tensors, or their bits if they are quantized
    size: int = 0  # bytes of its files
    default_type: DefaultType | None = None  # a sharing draft has its target's
    drafts: tuple[str, ...] = ()  # names of the folders that can draft for it; see `_drafts`
    draft_for: str | None = None  # the target of a sharing draft, which drafts for no other
    error: str | None = None  # why it cannot be loaded
    vocabulary: Vocabulary | None = None  # of its tokenizer; a sharing draft has none


@dataclass(frozen=True)
class Inspection:
    """A T5 or T5Gemma checkpoint that has not been converted."""

    name: str  # or its path
    family: str
    config: ModelConfig  # for a repository, whose tensors are not downloaded, config.json alone
    vocabulary: Vocabulary
    num_parameters: int
    stored: tuple[str, ...]  # the types of its tensors; empty for a repository
    default_type: DefaultType  # of a repository, as if it were stored in float32
    drafts: list[Listed]


def inspect(model: str, *, adapter: str | None = None, revision: str | None = None) -> Inspection:
    """Inspect what `convert` takes; weights are downloaded only to merge an adapter into them."""
    kinds: dict[str, mx.Dtype] = {}
    if adapter is not None or Path(model).is_dir():
        folder = locate(resolved(model), resolved(adapter) if adapter is not None else None)
        checkpoint = open_checkpoint(folder)
        config, kinds = checkpoint.config, checkpoint.dtypes
        chosen = checkpoint.default_type
    else:
        folder, _ = look_up(model, revision)
        config = folder.model_config()
        chosen = default_type(gated=config.gated)
    tokenizer, count = folder.tokenizer(), num_parameters(config)
    target = Listed(
        Path(model), num_parameters=count, vocabulary=_drafted(config, tokenizer.vocabulary)
    )
    return Inspection(
        name=model,
        family=family(config, tokenizer),
        config=config,
        vocabulary=tokenizer.vocabulary,
        num_parameters=count,
        stored=_dtype_names(kinds.values()),
        default_type=chosen,
        drafts=_drafts(target, folder.draft, _find_models()),
    )


def list_models() -> list[Listed]:
    """Return all model folders that `load` finds by name: the largest first, damaged ones last."""
    found = _find_models()
    listed = []
    for model in found:
        drafts = _drafts(model, ModelFolder(model.folder).draft, found)
        listed.append(replace(model, drafts=tuple(draft.folder.name for draft in drafts)))
    return listed


def _find_models() -> list[Listed]:
    # Of two with one name, `load` takes the first.
    folders = {folder.name: folder for folder in reversed(model_folders())}
    found = []
    for path in folders.values():
        size = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
        try:
            found.append(_list_model(ModelFolder(path), size))
        except (OSError, ValueError) as error:
            found.append(Listed(path, size=size, error=str(error)))
    return sorted(found, key=lambda model: (-model.num_parameters, model.folder.name))


def _list_model(folder: ModelFolder, size: int) -> Listed:
    path = folder.path
    if folder.is_adapter:
        base = Adapter(folder).base or "a model that it does not name"
        tensors = folder.tensors().values()
        count = sum(math.prod(tensor.shape) for tensor in tensors)
        stored = _dtype_names(tensor.dtype for tensor in tensors)
        return Listed(path, f"adapter for {printable(base)}", count, stored, size)
    if folder.kind == "t5-draft":
        target, count = inspect_draft(folder)
        return Listed(path, "draft", count, ("float16",), size, draft_for=target)
    if folder.family:
        return _list_registered(folder, folder.family, size)
    checkpoint, tokenizer = open_checkpoint(folder), folder.tokenizer()
    config, stored = checkpoint.config, _dtype_names(checkpoint.dtypes.values())
    if config.quantization:
        stored = (f"{config.quantization.bits} bits",)
    count, vocabulary = num_parameters(config), _drafted(config, tokenizer.vocabulary)
    name, chosen = family(config, tokenizer), checkpoint.default_type
    if merged := folder.origin.get("adapter"):
        name += f" with {printable(str(merged))}"
    return Listed(path, name, count, stored, size, chosen, vocabulary=vocabulary)


def _list_registered(folder: ModelFolder, family: Family, size: int) -> Listed:
    """List a model of another family."""
    family.check(folder)
    count, stored = family.describe(folder)
    chosen, vocabulary = family.default_type(folder), folder.tokenizer().vocabulary
    name = family.name(folder.config)
    return Listed(folder.path, name, count, stored, size, chosen, vocabulary=vocabulary)


def _drafted(config: ModelConfig, vocabulary: Vocabulary) -> Vocabulary | None:
    """Return a vocabulary by which a draft is found; an encoder alone has none, and is none."""
    return None if config.encoder_only else vocabulary


def _dtype_names(dtypes: Iterable[mx.Dtype]) -> tuple[str, ...]:
    return tuple(sorted(map(dtype_name, {*dtypes})))


def _drafts(target: Listed, named: str | None, found: list[Listed]) -> list[Listed]:
    """Return the models that can draft for a target, all of them smaller.

    Those that were trained for it come first, the draft `named` in its folder and those distilled
    for it; then those that only have its tokenizer; of each kind the smallest first.
    """
    name = target.folder.name
    fitting = [
        model
        for model in reversed(found)
        if model.num_parameters < target.num_parameters
        and (
            model.draft_for == name or (model.vocabulary and model.vocabulary == target.vocabulary)
        )
    ]
    return sorted(fitting, key=lambda each: name != each.draft_for and named != each.folder.name)


def family(config: ModelConfig, tokenizer: Tokenizer) -> str:
    """Name a model's member of the T5 family; its fine-tunes look the same."""
    if config.encoder_only:
        return f"encoder of {family(replace(config, encoder_only=False), tokenizer)}"
    if not isinstance(config, T5Config):
        return "T5Gemma" if config.generation == 1 else "T5Gemma 2"
    if config.bias_per_layer:
        return "umt5"
    if isinstance(tokenizer, ByteTokenizer):
        return "byt5"
    if getattr(tokenizer, "kind", "") == "GPT2Tokenizer":
        return "FRED-T5"
    if config.eos_token_id == 2:
        return "madlad400" if config.gated else "codet5"
    if config.vocab_size > 200_000:
        return "mt5"
    return "T5 v1.1 (as flan-t5, coedit)" if config.gated else "T5 v1.0"


def as_listing(found: Inspection) -> Iterator[str]:
    """Yield the lines of a report for people."""
    config = found.config
    yield found.name
    yield f"  family      {found.family}"
    decoder = "no" if config.encoder_only else config.num_decoder_layers
    yield (
        f"  layers      {config.num_layers} encoder, {decoder} decoder; d_model "
        f"{config.d_model}, {config.num_heads} heads of {config.d_kv}, d_ff {config.d_ff}, "
        f"{'gated ' if config.gated else ''}{config.activation}, "
        f"{'own' if config.own_head else 'tied'} head"
    )
    yield f"  vocabulary  {config.vocab_size} rows; tokenizer of {found.vocabulary}"
    stored = f"stored as {', '.join(found.stored)}" if found.stored else "by config.json alone"
    yield f"  parameters  {found.num_parameters / 1e6:.1f} million, {stored}"
    if config.quantization:
        yield f"  quantized   to {config.quantization}"
    dtype, reason = found.default_type
    yield f"  computes    in {dtype_name(dtype)} on this device by default: {reason}"
    drafts = [f"{d.folder} ({d.num_parameters / 1e6:.1f} million)" for d in found.drafts]
    yield f"  drafts      {', '.join(drafts) or 'none that shares its tokenizer is here'}"
