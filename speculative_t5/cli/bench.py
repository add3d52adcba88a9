"""The command line's `bench`: how fast decoding is here, and how near it comes to its bounds."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import mlx.core as mx
import typer
from tqdm import tqdm

from .. import __version__, device
from ..bench import (
    GREEDY,
    Bench,
    Report,
    Variant,
    check_shapes,
    context_of,
    first_token_seconds,
    random_model,
    random_prompts,
    synthetic_plan,
    variants_of,
)
from ..checkpoints import as_dtype
from ..decoding import Plan
from ..errors import not_utf8
from ..generation import NumDraft, SpeculativeDecoder
from .options import (
    DEFAULT_MODEL,
    DraftModel,
    DraftVocab,
    Dtype,
    MaxSource,
    Model,
    Prefix,
    Truncate,
    draft_of,
)
from .terminal import Failure, columns, give_tips

PROMPTS = [
    "correct: my sister have never been too paris. She wants to to go their next summer, but its "
    "very expensive",
    "correct: We was waiting for the the bus when it start to rain.",
    "correct: He dont know were his keys are. He thinks he lost them on the trian",
    "correct: An old man and his dog was walking threw the park. They walks their every day.",
    "correct: I has lived in this city for ten years, but I still get lost sometmies.",
    "correct: She asked me if i wanted a apple. I told her that i was'nt hungry",
]
STARTS = 5


def bench(
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file, a prompt a line.", show_default="six sentences to correct"),
    ] = None,
    prefix: Prefix = None,
    max_source_length: MaxSource = None,
    truncate: Truncate = False,
    dtype: Dtype = None,
    num_draft: Annotated[
        str, typer.Option(help="Tokens to draft: numbers and ranges, as 1-8 or 2,4,8.")
    ] = "1-8",
    draft_vocab: DraftVocab = None,
    max_tokens: Annotated[
        int, typer.Option(help="Upper bound on tokens of each output, EOS included.")
    ] = 128,
    turns: Annotated[
        int, typer.Option(help="How often everything is measured; medians are reported.")
    ] = 5,
    random_weights: Annotated[
        str | None,
        typer.Option(
            "--random",
            metavar="TARGET:DRAFT",
            help="Use random weights of these shapes instead, as t5-base:t5-small or "
            "opt-350m:opt-125m, with drafts that are accepted as often as --acceptance says.",
            show_default=False,
        ),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(help="With --random: the chance that a drafted token is accepted.")
    ] = 0.8,
    source: Annotated[int, typer.Option(help="With --random: tokens of a prompt.")] = 256,
    count: Annotated[int, typer.Option(help="With --random: prompts.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw speed-up, forwards and theory by K to this file (needs matplotlib).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure greedy decoding, one prompt at a time: regular, speculative, lookup, auto.

    Everything runs interleaved in one process, so that ratios hold even if the machine's speed
    drifts.
    """  # fmt: skip
    lengths = _lengths(num_draft)
    for option, value in (("--turns", turns), ("--max-tokens", max_tokens), ("--count", count),
                          ("--source", source)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"--acceptance must be from 0 to 1, got {acceptance}")
    if plot:  # checked before minutes of measuring
        pyplot()
        if not plot.absolute().parent.is_dir():
            raise ValueError(
                f"--plot is to go to {plot.absolute().parent}, which is no folder: "
                "create it, or give another path"
            )
    draft = draft_of(model, draft_model)
    if random_weights:
        model, draft, *_ = (*random_weights.split(":"), None)
        setup = _random(
            random_weights, dtype, source, count, acceptance, lengths, max_tokens, draft_vocab
        )
    else:
        first = SpeculativeDecoder.from_pretrained(
            model, draft, dtype=dtype, prefix=prefix, max_source_length=max_source_length,
            truncate=truncate,
        )  # fmt: skip
        setup = _pair(first, prompts, lengths, max_tokens, draft_vocab)
    with tqdm(total=turns + 2, desc="measuring", unit="turn", disable=None) as bar:
        reports = setup.bench.run(turns, lambda done, _: bar.update(done - bar.n))
    same = {"--draft-model": draft_model, "--dtype": dtype, "--prefix": prefix}
    starts = [] if random_weights else _starts(model, same)
    result: dict[str, Any] = {
        "machine": _machine(),
        "target": model,
        "draft": draft,
        "prompts": setup.count,
        "max_tokens": max_tokens,
        "draft_vocab": draft_vocab,
        "turns": turns,
        "rows": [dataclasses.asdict(report) for report in reports],
        "first_token_seconds": starts,
    }
    if random_weights:
        result |= {"acceptance": acceptance, "source": source}
    print(json.dumps(result) if as_json else "\n".join(_table(result, reports)))
    if plot:
        draw(reports, plot)
    give_tips()


