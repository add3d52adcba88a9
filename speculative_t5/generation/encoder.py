"""`Encoder`: texts to vectors, by the encoder of a T5 or a T5Gemma alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, overload

import mlx.core as mx

from ..checkpoints import POOLINGS, SentenceModules, load, locate, read_sentence_modules
from ..decoding import LanguageModel
from ..errors import check_utf8
from ..models import EncoderDecoder, TextEncoder
from ..options import check_integer, option_error
from ..tokenizers import PromptEncoder, Tokenizer, keep_beginning
from .decoder import SpeculativeDecoder

TOKENS_IN_PASS = 4096  # of a pass, padding included: more would take memory, and no less time
USUAL_ROWS = 32
Pooling = Literal["mean", "eos", "cls", "max", "none"]


class Encoder:
    """Turns texts into vectors, as sentence-transformers does with the same folder.

    Args:
        model: An encoder, as `load(..., encoder_only=True)` returns it.
        tokenizer: Its tokenizer.
        modules: What is done with its vectors, as `from_pretrained` reads it; by default the mean
            over tokens, of length 1.
        max_length: Tokens of a text, EOS included; longer texts are cut. By default what `modules`
            says, or any number: positions of a T5 are relative.
    """

    def __init__(
        self,
        model: TextEncoder,
        tokenizer: Tokenizer,
        *,
        modules: SentenceModules | None = None,
        max_length: int | None = None,
    ) -> None:
        if not isinstance(model, TextEncoder):
            raise ValueError(
                f"model must be an encoder, got {type(model).__name__}: use load with encoder_only"
            )
        self.model = model
        self.tokenizer = tokenizer
        modules = modules or SentenceModules()
        if max_length is not None:
            modules = replace(modules, max_length=check_integer("max_length", max_length, 2))
        self.modules = modules
        # Makes ids of texts by the rules of prompts, for those who refuse what is too long.
        self.prompts = PromptEncoder(
            cast(LanguageModel, model), tokenizer, prefix="", max_source_length=modules.max_length
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: mx.Dtype | str | None = None,
        adapter: str | Path | None = None,
        max_length: int | None = None,
    ) -> Encoder:
        """Load an encoder from a folder or by a name, as `load` does, whole models included.

        A folder of sentence-transformers is read with its pooling and its matrices.
        """
        folder = locate(model, adapter)
        found, modules = read_sentence_modules(folder.path)
        changed_by = folder.adapter.path if folder.adapter else None
        loaded, tokenizer = load(found, dtype=dtype, adapter=changed_by, encoder_only=True)
        return cls(loaded, tokenizer, modules=modules, max_length=max_length)

    @classmethod
    def of(cls, decoder: SpeculativeDecoder) -> Encoder:
        """Return the encoder of a decoder's target, which shares its weights.

        Raises:
            ValueError: If the target has none, as decoder-only models, or reads ids alone.
        """
        if not isinstance(decoder.model, EncoderDecoder) or decoder.tokenizer is None:
            name = getattr(decoder.model, "name", None) or "the model"
            raise ValueError(f"{name} has no encoder with a tokenizer: choose a T5 or a T5Gemma")
        made = cls(TextEncoder.of(decoder.model), decoder.tokenizer)
        # What a model is asked to generate from has a prefix; what it embeds has none.
        made.prompts = replace(decoder.prompts, prefix="", to=None, from_=None, chat=False)
        return made

    def __repr__(self) -> str:
        return f"Encoder(model={self.model.name}, size={self.size})"

    @property
    def size(self) -> int:
        """Numbers of an embedding."""
        return self.modules.dense[-1].weight.shape[0] if self.modules.dense else self.model.size

    @overload
    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Literal["none"],
        normalize: bool | None = None,
        prompt: str | None = None,
        batch_size: int = USUAL_ROWS,
    ) -> list[mx.array]: ...

    @overload
    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Literal["mean", "eos", "cls", "max"] | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        batch_size: int = USUAL_ROWS,
    ) -> mx.array: ...

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        batch_size: int = USUAL_ROWS,
    ) -> mx.array | list[mx.array]:
        """Return the embeddings of texts, (N, D) float32, in their order.

        Args:
            texts: One text, for (1, D), or several.
            pooling: "mean", "eos" (the last token's), "cls" (the first one's) or "max"; by default
                the folder's own, or the mean. "none" returns the last hidden states instead, a list
                of (S, D) with a row for each token, as they are.
            normalize: Whether vectors have length 1; by default as the folder says, or they do.
            prompt: What goes before each text, or the name of one of the folder's prompts.
            batch_size: Texts that are encoded side by side, those of similar length together.

        Raises:
            ValueError: If a text is no string, or an option is out of its range.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if pooling not in (None, "none", *POOLINGS):
            raise option_error("pooling", f"one of {', '.join((*POOLINGS, 'none'))}", pooling)
        batch_size = check_integer("batch_size", batch_size, 1)
        prompt = (self.modules.prompts or {}).get(prompt or "", prompt or "")
        rows = [self.ids(text, prompt) for text in texts]
        skipped = self._skipped(prompt)
        found: dict[int, mx.array] = {}
        for group in groups_of(rows, batch_size):
            together = [rows[i] for i in group]
            found |= zip(group, self.vectors(together, pooling, normalize, skipped), strict=True)
        ordered = [found[i] for i in range(len(texts))]
        if pooling == "none":
            return ordered
        return mx.stack(ordered) if ordered else mx.zeros((0, self.size))

    def vectors(
        self,
        rows: Sequence[Sequence[int]],
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        skipped: int = 0,
    ) -> list[mx.array]:
        """Encode rows of ids side by side; see `embed` and `pool` for the rest."""
        states, mask = self._encode(rows)
        if pooling == "none":
            vectors = [state[: len(row)] for state, row in zip(states, rows, strict=True)]
        else:
            pooled = pool(states, mask, pooling or self.modules.pooling, skipped)
            vectors = [*self._finished(pooled, normalize)]
        mx.eval(vectors)
        return vectors

    def ids(self, text: str, prompt: str = "") -> list[int]:
        """Return the ids of a text, cut to the most that are read; EOS stays its end."""
        if not isinstance(text, str):
            raise option_error("texts", "strings", text)
        check_utf8("texts", text)
        text = prompt + text
        ids = self.tokenizer.encode(text.lower() if self.modules.lower_case else text)
        most = self.modules.max_length
        if most is None or len(ids) <= most:
            return ids
        return keep_beginning(ids, most, self.model.config.eos_token_ids)

    def _skipped(self, prompt: str) -> int:
        """Return how many tokens at the beginning of each row are not pooled."""
        if not prompt or self.modules.includes_prompt:
            return 0
        return len(self.ids(prompt)) - 1  # without its EOS

    def _encode(self, rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
        """Return the last hidden states (B, S, D) float32 of rows, and where tokens are (B, S)."""
        longest, pad = max(map(len, rows)), self.model.config.pad_token_id
        tokens = mx.array([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=mx.int32)
        mask = mx.arange(longest) < mx.array([len(row) for row in rows])[:, None]
        is_padded = min(map(len, rows)) < longest
        states = self.model.encode(tokens, mask if is_padded else None)
        return states.astype(mx.float32), mask

    def _finished(self, vectors: mx.array, normalize: bool | None) -> mx.array:
        """Return pooled vectors (B, D) after the folder's matrices, of length 1 if they are."""
        for dense in self.modules.dense:
            vectors = dense(vectors)
        if self.modules.normalize if normalize is None else normalize:
            lengths = mx.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / mx.maximum(lengths, 1e-12)
        return vectors


def groups_of(rows: Sequence[Sequence[int]], batch_size: int) -> Iterable[list[int]]:
    """Return the indices of rows to encode together: the longest first, those alike together."""
    groups: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
        last = groups[-1] if groups else []
        most = min(batch_size, max(1, TOKENS_IN_PASS // len(rows[last[0]]))) if last else 0
        if len(last) < most:
            last.append(i)
        else:
            groups.append([i])
    return groups


def pool(states: mx.array, mask: mx.array, how: str, skipped: int = 0) -> mx.array:
    """Return one vector of each row.

    Args:
        states: (B, S, D) float32.
        mask: (B, S) bool, True at tokens, which begin each row.
        how: One of `POOLINGS`.
        skipped: Tokens at the beginning that do not count; all do in a row that has no more.
    """
    last = mask.sum(axis=1) - 1
    positions = mx.arange(mask.shape[1])
    counted = mask & ((positions >= skipped) | (last[:, None] < skipped))
    if how == "mean":
        weights = counted.astype(states.dtype)[..., None]
        return mx.where(counted[..., None], states, 0).sum(axis=1) / weights.sum(axis=1)
    if how == "max":
        return mx.where(counted[..., None], states, -mx.inf).max(axis=1)
    place = last if how == "eos" else mx.argmax(counted, axis=1)
    return mx.take_along_axis(states, place[:, None, None], axis=1)[:, 0]
