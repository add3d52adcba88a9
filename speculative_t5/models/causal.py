"""Decoder-only models of mlx-lm in the same loop: their sessions keep a length per row.

The only file that imports mlx-lm. Its models take any cache with the interface of its own; theirs
rewinds all rows of a batch alike, so that here they are given one whose rows are each as long as
they have come.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import device
from ..decoding import Vocabulary, argmax, fingerprint
from ..errors import first_line
from . import opt
from .cache import EncodedPrompt, KeysValues, KVCache, LayerShape, replace_rows, write
from .config_json import model_type

MLX_LM = "mlx-lm>=0.32,<0.33"  # as in pyproject.toml
# Some of its models, by which folders are known that do not say what head they have.
KNOWN = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral",
         "mixtral", "phi", "phi3", "qwen2", "qwen3", "starcoder2")  # fmt: skip
PREFILL = 512  # tokens of prompts in a pass


class CausalModel:
    """A `LanguageModel` over one of mlx-lm's, or over any that takes its caches.

    The context begins with the prompt: what is emitted goes on from it.

    Args:
        model: Called with tokens (B, L) and a cache for each layer; gives logits (B, L, V).
        eos_token_id: What ends an output.
        extra_eos_ids: Other ids that end one, too.
        max_context: Tokens of prompt and output that it can read, at most; None for any number.
        vocabulary: Of its tokenizer; None if unknown.

    Raises:
        ValueError: If its own cache is of a kind that cannot be rewound, or it cannot read rows of
            different lengths.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_id: int,
        max_context: int | None,
        extra_eos_ids: Iterable[int] = (),
        vocabulary: Vocabulary | None = None,
    ) -> None:
        device.enter_thread()
        check_cache(model)
        _bound_positions(model)
        self.model = model
        self.eos_token_id = eos_token_id
        self.eos_token_ids = frozenset({eos_token_id, *extra_eos_ids})
        self.max_context = max_context
        self.vocabulary = vocabulary
        self.shapes, self.vocab_size = _shapes(model)
        # Not only parameters: another thread could not evaluate what this one has begun.
        mx.eval(model)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of its shapes and of a sample of every weight."""
        return fingerprint(repr(self.shapes), self.model.parameters())

    @property
    def max_source_length(self) -> int:
        return self.max_context or sys.maxsize

    @property
    def is_decoder_only(self) -> bool:
        return True

    @property
    def special_tokens(self) -> frozenset[int]:
        known = self.vocabulary.special if self.vocabulary else frozenset()
        return known | self.eos_token_ids

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[CausalSession, list[list[int]]]:
        """Read the prompts but for their last tokens, with which decoding begins."""
        device.enter_thread()
        session = CausalSession(self, len(prompts))
        session.read(prompts)
        return session, [list(prompt) for prompt in prompts]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Logits (B, L, V) of what follows each token of whole sequences (B, L)."""
        device.enter_thread()
        logits: mx.array = self.model(tokens)
        return logits


class CausalSession:
    """One batch of sequences being decoded; a `Session`."""

    def __init__(self, model: CausalModel, batch: int) -> None:
        self._model = model
        self._cache = KVCache(model.shapes, batch)

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        cache, count = self._cache, tokens.shape[1]
        at = cache.reserve(count)
        layers = [_Layer(layer, at, cache.lengths, count) for layer in cache.take()]
        logits: mx.array = self._model.model(tokens, cache=layers)
        cache.put([layer.buffers for layer in layers], count)
        return logits[..., :vocab_size] if vocab_size else logits

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return argmax(self.step(tokens, vocab_size))

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fill empty rows with prompts, but for their last tokens."""
        lengths = [len(prompt) - 1 for prompt in prompts]
        longest = max(lengths)
        padded = [[*prompt[:-1], *[0] * (longest - len(prompt) + 1)] for prompt in prompts]
        for start in range(0, longest, PREFILL):
            part = mx.array([row[start : start + PREFILL] for row in padded], dtype=mx.int32)
            self.step(part)
            mx.eval(self._cache.layers)  # one part at a time: attention takes memory
        self.truncate(lengths)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt[KVCache]]:
        together = CausalSession(self._model, len(prompts))
        together.read(prompts)
        return [
            EncodedPrompt(together._cache, row, list(prompt)) for row, prompt in enumerate(prompts)
        ]

    def replace(
        self, rows: Sequence[int], encoded: Sequence[EncodedPrompt[KVCache]]
    ) -> list[list[int]]:
        replace_rows(self._cache, rows, encoded)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)


class _Layer:
    """One layer's keys and values during one pass, with the interface of mlx-lm's caches.

    Attributes:
        offset: Position of the first new token in each row, (B,) int32; one number if all rows are
            as long.
        buffers: With what this pass has added.
    """

    def __init__(
        self, buffers: KeysValues, at: mx.array, lengths: Sequence[int], count: int
    ) -> None:
        self.buffers = buffers
        self._at = at
        self._same = min(lengths) == max(lengths)
        self._end = max(lengths) + count
        self.offset: int | mx.array = lengths[0] if self._same else at

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Append (B, H, L, D) to every row; all that the longest has, (B, H, T, D)."""
        k, v = self.buffers
        self.buffers = (write(k, keys, self._at), write(v, values, self._at))
        k, v = self.buffers
        return k[:, :, : self._end], v[:, :, : self._end]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What each of the new tokens may see: None for all, "causal", or bool (B, 1, L, T)."""
        if self._same and not return_array and (window_size is None or self._end <= window_size):
            return None if count == 1 else "causal"
        places = mx.arange(self._end)
        own = (self._at[:, None] + mx.arange(count))[:, None, :, None]
        mask = places <= own
        return mask if window_size is None else mask & (places > own - window_size)

    @property
    def state(self) -> KeysValues:
        return self.buffers


def build(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config.json's contents, with random weights: OPT's of ours, others of mlx-lm.

    Raises:
        ValueError: If there is none of that model_type, a setting makes no sense to it, or mlx-lm
            is not installed.
    """
    kind = model_type(config)
    kind_of_model, settings = _classes(config)
    try:
        model: nn.Module = kind_of_model(settings.from_dict(dict(config)))
    except Exception as error:  # they check little: sizes that are missing or zero raise anything
        if kind == "opt" and isinstance(error, ValueError):  # whole as it is
            raise
        raise ValueError(
            f"config.json does not make a {kind} ({type(error).__name__}: {first_line(error)}): "
            "download the model again"
        ) from error
    return model


