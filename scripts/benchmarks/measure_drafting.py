"""Measure drafting with the shipped pair on held-out text: exactness, rules, lookups, lengths.

    python scripts/benchmarks/measure_drafting.py likelihood --data deu.txt.xz
    python scripts/benchmarks/measure_drafting.py rules      --data deu.txt.xz
    python scripts/benchmarks/measure_drafting.py lookup     --data deu.txt.xz
    python scripts/benchmarks/measure_drafting.py lengths    --data deu.txt.xz

Everything is in float32. Needs the data that weights/README.md names.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.models.t5.model import T5

import mlx.core as mx
import numpy as np
import typer
from texts import PREFIX, Corruptor, held_out_examples, read_sentences

MODEL, DRAFT = "correct-base", "correct-small"
DataOption = Annotated[Path, typer.Option(help="deu.txt.xz: English, a tab, German, a line each.")]
CountOption = Annotated[int, typer.Option(help="Number of prompts.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def sources(data: Path, count: int) -> list[str]:
    """Return damaged held-out sentences, one for each prompt."""
    return [source for source, _ in held_out_examples(data, count)]


def engine(draft: Any = DRAFT, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(MODEL, draft, dtype=mx.float32, **options)


def tokens_per_round(outputs: list[Generation]) -> float:
    return sum(o.stats.emitted for o in outputs) / sum(o.stats.rounds for o in outputs)


@app.command()
def likelihood(
    data: DataOption,
    count: CountOption = 2000,
    num_draft: Annotated[int, typer.Option(help="Tokens to draft for each target pass.")] = 5,
) -> None:
    """Compare the log-likelihood of sampled outputs under the target: speculative and plain.

    The variant with delta accepts every draft: it is not exact, and the comparison must show it.
    """
    prompts = sources(data, count)
    for filters in ({}, {"top_k": 20, "top_p": 0.9}):
        print(f"temperature 1, {filters or 'no filter'}, {count} outputs each:")
        plain = score(engine(), prompts, seed=0, speculative=False, **filters)
        print(f"  {'plain':12} {plain.mean():8.3f} nats per output")
        variants = {
            "block": {"verify": "block"},
            "token": {"verify": "token"},
            "delta 1": {"delta": 1.0},
        }
        for seed, (name, options) in enumerate(variants.items(), 1):
            # Each variant has seeds of its own: the samples are then independent.
            decoder = engine(num_draft=num_draft, **options)
            found = score(decoder, prompts, seed=seed * 10**6, **filters)
            differences = found - plain
            error = differences.std(ddof=1) / len(differences) ** 0.5
            print(
                f"  {name:12} {found.mean():8.3f}, differs by {differences.mean():+.3f} = "
                f"{differences.mean() / error:+.1f} standard errors of {error:.3f}",
                flush=True,
            )


def score(decoder: SpeculativeDecoder, prompts: list[str], **options: Any) -> np.ndarray:
    """Return the log-likelihood in nats of one sampled output for each prompt, at temperature 1."""
    outputs = decoder.generate_batch(prompts, batch_size=50, temperature=1.0, **options)
    assert decoder.tokenizer is not None
    pad, eos = 0, decoder.model.eos_token_id
    scores = []
    for first in range(0, len(prompts), 50):
        batch = outputs[first : first + 50]
        source = padded([decoder.tokenizer.encode(p) for p in prompts[first : first + 50]], pad)
        answers = [o.tokens + [eos] * (o.finish_reason == "eos") for o in batch]
        answer = padded(answers, pad)
        start = mx.zeros((len(batch), 1), mx.int32)
        logits = decoder.model(source, mx.concatenate([start, answer[:, :-1]], axis=1))
        log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        each = mx.take_along_axis(log_probs, answer[..., None], axis=-1)[..., 0]
        mask = mx.arange(answer.shape[1]) < mx.array([len(a) for a in answers])[:, None]
        scores.append(np.array(mx.sum(mx.where(mask, each, 0), axis=1)))
    return np.concatenate(scores)


def padded(rows: list[list[int]], value: int) -> mx.array:
    width = max(map(len, rows))
    return mx.array([row + [value] * (width - len(row)) for row in rows], dtype=mx.int32)


@app.command()
def rules(data: DataOption, count: CountOption = 2000) -> None:
    """Compare tokens per round at temperature 1: block verification and the token-wise rule."""
    prompts = sources(data, count)
    for num_draft in (4, 8):
        gains = {}
        for verify in ("token", "block"):
            outputs = engine(num_draft=num_draft, verify=verify).generate_batch(
                prompts, batch_size=50, temperature=1.0
            )
            gains[verify] = tokens_per_round(outputs)
        print(
            f"num_draft {num_draft}: token {gains['token']:.3f}, block {gains['block']:.3f} "
            f"tokens per round ({gains['block'] / gains['token'] - 1:+.1%})",
            flush=True,
        )


def paragraphs(data: Path, count: int, seed: int = 0) -> list[str]:
    """Return prompts of three or four damaged held-out sentences."""
    train, test = read_sentences(data)
    corruptor, rng = Corruptor(train), random.Random(seed)
    return [
        PREFIX
        + " ".join(corruptor.sentence(rng.choice(test), rng) for _ in range(rng.choice([3, 4])))
        for _ in range(count)
    ]


@app.command()
def lookup(data: DataOption, count: CountOption = 300) -> None:
    """Compare lookups, the draft model and both, greedy, on three or four sentences a prompt."""
    prompts = paragraphs(data, count)
    plain = engine().generate_batch(prompts, batch_size=50, speculative=False)
    for num_draft in (3, 5, 8, 10):
        for name, draft, with_lookup in (
            ("lookup", None, True),
            ("model", DRAFT, False),
            ("both", DRAFT, True),
        ):
            decoder = engine(draft, num_draft=num_draft, lookup=with_lookup)
            outputs = decoder.generate_batch(prompts, batch_size=50)
            same = sum(o.tokens == r.tokens for o, r in zip(outputs, plain, strict=True))
            rate = sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs)
            print(
                f"num_draft {num_draft:2} {name:8} {tokens_per_round(outputs):.2f} tokens per "
                f"round, acceptance {rate:.2f}, {same} of {count} outputs equal plain ones",
                flush=True,
            )


@app.command()
def lengths(
    data: DataOption,
    count: CountOption = 100,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Also look up after the model's tokens.")
    ] = False,
) -> None:
    """Compare tokens per second with num_draft "auto" and with every fixed length.

    A draft with random weights shows what happens where drafting cannot pay.
    """
    warmup, *prompts = sources(data, 4 * count + 1)
    base = engine()
    assert isinstance(base.draft, T5)
    mx.random.seed(0)
    noise = T5(base.draft.config)
    mx.eval(noise.parameters())
    # At temperature 1 variants sample different outputs: telling them apart takes more prompts.
    for name, draft, temperature, share in (
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
                base.model, draft, base.tokenizer, num_draft=num_draft, lookup=lookup
            )
        compare(f"{name}, {share} prompts", variants, warmup, prompts[:share], temperature)


def compare(
    name: str,
    variants: dict[str, SpeculativeDecoder],
    warmup: str,
    prompts: list[str],
    temperature: float,
) -> None:
    """Decode each prompt in every variant, in random order, and print tokens per second."""
    done: dict[str, list[Generation]] = {variant: [] for variant in variants}
    for decoder in variants.values():
        decoder.generate(warmup, temperature=temperature)
    for i, prompt in enumerate(prompts):
        order = list(variants)
        random.Random(i).shuffle(order)
        for variant in order:
            done[variant].append(
                variants[variant].generate(prompt, temperature=temperature, seed=i)
            )
    speeds = {
        variant: sum(o.stats.emitted for o in outputs) / sum(o.stats.seconds for o in outputs)
        for variant, outputs in done.items()
    }
    best = max(
        (variant for variant in variants if variant != "auto"), key=lambda variant: speeds[variant]
    )
    print(
        f"{name}, tokens/s: "
        + ", ".join(f"{variant} {speed:.0f}" for variant, speed in speeds.items())
    )
    chosen = [n for o in done["auto"] for n in o.stats.num_draft]
    print(
        f"  auto is {speeds['auto'] / speeds[best]:.3f} of the best fixed length, {best}, and "
        f"{speeds['auto'] / speeds['0']:.2f} of plain decoding; it drafted "
        f"{sum(chosen) / len(chosen):.1f} tokens a round",
        flush=True,
    )


if __name__ == "__main__":
    app()
