"""T5 checkpoints, our own and Hugging Face's, checked before their weights are read."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..device import DefaultType, default_type
from ..errors import printable
from ..models import ModelConfig, T5Config, T5GemmaConfig, new_model
from . import t5gemma
from .adapters import Adapter, WeightChange
from .model_folder import ModelFolder
from .packed import folded, quantization_of, unfolded
from .saved_names import unwrapped
from .tensors import (
    Shape,
    Sources,
    StoredTensor,
    check_tensors,
    is_zero,
    module_shapes,
    read_npz,
)

# Names of the embedding; checkpoints without the first have the second (madlad400).
T5_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
T5_HEAD = "lm_head.weight"
# An encoder-decoder bias that old checkpoints hold and that is never used.
UNUSED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A folder with every parameter of a model, their names and shapes checked."""

    config: ModelConfig  # config.json, corrected by the tensors where they differ
    tensors: dict[str, StoredTensor]  # by their names in the files
    parameters: dict[str, Sources]  # by our names, in the order of the model
    num_images: int = 0  # tensors of images that were left out

    @property
    def dtypes(self) -> dict[str, mx.Dtype]:
        """The type that each parameter is stored in; float32 if its parts differ."""
        found = {}
        for name, sources in self.parameters.items():
            kinds = {self.tensors[source].dtype for source in sources}
            found[name] = kinds.pop() if len(kinds) == 1 else mx.float32
        return found

    def is_from_zero(self, name: str) -> bool:
        """Whether a parameter is stored less 1, as the weights of T5Gemma's norms are."""
        return isinstance(self.config, T5GemmaConfig) and name.endswith("norm.weight")

    @property
    def default_type(self) -> DefaultType:
        """The type that the model computes in if none is asked for."""
        # Quantized weights are packed into integers.
        stored = {kind for kind in self.dtypes.values() if kind != mx.uint32}
        return default_type(stored, gated=self.config.gated)


def open_checkpoint(folder: ModelFolder) -> Checkpoint:
    """Open a model folder or a Hugging Face checkpoint; refuse all but a whole T5 or T5Gemma."""
    if folder.adapter:
        base = open_checkpoint(dataclasses.replace(folder, adapter=None, encoder_only=False))
        merged = _merge(base, Adapter(folder.adapter), folder.path)
        return _encoder_of(merged) if folder.encoder_only else merged
    config, path = folder.model_config(), folder.path
    if not folder.is_converted:
        return _open_saved(folder, config)
    path = path / "weights.npz"
    tensors, shapes = read_npz(path), parameter_shapes(config)
    if config.encoder_only:  # of a whole model, perhaps
        others = _prefixes(dataclasses.replace(config, encoder_only=False)) - _prefixes(config)
        tensors = {n: t for n, t in tensors.items() if n.partition(".")[0] not in others}
    # In the order of the file; missing ones come last, for check_tensors to name them.
    names = (name for name in tensors | shapes if name in shapes)
    parameters: dict[str, Sources] = {name: {name: shapes[name]} for name in names}
    return _complete(path, Checkpoint(config, tensors, parameters))


def _encoder_of(found: Checkpoint) -> Checkpoint:
    """Return the encoder's part of a checkpoint."""
    config = dataclasses.replace(found.config, encoder_only=True)
    own = _prefixes(config)
    parameters = {n: s for n, s in found.parameters.items() if n.partition(".")[0] in own}
    tensors = {each: found.tensors[each] for sources in parameters.values() for each in sources}
    return dataclasses.replace(found, config=config, tensors=tensors, parameters=parameters)


def _open_saved(folder: ModelFolder, config: ModelConfig) -> Checkpoint:
    """Open a checkpoint with Hugging Face's names, which MLX may have quantized."""
    path, num_images = folder.path, 0
    stored = unwrapped(path, folded(path, folder.config, folder.tensors()))
    if isinstance(config, T5GemmaConfig):
        text = t5gemma.of_text(stored)
        num_images = len(stored) - len(text)
        if config.encoder_only:
            text = t5gemma.of_encoder(config, text)
        config, tensors = t5gemma.infer_config(config, text)
    else:
        if config.encoder_only:
            stored = of_encoder(stored)
        config, tensors = infer_config(config, without_zero_biases(path, stored))
    found = _complete(path, Checkpoint(config, tensors, planned(config), num_images))
    how = quantization_of(folder.config, found.parameters, tensors)
    parameters, tensors = unfolded(found.parameters, tensors)
    config = dataclasses.replace(config, quantization=how)
    return dataclasses.replace(found, config=config, tensors=tensors, parameters=parameters)


