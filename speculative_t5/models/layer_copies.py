"""Layers of a sharing draft that begin as copies of its target's."""

import mlx.core as mx

from .config import spread
from .quantization import plain_weight
from .t5_draft import SharingDraft

# The matrices of a layer that read hidden states, each with the norm before it, and those that add
# to them, each with the norm after it, which T5Gemmas have.
NORMS_BEFORE = {
    "self_attention.qkv.weight": "self_norm.weight",
    "self_attention.q.weight": "self_norm.weight",
    "self_attention.kv.weight": "self_norm.weight",
    "cross_attention.q.weight": "cross_norm.weight",
    "feed_forward.wi.weight": "feed_forward_norm.weight",
}
NORMS_AFTER = {
    "self_attention.out.weight": "self_post_norm.weight",
    "cross_attention.out.weight": "cross_post_norm.weight",
    "feed_forward.wo.weight": "feed_forward_post_norm.weight",
}


def copy_layers(draft: SharingDraft) -> None:
    """Make the draft's layers copies of its target's, evenly spaced, the last among them.

    A single layer is a copy of the target's last. Quantized matrices are dequantized. Narrower
    hidden states are the target's, projected onto the leading principal components of the output
    matrix's rows (SliceGPT, arXiv 2401.15024, takes those of hidden states).
    """
    target, depth = draft.target.decoder, draft.own.num_decoder_layers
    width = draft.own.d_model
    chosen, norm = spread(depth, len(target.layers)), target.norm.weight
    if width:
        rows = plain_weight(draft.target.output)
        basis = mx.linalg.eigh(rows.T @ rows, stream=mx.cpu)[1][:, -width:]
        draft.narrow.weight, draft.widen.weight = basis.T, norm[:, None] * basis
        norm = _flat_norm(basis)
    for layer, number in zip(draft.decoder.layers, chosen, strict=True):
        modules = target.layers[number].named_modules()
        weights = {f"{name}.weight": plain_weight(m) for name, m in modules if "weight" in m}
        layer.load_weights([*(_projected(weights, basis) if width else weights).items()])
    draft.decoder.norm.weight = norm
    draft.set_dtype(draft.target.dtype)
    if "position_bias" not in target:
        return
    bias = target.position_bias
    rows = bias.weight.reshape(-1, bias.num_buckets, bias.weight.shape[1])
    if len(rows) > 1:
        rows = rows[mx.array(chosen)]
    draft.decoder.position_bias.weight = rows.reshape(-1, rows.shape[2])


def _projected(weights: dict[str, mx.array], basis: mx.array) -> dict[str, mx.array]:
    """Rewrite a layer's weights for hidden states in a basis (d_model, narrower width).

    The weights of norms before matrices become part of these. Those after matrices, too, but the
    norm then sees what they made larger or smaller: a T5Gemma's layer is approximated.
    """
    changed = {}
    for matrix, norm in NORMS_BEFORE.items():
        if matrix in weights:
            changed[matrix] = weights[matrix] * weights[norm] @ basis
            changed[norm] = _flat_norm(basis)
    for matrix, norm in NORMS_AFTER.items():
        if (weight := weights.get(matrix)) is None:
            continue
        if (scales := weights.get(norm)) is not None:
            weight = scales[:, None] * weight
            changed[norm] = mx.sqrt(mx.mean(mx.square(scales))) * _flat_norm(basis)
        changed[matrix] = basis.T @ weight
    if "cross_norm.weight" not in weights:  # a merged layer, which reads the memory, too
        changed["memory_kv.weight"] = weights["self_attention.kv.weight"]
    return weights | changed


def _flat_norm(basis: mx.array) -> mx.array:
    """Return the weight of a norm, whose own is in other matrices, for states in a basis.

    Of hidden states within the basis, it makes what the norm of their whole width made.
    """
    wide, narrow = basis.shape
    return mx.full(narrow, (wide / narrow) ** 0.5)
