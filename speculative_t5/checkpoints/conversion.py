"""Converts a T5 checkpoint to a model folder, one tensor at a time."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..models import Quantization, T5Config
from ..tokenizers import TOKENIZER_FILES
from .hub import download, flat_name, look_up
from .loading import as_dtype
from .model_folder import GENERATION_CONFIG, ModelFolder, name_of_folder, new_folder
from .t5 import Checkpoint, Parameter, open_checkpoint, parameter_shapes
from .tasks import TASKS
from .tensors import Shape, StoredTensor, as_mlx, as_numpy, dtype_name
from .writing import DEPTH, NewTensor, check_replaceable, write_folder

Layout = dict[str, tuple[Shape, mx.Dtype]]  # the tensors to write, by name

CHUNK = 1 << 16  # numbers that are checked at a time
MIN_SHARE = 0.01  # of the weights: quantizing a smaller embedding gains nothing

# The exponent's bits, all set in NaN and infinity, as integers of each type's size.
_EXPONENTS: dict[mx.Dtype, np.generic] = {
    mx.float32: np.uint32(0x7F800000),
    mx.float16: np.uint16(0x7C00),
    mx.bfloat16: np.uint16(0x7F80),
}


def convert(
    model: str,
    output: Path | None = None,
    *,
    dtype: str | None = None,
    quantize: int | None = None,
    group_size: int = 64,
    keep_wo: bool | None = None,
    revision: str | None = None,
    force: bool = False,
    allow_nonfinite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Convert a checkpoint folder, or a repository of the Hugging Face Hub, to a model folder.

    A repository that was converted before with the same options is neither downloaded nor converted
    again. Takes the memory of a few blocks of 4 MB, beside the mapped part of one tensor.

    Args:
        model: Path of a checkpoint or model folder, or name of a repository.
        output: Folder to write; by default `new_folder` of the last part of the name, or of
            `name_of_folder`.
        dtype: Type to store: float32, float16 or bfloat16; by default each tensor's own.
        quantize: Bits to quantize matrices to, 4 or 8; by default they are not quantized.
        group_size: Weights that share a scale and a bias: 32, 64 or 128.
        keep_wo: Whether to leave the feed-forward's second matrix unquantized; by default in gated
            models, where quantizing it loses most.
        revision: Branch, tag or commit on the Hub.
        force: Whether to replace an existing model folder.
        allow_nonfinite: Whether to accept weights that are NaN or infinite.
        progress: Called with the bytes read and the bytes to read, while the conversion runs.
        note: Called with each line that the user should see.

    Returns:
        The folder written.

    Raises:
        ValueError: If the checkpoint is not a whole T5 with a tokenizer, an option is out of range,
            or the output exists.
        OSError: If the Hub cannot be reached or the output cannot be written.
    """
    source = ModelFolder(Path(model)) if Path(model).is_dir() else None
    if source and revision is not None:
        raise ValueError(
            f"a revision is for a repository on the Hub, and {model} is a folder: "
            "leave --revision out"
        )
    if source and source.kind == "t5-draft":
        source.t5_config()  # says what a draft is for
    wanted = Quantization(quantize, group_size) if quantize is not None else None
    target = as_dtype(dtype)
    output = output or new_folder(
        name_of_folder(source.path.resolve()) if source else flat_name(model)
    )
    options = {"dtype": dtype, "quantize": quantize, "group_size": group_size, "keep_wo": keep_wo}
    made = {"repository": model, "revision": revision, **options}
    exists = (output / "weights.npz").exists()
    if exists and not force and not source and made.items() <= ModelFolder(output).origin.items():
        note(f"{output} exists already, made from {model}; --force converts it again")
        return output
    _check_output(output, source.path if source else None, replace=force)
    extra = {}
    if source is None:
        source = _download(model, revision, wanted, note)
        extra["converted_from"] = made | {"commit": source.path.name}
    checkpoint = _open_whole(source)
    config = quantized(checkpoint.config, wanted, keep_wo) if wanted else checkpoint.config
    dtypes = {p.name: target or checkpoint.dtype(p) for p in checkpoint.parameters}
    layout = new_layout(config, dtypes)
    conversion = _Conversion(checkpoint, config.quantization, layout, allow_nonfinite, progress)
    write_folder(
        output,
        config.to_dict() | _own_settings(source) | extra,
        conversion.tensors(),
        [p for n in (*TOKENIZER_FILES, GENERATION_CONFIG) if (p := source.path / n).is_file()],
        num_bytes=num_bytes(layout),
    )
    return output


def _check_output(output: Path, source: Path | None, *, replace: bool) -> None:
    if source and output.resolve() in (here := source.resolve(), *here.parents):
        raise ValueError(f"{output} is or holds the checkpoint itself: choose another --output")
    if (output / "weights.npz").exists() and not replace:
        raise ValueError(
            f"{output} exists: use --force to replace it, or --output to name another folder"
        )
    check_replaceable(output)


def _download(
    name: str, revision: str | None, wanted: Quantization | None, note: Callable[[str], None]
) -> ModelFolder:
    """Return a repository's folder in the cache, which is named by its commit."""
    repository = look_up(name, revision)
    if wanted:  # refused, if it is, before the download
        quantized(repository.folder.t5_config(), wanted)
    download(repository, note=note)
    return repository.folder


def _open_whole(source: ModelFolder) -> Checkpoint:
    """Open a checkpoint that is not quantized yet, and check that its tokenizer fits."""
    checkpoint = open_checkpoint(source)
    if checkpoint.config.quantization:
        raise ValueError(
            f"{source.path} is quantized already, to {checkpoint.config.quantization}: "
            "convert what it was made from"
        )
    source.tokenizer()
    return checkpoint


