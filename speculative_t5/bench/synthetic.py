"""Real costs without real weights: random models of known shapes, drafts of a given acceptance."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from ..cpu import accelerate
from ..decoding import Draft, Drafter, Groups, ModelInfo, Plan, Session
from ..generation import SpeculativeDecoder
from ..models import (
    T5,
    DecoderOnlyModel,
    EncoderDecoder,
    ModelConfig,
    T5Config,
    T5GemmaConfig,
    build,
    new_model,
)

Shape = ModelConfig | dict[str, Any]  # of a decoder-only model: entries of config.json


def _gemma(generation: int, size: int, d_ff: int, depth: int, *heads: int) -> T5GemmaConfig:
    num_heads, num_key_heads, head_dim = heads
    stack = {
        "hidden_size": size, "intermediate_size": d_ff, "num_hidden_layers": depth,
        "num_attention_heads": num_heads, "num_key_value_heads": num_key_heads,
        "head_dim": head_dim, "query_pre_attn_scalar": head_dim,
        "vocab_size": 256000 if generation == 1 else 262144,
        "sliding_window": 4096 if generation == 1 else 512,
    }  # fmt: skip
    kind = "t5gemma" if generation == 1 else "t5gemma2"
    return T5GemmaConfig.from_dict({"model_type": kind, "encoder": stack, "decoder": stack})


SHAPES: dict[str, ModelConfig] = {  # d_model, d_kv, d_ff, heads, layers of each stack
    "t5-efficient-tiny": T5Config(256, 64, 1024, 4, 4, 4, vocab_size=32128),
    "t5-small": T5Config(512, 64, 2048, 8, 6, 6, vocab_size=32128),
    "t5-base": T5Config(768, 64, 3072, 12, 12, 12, vocab_size=32128),
    "t5-large": T5Config(1024, 64, 4096, 16, 24, 24, vocab_size=32128),
    "t5-3b": T5Config(1024, 128, 16384, 32, 24, 24, vocab_size=32128),
    "t5gemma-s": _gemma(1, 512, 1024, 8, 8, 8, 64),
    "t5gemma-b": _gemma(1, 768, 2048, 12, 12, 12, 64),
    "t5gemma-l": _gemma(1, 1024, 2816, 24, 16, 16, 64),
    "t5gemma-xl": _gemma(1, 2048, 5120, 24, 32, 32, 64),
    "t5gemma-2b": _gemma(1, 2304, 9216, 26, 8, 4, 256),
    "t5gemma-9b": _gemma(1, 3584, 14336, 42, 16, 8, 256),
    "t5gemma2-270m": _gemma(2, 640, 2048, 18, 4, 1, 256),
    "t5gemma2-1b": _gemma(2, 1152, 6912, 26, 4, 1, 256),
    "t5gemma2-4b": _gemma(2, 2560, 10240, 34, 8, 4, 256),
}


def _gpt2(size: int, num_heads: int, depth: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": size, "n_head": num_heads, "n_layer": depth,
        "n_positions": 1024, "n_ctx": 1024, "layer_norm_epsilon": 1e-5, "vocab_size": 50257,
        "eos_token_id": 50256,
    }  # fmt: skip


def _qwen3(size: int, num_heads: int, depth: int, d_ff: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": size, "num_attention_heads": num_heads,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": depth,
        "intermediate_size": d_ff, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "vocab_size": 151936,
        "eos_token_id": 151645,
    }  # fmt: skip


CAUSAL_SHAPES = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 16, 24),
    "gpt2-large": _gpt2(1280, 20, 36),
    "gpt2-xl": _gpt2(1600, 25, 48),
    "qwen3-0.6b": _qwen3(1024, 16, 28, 3072),
    "qwen3-1.7b": _qwen3(2048, 16, 28, 6144),
    "qwen3-4b": _qwen3(2560, 32, 36, 9728),
}
# Standard deviation of embeddings: so large that each token of an output follows itself, however a
# pass is rounded.
EMBEDDINGS = 20.0
_EMBEDDINGS = ("shared", "encoder_shared", "wte", "embed_tokens")


def check_shapes(target: str, draft: str) -> None:
    """Refuse names of shapes that do not exist, or whose vocabularies differ."""
    ours, theirs = _family(target), _family(draft)
    if ours != theirs:
        raise ValueError(
            f"{target} has the vocabulary of {ours}, {draft} that of {theirs}: "
            "choose two shapes of one family"
        )


def context_of(shape: str) -> int | None:
    """Return the most tokens of prompt and output that a shape reads; None for a T5: no bound."""
    config = CAUSAL_SHAPES.get(shape, {})
    return config.get("n_positions") or config.get("max_position_embeddings")


def random_model(
    shape: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0, embeddings: float = EMBEDDINGS
) -> EncoderDecoder | DecoderOnlyModel:
    """Make a model of a shape with random weights, whose outputs do not end.

    With small `embeddings` (their standard deviation) outputs vary, and may end.
    """
    _family(shape)  # refused here, if it is none
    config = SHAPES.get(shape) or CAUSAL_SHAPES[shape]
    return ready(random_module(config, dtype=dtype, seed=seed, embeddings=embeddings), config)


def random_module(
    config: Shape, *, dtype: mx.Dtype = mx.float32, seed: int = 0, embeddings: float = 1.0
) -> nn.Module:
    """Make a module with random weights with which outputs depend on all that came before them.

    They are made one at a time: all in float32 might not fit in memory.
    """
    module = build(config) if isinstance(config, dict) else new_model(config)
    mx.random.seed(seed)

    def random_weight(path: str, weight: mx.array) -> mx.array:
        *_, layer, name = path.split(".")
        new = mx.random.normal(weight.shape)
        if weight.ndim == 1:  # of a norm, about 1, or a bias, about 0
            new = 0.2 * new + (name != "bias")
        elif layer in _EMBEDDINGS:
            new = embeddings * new
        elif "position" not in layer:
            new = 0.7 * weight.shape[1] ** -0.5 * new
        new = new.astype(dtype)
        mx.eval(new)
        return new

    module.update(tree_map_with_path(random_weight, module.parameters()))
    return module


def ready(module: nn.Module, config: Shape) -> EncoderDecoder | DecoderOnlyModel:
    """Return a model as `load` returns it: accelerated, or wrapped if it is decoder-only."""
    if isinstance(config, dict):
        most = config.get("n_positions") or config["max_position_embeddings"]
        return DecoderOnlyModel(module, eos_token_id=config["eos_token_id"], max_context=most)
    assert isinstance(module, EncoderDecoder)
    accelerate(module)
    return module


def random_prompts(
    model: EncoderDecoder | DecoderOnlyModel, length: int, count: int
) -> list[list[int]]:
    """Make `count` prompts of `length` ids, the same in every run; EOS ends those of a T5 only."""
    size, eos = model.info.vocab_size, model.info.eos_token_id
    ids = [i for i in range(min(100, size // 2), min(30_000, size)) if i != eos]
    last = [eos] if isinstance(model, T5) else []
    rng = random.Random(0)
    return [[*rng.choices(ids, k=length - len(last)), *last] for _ in range(count)]


def _family(shape: str) -> str:
    """Return the name of a shape's vocabulary: "t5" or its model_type."""
    if config := SHAPES.get(shape):
        return "t5" if isinstance(config, T5Config) else f"T5Gemma {config.generation}"
    if shape not in CAUSAL_SHAPES:
        known = ", ".join([*SHAPES, *CAUSAL_SHAPES])
        raise ValueError(f"there is no shape {shape!r}: choose from {known}")
    return str(CAUSAL_SHAPES[shape]["model_type"])


