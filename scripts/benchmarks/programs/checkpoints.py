"""One checkpoint for all programs: this package's model, as transformers and CTranslate2 read it.

Torch, CTranslate2 and MLX are imported where they are used: a BLAS loaded for one program changes
the speed of another.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from programs import BITS

if TYPE_CHECKING:
    from speculative_t5.models import T5, SharingDraft

GROUP_SIZE = 64  # of quantized matrices, as `convert` makes them by default


def as_hugging_face(model: T5, folder: Path) -> None:
    """Write a model, of its dtype, for `T5ForConditionalGeneration.from_pretrained`.

    Quantized models are refused, and those with a position bias in every layer (umt5).
    """
    from speculative_t5.checkpoints.t5 import plan

    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = model.config
    if config.quantization or config.bias_per_layer:
        raise ValueError("a quantized model or a umt5 cannot be written as a T5 of transformers")
    arrays = dict(tree_flatten(model.parameters()))
    tensors = {}
    for ours, sources in plan(config):
        rows = 0
        for name, (size, *_) in sources.items():
            part = arrays[ours][rows : rows + size]
            tensors[name], rows = mx.contiguous(part), rows + size
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    raw = {
        "architectures": ["T5ForConditionalGeneration"],
        "dtype": dtype_of(model),
    } | config.to_dict()
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")


def dtype_of(model: T5) -> str:
    """Return the name of a model's type."""
    return str(model.shared.weight.dtype).removeprefix("mlx.core.")


def read_back(folder: Path, kind: str | None = None) -> T5:
    """Load the model that `as_hugging_face` wrote, in the types in which `load` would have it.

    Matrices may be of another kind: a type of 16 bits, or one of `BITS`, as `convert --quantize`
    makes them, one at a time.
    """
    from speculative_t5.checkpoints import DTYPES, ModelFolder, open_checkpoint
    from speculative_t5.kernels import kept_types, takes_stored
    from speculative_t5.models import Quantization
    from speculative_t5.models.t5 import T5

    import mlx.core as mx

    checkpoint = open_checkpoint(ModelFolder(folder))
    config, bits = checkpoint.config, BITS.get(kind or "")
    if bits:
        how = Quantization(bits, GROUP_SIZE, keep_wo=config.gated)
        config = replace(config, quantization=how)
    model, tensors = T5(config), mx.load(str(folder / "model.safetensors"))
    quantized = {name for name, module in model.named_modules() if "scales" in module}
    types = checkpoint.dtypes
    if takes_stored():
        types = kept_types(model, types, DTYPES.get(kind or ""))
    for name, sources in checkpoint.parameters.items():
        whole = mx.concatenate([tensors.pop(source) for source in sources]).astype(types[name])
        module, parts = name.removesuffix(".weight"), {name: whole}
        if module in quantized:
            names = (name, f"{module}.scales", f"{module}.biases")
            parts = dict(zip(names, mx.quantize(whole, GROUP_SIZE, bits), strict=True))
        mx.eval(parts)
        model.load_weights([*parts.items()], strict=False)
    mx.clear_cache()
    return model


def write_draft(draft: T5 | SharingDraft, folder: Path) -> None:
    """Write a draft as `as_hugging_face` does; of one that shares its target's encoder, its own."""
    from speculative_t5.checkpoints import save_draft
    from speculative_t5.models import SharingDraft

    if isinstance(draft, SharingDraft):
        save_draft(folder, draft, "the target")
    else:
        as_hugging_face(draft, folder)


def read_draft(folder: Path, target: T5, kind: str | None = None) -> T5 | SharingDraft:
    """Load what `write_draft` wrote, for its target; matrices are as in `read_back`."""
    from speculative_t5.checkpoints import load_draft

    return read_back(folder, kind) if is_whole(folder) else load_draft(folder, target)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a model, which every program reads, and not just part of one."""
    return (folder / "model.safetensors").exists()


def as_ctranslate2(source: Path, output: Path) -> None:
    """Write a checkpoint of `as_hugging_face` for CTranslate2, with a made-up word for each id."""
    from ctranslate2.converters.transformers import T5Loader
    from transformers import T5ForConditionalGeneration

    silence_transformers()
    model = T5ForConditionalGeneration.from_pretrained(source, dtype="auto").eval()
    config, spec = model.config, T5Loader().get_model_spec(model)
    words = [word(i) for i in range(config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = word(config.decoder_start_token_id)
    spec.config.decoder_start_token = word(config.decoder_start_token_id)
    spec.config.eos_token = word(config.eos_token_id)
    spec.config.unk_token = words[2]
    assert not spec.config.add_source_eos and not spec.config.add_source_bos
    spec.validate()
    spec.optimize(quantization=str(model.dtype).removeprefix("torch."))
    output.mkdir()
    spec.save(str(output))


def word(token: int) -> str:
    return f"<{token}>"


def silence_transformers() -> None:
    """Keep transformers from printing warnings and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
