"""Measure what delta gains and what it costs: the shipped pair, held-out text, batch 1.

    python scripts/benchmarks/measure_delta.py --data deu.txt.xz --plot docs/images/delta.png

For each delta, at temperatures 0 and 1: drafted tokens accepted, tokens per pass of the target,
speed over plain decoding (interleaved on every prompt, so that ratios hold although the machine's
speed drifts), chrF against the references, and outputs that equal the target's own. Everything is
in float32. Needs the extra `train` and the data that weights/README.md names; --plot needs the
extra `plot`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.bench import pyplot

import sacrebleu
import typer
from texts import DataOption, DraftOption, engine, held_out_examples
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
    draft: DraftOption = "correct-small",
    plot: Annotated[Path | None, typer.Option(help="Draw to this file.")] = None,
) -> None:
    if plot:
        pyplot()  # a missing library is reported now
    examples = held_out_examples(data, count, single=False)
    rows = [
        row
        for temperature in TEMPERATURES
        for row in measure(examples, temperature, num_draft, draft)
    ]
    print("\n".join(map(as_line, rows)))
    if plot:
        draw(rows, plot)


def measure(
    examples: list[tuple[str, str]], temperature: float, num_draft: int, draft: str
) -> list[Row]:
    """Run all deltas and plain decoding on every prompt, in a random order for each."""
    first = engine(draft)
    decoders: dict[float | None, SpeculativeDecoder] = {
        None: SpeculativeDecoder(first.model, None, first.tokenizer)
    }
    for delta in DELTAS:
        decoders[delta] = SpeculativeDecoder(
            first.model, first.draft, first.tokenizer, num_draft=num_draft, delta=delta
        )
    done: dict[float | None, list[Generation]] = {delta: [] for delta in decoders}
    order = random.Random(0)
    for decoder in decoders.values():  # warm up
        decoder.generate(examples[0][0], temperature=temperature)
    for seed, (source, _) in enumerate(tqdm(examples, desc=f"temperature {temperature:g}")):
        for delta in order.sample(list(decoders), len(decoders)):
            output = decoders[delta].generate(source, temperature=temperature, seed=seed)
            done[delta].append(output)
    references = [reference for _, reference in examples]
    return [summary(temperature, delta, found, done[None], references)
            for delta, found in done.items()]  # fmt: skip


def summary(
    temperature: float,
    delta: float | None,
    outputs: list[Generation],
    plain: list[Generation],
    references: list[str],
) -> Row:
    stats = [output.stats for output in outputs]
    emitted, drafted = sum(s.emitted for s in stats), sum(s.drafted for s in stats)
    speed, plain_speed = (
        sum(o.stats.emitted for o in each) / sum(o.stats.seconds for o in each)
        for each in (outputs, plain)
    )
    return Row(
        temperature,
        delta,
        acceptance=sum(s.accepted for s in stats) / drafted if drafted else 0.0,
        tokens_per_round=emitted / sum(s.rounds for s in stats),
        tokens_per_second=speed,
        speedup=speed / plain_speed,
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
            alone, *fixed = [row for row in rows if row.temperature == temperature]
            axis.plot(
                DELTAS, [getattr(row, name) for row in fixed], "o-", color=colour,
                label=f"temperature {temperature:g}",
            )  # fmt: skip
            if name == "chrf":
                axis.axhline(alone.chrf, color=colour, linestyle=":", linewidth=1)
        axis.set(xlabel="delta", ylabel=label)
    axes[0].legend()
    axes[2].plot([], [], ":", color="0.4", label="the target alone")
    axes[2].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
