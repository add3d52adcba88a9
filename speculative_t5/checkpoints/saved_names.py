"""Names of tensors as programs save them: without their wrappers, or why they cannot be read.

Training wraps a model, and some programs save the wrapper: each name then has a beginning, or a
part in its middle, that a T5's own names lack. Others save what only they can read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import count, printable
from .tensors import StoredTensor

# Wrappers of torch and DeepSpeed; no T5 has a part of such a name.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|module)\."
)
# Where the names of a T5's or a T5Gemma's layers begin.
_LAYERS = re.compile(
    r"(.*?)(?:(?:encoder|decoder)\.block|(?:model\.)?(?:encoder|decoder)\.(?:text_model\.)?layers)"
    r"\.\d+\."
)
# What PEFT calls the parts of an adapter, and the weights that these change.
_UNMERGED = re.compile(r"\.(base_layer|lora_\w+|modules_to_save|original_module)\.")


def unwrapped(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by the names that its model gives them.

    Raises:
        ValueError: If they are the parts of an adapter that was not merged, or have no numbers, as
            where each process of a training saved its own.
    """
    _refuse_parts(path, tensors)
    names = {name: _WRAPPERS.sub("", name) for name in tensors}
    beginning = _common_beginning(names.values())
    found: dict[str, StoredTensor] = {}
    for name, own in names.items():
        own = own.removeprefix(beginning)
        if own in found:
            raise ValueError(
                f"{path} has two tensors for {printable(own)}, one of them {printable(name)}: save "
                "the model alone, without copies of it"
            )
        found[own] = tensors[name]
    return found


def _refuse_parts(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    unmerged = next(filter(_UNMERGED.search, tensors), None)
    if unmerged is not None:
        raise ValueError(
            f"{path} holds a model with an adapter of PEFT that was not merged, as "
            f"{printable(unmerged)} shows: merge it by merge_and_unload() and save the model, or "
            "give the adapter alone"
        )
    empty = [name for name, tensor in tensors.items() if 0 in tensor.shape]
    if empty:
        raise ValueError(
            f"{path} has {count(len(empty), 'tensor')} without numbers, such as "
            f"{printable(empty[0])} of shape {tensors[empty[0]].shape}, as DeepSpeed's ZeRO-3 "
            "leaves them where each process has a part: merge the parts with its zero_to_fp32.py, "
            "or save again with stage3_gather_16bit_weights_on_model_save"
        )


def _common_beginning(names: Iterable[str]) -> str:
    """Return what most names of layers begin with before their own part, usually nothing."""
    found = Counter(match[1] for match in map(_LAYERS.match, names) if match)
    return max(found, key=found.__getitem__, default="")
