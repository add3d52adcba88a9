"""Converts a T5 or T5Gemma checkpoint to a model folder, one tensor at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import shown
from ..models import QUANTIZATION_CONFIG, ModelConfig, Quantization, T5Config
from ..options import OptionError, option_error
from ..tokenizers import TOKENIZER_FILES
from . import model_folder
from .dequantizing import dequantized
from .hub import check_new_name, download, flat_name, look_up, upload
from .loading import as_dtype, locate, resolved, short_name
from .model_card import model_card, shipped_license
from .model_folder import ModelFolder
from .packed import sibling
from .saving import as_saved, saved_config, saved_layout
from .t5 import Checkpoint, open_checkpoint, parameter_shapes
from .tasks import TASK_PARAMS
from .tensors import Layout, NewTensor, as_mlx, as_numpy, dtype_name

SAFETENSORS = "safetensors"
OWN_FORMAT = "npz"
FORMATS = (OWN_FORMAT, SAFETENSORS)
NEW_OPTIONS = ("dequantize", "encoder_only")  # that folders say only where they are used
OF_TOKENIZER = (*TOKENIZER_FILES, "chat_template.jinja")
MIN_SHARE = 0.01  # of the weights: quantizing a smaller embedding gains nothing

# Infinity as an integer; the bits of NaN are above it.
_INFINITIES = {mx.float32: 0x7F800000, mx.float16: 0x7C00, mx.bfloat16: 0x7F80}


def convert(
    model: str,
    output: Path | None = None,
    *,
    adapter: str | None = None,
    dtype: str | None = None,
    quantize: int | None = None,
    group_size: int = 64,
    keep_wo: bool | None = None,
    dequantize: bool = False,
    encoder_only: bool = False,
    format: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Convert a checkpoint folder, or a repository of the Hugging Face Hub, to a model folder.

    Returns that folder. A repository that was converted before with the same options is not
    converted again. Takes the memory of a few blocks of 1 MB, beside the mapped part of one tensor.

    Args:
        model: Path of a checkpoint or model folder, or name of a repository; or of an adapter,
            which is merged into the model that it names.
        output: Folder to write; by default `new_folder` of the model's name, or the adapter's.
        adapter: A LoRA adapter of PEFT to merge into the model first, see `load`.
        dtype: Type to store: float32, float16 or bfloat16; by default as `default_types` says.
        quantize: Bits to quantize matrices to, 4 or 8; by default they are not quantized.
        group_size: Weights that share a scale and a bias: 32, 64 or 128.
        keep_wo: Whether to leave `wo` as it is; by default in gated models, where it loses most.
        dequantize: Whether to write what a quantized model's bits stand for, or keep them packed.
        encoder_only: Whether to leave the decoder out; what is written is read by `Encoder`.
        format: "npz", this package's own (the default), or "safetensors", for other programs.
        upload_repo: A repository on the Hub, new or not, to upload the folder to, as safetensors.
        revision: Branch, tag or commit on the Hub.
        force: Whether to replace an existing model folder.
        allow_nonfinite: Whether to accept weights that are NaN or infinite.
        progress: Called with the bytes read and the bytes to read, while the conversion runs.
        note: Called with each line that the user should see.

    Raises:
        ValueError: If the checkpoint is not a whole T5 or T5Gemma with a tokenizer, an option is
            out of range, or the output exists.
        OSError: If the Hub cannot be reached or the output cannot be written.
    """
    stored = _Stored(dtype, quantize, group_size, keep_wo, dequantize, encoder_only, format)
    wanted = _asked_for(model, adapter, revision, stored.checked(upload_repo))
    output = output or wanted.new_folder()
    if not force and wanted.is_made(ModelFolder(output)):
        note(f"{output} exists already, made from {model}; --force converts it again")
    else:
        _check_output(output, wanted.read, force=force)
        new = _open_new(wanted, output, note)
        new.write(output, upload_repo or output.name, allow_nonfinite, progress)
    if upload_repo is not None:
        note(f"uploaded to {upload(output, upload_repo)}")
    return output


