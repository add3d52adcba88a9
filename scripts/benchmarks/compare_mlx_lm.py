"""Compare the speed of decoding with that of mlx-lm, interleaved on one model in one process.

    python scripts/benchmarks/compare_mlx_lm.py causal-pair/target
    python scripts/benchmarks/compare_mlx_lm.py causal-pair/target --draft causal-pair/draft
    python scripts/benchmarks/compare_mlx_lm.py gpt2 --tokens 64

A model is a folder, or one of `SHAPES`, with random weights. Decoding is greedy, one prompt at a
time, in the device's default type: plain decoding is compared with `generate_step`, and with a
draft speculative decoding with `speculative_generate_step`. Both use the BLAS that this process has
loaded. The variants run in a new order for every prompt; ratios are taken within a turn. Outputs
are compared first, which also warms up. Needs `pip install mlx-lm`.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import SpeculativeDecoder, device, load
from speculative_t5.causal import DecoderOnlyModel

import mlx.core as mx
import typer

SHAPES: dict[str, dict[str, Any]] = {  # as their config.json says
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "n_ctx": 1024,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 50257,
        "eos_token_id": 50256,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "eos_token_id": 151645,
    },
}

OURS, THEIRS = "ours, plain", "mlx-lm, generate_step"
OURS_FASTER, THEIRS_FASTER = "ours, speculative", "mlx-lm, speculative_generate_step"
Variant = Callable[[list[int], int], list[int]]  # prompt and most tokens -> tokens, EOS included


def open_model(name: str) -> DecoderOnlyModel:
    """Load a folder's model, or make one of a known shape."""
    dtype = device.default_type().dtype
    if name not in SHAPES or Path(name).is_dir():
        return load(name, dtype=dtype)[0]
    shape = SHAPES[name]
    kind = import_module(f"mlx_lm.models.{shape['model_type']}")
    mx.random.seed(0)
    module = kind.Model(kind.ModelArgs.from_dict(shape))
    module.set_dtype(dtype)
    limit = shape.get("n_positions") or shape["max_position_embeddings"]
    return DecoderOnlyModel(module, eos_token_id=shape["eos_token_id"], max_context=limit)


def ours(decoder: SpeculativeDecoder) -> Variant:
    end = [decoder.model.info.eos_token_id]

    def run(prompt: list[int], max_tokens: int) -> list[int]:
        out = decoder.generate(prompt, max_tokens=max_tokens)
        return out.tokens + end * (out.finish_reason == "eos")

    return run


def theirs(model: DecoderOnlyModel, draft: DecoderOnlyModel | None, num_draft: int) -> Variant:
    from mlx_lm.generate import generate_step, speculative_generate_step

    def run(prompt: list[int], max_tokens: int) -> list[int]:
        if draft is None:
            steps = generate_step(mx.array(prompt), model.model, max_tokens=max_tokens)
        else:
            steps = speculative_generate_step(
                mx.array(prompt),
                model.model,
                draft.model,
                num_draft_tokens=num_draft,
                max_tokens=max_tokens,
            )
        tokens = []
        for step in steps:
            if int(step[0]) in model.info.eos_token_ids:
                return [*tokens, model.info.eos_token_id]  # any end counts as EOS, as in `ours`
            tokens.append(int(step[0]))
        return tokens

    return run


def variants_of(
    model: DecoderOnlyModel, draft: DecoderOnlyModel | None, num_draft: int
) -> dict[str, Variant]:
    variants = {OURS: ours(SpeculativeDecoder(model)), THEIRS: theirs(model, None, num_draft)}
    if draft is not None:
        variants[OURS_FASTER] = ours(SpeculativeDecoder(model, draft, num_draft=num_draft))
        variants[THEIRS_FASTER] = theirs(model, draft, num_draft)
    return variants


def measure(
    variants: dict[str, Variant], prompts: Sequence[list[int]], max_tokens: int, turns: int
) -> dict[str, list[float]]:
    """Return tokens per second of each variant in each turn."""
    rates: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)
    for _ in range(turns):
        seconds, tokens = dict.fromkeys(variants, 0.0), dict.fromkeys(variants, 0)
        for prompt in prompts:
            for name in order.sample(list(variants), len(variants)):
                began = time.perf_counter()
                tokens[name] += len(variants[name](prompt, max_tokens))
                seconds[name] += time.perf_counter() - began
        for name in variants:
            rates[name].append(tokens[name] / seconds[name])
    return rates


def main(
    model: Annotated[str, typer.Argument(help="Folder, or gpt2 or qwen3-0.6b at random.")],
    draft: Annotated[str | None, typer.Option(help="Folder or shape of a draft.")] = None,
    num_draft: Annotated[int, typer.Option(min=1, help="Tokens to draft for each pass.")] = 4,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 7,
) -> None:
    try:
        target = open_model(model)
        small = open_model(draft) if draft else None
        variants = variants_of(target, small, num_draft)
        rng = random.Random(0)
        prompts = [
            rng.choices(range(1, target.info.vocab_size), k=prompt_tokens) for _ in range(count)
        ]
        expected = [variants[OURS](prompt, tokens) for prompt in prompts]
    except ValueError as error:
        sys.exit(f"error: {error}")
    same = {
        name: sum(variant(p, tokens) == e for p, e in zip(prompts, expected, strict=True))
        for name, variant in variants.items()
    }
    rates = measure(variants, prompts, tokens, turns)
    print(
        f"{model}{f', {draft} drafts {num_draft}' if draft else ''}; {count} prompts of "
        f"{prompt_tokens} tokens, {sum(map(len, expected))} tokens of output, {turns} turns, "
        f"{mx.default_device()}"
    )
    print(f"{'':34} tokens/s   over generate_step   (least to most)   same output")
    for name, found in rates.items():
        ratios = [rate / other for rate, other in zip(found, rates[THEIRS], strict=True)]
        print(
            f"{name:34} {statistics.median(found):8.1f} {statistics.median(ratios):20.3f}   "
            f"({min(ratios):.3f} to {max(ratios):.3f}) {same[name]:8}/{count}"
        )


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