class ReplayDrafter:
    """A drafter that costs as much as another one, and proposes a known output.

    The chance of each token to be right is `acceptance`; prompt and position decide, so that it is
    the same in every run. `outputs` are the greedy ones of the target, by the ids of their prompts.
    """

    def __init__(
        self,
        drafter: Drafter,
        outputs: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        target: ModelInfo,
    ) -> None:
        self._drafter = drafter
        self._outputs = outputs
        self._acceptance = acceptance
        self._target = target
        self._replayed: list[list[int]] = []  # by row: what is at each place of its context

    def start(self, prompts: Sequence[Sequence[int]], session: Session | None = None) -> None:
        self._drafter.start(prompts, session)
        self._replayed = [self._corrupted(tuple(prompt)) for prompt in prompts]

    def propose(
        self, contexts: list[list[int]], num_draft: int, groups: Groups, keys: mx.array | None
    ) -> Draft:
        draft = self._drafter.propose(contexts, num_draft, groups, keys)
        width = draft.tokens.shape[1]
        rows = [
            (replayed[len(tokens) :] + [0] * width)[:width]
            for replayed, tokens in zip(self._replayed, contexts, strict=True)
        ]
        # The sum depends on the drafter's own tokens, so that these are computed as well.
        zeros = draft.tokens - draft.tokens
        return replace(draft, tokens=mx.array(rows, dtype=mx.int32) + zeros)

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._drafter.replace(rows, prompts)
        for row, prompt in zip(rows, prompts, strict=True):
            self._replayed[row] = self._corrupted(tuple(prompt))

    def select(self, rows: Sequence[int]) -> None:
        self._drafter.select(rows)
        self._replayed = [self._replayed[row] for row in rows]

    def _corrupted(self, prompt: tuple[int, ...]) -> list[int]:
        rng, size = random.Random(str(prompt)), self._target.vocab_size
        # Before the output a T5's context has one token, that of others the prompt.
        before = prompt if self._target.is_decoder_only else (0,)
        return [*before] + [
            token if rng.random() < self._acceptance else (token + 1) % size
            for token in self._outputs[prompt]
        ]


def synthetic_plan(
    decoder: SpeculativeDecoder, outputs: Mapping[tuple[int, ...], Sequence[int]], acceptance: float
) -> Plan:
    """Return a decoder's plan with a `ReplayDrafter` around its drafter."""
    plan = decoder.plan()
    drafter = ReplayDrafter(plan.drafter, outputs, acceptance, decoder.model.info)
    return replace(plan, drafter=drafter)