@dataclasses.dataclass(frozen=True)
class _Stored:
    """How weights are to be stored: arguments of `convert`."""

    dtype: str | None
    quantize: int | None
    group_size: int
    keep_wo: bool | None
    dequantize: bool
    encoder_only: bool
    format: str | None  # None before `checked`

    def checked(self, upload_repo: str | None) -> _Stored:
        """Return it with its format; refuse options out of range, or that exclude each other."""
        if self.format is None:
            usual = OWN_FORMAT if upload_repo is None else SAFETENSORS
            return dataclasses.replace(self, format=usual).checked(upload_repo)
        if self.format not in FORMATS:
            raise option_error("format", " or ".join(FORMATS), self.format)
        if self.dequantize and self.quantize is not None:
            raise OptionError("{dequantize} and {quantize} exclude each other: leave one out")
        if upload_repo is not None:
            if self.format != SAFETENSORS:
                raise OptionError(
                    "{format} is {}, and what is uploaded is safetensors: leave it out", self.format
                )
            check_new_name(upload_repo)
        _ = self.quantization, as_dtype(self.dtype)  # refused here, if they are
        return self

    @property
    def quantization(self) -> Quantization | None:
        if self.quantize is None:
            return None
        if self.quantize not in (4, 8):
            raise ValueError(f"quantization must be to 4 or 8 bits, got {shown(self.quantize)}")
        return Quantization(self.quantize, self.group_size)

    def to_dict(self) -> dict[str, Any]:
        """What a folder made from a repository notes of it; what is new only where it is used."""
        found = dataclasses.asdict(self)
        for name in NEW_OPTIONS:
            if not found[name]:
                del found[name]
        if self.format != SAFETENSORS:
            del found["format"]
        return found


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What is converted, and how."""

    model: str
    adapter: str | None
    revision: str | None
    stored: _Stored
    folder: ModelFolder | None  # of the model, if it is one and not a repository

    @property
    def origin(self) -> dict[str, Any]:
        """What a folder made from a repository notes of that."""
        return {
            "repository": self.model,
            "revision": self.revision,
            **self.stored.to_dict(),
        }

    @property
    def named(self) -> str:
        """What the new model is named after."""
        return self.model if self.adapter is None else self.adapter

    @property
    def read(self) -> list[Path]:
        """The folders that are read, of those given by their paths; that of an adapter is last."""
        return [Path(each).resolve() for each in (self.model, self.named) if Path(each).is_dir()]

    def new_folder(self) -> Path:
        """Return where the model is written by default."""
        if Path(self.named).is_dir():
            return model_folder.new_folder(model_folder.name_of_folder(self.read[-1]))
        return model_folder.new_folder(flat_name(self.named))

    def is_made(self, found: ModelFolder) -> bool:
        """Whether a folder was made from the same repository with the same options."""
        if self.adapter is not None or Path(self.model).is_dir() or not found.is_made_here:
            return False
        form = OWN_FORMAT if found.is_converted else SAFETENSORS
        # What older folders do not say, they were not made with.
        made = dict.fromkeys(NEW_OPTIONS, False) | found.origin
        wanted = dict.fromkeys(NEW_OPTIONS, False) | self.origin
        return form == self.stored.format and wanted.items() <= made.items()


def _asked_for(model: str, adapter: str | None, revision: str | None, stored: _Stored) -> _Wanted:
    """Return what is converted.

    Raises:
        ValueError: If a folder is neither a model nor an adapter, or a revision of it is asked for.
    """
    folder = ModelFolder(Path(model)) if Path(model).is_dir() else None
    if folder and revision is not None:
        raise ValueError(
            f"a revision is for a repository on the Hub, and {model} is a folder: leave --revision "
            "out"
        )
    if folder and not folder.is_adapter:
        folder.model_config()  # refused here, if it is
    return _Wanted(model, adapter, revision, stored, folder)


def _find_source(wanted: _Wanted, output: Path) -> tuple[ModelFolder, dict[str, Any]]:
    """Return the folder to read, downloaded if need be, and what is noted of where it is from."""
    source, origin = wanted.folder, dict[str, Any]()
    if source is None and wanted.adapter is None:
        source, files = look_up(wanted.model, wanted.revision)
        if not source.is_adapter:
            config = source.model_config()  # refused before the download, if it is
            if wanted.stored.quantization:
                quantized(config, wanted.stored.quantization)
            download(wanted.model, source, files)
            origin = {"converted_from": wanted.origin | {"commit": source.path.name}}
    if source is not None and not source.is_adapter and wanted.adapter is None:
        return source, origin
    return _find_merged(wanted, output)


def _find_merged(wanted: _Wanted, output: Path) -> tuple[ModelFolder, dict[str, Any]]:
    """Return the folder of a model with its adapter, and what is noted of the two."""
    if wanted.revision is not None:
        raise ValueError("a revision does not go with an adapter: leave --revision out")
    adapter = None if wanted.adapter is None else resolved(wanted.adapter)
    source = locate(resolved(wanted.model), adapter)
    assert source.adapter is not None
    _check_apart(output, [source.path.resolve(), source.adapter.path.resolve()])
    names = {"base": short_name(source.path), "adapter": short_name(source.adapter.path)}
    return source, {"converted_from": names | wanted.stored.to_dict()}


def _open_new(wanted: _Wanted, output: Path, note: Callable[[str], None]) -> _NewModel:
    """Open what is to be converted, downloaded if need be; see `_open_source`."""
    source, origin = _find_source(wanted, output)
    source = dataclasses.replace(source, encoder_only=wanted.stored.encoder_only)
    checkpoint, types = _open_source(source, wanted.stored, note)
    base = None if Path(wanted.model).is_dir() else wanted.model
    return _NewModel(wanted.stored, source, checkpoint, types, origin, base)


def _open_source(
    source: ModelFolder, wanted: _Stored, note: Callable[[str], None]
) -> tuple[Checkpoint, dict[str, mx.Dtype]]:
    """Open a checkpoint to convert, and the types that it is stored in, dequantized if asked.

    Raises:
        ValueError: If it is quantized already where it is to be, or is without its tokenizer.
    """
    checkpoint = open_checkpoint(source)
    how, types = checkpoint.config.quantization, checkpoint.dtypes
    if how and wanted.quantize is not None:
        raise ValueError(
            f"{source.path} is quantized already, to {how}: convert what it was made from"
        )
    if wanted.dequantize:
        if not how:
            raise ValueError(f"{source.path} is not quantized: leave --dequantize out")
        checkpoint = dequantized(checkpoint)
        types = {n: types.get(sibling(n, "scales"), types[n]) for n in checkpoint.parameters}
    if checkpoint.num_images:
        note(f"left out {checkpoint.num_images} tensors for images: this package reads text only")
    source.tokenizer()  # refused here, if it does not fit
    return checkpoint, types


@dataclasses.dataclass(frozen=True)
class _NewModel:
    """A model to write, and what it is made of."""

    wanted: _Stored
    source: ModelFolder
    checkpoint: Checkpoint
    types: Mapping[str, mx.Dtype]  # that its parameters are stored in
    origin: dict[str, Any]
    base: str | None  # the repository of what it is made of

    def write(
        self,
        output: Path,
        name: str,
        allow_nonfinite: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        """Write its folder; others know the model by its `name`."""
        wanted, source, checkpoint = self.wanted, self.source, self.checkpoint
        config, quantization = checkpoint.config, wanted.quantization
        if quantization:
            config = quantized(config, quantization, wanted.keep_wo)
        chosen = as_dtype(wanted.dtype) or default_types(config, self.types)
        layout = new_layout(config, chosen)
        settings = _config_json(config, source) | _own_settings(source) | self.origin
        files = _small_files(source)
        written: Layout | None = None  # of safetensors
        card: str | None = None
        if wanted.format == SAFETENSORS:
            checkpoint, layout = as_saved(checkpoint), saved_layout(config, layout)
            settings, written = saved_config(config, settings, layout), layout
            bits = config.quantization.bits if config.quantization else None
            card = model_card(source, name, self.base, bits)
            files += filter(None, [shipped_license(source.path)])
        tensors = _new_tensors(checkpoint, config.quantization, layout, allow_nonfinite, progress)
        size = bytes_of_layout(layout)
        model_folder.write_folder(
            output, settings, tensors, files, num_bytes=size, layout=written, card=card
        )


def _small_files(source: ModelFolder) -> list[Path]:
    """Return the files to copy beside the weights."""
    paths = [source.tokenizer_path / name for name in OF_TOKENIZER]
    paths.append(source.path / model_folder.GENERATION_CONFIG)
    return [path for path in paths if path.is_file()]


def _check_output(output: Path, read: Iterable[Path], *, force: bool) -> None:
    """Refuse to write over what is read, over a model unless forced, or over anything else."""
    _check_apart(output, read)
    if ModelFolder(output).is_made_here and not force:
        raise ValueError(
            f"{output} exists: use --force to replace it, or --output to name another folder"
        )
    model_folder.check_model_replaceable(output)


def _check_apart(output: Path, read: Iterable[Path]) -> None:
    """Refuse to write where something is read, or around it."""
    if any(output.resolve() in (folder, *folder.parents) for folder in read):
        raise ValueError(f"{output} is or holds the checkpoint itself: choose another --output")


def _config_json(config: ModelConfig, source: ModelFolder) -> dict[str, Any]:
    """Return what is read back as this config: a T5's own entries, or those of the checkpoint."""
    if isinstance(config, T5Config):
        return config.to_dict()
    # True of the checkpoint alone.
    left_out = ("draft", "converted_from", "dtype", "quantization", QUANTIZATION_CONFIG)
    raw = {name: value for name, value in source.config.items() if name not in left_out}
    raw["tie_word_embeddings"] = not config.own_head  # whatever the checkpoint says
    if config.encoder_only:
        raw["encoder_only"] = True
        raw.pop("architectures", None)
    how = config.quantization
    return raw | ({"quantization": how.to_dict()} if how else {})