def _complete(path: Path, found: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors have the names and shapes that its parameters need."""
    expected = {name: shape for each in found.parameters.values() for name, shape in each.items()}
    kind = "T5" if isinstance(found.config, T5Config) else "T5Gemma"
    check_tensors(path, expected, found.tensors, kind)
    return found


def planned(config: ModelConfig) -> dict[str, Sources]:
    """Return the Hugging Face tensors that each parameter consists of, by our names."""
    return dict(plan(config) if isinstance(config, T5Config) else t5gemma.plan(config))


def _merge(base: Checkpoint, adapter: Adapter, path: Path) -> Checkpoint:
    """Return the model in the folder `path` with what an adapter changes."""
    config, sources_of, changes = base.config, planned(base.config), adapter.changes()
    if config.quantization:
        raise ValueError(
            f"{path} is quantized, and an adapter is merged before that: convert what {path} was "
            "made from with the adapter"
        )
    head, embedding, is_tied = T5_HEAD, T5_EMBEDDINGS[0], not config.own_head
    if isinstance(config, T5GemmaConfig):
        head, embedding = t5gemma.T5GEMMA_HEAD, t5gemma.T5GEMMA_EMBEDDINGS[0]
        changes = t5gemma.of_text(changes)
    tensors = base.tensors
    if base.parameters.keys() <= tensors.keys():  # converted: of our names, and stacked
        tensors = {
            source: tensor
            for name, sources in sources_of.items()
            for source, tensor in zip(sources, tensors[name].split(sources.values()), strict=True)
        }
    changes = _one_embedding(changes, embedding, tensors)
    # Training leaves a tied head as it was where the embedding alone changes, and the reverse. (No
    # pass of a T5 in transformers reads the embedding that is called shared.)
    if is_tied and (head in changes or (embedding in changes and embedding != T5_EMBEDDINGS[0])):
        tensors = tensors | {head: tensors[embedding]}
    merged = adapter.merge(tensors, changes, head)
    if is_tied and head in merged and _equal(merged[head], merged[embedding]):
        del merged[head]  # saved beside the embedding that it is
    rows = _rows(merged, embedding, head, adapter.folder.path)
    config = dataclasses.replace(config, own_head=head in merged, vocab_size=rows)
    made = Checkpoint(config, merged, planned(config), base.num_images)
    return _complete(adapter.folder.path, made)


def _one_embedding(
    changes: Mapping[str, WeightChange], embedding: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, WeightChange]:
    """Give an embedding that an adapter brings, by another of its names, that of the model."""
    kept = dict(changes)
    for name in (*T5_EMBEDDINGS, *t5gemma.T5GEMMA_EMBEDDINGS):
        whole = kept[name].whole if name in kept and name not in tensors else None
        if whole is None or kept[name].parts:
            continue
        first = kept.setdefault(embedding, kept[name])
        if first.whole is not None and _equal(first.whole, whole):
            del kept[name]
    return kept


def _rows(merged: Mapping[str, StoredTensor], embedding: str, head: str, adapter: Path) -> int:
    """Return the rows of an embedding, which an adapter in a folder may have enlarged.

    Raises:
        ValueError: If the head has another number.
    """
    shape = merged[embedding].shape
    rows = {merged[name].shape[:1] for name in (embedding, head) if name in merged}
    if len(shape) != 2 or len(rows) > 1:
        raise ValueError(
            f"{adapter} gives the model an embedding of shape {shape}, and its {head} has "
            f"{merged.get(head, merged[embedding]).shape}: save the adapter again with both "
            "(save_embedding_layers=True)"
        )
    return shape[0]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of all parameters of a model."""
    return module_shapes(new_model(config))


def _prefixes(config: ModelConfig) -> set[str]:
    """Return the modules that a model consists of, by name."""
    return {name.partition(".")[0] for name in planned(config)}


def of_encoder(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a T5's encoder, and every name of its embedding."""
    kept = {n: t for n, t in tensors.items() if not n.startswith("decoder.") or n in T5_EMBEDDINGS}
    if any(name in kept for name in T5_EMBEDDINGS):
        kept.pop(T5_HEAD, None)
    return kept


def without_zero_biases(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Leave out biases, which a T5 does not have and old programs save as zeros.

    Raises:
        ValueError: If one of a norm adds something.
    """
    kept = {}
    for name, tensor in tensors.items():
        if not name.endswith(".bias") or not is_zero(tensor):
            kept[name] = tensor
            if name.endswith("layer_norm.bias"):
                raise ValueError(
                    f"{path}: {printable(name)} is not zero, and the norms of a T5 have no bias: "
                    "choose another checkpoint, or leave its biases out"
                )
    return kept


def infer_config(
    config: T5Config, tensors: Mapping[str, StoredTensor]
) -> tuple[T5Config, dict[str, StoredTensor]]:
    """Correct a config by the stored tensors, and leave out tensors that repeat others.

    Old configs say relu for gated-gelu, and so on. Tensors do not show whether the decoder's output
    is scaled: that stays as configured. Different embeddings of encoder and decoder are refused.
    """
    kept = _with_one_embedding(config, tensors)
    gated = any(name.endswith("DenseReluDense.wi_0.weight") for name in kept)
    activation = config.activation
    if gated and not config.gated and activation in ("relu", "gelu"):
        activation = "gelu_new"
    own_bias = re.compile(
        r"\w+\.block\.1\.layer\.0\.SelfAttention\.relative_attention_bias\.weight"
    )
    corrected = dataclasses.replace(
        config,
        gated=gated,
        activation=activation,
        own_head=T5_HEAD in kept,
        num_layers=_depth(kept, "encoder") or config.num_layers,
        num_decoder_layers=_depth(kept, "decoder") or config.num_decoder_layers,
        bias_per_layer=any(own_bias.fullmatch(name) for name in kept),
    )
    return corrected, kept


def _with_one_embedding(
    config: T5Config, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Leave out what repeats the embedding, a head as well, and call that by its first name."""
    kept = {name: tensor for name, tensor in tensors.items() if name != UNUSED_BIAS}
    embeddings = [name for name in T5_EMBEDDINGS if name in kept]
    for name in embeddings[1:]:
        if not _equal(kept[embeddings[0]], kept[name]):
            raise ValueError(
                f"{name} differs from {embeddings[0]}, and a T5 has one embedding: "
                "save the checkpoint with the one that is meant, or choose another"
            )
        del kept[name]
    if not embeddings and T5_HEAD in kept:  # one matrix, saved under the name of the head alone
        # Only a tied model's outputs are scaled; programs write the first entry for all.
        if config.own_head or not config.scale_decoder_outputs:
            raise ValueError(
                f"it has the tensor {T5_HEAD} and no embedding, and by config.json "
                "(tie_word_embeddings, scale_decoder_outputs) the two differ: save the model again "
                "with both"
            )
        embeddings = [T5_HEAD]
    if embeddings:
        kept[T5_EMBEDDINGS[0]] = kept.pop(embeddings[0])
        if T5_HEAD in kept and _equal(kept[T5_EMBEDDINGS[0]], kept[T5_HEAD]):
            del kept[T5_HEAD]
    return kept


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    pairs = zip(a.blocks(), b.blocks(), strict=True)
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in pairs)


def _depth(tensors: Mapping[str, Any], stack: str) -> int:
    """Count the layers; the last one's number could be anything that a name says."""
    pattern = re.compile(rf"{stack}\.block\.(\d+)\.")
    return len({m[1] for name in tensors if (m := pattern.match(name))})


def plan(config: T5Config) -> Iterator[tuple[str, Sources]]:
    """Yield the names of all our parameters and the Hugging Face tensors that they consist of."""
    d, d_ff, inner = config.d_model, config.d_ff, config.num_heads * config.d_kv
    yield "shared.weight", {"shared.weight": (config.vocab_size, d)}
    stacks = [("encoder", config.num_layers), ("decoder", config.num_decoder_layers)]
    for stack, depth in stacks[:1] if config.encoder_only else stacks:
        bias = f"{stack}.block.%s.layer.0.SelfAttention.relative_attention_bias.weight"
        buckets = (config.relative_attention_num_buckets, config.num_heads)
        layers = range(depth if config.bias_per_layer else 1)
        yield f"{stack}.position_bias.weight", {bias % i: buckets for i in layers}
        # Each group of an attention's q, k and v is one matrix of ours.
        attentions = [("self", "SelfAttention", ["qkv"])]
        if stack == "decoder":
            attentions.append(("cross", "EncDecAttention", ["q", "kv"]))
        for i in range(depth):
            ours, theirs = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer"
            for j, (kind, name, groups) in enumerate(attentions):
                attention = f"{theirs}.{j}.{name}"
                for group in groups:
                    parts = {f"{attention}.{part}.weight": (inner, d) for part in group}
                    yield f"{ours}.{kind}_attention.{group}.weight", parts
                out = {f"{attention}.o.weight": (d, inner)}
                yield f"{ours}.{kind}_attention.out.weight", out
                yield f"{ours}.{kind}_norm.weight", {f"{theirs}.{j}.layer_norm.weight": (d,)}
            last = f"{theirs}.{len(attentions)}"
            names = ("wi_0", "wi_1") if config.gated else ("wi",)
            wi = {f"{last}.DenseReluDense.{name}.weight": (d_ff, d) for name in names}
            yield f"{ours}.feed_forward.wi.weight", wi
            wo = {f"{last}.DenseReluDense.wo.weight": (d, d_ff)}
            yield f"{ours}.feed_forward.wo.weight", wo
            yield f"{ours}.feed_forward_norm.weight", {f"{last}.layer_norm.weight": (d,)}
        yield f"{stack}.norm.weight", {f"{stack}.final_layer_norm.weight": (d,)}
    if config.own_head and not config.encoder_only:
        yield T5_HEAD, {T5_HEAD: (config.vocab_size, d)}
