"""Real costs without real weights: random models of known shapes, drafts of a given acceptance."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_map_with_path

from ..decoding import Draft, Drafter, Groups, ModelInfo, Plan, Session
from ..generation import SpeculativeDecoder
from ..kernels import accelerate
from ..models import T5, EncoderDecoder, ModelConfig, T5Config, T5GemmaConfig, new_model


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
# Standard deviation of embeddings: so large that each token of an output follows itself, however a
# pass is rounded.
EMBEDDINGS = 20.0
_EMBEDDINGS = ("shared", "encoder_shared")


def check_shapes(target: str, draft: str) -> None:
    """Refuse names of shapes that do not exist, or whose vocabularies differ."""
    ours, theirs = _family(target), _family(draft)
    if ours != theirs:
        raise ValueError(
            f"{target} has the vocabulary of {ours}, {draft} that of {theirs}: "
            "choose two shapes of one family"
        )


def random_model(
    shape: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0, embeddings: float = EMBEDDINGS
) -> EncoderDecoder:
    """Make a model of a shape with random weights, whose outputs do not end.

    With small `embeddings` (their standard deviation) outputs vary, and may end.
    """
    _family(shape)  # refused here, if it is none
    model = random_weights(SHAPES[shape], dtype=dtype, seed=seed, embeddings=embeddings)
    accelerate(model)
    return model


def random_weights(
    config: ModelConfig, *, dtype: mx.Dtype = mx.float32, seed: int = 0, embeddings: float = 1.0
) -> EncoderDecoder:
    """Make a model with random weights with which outputs depend on all that came before them.

    They are made one at a time: all in float32 might not fit in memory. It is not accelerated.
    """
    model = new_model(config)
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

    model.update(tree_map_with_path(random_weight, model.parameters()))
    return model


def random_prompts(model: EncoderDecoder, length: int, count: int) -> list[list[int]]:
    """Make `count` prompts of `length` ids, the same in every run; EOS ends those of a T5 only."""
    size, eos = model.info.vocab_size, model.info.eos_token_id
    ids = [i for i in range(min(100, size // 2), min(30_000, size)) if i != eos]
    last = [eos] if isinstance(model, T5) else []
    rng = random.Random(0)
    return [[*rng.choices(ids, k=length - len(last)), *last] for _ in range(count)]


def _family(shape: str) -> str:
    """Return the name of a shape's vocabulary."""
    config = SHAPES.get(shape)
    if config is None:
        raise ValueError(f"there is no shape {shape!r}: choose from {', '.join(SHAPES)}")
    return "t5" if isinstance(config, T5Config) else f"T5Gemma {config.generation}"


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
        return [0] + [  # before the output, a context has the start token
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
