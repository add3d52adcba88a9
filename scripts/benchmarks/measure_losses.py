"""Compare the losses that a draft can be trained with, at the same processor time.

    python scripts/benchmarks/measure_losses.py --data prompts --seconds 180

The target labels the prompts once. Then every variant trains a draft of its own; the one that has
had the least processor time takes the next step, so that all see the same machine. `--variant` is
a loss, or a loss with a learning rate and tokens of a step, such as ce:0.002:4096.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from speculative_t5 import load
from speculative_t5.distill import DistillOptions, Label, label, new_draft, read_data
from speculative_t5.distill.training import Training, agreement
from speculative_t5.models import T5
from speculative_t5.tokenizers import PromptEncoder

import typer

CHECKS = 3  # of each variant
NEVER_ENDING = 10**9  # steps: the learning rate goes by the time instead


@dataclass
class Variant:
    """One way to train: its state, and what it has cost."""

    name: str
    training: Training
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    checks: int = 0

    def step(self, limit: float) -> None:
        """Take a step, as part of a training of `limit` seconds."""
        began = time.process_time()
        self.losses.append(self.training.step(self.seconds / limit))
        self.seconds += time.process_time() - began


def main(
    data: Annotated[Path, typer.Option(help="Prompts, as for `distill --data`.")],
    model: Annotated[str, typer.Option(help="The target.")] = "correct-base",
    prompts: Annotated[int, typer.Option(help="Prompts to label and train on.")] = 8192,
    seconds: Annotated[float, typer.Option(help="Processor time of each variant.")] = 180.0,
    variant: Annotated[
        list[str] | None, typer.Option(help="A loss, or LOSS:RATE:TOKENS; repeatable.")
    ] = None,
) -> None:
    """Print each variant's agreement and tokens per pass, three times on the way."""
    target, tokenizer = load(model)
    if not isinstance(target, T5):
        raise typer.BadParameter(f"{model} is not a T5")
    found = read_data(data, PromptEncoder(target, tokenizer), tokenizer)
    with TemporaryDirectory() as folder:
        held_out = [replace(example, completion=None) for example in found.valid[:200]]
        valid = label(target, held_out, Path(folder, "valid"), max_tokens=128)
        train = label(target, found.train[:prompts], Path(folder, "train"), max_tokens=128)
    names = variant or ["ce", "kl", "ce+kl", "tv", "lk"]
    variants = [Variant(name, begin(target, train, name)) for name in names]
    print(f"{'':20} {'steps':>6} {'seconds':>8} {'loss':>7} {'right':>7} {'K = 5':>6} {'K = 8':>6}")
    while (least := min(variants, key=lambda each: each.seconds)).seconds < seconds:
        least.step(seconds)
        if least.seconds >= seconds * (least.checks + 1) / CHECKS:
            report(least, valid)


def begin(target: T5, labels: Sequence[Label], name: str) -> Training:
    """Return a new training of the variant with that name."""
    loss, rate, tokens = (*name.split(":"), "", "")[:3]
    options = DistillOptions(
        loss=loss,  # type: ignore[arg-type]  # which checks it
        learning_rate=float(rate or DistillOptions.learning_rate),
        batch_tokens=int(tokens or DistillOptions.batch_tokens),
    )
    return Training(new_draft(target, options), labels, options, NEVER_ENDING)


def report(variant: Variant, valid: Sequence[Label]) -> None:
    """Print a line about a variant, and begin its next stretch."""
    training, recent = variant.training, variant.losses
    found = agreement(training.draft, valid, 4096)
    print(
        f"{variant.name:20} {training.step_number:6} {variant.seconds:8.0f} "
        f"{sum(recent) / len(recent):7.3f} {100 * found.rate:6.1f}% "
        f"{found.tokens_per_pass(5):6.2f} {found.tokens_per_pass(8):6.2f}",
        flush=True,
    )
    variant.losses, variant.checks = [], variant.checks + 1


if __name__ == "__main__":
    typer.run(main)