def _classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model of that type, and its settings."""
    kind = model_type(config)
    if kind == "opt":
        return opt.Model, opt.ModelArgs
    try:
        from mlx_lm import utils
    except ImportError as error:
        if not _may_have(config):
            raise ValueError(
                f"this is a {kind} (model_type in config.json), which does not say that it is a "
                "decoder-only model that generates text: choose one that does, or a T5"
            ) from error
        raise ValueError(
            f"a {kind} (model_type in config.json) takes mlx-lm, which cannot be imported "
            f"({first_line(error)}): run pip install '{MLX_LM}'"
        ) from error
    installed = version("mlx-lm")
    # Private, and the only thing of mlx-lm that is: it knows which file is for which model_type.
    find = getattr(utils, "_get_classes", None)
    if find is None:
        raise ValueError(f"mlx-lm {installed} lacks utils._get_classes: run pip install '{MLX_LM}'")
    try:
        classes: tuple[Any, Any] = find(dict(config))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"this is a {kind} (model_type in config.json), which is neither of the T5 family nor "
            f"among the decoder-only models of mlx-lm {installed}: choose another"
        ) from error
    return classes


def _may_have(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm, which is not installed, seems to have a model."""
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    heads = ("ForCausalLM", "LMHeadModel")
    generates = any(isinstance(name, str) and name.endswith(heads) for name in names)
    return generates or config.get("model_type") in KNOWN


def check_cache(model: nn.Module) -> None:
    """Refuse a model whose cache cannot be rewound row by row.

    Raises:
        ValueError: If it has another than plain keys and values.
    """
    make = getattr(model, "make_cache", None)
    if make is None:
        return
    from mlx_lm.models.cache import KVCache as Plain

    others = sorted({type(cache).__name__ for cache in make()} - {Plain.__name__})
    if others:
        raise ValueError(
            f"the model keeps its context in {', '.join(others)}, which cannot be rewound row by "
            "row: use a model with plain keys and values"
        )


def _bound_positions(model: nn.Module) -> None:
    """Have the last row of a table of learned positions, as GPT-2's, stand for all beyond it.

    Rows near their end are fed as many tokens as their neighbours. What comes of these is not
    looked at, but they must not be read from outside of the table: MLX does not check.
    """
    named = [module for name, module in model.named_modules() if name.split(".")[-1] == "wpe"]
    if not named or hasattr(named[0], "bounded"):
        return
    (table,) = named
    kind, last = type(table), table.weight.shape[0] - 1

    class Bounded(kind):  # type: ignore[valid-type, misc]
        bounded = True

        def __call__(self, positions: mx.array) -> mx.array:
            rows: mx.array = super().__call__(mx.minimum(positions, last))
            return rows

    table.__class__ = Bounded


class _Probe:
    """Takes down the shapes of one layer's keys and values, as a cache of two unlike rows."""

    def __init__(self) -> None:
        self.offset = mx.array([0, 1])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        self.seen = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def _shapes(model: nn.Module) -> tuple[list[LayerShape], int]:
    """Shapes of the layers' keys and values, and the width of the logits."""
    probes = [_Probe() for _ in model.layers]
    try:
        logits = model(mx.zeros((2, 1), dtype=mx.int32), cache=probes)  # built, and never computed
    except Exception as error:  # whatever comes of asking an array what a number can answer
        raise ValueError(
            f"the model cannot read rows of different lengths side by side ({first_line(error)}): "
            "choose another"
        ) from error
    return [probe.seen for probe in probes], int(logits.shape[-1])