def _own_settings(source: ModelFolder) -> dict[str, Any]:
    """Return the settings that a config.json has beside the model's own: ours, and of tasks."""
    names = ("prefix", "draft", "min_probability", "corrects")
    checked = {name: getattr(source, name) for name in names}
    others = (TASK_PARAMS, "languages", "trained_length", "tokenizer_class", "split_special_tokens")
    own = checked | {name: source.config.get(name) for name in others}
    return {name: value for name, value in own.items() if value}


def quantized(
    config: ModelConfig, wanted: Quantization, keep_wo: bool | None = None
) -> ModelConfig:
    """Return the config of a model quantized as wanted; refuse groups that divide no matrix."""
    if config.d_model % wanted.group_size and config.d_ff % wanted.group_size:
        raise ValueError(
            f"no matrix can be quantized in groups of {wanted.group_size}, as d_model is "
            f"{config.d_model} and d_ff {config.d_ff}: "
            "choose a --group-size that divides one of them, or leave --quantize out"
        )
    embeddings = config.vocab_size * config.d_model >= MIN_SHARE * num_parameters(config)
    how = dataclasses.replace(
        wanted, keep_wo=config.gated if keep_wo is None else keep_wo, embeddings=embeddings
    )
    return dataclasses.replace(config, quantization=how)


