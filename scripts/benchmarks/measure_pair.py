"""Measure the shipped pair on held-out text, in float32: drafts, lengths, delta, batches, bits.

    python scripts/benchmarks/measure_pair.py drafters   --data deu.txt.xz    # tokens per pass
    python scripts/benchmarks/measure_pair.py lengths    --data deu.txt.xz    # num_draft "auto"
    python scripts/benchmarks/measure_pair.py delta      --data deu.txt.xz --plot delta.png
    python scripts/benchmarks/measure_pair.py throughput --data deu.txt.xz    # by batch size
    python scripts/benchmarks/measure_pair.py memory     --data deu.txt.xz    # of 10,000 prompts
    python scripts/benchmarks/measure_pair.py bits       --data deu.txt.xz    # quantized targets

Speeds are interleaved: each prompt is decoded in all ways, in a new order each time, so that ratios
hold although the machine's speed drifts. Needs the data that weights/README.md names; `delta` and
`bits` need the extra `train`, --plot the extra `plot`.
"""

import os
import random
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from speculative_t5 import Generation, SpeculativeDecoder
from speculative_t5.checkpoints import convert, find_folder
from speculative_t5.cli.batch import peak_memory
from speculative_t5.measure import random_model, random_prompts
from speculative_t5.models import T5, SharingDraft

import mlx.core as mx
import typer
from compare_lengths import against_best
from texts import DataOption, DraftOption, engine, held_out_examples

DELTAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
SIZES = (1, 4, 16, 64)  # of batches
PLAIN = "plain"
TURNS = 9  # of comparing lengths, after the one in which the first things are learned
AUTOS = 3  # decoders with "auto", each of which learns for itself

