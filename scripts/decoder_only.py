"""Run decoder-only models of mlx-lm (GPT-2, Qwen3, Llama) by exact speculative decoding.

    python scripts/decoder_only.py --model openai-community/gpt2-xl \
        --draft-model openai-community/gpt2 --prompt "Once upon a time" --num-draft 4

The text goes to standard output, statistics to standard error. mlx-lm loads the models, in the type
that they are stored in; they accept any cache with the interface of its own. Those rewind all rows
of a batch alike. The one here has rows of different lengths, as `LanguageModel` and `Session` ask
(docs/extending.md). Needs `pip install mlx-lm`.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.decoding import (
    ModelInfo,
    Vocabulary,
    best,
    best_logprobs,
    counters,
    fingerprint,
)
from speculative_t5.errors import first_line
from speculative_t5.models import SMALLEST_CAPACITY, EncodedPrompt, KVCache, write
from speculative_t5.tokenizers.base import as_vocabulary

import mlx.core as mx
import mlx.nn as nn
import typer

PREFILL = 512  # tokens of prompts in a pass
# Names in config.json of the most tokens that a model reads.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
KeysValues = tuple[mx.array, mx.array]  # (B, H, T, D) each
LayerShape = tuple[int, tuple[int, int], mx.Dtype]  # H, the two D, and the type


class DecoderOnlyModel:
    """A `LanguageModel` over a model of mlx-lm, or over any that accepts its caches.

    Contexts begin with the prompt, and outputs continue it.

    Args:
        model: Called with tokens (B, L) and a cache for each layer; returns logits (B, L, V).
            Refused if its own cache cannot be rewound, or it cannot read rows of different lengths.
        eos_token_id: The id that ends an output, as do `extra_eos_ids`.
        max_context: Largest number of tokens of prompt and output together; None for no limit.
        vocabulary: That of its tokenizer, which a draft's must equal; None if unknown.
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
        clamp_positions(model)
        self.model = model
        self.shapes, vocab_size = shapes_of(model)
        ends = frozenset({eos_token_id, *extra_eos_ids})
        self.info = ModelInfo(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            eos_token_ids=ends,
            special_tokens=ends,
            is_decoder_only=True,
            max_context=max_context,
            max_source_length=max_context or sys.maxsize,
        ).with_vocabulary(vocabulary)
        # Not the parameters alone: another thread could not evaluate an array begun in this one.
        mx.eval(model)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of its shapes and of a sample of every weight."""
        return fingerprint(repr(self.shapes), self.model.parameters())

    def start(
        self, prompts: Sequence[Sequence[int]], *, width: int | None = None
    ) -> tuple["DecoderOnlySession", list[list[int]]]:
        """Read the prompts except their last tokens, with which decoding begins."""
        device.enter_thread()
        session = DecoderOnlySession(self, len(prompts), width)
        session.read(prompts)
        return session, [list(prompt) for prompt in prompts]

    def __call__(self, tokens: mx.array) -> mx.array:
        """Score whole sequences (B, L): logits (B, L, V) of what follows each token."""
        device.enter_thread()
        return self.model(tokens)


class DecoderOnlySession:
    """One batch of sequences being decoded; a `Session`."""

    def __init__(self, model: DecoderOnlyModel, batch: int, width: int | None = None) -> None:
        self._model = model
        layers = [
            tuple(mx.zeros((batch, heads, SMALLEST_CAPACITY, size), dtype) for size in sizes)
            for heads, sizes, dtype in model.shapes
        ]
        self._cache = KVCache(layers, width)
        self._whole = width is not None  # attend to whole buffers, whose sizes are few

    @property
    def lengths(self) -> list[int]:
        return self._cache.lengths

    def step(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        parts = self._cache.parts(tokens)
        found = [self._run(part, count, whole=self._whole) for part, count in parts]
        logits = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
        return logits[..., :vocab_size] if vocab_size else logits

    def _run(self, tokens: mx.array, count: int, *, whole: bool) -> mx.array:
        """Run the model over tokens (B, L) of every row, of which the first `count` stay."""
        lengths, length = self._cache.lengths, tokens.shape[1]
        offsets, buffers = self._cache.hand_over(length)
        layers = [_Layer(pair, offsets, lengths, length, whole=whole) for pair in buffers]
        logits = self._model.model(tokens, cache=layers)
        self._cache.take_back([layer.buffers for layer in layers], count)
        return logits[:, :count]

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        return best(self.step(tokens, vocab_size))

    def step_logprobs(self, tokens: mx.array) -> mx.array:
        return best_logprobs(self.step(tokens))

    def truncate(self, lengths: Sequence[int]) -> None:
        self._cache.truncate(lengths)

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Fill empty rows with prompts, except their last tokens."""
        counters.extra_work += 1
        lengths = [len(prompt) - 1 for prompt in prompts]
        longest = max(lengths)
        padded = [[*prompt[:-1], *[0] * (longest - len(prompt) + 1)] for prompt in prompts]
        for start in range(0, longest, PREFILL):
            part = mx.array([row[start : start + PREFILL] for row in padded], dtype=mx.int32)
            self._run(part, part.shape[1], whole=False)
            mx.eval(self._cache.layers)  # one part at a time, to bound the memory of attention
        self.truncate(lengths)

    def encode(self, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt]:
        together = DecoderOnlySession(self._model, len(prompts))
        together.read(prompts)
        cache = together._cache
        return [EncodedPrompt(cache, row, list(prompt)) for row, prompt in enumerate(prompts)]

    def replace(self, rows: Sequence[int], encoded: Sequence[EncodedPrompt]) -> list[list[int]]:
        self._cache.give(rows, encoded)
        return [list(item.context) for item in encoded]

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)