def num_parameters(config: ModelConfig) -> int:
    """Return how many parameters a model has before it is quantized."""
    dense = dataclasses.replace(config, quantization=None)
    return sum(math.prod(shape) for shape in parameter_shapes(dense).values())


def new_layout(config: ModelConfig, dtype: mx.Dtype | Mapping[str, mx.Dtype]) -> Layout:
    """Return the tensors that a model is written as, in one type or in each parameter's."""
    shapes = parameter_shapes(config)
    layout = {}
    for name, shape in shapes.items():
        weight, scales = sibling(name, "weight"), sibling(name, "scales")
        kind = dtype if isinstance(dtype, mx.Dtype) else dtype.get(name, dtype[weight])
        layout[name] = (shape, mx.uint32 if name == weight and scales in shapes else kind)
    return layout


def default_types(config: ModelConfig, stored: Mapping[str, mx.Dtype]) -> Mapping[str, mx.Dtype]:
    """Return the types that a model's parameters are written in by default: those of `stored`.

    Matrices that a quantized model keeps, such as `wo` of gated ones, are not float32: they would
    be most of a 4-bit folder. In bfloat16 they lose less than the others do in 8 bits.
    """
    if not config.quantization or mx.uint32 in stored.values():
        return stored
    shapes = parameter_shapes(config)

    def kind(name: str, dtype: mx.Dtype) -> mx.Dtype:
        is_whole = len(shapes[name]) == 2 and sibling(name, "scales") not in shapes
        is_table = "position_bias" in name
        return mx.bfloat16 if is_whole and not is_table and dtype == mx.float32 else dtype

    return {name: kind(name, dtype) for name, dtype in stored.items()}