def _own_settings(source: ModelFolder) -> dict[str, Any]:
    """Return the settings that a config.json has beside the model's own: ours, and of tasks."""
    own = {
        "prefix": source.prefix,
        "draft": source.draft,
        "min_probability": source.min_probability,
    }
    kept = (TASKS, "tokenizer_class", "split_special_tokens")
    own |= {name: source.config.get(name) for name in kept}
    return {key: value for key, value in own.items() if value}


def quantized(config: T5Config, wanted: Quantization, keep_wo: bool | None = None) -> T5Config:
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


def num_parameters(config: T5Config) -> int:
    """Return how many parameters a model with this config has before it is quantized."""
    dense = dataclasses.replace(config, quantization=None)
    return sum(math.prod(shape) for shape in parameter_shapes(dense).values())


def new_layout(config: T5Config, dtype: mx.Dtype | Mapping[str, mx.Dtype]) -> Layout:
    """Return the names, shapes and types of the tensors that a model is written as.

    `dtype` is the type of all parameters, or of each by name; of a quantized one's scales.
    """
    shapes = parameter_shapes(config)
    layout = {}
    for name, shape in shapes.items():
        weight, scales = _sibling(name, "weight"), _sibling(name, "scales")
        kind = dtype if isinstance(dtype, mx.Dtype) else dtype[weight]
        layout[name] = (shape, mx.uint32 if name == weight and scales in shapes else kind)
    return layout


def num_bytes(layout: Layout) -> int:
    """Return the bytes of all tensors of a layout."""
    return sum(math.prod(shape) * dtype.size for shape, dtype in layout.values())


def _sibling(name: str, last: str) -> str:
    """Return x.last for x.weight, x.scales or x.biases."""
    return f"{name.rsplit('.', 1)[0]}.{last}"


class _Conversion:
    """Makes the tensors to write from the stored ones, block by block."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        how: Quantization | None,
        layout: Layout,
        allow_nonfinite: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._how = how
        self._layout = layout
        self._allow_nonfinite = allow_nonfinite
        self._progress = progress
        stored = [checkpoint.tensors[name] for p in checkpoint.parameters for name in p.sources]
        self._total = sum(tensor.nbytes for tensor in stored)
        self._done = 0

    def tensors(self) -> Iterator[NewTensor]:
        """Yield the tensor of each parameter, or the three of a quantized one."""
        for parameter in self._checkpoint.parameters:
            name = parameter.name
            siblings = (_sibling(name, last) for last in ("scales", "biases"))
            others = [sibling for sibling in siblings if sibling in self._layout]
            dtype = self._layout[others[0] if others else name][1]
            blocks = self._blocks(parameter, dtype)
            parts: list[list[np.ndarray]] = [[] for _ in others]
            if others:
                blocks = self._quantize(blocks, dtype, parts)
            yield NewTensor(name, *self._layout[name], blocks)
            # These are small, and complete once the weights have been written.
            for other, part in zip(others, parts, strict=True):
                yield NewTensor(other, *self._layout[other], part)

    def _blocks(self, parameter: Parameter, dtype: mx.Dtype) -> Iterator[np.ndarray]:
        """Yield the rows of a parameter, one part after the other, in its new type."""
        for name in parameter.sources:
            tensor = self._checkpoint.tensors[name]
            for block, finite in _read_ahead(tensor):
                if not finite and not self._allow_nonfinite:
                    raise ValueError(
                        f"{name} has weights that are NaN or infinite; "
                        "use --allow-nonfinite to convert them all the same"
                    )
                yield self._cast(name, block, tensor.dtype, dtype, finite)
                self._done += block.nbytes
                self._progress(self._done, self._total)

    def _cast(
        self, name: str, block: np.ndarray, old: mx.Dtype, new: mx.Dtype, finite: bool
    ) -> np.ndarray:
        if old == new:
            return block
        array = as_numpy(as_mlx(block, old).astype(new))
        if finite and not is_finite(array, new):
            better = "bfloat16 or float32" if new == mx.float16 else "float32"
            raise ValueError(f"{name} has weights too large for {dtype_name(new)}: use {better}")
        return array

    def _quantize(
        self, blocks: Iterator[np.ndarray], dtype: mx.Dtype, parts: list[list[np.ndarray]]
    ) -> Iterator[np.ndarray]:
        """Yield quantized rows; append their scales and biases to `parts`."""
        assert self._how is not None
        for block in blocks:
            packed, *rest = mx.quantize(as_mlx(block, dtype), self._how.group_size, self._how.bits)
            mx.eval(packed, rest)
            for part, array in zip(parts, rest, strict=True):
                part.append(as_numpy(array))
            yield as_numpy(packed)


def _read_ahead(tensor: StoredTensor) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the blocks of a tensor, and whether each is finite, while a thread reads the next."""
    checked = ((block, is_finite(block, tensor.dtype)) for block in tensor.blocks())
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, checked, None) for _ in range(DEPTH))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, checked, None))
            yield item


def is_finite(block: np.ndarray, dtype: mx.Dtype) -> bool:
    """Whether an array that stands for `dtype` holds neither NaN nor infinity."""
    exponent = _EXPONENTS[dtype]
    bits = block.reshape(-1).view(exponent.dtype)
    # In chunks that fit a processor's cache and reuse the same memory.
    chunks = (bits[i : i + CHUNK] & exponent for i in range(0, len(bits), CHUNK))
    return all(chunk.max() != exponent for chunk in chunks)
