"""Folders of sharing drafts: weights of their own, and the name and fingerprint of their target.

config.json   "model_type": "t5-draft", the target, what is shared, the sizes
weights.npz   the decoder's layers, their position bias and last normalization
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cpu import accelerate
from ..errors import printable, shown
from ..models import (
    DRAFT_TYPE,
    MAX_LAYERS,
    T5,
    CausalModel,
    SharingConfig,
    SharingDraft,
    is_sample,
    read_size,
    same_weights,
    sample_weights,
)
from .folder import check_shapes, read_json
from .npz import NewTensor, read_npz
from .tensors import as_mlx, as_numpy
from .writing import write_folder

SHARED = ["encoder", "embedding", "head"]
AGAIN = "copy or distill the draft again"


def holds_draft(folder: Path) -> bool:
    """Whether a folder's config.json is that of a sharing draft."""
    config = folder / "config.json"
    return config.is_file() and read_json(config).get("model_type") == DRAFT_TYPE


def target_name(folder: Path) -> str:
    """Return the name of the target in the folder of a sharing draft, for messages."""
    name = read_json(folder / "config.json").get("target")
    return printable(name) if isinstance(name, str) else "a model that it does not name"


def load_draft(folder: Path, target: T5 | CausalModel | None) -> SharingDraft:
    """Load a sharing draft for a target that is loaded.

    Raises:
        ValueError: If the folder is damaged, or the draft is another target's.
    """
    name = target_name(folder)
    if target is None:
        raise ValueError(
            f"{folder} is a draft for {name}, whose encoder it shares, and not a model of its own: "
            f"give it as the draft of {name} (--draft-model, or load(..., target=model))"
        )
    config, sample = _read_config(folder)
    if not isinstance(target, T5) or not same_weights(sample, sample_weights(target)):
        raise ValueError(
            f"{folder} is a draft for {name}, and the target is another model: "
            f"use {name} as the target, or distill a draft for this one"
        )
    if config.draft_vocab is not None and config.draft_vocab <= target.eos_token_id:
        raise ValueError(
            f"{folder / 'config.json'}: draft_vocab is {config.draft_vocab}, expected more than "
            f"{target.eos_token_id}, the id that ends outputs: {AGAIN}"
        )
    draft = SharingDraft(target, config)
    path = folder / "weights.npz"
    tensors = read_npz(path)
    shapes = {name: tuple(w.shape) for name, w in _parameters(draft).items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(path, shapes, found, "draft", again=AGAIN)
    draft.load_weights(
        [(name, as_mlx(t.read(), t.dtype).astype(target.dtype)) for name, t in tensors.items()]
    )
    mx.eval(draft.parameters())
    accelerate(draft)
    return draft


def save_draft(
    folder: Path,
    draft: SharingDraft,
    name: str,
    *,
    more: Mapping[str, Any] | None = None,
    files: Iterable[Path] = (),
) -> None:
    """Write the folder of a draft, whole or not at all.

    Args:
        folder: To write.
        draft: Its weights are stored as float16.
        name: The target's, for people and messages.
        more: Further entries of config.json.
        files: Files to copy into the folder.

    Raises:
        ValueError: If a weight is not finite in float16.
        OSError: If the folder cannot be written.
    """
    weights = {key: weight.astype(mx.float16) for key, weight in _parameters(draft).items()}
    for key, weight in weights.items():
        if not mx.isfinite(weight).all().item():
            raise ValueError(
                f"{key} of the draft is not finite in float16: train it with a smaller "
                "--learning-rate"
            )
    config = {
        "model_type": DRAFT_TYPE,
        "target": name,
        "fingerprint": sample_weights(draft.target),
        "shares": SHARED,
        **{key: value for key, value in asdict(draft.own).items() if value is not None},
        **(more or {}),
    }
    tensors = [
        NewTensor(key, tuple(weight.shape), mx.float16, [as_numpy(weight)])
        for key, weight in weights.items()
    ]
    write_folder(folder, config, tensors, files)


def inspect_draft(folder: Path) -> tuple[str, int]:
    """Return the target's name and the number of a draft's own parameters, from its files."""
    _read_config(folder)
    tensors = read_npz(folder / "weights.npz")
    sizes = [tensor.nbytes // tensor.dtype.size for tensor in tensors.values()]
    return target_name(folder), sum(sizes)


def _parameters(draft: SharingDraft) -> dict[str, mx.array]:
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(draft.parameters())))


def _read_config(folder: Path) -> tuple[SharingConfig, str]:
    """Read config.json of a sharing draft: what it has of its own, and its target's sample."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("shares") != SHARED:
        raise ValueError(
            f"{path}: shares is {shown(raw.get('shares'))}, expected {SHARED}: use a newer "
            "version, or distill the draft again"
        )
    if not is_sample(raw.get("fingerprint")):
        raise ValueError(
            f"{path}: fingerprint is {shown(raw.get('fingerprint'))}, expected one that this "
            f"version writes: {AGAIN}"
        )
    try:
        depth, d_ff = read_size(raw, "num_decoder_layers"), read_size(raw, "d_ff")
        vocab = read_size(raw, "draft_vocab") if raw.get("draft_vocab") is not None else None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; {AGAIN}") from error
    if depth > MAX_LAYERS:
        raise ValueError(
            f"{path}: num_decoder_layers is {depth}, expected at most {MAX_LAYERS}: {AGAIN}"
        )
    return SharingConfig(depth, d_ff, vocab), cast(str, raw["fingerprint"])
