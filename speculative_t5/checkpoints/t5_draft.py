"""Folders of drafts that share their target's encoder, and name it and its fingerprint."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from .. import models
from ..errors import printable, shown
from ..kernels import accelerate, kept_types, takes_stored
from ..models import EncoderDecoder, SharingConfig, SharingDraft
from . import tensors
from .model_folder import ModelFolder, write_folder

SHARED_PARTS = ["encoder", "embedding", "head"]
OPTIONAL_SIZES = {
    "draft_vocab": models.MAX_SIZE,
    "block": models.MOST_BLOCK,
    "d_model": models.MAX_SIZE,
}
DISTILL_AGAIN = "copy or distill the draft again"


def load_draft(
    folder: Path, target: EncoderDecoder | None, dtype: mx.Dtype | None = None
) -> SharingDraft:
    """Load a draft for a target that is loaded; refuse a damaged one, and another target's.

    It computes in the target's type; if that is float32, its matrices may be kept in `dtype`, see
    `load`.
    """
    opened = ModelFolder(folder)
    name = _target_name(opened)
    if target is None:
        raise ValueError(
            f"{folder} is a draft for {name}, whose encoder it shares, and not a model of its own: "
            f"give it as the draft of {name} (--draft-model, or load(..., target=model))"
        )
    config, sample = _read_config(opened)
    if not isinstance(target, EncoderDecoder) or not models.same_weights(
        sample, models.sample_weights(target)
    ):
        raise ValueError(
            f"{folder} is a draft for {name}, and the target is another model: "
            f"use {name} as the target, or distill a draft for this one"
        )
    if config.draft_vocab is not None and config.draft_vocab <= target.info.eos_token_id:
        raise ValueError(
            f"{folder / 'config.json'}: draft_vocab is {config.draft_vocab}, expected more than "
            f"{target.info.eos_token_id}, the id that ends outputs: {DISTILL_AGAIN}"
        )
    draft = SharingDraft(target, config)
    path = folder / "weights.npz"
    stored = tensors.read_npz(path)
    tensors.check_tensors(path, tensors.module_shapes(draft), stored, "draft", again=DISTILL_AGAIN)
    types = dict.fromkeys(stored, target.dtype)
    if takes_stored() and target.dtype == mx.float32:
        types = kept_types(draft, {name: tensor.dtype for name, tensor in stored.items()}, dtype)
    for name, tensor in stored.items():
        weight = tensors.as_mlx(tensor.read(), tensor.dtype)
        draft.load_weights([(name, weight.astype(types[name]))], strict=False)
    mx.eval(draft.parameters())
    accelerate(draft)
    return draft


def save_draft(folder: Path, draft: SharingDraft, name: str, *, files: Iterable[Path] = ()) -> None:
    """Write the folder of a draft, whole or not at all, with copies of `files`.

    Its weights are stored as float16. `name` is the target's, for people and messages.
    """
    own = {key: value for key, value in asdict(draft.own).items() if value is not None}
    config = {
        "model_type": models.DRAFT_TYPE,
        "target": name,
        "fingerprint": models.sample_weights(draft.target),
        "shares": SHARED_PARTS,
    }
    new = []
    for key, weight in tensors.parameters_of(draft).items():
        half = tensors.as_numpy(weight.astype(mx.float16))
        new.append(tensors.NewTensor(key, half.shape, mx.float16, [half]))
    write_folder(folder, config | own, new, files)


def inspect_draft(folder: ModelFolder) -> tuple[str, int]:
    """Return the target's name and the number of a draft's own parameters, from its files."""
    _read_config(folder)
    stored = tensors.read_npz(folder.path / "weights.npz")
    sizes = [tensor.nbytes // tensor.dtype.size for tensor in stored.values()]
    return _target_name(folder), sum(sizes)


def _target_name(folder: ModelFolder) -> str:
    name = folder.config.get("target")
    return printable(name) if isinstance(name, str) else "a model that it does not name"


def _read_config(folder: ModelFolder) -> tuple[SharingConfig, str]:
    """Read config.json of a draft: what it has of its own, and its target's sample."""
    path, raw = folder.path / "config.json", folder.config
    shared, sample = raw.get("shares"), raw.get("fingerprint")
    if shared != SHARED_PARTS:
        raise ValueError(
            f"{path}: shares is {shown(shared)}, expected {SHARED_PARTS}: use a newer version, or "
            "distill the draft again"
        )
    if not isinstance(sample, str) or not models.is_sample(sample):
        raise ValueError(
            f"{path}: fingerprint is {shown(sample)}, expected one that this version writes: "
            f"{DISTILL_AGAIN}"
        )
    try:
        depth = models.read_size(raw, "num_decoder_layers", models.MAX_LAYERS)
        d_ff = models.read_size(raw, "d_ff")
        others = {
            name: models.read_size(raw, name, most)
            for name, most in OPTIONAL_SIZES.items()
            if raw.get(name) is not None
        }
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}; {DISTILL_AGAIN}") from error
    return SharingConfig(depth, d_ff, **others), sample
