"""`SharingDraft`: a draft that consists of decoder layers on its target's encoder.

A draft knows its target by a few numbers of each weight, whatever type they are stored in.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import device
from ..decoding import fingerprint
from .config import T5Config, spread
from .encoder_decoder import (
    COMPILING,
    CompiledDecoder,
    CompiledModel,
    EncoderDecoder,
    read_sources,
)
from .session import SharingSession, T5Session
from .t5_parallel import split_of

PLACES = 4  # of each weight
MOST_BLOCK = 16  # tokens
SOME = 1000  # tokens whose embeddings tell how large those of masks should be
CLOSE = 1.3 * 2.0**-8  # relative: rounding to bfloat16, and to float16 there and here
TINY = 2e-7  # float16's rounding of the smallest numbers
# The matrices of a layer that read hidden states, each with the norm before it, and those that add
# to them, each with the norm after it, which T5Gemmas have.
READ = {
    "self_attention.qkv.weight": "self_norm.weight",
    "self_attention.q.weight": "self_norm.weight",
    "self_attention.kv.weight": "self_norm.weight",
    "cross_attention.q.weight": "cross_norm.weight",
    "feed_forward.wi.weight": "feed_forward_norm.weight",
}
WRITTEN = {
    "self_attention.out.weight": "self_post_norm.weight",
    "cross_attention.out.weight": "cross_post_norm.weight",
    "feed_forward.wo.weight": "feed_forward_post_norm.weight",
}
_SAMPLE = re.compile(rf"([0-9a-f]{{16}})\.((?:[0-9a-f]{{{4 * (PLACES + 1)}}})+)")


@dataclass(frozen=True)
class SharingConfig:
    """The sizes of a sharing draft's own part, and the ids that it may propose."""

    num_decoder_layers: int
    d_ff: int  # sizes that are not here are the target's
    draft_vocab: int | None = None  # it proposes only ids below this; None for all
    block: int = 1  # tokens that a pass proposes
    d_model: int | None = None  # the width of narrower layers; None for the target's


class SharingDraft(CompiledModel):
    """A draft model for one target, whose encoder, embedding and output head it shares.

    Of its own it has decoder layers, their position bias and their last normalization, as
    distil-whisper's models for speech (arXiv 2311.00430); random until they are loaded, trained or
    copied (`copy_layers`). In the decoding loop it reads the encoding that the target has made of
    each prompt (`start_both`); alone (`start`), it has the target's encoder read the prompts.

    The layers may be narrower than the target's: one matrix then leads from its embeddings to their
    width, another one back to what its output head reads. A compiled draft has the product of the
    second and the output matrix, not quantized, so that its head is as narrow as its layers.

    A draft of blocks proposes several tokens in a pass (PARD, arXiv 2504.18583): masks follow the
    last token. It has embeddings for them, and their ids come after those of tokens.
    """

    def __init__(self, target: EncoderDecoder, config: SharingConfig) -> None:
        super().__init__()
        device.enter_thread()
        self.own = config
        self.config = target.config.of_draft(config.num_decoder_layers, config.d_ff, config.d_model)
        self._target = (target,)  # MLX does not look into tuples: its weights are not the draft's
        self.info = replace(target.info, block=config.block)
        self._compiled_with: CompiledDecoder | None = None  # the target's, of the same weights
        stack: Any = type(target.decoder)
        self.decoder = stack(self.config)
        if config.d_model:
            wide = target.config.d_model
            if config.d_model >= wide:
                raise ValueError(
                    f"d_model must be below {wide}, the target's, got {config.d_model}"
                )
            if isinstance(self.config, T5Config):
                for layer in self.decoder.layers:
                    attention = layer.cross_attention
                    attention.kv = nn.Linear(wide, len(attention.kv.weight), bias=False)
            self.narrow = nn.Linear(wide, config.d_model, bias=False)
            self.widen = nn.Linear(config.d_model, wide, bias=False)
        self.set_dtype(target.dtype)
        if config.block > 1:  # random masks, as large as tokens are
            tokens = target.embed(mx.arange(min(SOME, self.config.vocab_size))[None])
            size = mx.sqrt(mx.mean(mx.square(tokens.astype(mx.float32))))
            noise = mx.random.normal((config.block - 1, tokens.shape[2]), key=mx.random.key(0))
            self.masks = (size * noise).astype(target.dtype)

    @property
    def target(self) -> EncoderDecoder:
        """The model that this draft belongs to."""
        return self._target[0]

    def encode(self, tokens: mx.array, mask: mx.array | None) -> mx.array:
        """Encode sources as the target does."""
        return self.target.encode(tokens, mask)

    @property
    def head(self) -> nn.Module:
        """The target's step from hidden states to logits."""
        head: nn.Module = self.target.head
        return head

    @property
    def output(self) -> nn.Module:
        """The output matrix, as wide as the draft's layers; each use computes a narrow one."""
        matrix = self.target.output
        if self.own.d_model is None:
            return matrix
        narrow = nn.Linear(self.own.d_model, self.config.vocab_size, bias=False)
        narrow.weight = plain_weight(matrix) @ self.widen.weight
        return narrow

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed tokens, and masks among them: (B, L) int32 -> (B, L, d_model of its layers)."""
        embedded = self._embed(tokens)
        return self.narrow(embedded) if self.own.d_model else embedded

    def _embed(self, tokens: mx.array) -> mx.array:
        if self.own.block == 1:
            return self.target.embed(tokens)
        size = self.config.vocab_size
        masks = self.masks[mx.maximum(tokens - size, 0)]
        embedded = self.target.embed(mx.minimum(tokens, size - 1))
        return mx.where((tokens < size)[..., None], embedded, masks)

    @property
    def fingerprint(self) -> str:
        """Digest of the draft's own weights, its type, and the target's fingerprint."""
        own = fingerprint(repr(self.own), self.parameters())
        return f"{own} {self.dtype} {self.target.fingerprint}"

    def start_both(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple[T5Session, SharingSession, list[list[int]]]:
        """Encode prompts once, and begin decoding them by the target and by this draft."""
        device.enter_thread()
        target = self.target
        decoder, own = target.compiled, self.compiled
        encode = partial(read_sources, target, [decoder.decoder, own.decoder])
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

    A single layer is a copy of the target's last. Quantized matrices are dequantized. Narrower
    hidden states are the target's, projected onto the leading principal components of the output
    matrix's rows (SliceGPT, arXiv 2401.15024, takes those of hidden states).
    """
    target, depth = draft.target.decoder, draft.own.num_decoder_layers
    width = draft.own.d_model
    chosen, norm = spread(depth, len(target.layers)), target.norm.weight
    if width:
        rows = plain_weight(draft.target.output).astype(mx.float32)
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
    for matrix, norm in READ.items():
        if matrix in weights:
            changed[matrix] = weights[matrix] * weights[norm] @ basis
            changed[norm] = _flat_norm(basis)
    for matrix, norm in WRITTEN.items():
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