def bytes_of_layout(layout: Layout) -> int:
    """Return the bytes of all tensors of a layout."""
    return sum(math.prod(shape) * dtype.size for shape, dtype in layout.values())


def _new_tensors(
    checkpoint: Checkpoint,
    how: Quantization | None,
    layout: Layout,
    allow_nonfinite: bool,
    progress: Callable[[int, int], None],
) -> Iterator[NewTensor]:
    """Yield the tensor of each parameter, or the three of a quantized one, made block by block."""
    stored, parameters = checkpoint.tensors, checkpoint.parameters
    total = sum(stored[name].nbytes for sources in parameters.values() for name in sources)
    done = 0

    def blocks(sources: Iterable[str], dtype: mx.Dtype) -> Iterator[np.ndarray]:
        nonlocal done
        for name in sources:
            for block in stored[name].blocks():
                yield _checked_block(name, block, stored[name].dtype, dtype, allow_nonfinite)
                done += block.nbytes
                progress(done, total)

    for name, sources in parameters.items():
        siblings = (sibling(name, last) for last in ("scales", "biases"))
        made_here = (each for each in siblings if each in layout and each not in parameters)
        parts: dict[str, list[np.ndarray]] = {each: [] for each in made_here}
        dtype = layout[next(iter(parts), name)][1]
        made = blocks(sources, dtype)
        if parts:
            assert how is not None
            made = _quantize(made, dtype, how, parts.values())
        yield NewTensor(name, *layout[name], made)
        # These are small, and complete once the weights have been written.
        for other, part in parts.items():
            yield NewTensor(other, *layout[other], part)


def _checked_block(
    name: str, block: np.ndarray, old: mx.Dtype, new: mx.Dtype, allow_nonfinite: bool
) -> np.ndarray:
    """Return a block in its new type; refuse numbers that are not finite, or not in that type."""
    if old == mx.uint32:  # packed
        return block
    finite = is_finite(block, old)
    if not finite and not allow_nonfinite:
        raise ValueError(
            f"{name} has weights that are NaN or infinite; "
            "use --allow-nonfinite to convert them all the same"
        )
    if old == new:
        return block
    array = as_numpy(as_mlx(block, old).astype(new))
    if finite and not is_finite(array, new):
        better = "bfloat16 or float32" if new == mx.float16 else "float32"
        raise ValueError(f"{name} has weights too large for {dtype_name(new)}: use {better}")
    return array


def _quantize(
    blocks: Iterator[np.ndarray],
    dtype: mx.Dtype,
    how: Quantization,
    parts: Collection[list[np.ndarray]],
) -> Iterator[np.ndarray]:
    """Yield quantized rows; append their scales and biases to `parts`."""
    for block in blocks:
        packed, *rest = mx.quantize(as_mlx(block, dtype), how.group_size, how.bits)
        mx.eval(packed, rest)
        for part, array in zip(parts, rest, strict=True):
            part.append(as_numpy(array))
        yield as_numpy(packed)


def is_finite(block: np.ndarray, dtype: mx.Dtype) -> bool:
    """Whether an array that stands for `dtype` holds neither NaN nor infinity."""
    infinity, size = _INFINITIES[dtype], block.itemsize
    bits = block.reshape(-1).view(f"u{size}")
    negative = infinity | 1 << (8 * size - 1)
    # Of signed integers the largest is a positive number's; of unsigned ones, a negative number's.
    return bool(bits.view(f"i{size}").max() < infinity and bits.max() < negative)
