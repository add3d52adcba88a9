"""Measure drafting with the shipped pair on held-out text: exactness, rules, lookups, lengths.

    python scripts/measure_drafting.py likelihood --data deu.txt.xz
    python scripts/measure_drafting.py rules      --data deu.txt.xz

Everything is in float32. Needs the data that weights/README.md names.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import Generation, SpeculativeDecoder

import mlx.core as mx
import numpy as np
import typer
from corruption import held_out_examples

MODEL, DRAFT = "correct-base", "correct-small"
DataOption = Annotated[Path, typer.Option(help="deu.txt.xz: English, a tab, German, a line each.")]
CountOption = Annotated[int, typer.Option(help="Number of prompts.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def sources(data: Path, count: int) -> list[str]:
    """Damaged held-out sentences, one a prompt."""
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
    """Mean log-likelihood of sampled outputs under the target: speculative against regular.

    The arm with delta is not exact, and shows what the comparison can tell.
    """
    prompts = sources(data, count)
    for filters in ({}, {"top_k": 20, "top_p": 0.9}):
        print(f"temperature 1, {filters or 'no filter'}, {count} outputs each:")
        regular = score(engine(), prompts, speculative=False, **filters)
        print(f"  {'regular':12} {regular.mean():8.3f} nats per output")
        for name, options in (
            ("block", {"verify": "block"}),
            ("token", {"verify": "token"}),
            ("delta 0.2", {"delta": 0.2}),
        ):
            found = score(engine(num_draft=num_draft, **options), prompts, **filters)
            differences = found - regular
            error = differences.std(ddof=1) / len(differences) ** 0.5
            print(
                f"  {name:12} {found.mean():8.3f}, differs by {differences.mean():+.3f} = "
                f"{differences.mean() / error:+.1f} standard errors of {error:.3f}",
                flush=True,
            )


def score(decoder: SpeculativeDecoder, prompts: list[str], **options: Any) -> np.ndarray:
    """Log-likelihood in nats under the target at temperature 1 of one drawn output a prompt."""
    # Every arm draws with seeds of its own, so that differences have the error of two samples.
    seed = random.Random(repr((vars(decoder)["_delta"], options))).randrange(2**32)
    outputs = decoder.generate_batch(prompts, batch_size=50, temperature=1.0, seed=seed, **options)
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
        real = mx.arange(answer.shape[1]) < mx.array([len(a) for a in answers])[:, None]
        scores.append(np.array(mx.sum(mx.where(real, each, 0), axis=1)))
    return np.concatenate(scores)


def padded(rows: list[list[int]], value: int) -> mx.array:
    width = max(map(len, rows))
    return mx.array([row + [value] * (width - len(row)) for row in rows], dtype=mx.int32)


@app.command()
def rules(data: DataOption, count: CountOption = 2000) -> None:
    """Tokens per round at temperature 1: block verification against the token-wise rule."""
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


if __name__ == "__main__":
    app()