@dataclasses.dataclass(frozen=True)
class _Setup:
    bench: Bench
    count: int


def _pair(
    first: SpeculativeDecoder,
    prompts: Path | None,
    lengths: Sequence[int],
    max_tokens: int,
    draft_vocab: int | None,
) -> _Setup:
    target, small, tokenizer = first.model, first.draft, first.tokenizer
    lines = _read_prompts(prompts) if prompts else PROMPTS
    sources = [first.fit(line, max_tokens).ids for line in lines if line.strip()]
    if not sources:
        raise ValueError(f"{prompts} has no prompts: write one on each of its lines")

    def drafting(num_draft: NumDraft) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            target, small, tokenizer, num_draft=num_draft, draft_vocab=draft_vocab
        )

    decoders: dict[str, SpeculativeDecoder] = {}
    if small:
        for k in lengths:
            decoders[f"K = {k}"] = drafting(k)
        decoders["auto"] = drafting("auto")
    decoders["lookup"] = SpeculativeDecoder(target, "lookup", tokenizer, num_draft=max(lengths))
    variants = variants_of(decoders, max_tokens, drafts=small is not None)
    return _Setup(Bench(target, small, variants, sources, draft_vocab), len(sources))


def _read_prompts(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is {not_utf8(error)}") from error


def _random(
    shapes: str,
    dtype: str | None,
    source: int,
    count: int,
    acceptance: float,
    lengths: Sequence[int],
    max_tokens: int,
    draft_vocab: int | None,
) -> _Setup:
    names = shapes.split(":")
    if len(names) != 2:
        raise ValueError(f"--random must be TARGET:DRAFT, as t5-base:t5-small, got {shapes!r}")
    check_shapes(*names)
    for name in names:
        limit = context_of(name)
        if limit is not None and source + max_tokens > limit:
            raise ValueError(
                f"--source and --max-tokens must be at most {limit} together, which {name} reads, "
                f"got {source} and {max_tokens}"
            )
    kind = as_dtype(dtype) or device.default_dtype()
    target, small = (random_model(name, dtype=kind) for name in names)
    prompts = random_prompts(target, source, count)
    decoder = SpeculativeDecoder(target, max_source_length=max(source, 2))

    def regular(prompt: list[int]) -> Plan:
        return decoder.plan([], GREEDY, max_tokens, speculative=False)

    outputs = {
        tuple(prompt): decoder.generate(prompt, max_tokens=max_tokens).tokens for prompt in prompts
    }

    def variant(k: int) -> Variant:
        drafting = SpeculativeDecoder(target, small, num_draft=k, draft_vocab=draft_vocab)
        return Variant(
            f"K = {k}",
            lambda prompt: synthetic_plan(drafting, outputs, acceptance, max_tokens),
            True,
        )

    variants = [Variant("regular", regular), *map(variant, lengths)]
    return _Setup(Bench(target, small, variants, prompts, draft_vocab), count)


def _starts(model: str, options: Mapping[str, str | None]) -> list[float]:
    """Seconds to the first output of new processes, once files are in the page cache.

    Args:
        model: The target.
        options: Of the command line; those that are None are left out.
    """
    arguments = ["--model", model, "--prompt", PROMPTS[1]]
    for name, value in options.items():
        arguments += [] if value is None else [name, value]
    try:
        return [first_token_seconds(arguments) for _ in range(STARTS + 1)][1:]
    except RuntimeError as error:
        raise Failure(f"{error}: run it by itself to see why") from error


def _machine() -> dict[str, Any]:
    threads = {n: v for n, v in sorted(os.environ.items()) if n.endswith("NUM_THREADS")}
    return {
        "device": str(mx.default_device()),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "versions": {"speculative_t5": __version__, "mlx": version("mlx")},
    }  # fmt: skip


def _table(result: dict[str, Any], reports: Sequence[Report]) -> list[str]:
    draft = f", {result['draft']} drafts" if result["draft"] else ""
    names = ("", "tokens/s", "ms/round", "draft", "verify", "other", "waits", "accepted",
               "forwards", "speed-up", "theory", "efficiency", "same output")  # fmt: skip
    rows = [
        (
            r.name, f"{r.tokens_per_second:.0f}", f"{r.round_ms:.2f}", f"{r.draft_ms:.2f}",
            f"{r.verify_ms:.2f}", f"{r.other_ms:.2f}", f"{r.waits:.2f}",
            f"{r.acceptance:.2f}" if r.acceptance else "-", f"{r.forwards:.2f}",
            f"{r.speedup:.2f}", f"{r.theory:.2f}", f"{r.efficiency:.2f}", f"{r.same}/{r.outputs}",
        )
        for r in reports
    ]  # fmt: skip
    lines = [f"{result['target']}{draft}; {result['prompts']} prompts, greedy, "
             f"{result['turns']} turns, {result['machine']['device']}"]  # fmt: skip
    lines += columns([names, *rows], right=range(1, len(names)))
    lines.append(
        "forwards: how many times fewer forward passes of the target, per token, than regular\n"
        "speed-up: per token over regular, of rounds without the first ones, which read prompts\n"
        "theory: what fewer forwards and bare passes would give; efficiency: one over the other\n"
        "draft, verify, other: parts of a round, measured apart with a second wait"
    )
    if starts := result["first_token_seconds"]:
        lines.append(
            f"first text {median(starts):.2f} s after the start of a process "
            f"({min(starts):.2f} to {max(starts):.2f})"
        )
    return lines


def draw(reports: Sequence[Report], path: Path) -> None:
    """Plot speed-up, in time and in forward passes, and theory against drafted tokens."""
    plt = pyplot()
    fixed = [(int(r.name.removeprefix("K = ")), r) for r in reports if r.name.startswith("K = ")]
    if not fixed:
        raise ValueError(
            f"there is nothing to plot in {', '.join(r.name for r in reports)}: "
            "give a model as --draft-model"
        )
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    ks = [k for k, _ in fixed]
    axes.plot(ks, [r.forwards for _, r in fixed], "o:", color="C3", label="in forward passes")
    axes.plot(ks, [r.theory for _, r in fixed], "o--", color="0.55", label="theory, in time")
    axes.plot(ks, [r.speedup for _, r in fixed], "o-", color="C0", label="measured, in time")
    axes.axhline(1, color="0.3", linestyle=":", linewidth=1, label="regular")
    for name, color in (("auto", "C1"), ("lookup", "C2")):
        for report in (r for r in reports if r.name == name):
            axes.axhline(report.speedup, color=color, linewidth=1, label=name)
    axes.set(xlabel="drafted tokens a round, K", ylabel="speed-up over regular decoding",
             xticks=ks, ylim=(0, None))  # fmt: skip
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # it goes by the name what kind of file it is to be
        raise ValueError(
            f"the plot cannot be written to {path} ({error}): give a name that ends in .png"
        ) from error
    plt.close(figure)


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: run pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _lengths(text: str) -> list[int]:
    """Numbers and ranges, as in 1-8 or 2,4,8."""
    lengths: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.strip().isdecimal() for end in ends):
            raise ValueError(
                f"--num-draft must be numbers and ranges, as 1-8 or 2,4,8, got {text!r}"
            )
        lengths += range(int(ends[0]), int(ends[1]) + 1)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--num-draft must be at least 1, ranges upwards, got {text!r}")
    return sorted(set(lengths))