def plain_weight(module: nn.Module, rows: Any = slice(None)) -> mx.array:
    """Return a module's weight, or some rows of it, dequantized."""
    weight: mx.array = module.weight[rows]
    if "scales" in module:
        scales, biases = module.scales[rows], module.biases[rows]
        weight = mx.dequantize(weight, scales, biases, module.group_size, module.bits)
    return weight


def sample_weights(model: EncoderDecoder) -> str:
    """Return a sample of a model's weights as text, which `same_weights` compares.

    A digest of all names and shapes, and for each weight float16 numbers in hexadecimal: some of
    its elements (NaN if it is split), and how far quantization may have moved them.
    """
    shapes, numbers, steps = [], [], dict(model.quantization_steps)
    for name, module in sorted((n, m) for n, m in model.named_modules() if "weight" in m):
        shape, elements, step = _elements(name, module)
        step = mx.array(steps[name]) if name in steps else step
        split = split_of(f"{name}.weight", model.config) if model.num_processes > 1 else None
        if split is not None:
            whole = list(shape)
            whole[split.axis] *= model.num_processes
            shape, elements = tuple(whole), mx.full(elements.shape, mx.nan)
        shapes.append((name, shape))
        numbers.append(mx.concatenate([elements, step[None]]).astype(mx.float16))
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    words = np.array(mx.stack(numbers).view(mx.uint16)).reshape(-1).tolist()
    return f"{digest}." + "".join(f"{word:04x}" for word in words)


def same_weights(a: str, b: str) -> bool:
    """Whether two samples may be of one model, if in other types or quantized; `b` may be split."""
    (names, x), (others, y) = _parts(a), _parts(b)
    if names != others or x.shape != y.shape:
        return False
    (x, x_step), (y, y_step) = (np.split(each, [PLACES], axis=1) for each in (x, y))
    with np.errstate(invalid="ignore"):  # of infinities, and what is unknown
        room = CLOSE * np.maximum(np.abs(x), np.abs(y)) + TINY + x_step + y_step
        return bool(np.all((x == y) | (np.abs(x - y) <= room) | np.isnan(y)))


def is_sample(text: object) -> bool:
    """Whether a value from a file is a sample."""
    return isinstance(text, str) and _SAMPLE.fullmatch(text) is not None


def _elements(name: str, module: nn.Module) -> tuple[tuple[int, ...], mx.array, mx.array]:
    """Return a weight's shape, `PLACES` of its elements, and their quantization's step, ()."""
    scales = cast(mx.array | None, module.get("scales"))
    shape: tuple[int, ...] = module.weight.shape
    if scales is not None:
        shape = len(scales), scales.shape[1] * module.group_size
    rows, columns = _places(name, shape)
    if len(shape) == 1:
        return shape, module.weight[columns].astype(mx.float32), mx.zeros(())
    elements = mx.take_along_axis(plain_weight(module, rows), columns[:, None], axis=1)[:, 0]
    step = mx.zeros(())
    if scales is not None:
        step = mx.array(quantization_step(name, scales, module.group_size))
    return shape, elements.astype(mx.float32), step


def quantization_step(name: str, scales: mx.array, group_size: int) -> float:
    """Return how far quantization may have moved the sampled elements of a matrix.

    Its scales are (rows, groups), of any float type.
    """
    rows, columns = _places(name, (len(scales), scales.shape[1] * group_size))
    largest = mx.max(mx.abs(scales[rows, columns // group_size])).astype(mx.float32)
    return cast(float, largest.item())


def _places(name: str, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Return the rows and columns, (PLACES,) int32, of a weight's sampled elements."""
    digest = hashlib.sha256(name.encode()).digest()
    places = [int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(PLACES)]
    columns = mx.array([place % shape[-1] for place in places])
    return mx.array([place // shape[-1] % shape[0] for place in places]), columns


def _parts(sample: str) -> tuple[str, np.ndarray]:
    """Return the digest in a sample, and its numbers, (weights, PLACES + 1) float32."""
    names, words = sample.split(".")
    numbers = np.array([int(words[i : i + 4], 16) for i in range(0, len(words), 4)], np.uint16)
    return names, numbers.view(np.float16).astype(np.float32).reshape(-1, PLACES + 1)
