"""Hugging Face checkpoints -> model folders, from the raw tensors and config.json."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .config import T5Config
from .tokenizer import TOKENIZER_FILES
from .weights import check_shapes, read_config, write_folder

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

# Copies of the shared embedding, and an encoder-decoder bias that no T5 uses.
_REDUNDANT = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One of our parameters: Hugging Face tensors of these names and shapes, stacked by rows."""

    name: str
    sources: dict[str, Shape]


def convert(
    model: str,
    output: Path | None = None,
    *,
    dtype: mx.Dtype | None = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Convert a checkpoint folder, or a repository of the Hugging Face Hub, to a model folder.

    Args:
        model: Path of the folder, or name of the repository.
        output: Folder to write; weights/<last part of the name> by default.
        dtype: Type to store; by default each tensor's own.
        revision: Branch, tag or commit on the Hub.
        progress: Called with how many parameters are done, and how many there are.

    Returns:
        The folder written.

    Raises:
        ValueError: If the checkpoint is not a whole T5 with a tokenizer.
        OSError: If the Hub cannot be reached or the output cannot be written.
    """
    source = Path(model) if Path(model).is_dir() else _download(model, revision)
    name = Path(model).resolve().name if Path(model).is_dir() else model.rsplit("/", 1)[-1]
    config = read_config(source)
    tokenizer_files = [path for file in TOKENIZER_FILES if (path := source / file).is_file()]
    if not any(path.name in ("spiece.model", "tokenizer.json") for path in tokenizer_files):
        raise ValueError(
            f"no tokenizer in {source}: expected spiece.model or tokenizer.json; "
            "copy it there from the model that this one was tuned from"
        )
    tensors = read_tensors(source)
    config = believe_tensors(config, tensors)
    parameters = list(plan(config))
    expected = {name: shape for p in parameters for name, shape in p.sources.items()}
    found = {n: tuple(t.shape) for n, t in tensors.items() if not _redundant(n, config)}
    check_shapes(source, expected, found)

    def produce() -> Iterator[tuple[str, mx.array]]:
        for done, parameter in enumerate(parameters):
            progress(done, len(parameters))
            parts = [_take(tensors, name) for name in parameter.sources]
            whole = mx.concatenate(parts) if len(parts) > 1 else parts[0]
            yield parameter.name, whole.astype(dtype) if dtype else whole
        progress(len(parameters), len(parameters))

    output = output or Path("weights") / name
    if output.resolve() == source.resolve():
        raise ValueError(f"{source} is the checkpoint itself: choose another --output")
    write_folder(output, config, produce(), tokenizer_files)
    return output


def believe_tensors(config: T5Config, tensors: Mapping[str, Any]) -> T5Config:
    """Correct a config by the tensors that are there; old ones say relu for gated-gelu, and so on.

    The scaling of the decoder's output is not to be seen in tensors and stays as configured.
    """
    gated = any(name.endswith("DenseReluDense.wi_0.weight") for name in tensors)
    activation = config.activation
    if gated and not config.gated and activation in ("relu", "gelu"):
        activation = "gelu_new"
    head, shared = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    own_head = head is not None and (shared is None or not _equal(head, shared))
    return dataclasses.replace(
        config,
        gated=gated,
        activation=activation,
        own_head=own_head,
        num_layers=_depth(tensors, "encoder") or config.num_layers,
        num_decoder_layers=_depth(tensors, "decoder") or config.num_decoder_layers,
    )


def plan(config: T5Config) -> Iterator[Parameter]:
    """All our parameters and the Hugging Face tensors they are made of."""
    d, inner = config.d_model, config.num_heads * config.d_kv
    yield Parameter("shared.weight", {"shared.weight": (config.vocab_size, d)})
    stacks = (("encoder", config.num_layers), ("decoder", config.num_decoder_layers))
    for stack, depth in stacks:
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Parameter(
            f"{stack}.position_bias.weight",
            {bias: (config.relative_attention_num_buckets, config.num_heads)},
        )
        for i in range(depth):
            ours, theirs = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer"
            attention = f"{theirs}.0.SelfAttention"
            yield Parameter(
                f"{ours}.self_attention.qkv.weight",
                {f"{attention}.{part}.weight": (inner, d) for part in "qkv"},
            )
            yield Parameter(
                f"{ours}.self_attention.out.weight", {f"{attention}.o.weight": (d, inner)}
            )
            yield Parameter(f"{ours}.self_norm.weight", {f"{theirs}.0.layer_norm.weight": (d,)})
            if stack == "decoder":
                yield from _plan_cross(ours, theirs, d, inner)
            yield from _plan_feed_forward(config, ours, f"{theirs}.{1 + (stack == 'decoder')}")
        yield Parameter(f"{stack}.norm.weight", {f"{stack}.final_layer_norm.weight": (d,)})
    if config.own_head:
        yield Parameter("lm_head.weight", {"lm_head.weight": (config.vocab_size, d)})


def _plan_cross(ours: str, theirs: str, d: int, inner: int) -> Iterator[Parameter]:
    attention = f"{theirs}.1.EncDecAttention"
    yield Parameter(f"{ours}.cross_attention.q.weight", {f"{attention}.q.weight": (inner, d)})
    yield Parameter(
        f"{ours}.cross_attention.kv.weight",
        {f"{attention}.{part}.weight": (inner, d) for part in "kv"},
    )
    yield Parameter(f"{ours}.cross_attention.out.weight", {f"{attention}.o.weight": (d, inner)})
    yield Parameter(f"{ours}.cross_norm.weight", {f"{theirs}.1.layer_norm.weight": (d,)})


def _plan_feed_forward(config: T5Config, ours: str, theirs: str) -> Iterator[Parameter]:
    d, d_ff, dense = config.d_model, config.d_ff, f"{theirs}.DenseReluDense"
    parts = ("wi_0", "wi_1") if config.gated else ("wi",)
    yield Parameter(
        f"{ours}.feed_forward.wi.weight", {f"{dense}.{part}.weight": (d_ff, d) for part in parts}
    )
    yield Parameter(f"{ours}.feed_forward.wo.weight", {f"{dense}.wo.weight": (d, d_ff)})
    yield Parameter(f"{ours}.feed_forward_norm.weight", {f"{theirs}.layer_norm.weight": (d,)})


def read_tensors(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint by name, read from disk when they are used.

    Safetensors come as MLX arrays; .bin files, which need torch, as memory-mapped torch tensors.

    Raises:
        ValueError: If files are missing, truncated or not readable.
    """
    for suffix, read in (("safetensors", _read_safetensors), ("bin", _read_bin)):
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if single.is_file():
            return read(single)
        if index.is_file():
            tensors: dict[str, Any] = {}
            for shard in _shards(index):
                tensors |= read(folder / shard)
            return tensors
    raise ValueError(
        f"no weights in {folder}: expected model.safetensors or pytorch_model.bin, "
        "or one of them in shards with its index.json"
    )


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of shards: {error!r}") from error
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{missing[0]}, named by {index}, is missing")
    return shards


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        tensors = mx.load(str(path))
    except (RuntimeError, ValueError) as error:
        cause = str(error).strip().splitlines()[-1]
        raise ValueError(f"{path} is truncated or damaged: {cause}") from error
    assert isinstance(tensors, dict)
    return tensors


def _read_bin(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"{path} is a pickled checkpoint, which takes torch to read: pip install torch, "
            "or convert a safetensors version"
        ) from error
    try:
        # Files of torch before 1.6 are no archives, and cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        return dict(torch.load(path, map_location="cpu", mmap=mapped, weights_only=True))
    except Exception as error:  # unpicklers raise anything
        cause = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is truncated or damaged: {cause}") from error


def _as_array(tensor: Any) -> mx.array:
    if isinstance(tensor, mx.array):
        return tensor
    import torch

    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def _take(tensors: dict[str, Any], name: str) -> mx.array:
    """Remove a tensor, so that its memory is free once it is stored."""
    array = _as_array(tensors.pop(name))
    mx.eval(array)
    return array


def _redundant(name: str, config: T5Config) -> bool:
    return bool(_REDUNDANT.fullmatch(name)) or (name == "lm_head.weight" and not config.own_head)


def _equal(a: Any, b: Any) -> bool:
    return bool(mx.array_equal(_as_array(a), _as_array(b)))


def _depth(tensors: Mapping[str, Any], stack: str) -> int:
    pattern = re.compile(rf"{stack}\.block\.(\d+)\.")
    return 1 + max((int(m[1]) for name in tensors if (m := pattern.match(name))), default=-1)


def _download(name: str, revision: str | None) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"no checkpoint folder {name!r}")
    # Imported here: only this path needs it, and it takes its time.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        files = HfApi().list_repo_files(name, revision=revision)
        weights = "*.safetensors*" if any(f.endswith(".safetensors") for f in files) else "*.bin*"
        wanted = ["config.json", *TOKENIZER_FILES, weights]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a folder nor a name on the Hub: {error}") from error
    except Exception as error:  # its HTTP client's errors have no base of their own
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        cause = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"there is no folder {name!r}, and it could not be had from the Hub: {cause}"
        ) from error
