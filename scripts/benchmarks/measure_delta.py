"""Measure what delta gains and what it costs: the shipped pair, held-out text, batch 1.

    python scripts/benchmarks/measure_delta.py --data deu.txt.xz --plot docs/images/delta.png

For each delta, at temperatures 0 and 1: drafted tokens accepted, tokens per pass of the target,
speed over plain decoding (interleaved on every prompt, so that ratios hold although the machine's
speed drifts), chrF against the references, and outputs that equal the target's own. Everything is
in float32. Needs the extra `train` and the data that weights/README.md names; --plot needs the
extra `plot`.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.cli.bench import pyplot

import mlx.core as mx
import sacrebleu
import typer
from texts import DataOption, held_out_examples
from tqdm import tqdm

DELTAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Row:
    """One setting; delta None is the target alone."""

    temperature: float
    delta: float | None
    acceptance: float
    tokens_per_round: float
    tokens_per_second: float
    speedup: float
    chrf: float
    same: float


def main(
    data: DataOption,
    count: Annotated[int, typer.Option(help="Held-out prompts of one to four sentences.")] = 300,
    num_draft: Annotated[int, typer.Option(help="Tokens to draft for each target pass.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each row.")
    ] = False,
) -> None:
    if plot:
        pyplot()  # a missing library is reported now
    examples = held_out_examples(data, count, single=False)
    rows = [
        row for temperature in TEMPERATURES for row in measure(examples, temperature, num_draft)
    ]
    for row in rows:
        print(json.dumps(asdict(row)) if as_json else as_line(row))
    if plot:
        draw(rows, plot)


def measure(examples: list[tuple[str, str]], temperature: float, num_draft: int) -> list[Row]:
    """Run all deltas and plain decoding on every prompt, in a random order for each."""
    first = SpeculativeDecoder.from_pretrained("correct-base", "correct-small", dtype=mx.float32)
    decoders = {
        delta: SpeculativeDecoder(
            first.model, first.draft, first.tokenizer, num_draft=num_draft, delta=delta
        )
        for delta in DELTAS
    }
    variants: list[float | None] = [None, *DELTAS]
    done: dict[float | None, list[Generation]] = {variant: [] for variant in variants}
    order = random.Random(0)
    for variant in variants:  # warm up
        run(decoders, variant, examples[0][0], temperature, 0)
    for seed, (source, _) in enumerate(tqdm(examples, desc=f"temperature {temperature:g}")):
        for variant in order.sample(variants, len(variants)):
            done[variant].append(run(decoders, variant, source, temperature, seed))
    references = [reference for _, reference in examples]
    plain = done[None]
    return [summary(temperature, variant, done[variant], plain, references) for variant in variants]


def run(
    decoders: dict[float, SpeculativeDecoder],
    delta: float | None,
    source: str,
    temperature: float,
    seed: int,
) -> Generation:
    decoder = decoders[delta or 0.0]
    return decoder.generate(
        source, temperature=temperature, seed=seed, speculative=delta is not None
    )


def summary(
    temperature: float,
    delta: float | None,
    outputs: list[Generation],
    plain: list[Generation],
    references: list[str],
) -> Row:
    stats = [output.stats for output in outputs]
    emitted, drafted = sum(s.emitted for s in stats), sum(s.drafted for s in stats)
    speeds = [
        sum(o.stats.emitted for o in each) / sum(o.stats.seconds for o in each)
        for each in (outputs, plain)
    ]
    return Row(
        temperature,
        delta,
        acceptance=sum(s.accepted for s in stats) / drafted if drafted else 0.0,
        tokens_per_round=emitted / sum(s.rounds for s in stats),
        tokens_per_second=speeds[0],
        speedup=speeds[0] / speeds[1],
        chrf=sacrebleu.corpus_chrf([output.text for output in outputs], [references]).score,
        same=sum(o.tokens == r.tokens for o, r in zip(outputs, plain, strict=True)) / len(outputs),
    )


def as_line(row: Row) -> str:
    name = "plain" if row.delta is None else f"delta {row.delta:g}"
    return (
        f"temperature {row.temperature:g}  {name:10}  accepted {row.acceptance:.2f}  "
        f"{row.tokens_per_round:.2f} tokens/pass  {row.tokens_per_second:5.0f} tokens/s  "
        f"{row.speedup:.2f}x  chrF {row.chrf:.1f}  the target's own {row.same:.1%}"
    )


def draw(rows: list[Row], path: Path) -> None:
    """Acceptance, speed and quality against delta."""
    plt: Any = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    panels = (
        ("acceptance", "drafted tokens accepted"),
        ("speedup", "speed over plain decoding"),
        ("chrf", "chrF against the references"),
    )
    for axis, (name, label) in zip(axes, panels, strict=True):
        for temperature, colour in zip(TEMPERATURES, ("C0", "C1"), strict=True):
            mine = [row for row in rows if row.temperature == temperature]
            fixed = [row for row in mine if row.delta is not None]
            axis.plot(
                [row.delta for row in fixed], [getattr(row, name) for row in fixed], "o-",
                color=colour, label=f"temperature {temperature:g}",
            )  # fmt: skip
            if name == "chrf":
                axis.axhline(
                    next(row.chrf for row in mine if row.delta is None), color=colour,
                    linestyle=":", linewidth=1,
                )  # fmt: skip
        axis.set(xlabel="delta", ylabel=label)
    axes[0].legend()
    axes[2].plot([], [], ":", color="0.4", label="the target alone")
    axes[2].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