class _Layer:
    """One layer's keys and values during one pass, with the interface of mlx-lm's caches.

    See `KVCache.hand_over` for `offsets`; `count` is L. `whole` attends to all C positions, with an
    array as the mask, and not only to those up to the longest row's end.
    """

    def __init__(
        self,
        buffers: KeysValues,
        offsets: mx.array,
        lengths: Sequence[int],
        count: int,
        *,
        whole: bool,
    ) -> None:
        self.buffers = buffers  # (B, H, C, D), with what this pass adds
        self._offsets = offsets
        same = min(lengths) == max(lengths)
        self._end = buffers[0].shape[2] if whole else max(lengths) + count
        self._plain = same and not whole  # a mask need not be an array
        self.offset: int | mx.array = lengths[0] if same else offsets  # of the first new tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Append (B, H, L, D) to every row; return (B, H, T, D), T being the longest row's end."""
        k, v = self.buffers
        k, v = self.buffers = write(k, keys, self._offsets), write(v, values, self._offsets)
        return k[:, :, : self._end], v[:, :, : self._end]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Make the mask of new tokens: None for no mask, "causal", or bool (B, 1, L, T)."""
        if self._plain and not return_array and (window_size is None or self._end <= window_size):
            return None if count == 1 else "causal"
        positions = mx.arange(self._end)
        own = (self._offsets[:, None] + mx.arange(count))[:, None, :, None]
        mask = positions <= own
        return mask if window_size is None else mask & (positions > own - window_size)


def check_cache(model: nn.Module) -> None:
    """Refuse a model whose cache cannot be rewound row by row: only keys and values can be."""
    make: Any = getattr(model, "make_cache", list)  # a list of mlx-lm's caches
    others = sorted({type(cache).__name__ for cache in make()} - {"KVCache"})
    if others:
        raise ValueError(
            f"the model keeps its context in {', '.join(others)}, which cannot be rewound row by "
            "row: use a model with plain keys and values"
        )


class ClampedPositions(nn.Module):
    """A table of learned positions whose last row stands for all beyond it.

    Rows near their end are fed tokens beyond it, as their neighbours are; MLX does not check.
    """

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def __call__(self, positions: mx.array) -> mx.array:
        return self.table(mx.minimum(positions, self.table.weight.shape[0] - 1))


def clamp_positions(model: nn.Module) -> None:
    """Put `ClampedPositions` in the place of a table of learned positions, `wpe` in mlx-lm."""
    for module in model.modules():
        if "wpe" in module and not isinstance(module["wpe"], ClampedPositions):
            module["wpe"] = ClampedPositions(module["wpe"])


class _Probe:
    """A cache of two rows of different lengths that records the shapes of keys and values."""

    def __init__(self) -> None:
        self.offset = mx.array([0, 1])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysValues:
        self.seen: LayerShape = (keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None


def shapes_of(model: nn.Module) -> tuple[list[LayerShape], int]:
    """Return the shapes of the layers' keys and values, and the width of the logits."""
    probes = [_Probe() for _ in model.layers]
    try:  # a graph that is never evaluated
        logits = model(mx.zeros((2, 1), dtype=mx.int32), cache=probes)
    except Exception as error:  # models that take the offset for a number raise anything
        raise ValueError(
            f"the model cannot read rows of different lengths side by side ({first_line(error)}): "
            "choose another"
        ) from error
    return [probe.seen for probe in probes], int(logits.shape[-1])


