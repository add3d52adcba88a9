"""Measure drafting with the shipped pair on held-out text: rules, lookups and draft lengths.

    python scripts/benchmarks/measure_drafting.py rules   --data deu.txt.xz
    python scripts/benchmarks/measure_drafting.py lookup  --data deu.txt.xz
    python scripts/benchmarks/measure_drafting.py drafts  --data deu.txt.xz
    python scripts/benchmarks/measure_drafting.py lengths --data deu.txt.xz

Everything is in float32. Needs the data that weights/README.md names.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.models import T5, SharingDraft

import mlx.core as mx
import typer
from texts import (
    PREFIX,
    Corruptor,
    DataOption,
    DraftOption,
    engine,
    held_out_examples,
    read_sentences,
)

CountOption = Annotated[int, typer.Option(help="Number of prompts.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def tokens_per_round(outputs: list[Generation]) -> float:
    return sum(o.stats.emitted for o in outputs) / sum(o.stats.rounds for o in outputs)


def report(name: str, outputs: list[Generation], plain: list[Generation]) -> None:
    """Print the tokens per round, and how many outputs equal those of plain decoding."""
    same = sum(o.tokens == r.tokens for o, r in zip(outputs, plain, strict=True))
    print(
        f"{name} {tokens_per_round(outputs):.2f} tokens a round, "
        f"{same} of {len(plain)} outputs equal plain ones",
        flush=True,
    )


@app.command()
def rules(
    data: DataOption, count: CountOption = 2000, draft: DraftOption = "correct-small"
) -> None:
    """Compare tokens per round at temperature 1: block verification and the token-wise rule."""
    prompts = [source for source, _ in held_out_examples(data, count)]
    for num_draft in (4, 8):
        for verify in ("token", "block"):
            decoder = engine(draft, num_draft=num_draft, verify=verify)
            outputs = decoder.generate_batch(prompts, batch_size=50, temperature=1.0)
            print(
                f"num_draft {num_draft}, {verify}: {tokens_per_round(outputs):.3f} tokens a round"
            )


@app.command()
def lookup(
    data: DataOption, count: CountOption = 300, draft: DraftOption = "correct-small"
) -> None:
    """Compare lookups, the draft model and both, greedy, on three or four sentences a prompt."""
    train, test = read_sentences(data)
    corruptor, rng = Corruptor(train), random.Random(0)
    prompts = [
        PREFIX
        + " ".join(corruptor.sentence(rng.choice(test), rng) for _ in range(rng.choice([3, 4])))
        for _ in range(count)
    ]
    plain = engine().generate_batch(prompts, batch_size=50, speculative=False)
    for num_draft in (5, 10):
        for name, given, with_lookup in (
            ("lookup", None, True),
            ("model", draft, False),
            ("both", draft, True),
        ):
            decoder = engine(given, num_draft=num_draft, lookup=with_lookup)
            outputs = decoder.generate_batch(prompts, batch_size=50)
            report(f"num_draft {num_draft:2} {name:8}", outputs, plain)


@app.command()
def drafts(
    data: DataOption,
    count: CountOption = 300,
    draft: Annotated[list[str] | None, typer.Option(help="A draft; repeatable.")] = None,
) -> None:
    """Compare drafts of the shipped target, greedy, on one to four held-out sentences a prompt."""
    prompts = [source for source, _ in held_out_examples(data, count, single=False)]
    plain = engine().generate_batch(prompts, batch_size=50, speculative=False)
    for num_draft in (5, 8):
        for name in draft or ["correct-small", "correct-draft"]:
            decoder = engine(name, num_draft=num_draft)
            outputs = decoder.generate_batch(prompts, batch_size=50)
            report(f"num_draft {num_draft} {name:14}", outputs, plain)


@app.command()
def lengths(
    data: DataOption, count: CountOption = 100, draft: DraftOption = "correct-small"
) -> None:
    """Compare tokens per second with num_draft "auto" and with every fixed length.

    A draft with random weights shows what happens where drafting cannot pay.
    """
    warmup, *prompts = [source for source, _ in held_out_examples(data, 4 * count + 1)]
    base = engine(draft)
    mx.random.seed(0)
    noise: Any
    if isinstance(base.draft, SharingDraft):
        noise = SharingDraft(base.draft.target, base.draft.own)
    else:
        assert isinstance(base.draft, T5)
        noise = T5(base.draft.config)
    mx.eval(noise.parameters())
    # At temperature 1 variants sample different outputs: telling them apart takes more prompts.
    for name, small, temperature, share in (
        ("greedy", base.draft, 0.0, count),
        ("temperature 1", base.draft, 1.0, 4 * count),
        ("random draft, greedy", noise, 0.0, count // 2),
        ("random draft, temperature 1", noise, 1.0, count // 2),
    ):
        variants: dict[str, SpeculativeDecoder] = {
            "0": SpeculativeDecoder(base.model, None, base.tokenizer)
        }
        for num_draft in (*range(1, 11), "auto"):
            variants[str(num_draft)] = SpeculativeDecoder(
                base.model, small, base.tokenizer, num_draft=num_draft
            )
        print(f"{name}, {share} prompts, tokens/s:")
        compare(variants, warmup, prompts[:share], temperature)


def compare(
    variants: dict[str, SpeculativeDecoder], warmup: str, prompts: list[str], temperature: float
) -> None:
    """Decode each prompt in every variant, in random order, and print tokens per second."""
    done: dict[str, list[Generation]] = {variant: [] for variant in variants}
    for decoder in variants.values():
        decoder.generate(warmup, temperature=temperature)
    for i, prompt in enumerate(prompts):
        for variant in random.Random(i).sample(list(variants), len(variants)):
            output = variants[variant].generate(prompt, temperature=temperature, seed=i)
            done[variant].append(output)
    speeds = {
        variant: sum(o.stats.emitted for o in outputs) / sum(o.stats.seconds for o in outputs)
        for variant, outputs in done.items()
    }
    best = max(speed for variant, speed in speeds.items() if variant != "auto")
    print("  " + ", ".join(f"{variant} {speed:.0f}" for variant, speed in speeds.items()))
    print(f"  auto is {speeds['auto'] / best:.3f} of the best fixed length", flush=True)


if __name__ == "__main__":
    app()
