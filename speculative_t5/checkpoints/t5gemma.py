"""T5Gemma checkpoints of both generations: the names of their tensors."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

from ..models import T5GemmaConfig
from .tensors import Sources, StoredTensor

Renamed = TypeVar("Renamed")

# Of images and their place in a text, which this package does not read.
IMAGE_TENSORS = (
    "encoder.vision_tower.",
    "encoder.multi_modal_projector.",
    "encoder.embed_tokens.eoi_embedding",
    "decoder.embed_tokens.eoi_embedding",
)
T5GEMMA_HEAD = "lm_head.out_proj.weight"
T5GEMMA_EMBEDDINGS = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
NORM_NAMES = {  # ours and theirs, of parts of a layer
    "self": "self_attn_layernorm",
    "cross": "cross_attn_layernorm",
    "feed_forward": "feedforward_layernorm",
}


def of_text(tensors: Mapping[str, Renamed]) -> dict[str, Renamed]:
    """Return the tensors of text, or what is done to them, by their names in the bare model."""
    bare = {
        name.removeprefix("model.").replace("encoder.text_model.", "encoder."): tensor
        for name, tensor in tensors.items()
    }
    return {name: tensor for name, tensor in bare.items() if not name.startswith(IMAGE_TENSORS)}


def of_encoder(config: T5GemmaConfig, tensors: Mapping[str, Renamed]) -> dict[str, Renamed]:
    """Return the tensors of an encoder, of those that `of_text` returns."""
    embedding = T5GEMMA_EMBEDDINGS[0] if config.generation == 2 else ""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith("encoder.") or name == embedding
    }


def saved_name(config: T5GemmaConfig, name: str) -> str:
    """Return the name that transformers saves a tensor of the bare model by."""
    if name == T5GEMMA_HEAD:
        return name
    if config.generation == 2 and name == T5GEMMA_EMBEDDINGS[0]:
        name = T5GEMMA_EMBEDDINGS[1]  # the one embedding
    return name if config.encoder_only else f"model.{name}"


def infer_config(
    config: T5GemmaConfig, tensors: Mapping[str, StoredTensor]
) -> tuple[T5GemmaConfig, dict[str, StoredTensor]]:
    """Leave out what repeats other tensors of `of_text`, as a tied head does."""
    kept = dict(tensors)
    if not config.own_head:
        kept.pop(T5GEMMA_HEAD, None)
    if config.generation == 2 and T5GEMMA_EMBEDDINGS[1] in kept:  # one embedding, by either name
        kept.setdefault(T5GEMMA_EMBEDDINGS[0], kept[T5GEMMA_EMBEDDINGS[1]])
        del kept[T5GEMMA_EMBEDDINGS[1]]
    return dataclasses.replace(config, own_head=T5GEMMA_HEAD in kept), kept


def plan(config: T5GemmaConfig) -> Iterator[tuple[str, Sources]]:
    """Yield the names of all our parameters and the Hugging Face tensors that they consist of."""
    size, vocab_size = config.decoder.hidden_size, config.vocab_size
    if config.generation == 2 or not config.encoder_only:
        yield "shared.weight", {T5GEMMA_EMBEDDINGS[0]: (vocab_size, size)}
    if config.generation == 1:
        memory_size = config.encoder.hidden_size
        yield "encoder_shared.weight", {T5GEMMA_EMBEDDINGS[1]: (vocab_size, memory_size)}
    stacks = [("encoder", config.encoder), ("decoder", config.decoder)]
    for part, stack in stacks[:1] if config.encoder_only else stacks:
        d, d_ff = stack.hidden_size, stack.intermediate_size
        queries = stack.num_attention_heads * stack.head_dim
        keys = stack.num_key_value_heads * stack.head_dim
        has_cross = part == "decoder" and config.generation == 1
        for i in range(stack.num_hidden_layers):
            layer = f"{part}.layers.{i}"  # in both
            kinds = [("self", d), *([("cross", config.encoder.hidden_size)] if has_cross else [])]
            for kind, read in kinds:
                attention = f"{layer}.{kind}_attn"
                own = f"{layer}.{kind}_attention"
                yield f"{own}.q.weight", {f"{attention}.q_proj.weight": (queries, d)}
                kv = {f"{attention}.{name}_proj.weight": (keys, read) for name in "kv"}
                yield f"{own}.kv.weight", kv
                yield f"{own}.out.weight", {f"{attention}.o_proj.weight": (d, queries)}
                if config.generation == 2:
                    for norm in ("q_norm", "k_norm"):
                        name = f"{attention}.{norm}.weight"
                        yield f"{own}.{norm}.weight", {name: (stack.head_dim,)}
            wi = {f"{layer}.mlp.{name}_proj.weight": (d_ff, d) for name in ("gate", "up")}
            yield f"{layer}.feed_forward.wi.weight", wi
            wo = {f"{layer}.mlp.down_proj.weight": (d, d_ff)}
            yield f"{layer}.feed_forward.wo.weight", wo
            for kind in [kind for kind, _ in kinds] + ["feed_forward"]:
                for place, when in (("", "pre"), ("post_", "post")):
                    name = f"{layer}.{when}_{NORM_NAMES[kind]}.weight"
                    yield f"{layer}.{kind}_{place}norm.weight", {name: (d,)}
        yield f"{part}.norm.weight", {f"{part}.norm.weight": (d,)}
    if config.own_head and not config.encoder_only:
        yield "lm_head.weight", {T5GEMMA_HEAD: (vocab_size, size)}
