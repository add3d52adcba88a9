"""Models of known shapes with random weights, and drafts of a set acceptance: real costs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_map_with_path

from .config import T5Config
from .decoder import SpeculativeDecoder
from .draft import Draft, Drafter
from .engine import Plan, decode
from .results import Generation
from .sampling import Sampler
from .t5 import T5

_SIZES = {  # d_model, d_kv, d_ff, heads, layers of each stack
    "t5-small": (512, 64, 2048, 8, 6),
    "t5-base": (768, 64, 3072, 12, 12),
    "t5-large": (1024, 64, 4096, 16, 24),
    "t5-3b": (1024, 128, 16384, 32, 24),
}
SHAPES = {
    name: T5Config(d_model, d_kv, d_ff, num_heads, depth, depth, vocab_size=32128)
    for name, (d_model, d_kv, d_ff, num_heads, depth) in _SIZES.items()
}


def random_model(shape: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> T5:
    """A model of that shape whose outputs mean nothing and do not end.

    Args:
        shape: Of `SHAPES`.
        dtype: Of the weights.
        seed: Of the weights.

    Raises:
        ValueError: If there is no such shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}: choose from {', '.join(SHAPES)}")
    model = T5(SHAPES[shape])
    mx.random.seed(seed)

    def drawn(path: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:
            return mx.ones(weight.shape, dtype)
        # A small embedding: with a large one each token would be followed by itself.
        scale = 0.02 if path == "shared.weight" else weight.shape[1] ** -0.5
        new = scale * mx.random.normal(weight.shape)
        if path == "shared.weight":
            new[model.eos_token_id] = 0  # never the best
        return new.astype(dtype)

    model.update(tree_map_with_path(drawn, model.parameters()))
    mx.eval(model.parameters())
    return model


class Replayed:
    """A drafter that costs what another one does, and proposes what is known to follow.

    So any rate of acceptance can be had at the real cost of a pair, whose weights may be random.

    Args:
        drafter: Drafts, and is overruled.
        outputs: The target's own output for each prompt (source ids, EOS included).
        acceptance: Chance of each token to be right; drawn by prompt and place, so that it is the
            same in every run.
        vocab_size: The target's.
    """

    def __init__(
        self,
        drafter: Drafter,
        outputs: Mapping[tuple[int, ...], Sequence[int]],
        acceptance: float,
        vocab_size: int,
    ) -> None:
        self._drafter = drafter
        self._outputs = outputs
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._known: list[list[int]] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._drafter.start(prompts)
        self._known = [self._damaged(tuple(prompt)) for prompt in prompts]

    def propose(self, context: list[list[int]], num_draft: int, keys: mx.array | None) -> Draft:
        draft = self._drafter.propose(context, num_draft, keys)
        width = draft.tokens.shape[1]
        replay = [
            (known[len(c) - 1 :] + [0] * width)[:width]
            for known, c in zip(self._known, context, strict=True)
        ]
        if width == 0:
            return draft
        own = draft.tokens
        return replace(draft, tokens=mx.array(replay, dtype=mx.int32) + (own - own))

    def replace(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._drafter.replace(rows, prompts)
        for row, prompt in zip(rows, prompts, strict=True):
            self._known[row] = self._damaged(tuple(prompt))

    def select(self, rows: Sequence[int]) -> None:
        self._drafter.select(rows)
        self._known = [self._known[row] for row in rows]

    def _damaged(self, prompt: tuple[int, ...]) -> list[int]:
        chance = random.Random(str(prompt))
        return [
            token if chance.random() < self._acceptance else (token + 1) % self._vocab_size
            for token in self._outputs[prompt]
        ]


def forced_plan(
    decoder: SpeculativeDecoder,
    outputs: Mapping[tuple[int, ...], Sequence[int]],
    acceptance: float,
    max_tokens: int,
) -> Plan:
    """A decoder's plan with its drafts replayed; see `Replayed`."""
    plan = decoder.plan([], Sampler(), max_tokens)
    size = decoder.model.vocab_size
    return replace(plan, drafter=Replayed(plan.drafter, outputs, acceptance, size))


class ForcedDecoder:
    """Decodes greedily, one prompt at a time, with drafts of a set acceptance.

    Args:
        decoder: With a draft model and a number of tokens to draft.
        acceptance: Chance of each drafted token to be right.
    """

    def __init__(self, decoder: SpeculativeDecoder, acceptance: float) -> None:
        self._decoder = decoder
        self._acceptance = acceptance
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: list[int], max_tokens: int) -> Generation:
        """As `SpeculativeDecoder.generate`; decodes a prompt twice where it is a new one."""
        decoder, ids = self._decoder, tuple(prompt)
        if ids not in self._outputs:
            alone = decoder.generate(prompt, max_tokens=max_tokens, speculative=False)
            self._outputs[ids] = alone.tokens
        plan = forced_plan(decoder, self._outputs, self._acceptance, max_tokens)
        *_, last = decode(decoder.model, [(0, prompt)], plan, batch_size=1)
        return Generation("", last.output, last.finish_reason or "length", last.stats)
