"""`SharingDraft`: a draft that consists of decoder layers on its target's encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..decoding import fingerprint
from .t5 import COMPILING, T5, CompiledModel, Decoder
from .t5_session import CompiledDecoder, SharingSession, T5Session, read_sources


@dataclass(frozen=True)
class SharingConfig:
    """The sizes of a sharing draft's own part, and the ids that it may propose."""

    num_decoder_layers: int
    d_ff: int  # all other sizes are the target's
    draft_vocab: int | None = None  # it proposes only ids below this; None for all


def _of_target(name: str) -> Any:
    """Return a property that reads the target's attribute of that name."""
    return property(lambda draft: getattr(draft.target, name))


class SharingDraft(CompiledModel):
    """A draft model for one target, whose encoder, embedding and output head it shares.

    Of its own it has decoder layers, their position bias and their last normalization, as
    distil-whisper's models for speech (arXiv 2311.00430); random until they are loaded, trained or
    copied (`copy_layers`). In the decoding loop it reads the encoding that the target has made of
    each prompt (`start_both`); alone (`start`), it has the target's encoder read the prompts.
    """

    def __init__(self, target: T5, config: SharingConfig) -> None:
        super().__init__()
        device.enter_thread()
        self.own = config
        self.config = replace(
            target.config,
            num_decoder_layers=config.num_decoder_layers,
            d_ff=config.d_ff,
            quantization=None,
        )
        self._target = (target,)  # MLX does not look into tuples: its weights are not the draft's
        self._compiled_with: CompiledDecoder | None = None  # the target's, of the same weights
        self.decoder = Decoder(self.config)
        self.decoder.set_dtype(target.dtype)

    @property
    def target(self) -> T5:
        """The model that this draft belongs to."""
        return self._target[0]

    shared, encoder, head, output, info = map(
        _of_target, ("shared", "encoder", "head", "output", "info")
    )

    @property
    def draft_vocab(self) -> int | None:
        """The draft proposes only ids below this; None for all."""
        return self.own.draft_vocab

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the draft's own weights and the target's."""
        own = fingerprint(repr(self.own), self.parameters())
        return f"{own} {self.dtype} {self.target.fingerprint}"

    def start_both(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[T5Session, SharingSession, list[list[int]]]:
        """Encode prompts once, and begin decoding them by the target and by this draft."""
        device.enter_thread()
        target = self.target
        decoder, own = target.compiled, self.compiled
        encode = partial(read_sources, target, [target.decoder, self.decoder])
        session = T5Session(decoder, encode, prompts, width)
        return session, SharingSession(own, session), session.contexts

    @property
    def compiled(self) -> CompiledDecoder:
        """The compiled decoder, made by the first use, and anew once the target is recompiled."""
        target = self.target.compiled  # evaluates the weights that are shared
        with COMPILING:
            if self._compiled is None or self._compiled_with is not target:
                self._compiled, self._compiled_with = CompiledDecoder(self), target
            return self._compiled


def copy_layers(draft: SharingDraft) -> None:
    """Make the draft's layers copies of its target's, evenly spaced, the last among them.

    A single layer is a copy of the target's last. Quantized matrices are dequantized. Where the
    draft's feed-forward layers are narrower, they keep the units with the largest weights.
    """
    target, depth = draft.target.decoder, draft.own.num_decoder_layers
    config = draft.config
    last = len(target.layers) - 1
    chosen = [round(i * last / (depth - 1)) for i in range(depth)] if depth > 1 else [last]
    for layer, number in zip(draft.decoder.layers, chosen, strict=True):
        modules = target.layers[number].named_modules()
        weights = {f"{name}.weight": plain_weight(m) for name, m in modules if "weight" in m}
        layer.load_weights([*_narrowed(weights, config.d_ff, gated=config.gated).items()])
    draft.decoder.norm.weight = target.norm.weight
    bias = target.position_bias
    rows = bias.weight.reshape(-1, bias.num_buckets, bias.weight.shape[1])
    if len(rows) > 1:
        rows = rows[mx.array(chosen)]
    draft.decoder.position_bias.weight = rows.reshape(-1, rows.shape[2])


def _narrowed(weights: dict[str, mx.array], d_ff: int, *, gated: bool) -> dict[str, mx.array]:
    """Keep `d_ff` units of a layer's feed-forward part, those with the largest weights."""
    inner, outer = (next(n for n in weights if n.endswith(f"{w}.weight")) for w in ("wi", "wo"))
    wo = weights[outer].astype(mx.float32)
    if d_ff == wo.shape[1]:
        return weights
    wi = weights[inner].reshape(1 + gated, wo.shape[1], -1)
    sizes = mx.sum(mx.square(wi.astype(mx.float32)), axis=(0, 2)) * mx.sum(mx.square(wo), axis=0)
    kept = mx.sort(mx.argsort(-sizes)[:d_ff])
    narrow = {inner: wi[:, kept].reshape(-1, wi.shape[2]), outer: weights[outer][:, kept]}
    return weights | narrow


def plain_weight(module: nn.Module, rows: Any = slice(None)) -> mx.array:
    """Return a module's weight, or some rows of it, dequantized."""
    weight: mx.array = module.weight[rows]
    if "scales" in module:
        scales, biases = module.scales[rows], module.biases[rows]
        weight = mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return weight