class LmTokenizer:
    """A `Tokenizer` over one of mlx-lm's, which also formats chats."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        ids: dict[str, int] = backend.get_vocab()
        self._known = frozenset(ids.values())
        self.vocabulary = as_vocabulary(ids, {*backend.all_special_ids})

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the begin token goes first unless the text starts with it."""
        begun = bool(self._backend.bos_token) and text.startswith(self._backend.bos_token)
        return self._backend.encode(text, add_special_tokens=not begun)

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of what a user says, in the model's template, up to where it answers."""
        if not self._backend.has_chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template: leave --chat out, or choose a model "
                "that is tuned for chats"
            )
        said = [{"role": "user", "content": text}]
        return self._backend.apply_chat_template(said, add_generation_prompt=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; control tokens and vocabulary padding have none."""
        known = [token for token in ids if token in self._known]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self._backend.decode(known, **options)


def load(name: str, *, dtype: mx.Dtype | None = None) -> tuple[DecoderOnlyModel, LmTokenizer]:
    """Load a model and its tokenizer by mlx-lm, by default in the type that it is stored in."""
    try:
        import mlx_lm
    except ImportError as error:
        raise ValueError(
            f"mlx-lm cannot be imported ({first_line(error)}): run pip install mlx-lm"
        ) from error
    device.limit_memory()
    try:
        module, backend, config = mlx_lm.load(name, return_config=True)
    except Exception as error:  # mlx-lm, the Hub's client and transformers raise anything
        raise ValueError(
            f"mlx-lm cannot load {name} ({type(error).__name__}: {first_line(error)}): "
            "choose a decoder-only model that it has, or check the name"
        ) from error
    if dtype is not None:
        module.set_dtype(dtype)
    if not backend.eos_token_ids:
        raise ValueError(
            f"{name} does not say what ends an output: put eos_token_id into its config.json"
        )
    tokenizer, ends = LmTokenizer(backend), sorted(backend.eos_token_ids)
    limits = [config.get(key) for key in CONTEXTS]
    model = DecoderOnlyModel(
        module,
        eos_token_id=ends[0],
        extra_eos_ids=ends[1:],
        vocabulary=tokenizer.vocabulary,
        max_context=next((limit for limit in limits if limit), None),
    )
    return model, tokenizer


def main(
    model: Annotated[str, typer.Option(help="The target: a folder, or a name on the Hub.")],
    prompt: Annotated[str, typer.Option(help="Text to continue or, with --chat, to answer.")],
    draft_model: Annotated[str | None, typer.Option(help="The draft, or 'lookup'.")] = None,
    num_draft: Annotated[int | None, typer.Option(help="Tokens to draft for each pass.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the output.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same gives the same output.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
) -> None:
    try:
        target, tokenizer = load(model)
        draft: Any = draft_model
        if draft_model not in (None, "lookup"):
            draft, _ = load(draft_model)
        length: Any = "auto" if num_draft is None else num_draft
        decoder = SpeculativeDecoder(target, draft, tokenizer, num_draft=length)
        source = tokenizer.encode_chat(prompt) if chat else prompt
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        for chunk in decoder.stream(source, **options):
            print(chunk.text, end="", flush=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"\n{chunk.stats.summary()}", file=sys.stderr)


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