CountOption = Annotated[int, typer.Option(help="Number of prompts.")]
NumDraftOption = Annotated[int, typer.Option(help="Tokens to draft for each target pass.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


def interleaved(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[str] | Sequence[list[int]],
    **options: Any,
) -> dict[str, list[Generation]]:
    """Decode each prompt by each decoder, in random order, after a prompt that warms all up."""
    done: dict[str, list[Generation]] = {name: [] for name in decoders}
    for decoder in decoders.values():
        decoder.generate(prompts[0], **options)
    for seed, prompt in enumerate(prompts):
        for name in random.Random(seed).sample(list(decoders), len(decoders)):
            done[name].append(decoders[name].generate(prompt, seed=seed, **options))
    return done


def tokens_per_pass(outputs: Sequence[Generation]) -> float:
    return sum(o.stats.emitted for o in outputs) / sum(o.stats.rounds for o in outputs)


def tokens_per_second(outputs: Sequence[Generation]) -> float:
    return sum(o.stats.emitted for o in outputs) / sum(o.stats.seconds for o in outputs)


def num_same(outputs: Sequence[Generation], plain: Sequence[Generation]) -> int:
    return sum(o.tokens == p.tokens for o, p in zip(outputs, plain, strict=True))


def chrf(outputs: Sequence[Generation], references: Sequence[str]) -> float:
    import sacrebleu

    return sacrebleu.corpus_chrf([output.text for output in outputs], [references]).score


@app.command()
def drafters(
    data: DataOption,
    count: CountOption = 300,
    draft: Annotated[list[str] | None, typer.Option(help="A draft; repeatable.")] = None,
) -> None:
    """Compare tokens per pass: each draft alone and with a lookup, a lookup, and all rules."""
    prompts = [source for source, _ in held_out_examples(data, count, single=False)]
    plain = engine().generate_batch(prompts, batch_size=50, speculative=False)
    names = draft or ["correct-small", "correct-draft"]
    ways: dict[str, tuple[str | None, dict[str, Any]]] = {"lookup": (None, {"lookup": True})}
    for name in names:
        ways |= {name: (name, {}), f"{name}, lookup": (name, {"lookup": True})}
    for num_draft in (5, 8):
        for way, (name, options) in ways.items():
            outputs = engine(name, num_draft=num_draft, **options).generate_batch(
                prompts, batch_size=50
            )
            print(
                f"num_draft {num_draft} {way:24} {tokens_per_pass(outputs):.2f} tokens a pass, "
                f"{num_same(outputs, plain)} of {count} outputs equal plain ones",
                flush=True,
            )
        for rule in ("coupled", "token", "block"):
            outputs = engine(names[0], num_draft=num_draft, verify=rule).generate_batch(
                prompts, batch_size=50, temperature=1.0
            )
            print(
                f"num_draft {num_draft} {names[0]}, temperature 1, rule {rule}: "
                f"{tokens_per_pass(outputs):.3f} tokens a pass",
                flush=True,
            )


@app.command()
def lengths(
    data: DataOption, count: CountOption = 100, draft: DraftOption = "correct-small"
) -> None:
    """Compare tokens per second with num_draft "auto" and with every fixed length.

    A draft with random weights shows what happens where drafting cannot pay. The speed of "auto" is
    the mean of a few decoders, as what they settle on differs.
    """
    cache = tempfile.TemporaryDirectory()  # earlier runs have learned nothing for this one
    os.environ["XDG_CACHE_HOME"] = cache.name
    prompts = [source for source, _ in held_out_examples(data, count)]
    base = engine(draft)
    mx.random.seed(0)
    own: Any = base.draft
    is_sharing = isinstance(own, SharingDraft)
    noise = SharingDraft(own.target, own.own) if is_sharing else T5(own.config)
    mx.eval(noise.parameters())
    unlike = random_model(
        "t5-efficient-tiny", embeddings=0.02
    )  # whose outputs have nothing of their sources
    unlike_options = {"max_tokens": 64, "no_repeat_ngram_size": 2}  # else they repeat themselves
    unlike_prompts = random_prompts(unlike, 40, count // 6)
    pair, of_noise = (base.model, base.draft, base.tokenizer), (base.model, noise, base.tokenizer)
    lookup, seldom = (base.model, "lookup", base.tokenizer), (unlike, "lookup", None)
    for name, models, temperature, given in (
        ("greedy", pair, 0.0, prompts[:count]),
        ("temperature 1", pair, 1.0, prompts[:count]),
        ("random draft, greedy", of_noise, 0.0, prompts[: count // 2]),
        ("random draft, temperature 1", of_noise, 1.0, prompts[: count // 2]),
        ("lookup, greedy", lookup, 0.0, prompts[: count // 2]),
        ("lookup that finds nothing, greedy", seldom, 0.0, unlike_prompts),
        ("lookup that finds nothing, temperature 1", seldom, 1.0, unlike_prompts),
    ):
        model, _, tokenizer = models
        options = unlike_options if model is unlike else {}
        decoders = {"0": SpeculativeDecoder(model, None, tokenizer)}
        for num_draft in (*range(1, 9), 10):
            decoders[f"{num_draft}"] = SpeculativeDecoder(*models, num_draft=num_draft)
        autos = [f"auto {i}" for i in range(AUTOS)]
        decoders |= {name: SpeculativeDecoder(*models, num_draft="auto") for name in autos}
        speeds: list[dict[str, float]] = []
        for _ in range(1 + TURNS):
            done = interleaved(decoders, given, temperature=temperature, **options)
            speed = {name: tokens_per_second(outputs) for name, outputs in done.items()}
            speed["auto"] = fmean(speed.pop(name) for name in autos)
            speeds.append(speed)
        first, *later = speeds
        medians = {name: median(turn[name] for turn in later) for name in first}
        for turn, found in (("nothing learned yet", first), ("later, medians", medians)):
            print(f"{name}, {len(given)} prompts, {turn}, tokens/s:")
            print("  " + ", ".join(f"{length} {speed:.0f}" for length, speed in found.items()))
        print(f"  auto is {first['auto'] / max(first.values()):.3f} of the best at first; later")
        for other, ratios in auto_against(later).items():
            span = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"  {median(ratios):.3f} of {other} ({span})", flush=True)


def auto_against(turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the speed of "auto" in each turn, by that of the best fixed length and of plain."""
    plain = [turn["auto"] / turn["0"] for turn in turns]
    return {"the best fixed length": against_best(turns), "plain decoding": plain}


@app.command()
def delta(
    data: DataOption,
    count: CountOption = 300,
    num_draft: NumDraftOption = 5,
    draft: DraftOption = "correct-small",
    plot: Annotated[Path | None, typer.Option(help="Draw to this file.")] = None,
) -> None:
    """Measure what delta gains and what it costs: acceptance, speed, chrF, equal outputs."""
    examples = held_out_examples(data, count, single=False)
    sources, references = zip(*examples, strict=True)
    first = engine(draft)
    decoders = {PLAIN: SpeculativeDecoder(first.model, None, first.tokenizer)}
    for value in DELTAS:
        decoders[f"{value:g}"] = SpeculativeDecoder(
            first.model, first.draft, first.tokenizer, num_draft=num_draft, delta=value
        )
    rows: dict[float, dict[str, tuple[float, float, float]]] = {}
    for temperature in (0.0, 1.0):
        done, rows[temperature] = interleaved(decoders, sources, temperature=temperature), {}
        for name, outputs in done.items():
            drafted = sum(o.stats.drafted for o in outputs)
            accepted = sum(o.stats.accepted for o in outputs) / max(drafted, 1)
            speedup = tokens_per_second(outputs) / tokens_per_second(done[PLAIN])
            rows[temperature][name] = accepted, speedup, chrf(outputs, references)
            print(
                f"temperature {temperature:g}  delta {name:5}  accepted {accepted:.2f}  "
                f"{tokens_per_pass(outputs):.2f} tokens/pass  "
                f"{tokens_per_second(outputs):5.0f} tokens/s  {speedup:.2f}x  "
                f"chrF {rows[temperature][name][2]:.1f}  "
                f"the target's own {num_same(outputs, done[PLAIN]) / count:.1%}"
            )
    if plot:
        draw(rows, plot)


def draw(rows: dict[float, dict[str, tuple[float, float, float]]], path: Path) -> None:
    """Draw acceptance, speed and quality against delta."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    labels = ("drafted tokens accepted", "speed over plain decoding", "chrF against the references")
    for i, (axis, label) in enumerate(zip(axes, labels, strict=True)):
        for colour, (temperature, found) in zip(("C0", "C1"), rows.items(), strict=True):
            values = [found[f"{delta:g}"][i] for delta in DELTAS]
            axis.plot(DELTAS, values, "o-", color=colour, label=f"temperature {temperature:g}")
            if i == 2:
                axis.axhline(found[PLAIN][i], color=colour, linestyle=":", linewidth=1)
        axis.set(xlabel="delta", ylabel=label)
    axes[0].legend()
    axes[2].plot([], [], ":", color="0.4", label="plain decoding")
    axes[2].legend()
    figure.savefig(path, dpi=150)


@app.command()
def throughput(
    data: DataOption,
    count: CountOption = 128,
    turns: Annotated[int, typer.Option(help="How often everything is measured.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Measure tokens per second by batch size, with plain and with speculative decoding."""
    prompts = [source for source, _ in held_out_examples(data, count, single=False)]
    decoder = engine(num_draft=5)
    ways = [(speculative, size) for speculative in (False, True) for size in SIZES]
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    order = random.Random(0)
    for turn in range(turns + 1):
        for speculative, size in order.sample(ways, len(ways)):
            began = time.perf_counter()
            outputs = decoder.generate_batch(
                prompts[: 2 * size] if turn == 0 else prompts,
                batch_size=size,
                speculative=speculative,
                temperature=temperature,
            )
            if turn:  # the first turn warms up, and does not count
                seconds[speculative, size] += time.perf_counter() - began
                tokens[speculative, size] += sum(output.stats.emitted for output in outputs)
    print(f"{count} prompts, {turns} turns, temperature {temperature:g}, num_draft 5")
    for speculative in (False, True):
        speed = {n: tokens[speculative, n] / seconds[speculative, n] for n in SIZES}
        row = "  ".join(f"{n}: {s:5.0f} ({s / speed[1]:.2f})" for n, s in speed.items())
        name = "speculative" if speculative else PLAIN
        print(f"{name:12} tokens/s by batch size (over batch size 1): {row}")


@app.command()
def memory(
    data: DataOption,
    count: CountOption = 10_000,
    distinct: Annotated[int, typer.Option(help="Number of different prompts, repeated.")] = 100,
) -> None:
    """Print the memory used in the course of one run over many prompts."""
    few = [source for source, _ in held_out_examples(data, distinct, single=False)]
    prompts = (few[i % len(few)] for i in range(count))
    print(f"{'prompts':>8} {'resident, MB':>14} {'peak of it':>12} {'MLX, MB':>10} {'peak':>8}")
    for done, _ in enumerate(engine().iter_batch(enumerate(prompts), batch_size=16), 1):
        if done in (1, 100, 200, 500) or done % 1000 == 0:
            figures = (resident(), peak_memory(), mx.get_active_memory(), mx.get_peak_memory())
            now, peak, active, most = (figure / 1e6 for figure in figures)
            print(f"{done:8,} {now:14.1f} {peak:12.1f} {active:10.1f} {most:8.1f}", flush=True)


def resident() -> float:
    """Return the bytes resident now, or NaN where the system does not say (outside Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except FileNotFoundError:
        return float("nan")
    return pages * resource.getpagesize()


@app.command()
def bits(data: DataOption, count: CountOption = 200) -> None:
    """Compare targets of 8 and 4 bits with the whole one: size, equal outputs, chrF, speed."""
    sources, references = zip(*held_out_examples(data, count), strict=True)
    folder, plain = find_folder("correct-base"), None
    with tempfile.TemporaryDirectory() as work:
        for size in (None, 8, 4):
            stored = convert(str(folder), Path(work, f"{size}"), quantize=size) if size else folder
            decoder = SpeculativeDecoder.from_pretrained(stored, None, dtype=mx.float32)
            began = time.perf_counter()
            outputs = decoder.generate_batch(sources, batch_size=32)
            seconds = time.perf_counter() - began
            plain = plain or outputs
            print(
                f"{f'{size} bits' if size else 'whole'}: "
                f"{(stored / 'weights.npz').stat().st_size / 1e6:.1f} MB, "
                f"{num_same(outputs, plain) / count:.1%} of outputs the same, "
                f"chrF {chrf(outputs, references):.2f}, "
                f"{sum(output.stats.emitted for output in outputs) / seconds:.0f} tokens/s"
            )


if __name__ == "__main__":
    app()
