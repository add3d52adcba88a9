"""The `bench` command: how fast decoding is on this machine."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from .. import device
from .._version import __version__
from ..checkpoints import as_dtype, model_name
from ..errors import count, decoded
from ..generation import SpeculativeDecoder
from ..kernels import try_all_on_metal
from ..measure import (
    PLAIN_DECODING,
    BatchReport,
    Variant,
    VariantReport,
    check_pair_of_shapes,
    random_model,
    random_prompts,
    replaying_plan,
    report_on,
    report_on_batches,
    variants_of,
)
from ..options import check_options, option
from .examples import SENTENCES_TO_CORRECT
from .options import decoder_option, draft_of, with_options
from .terminal import columns, give_tips


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how."""

    prompts: Path | None = option(
        None, "Text file with one prompt per line.", shown="six sentences to correct"
    )
    num_draft: str | None = option(
        None,
        "Tokens to draft: numbers and ranges, such as 1-8 or 2,4,8.",
        shown="1-8; none with --batch-size",
    )
    batch_size: str | None = option(
        None,
        "Measure many prompts in batches of these sizes instead, such as 1,4,16,64.",
        shown="one prompt at a time",
    )
    steady: bool = option(False, "Measure each number in steady mode, too.")
    max_tokens: int = option(128, "Upper bound on the tokens of an output, EOS included.", least=1)
    turns: int = option(5, "How many times to measure everything; medians are reported.", least=1)
    random_weights: str | None = option(
        None,
        "Use random weights of these shapes instead, such as t5-base:t5-small, with drafts that "
        "are accepted as often as --acceptance says.",
    )
    acceptance: float = option(
        0.8, "With --random: the chance that a drafted token is accepted.", least=0.0, most=1.0
    )
    source: int = option(256, "With --random: tokens of each prompt.", least=1)
    count: int = option(3, "With --random: number of prompts.", least=1)
    as_json: bool = option(False, "Print one JSON object instead of the table.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.batch_size is not None and self.steady:
            raise ValueError("--steady decodes one prompt at a time: leave --batch-size out")

    @property
    def lengths(self) -> list[int]:
        """The numbers of tokens to draft."""
        if self.num_draft is None:
            return [] if self.sizes else [*range(1, 9)]
        return _counts(self.num_draft, "--num-draft", "1-8 or 2,4,8")

    @property
    def sizes(self) -> list[int]:
        """The sizes of batches; none stands for one prompt at a time."""
        if self.batch_size is None:
            return []
        return _counts(self.batch_size, "--batch-size", "1,4,16,64")


@dataclass(frozen=True)
class BenchModels:
    """What is measured, and how its prompts are read."""

    model: str = decoder_option("model")
    draft_model: str | None = decoder_option("draft_model")
    dtype: str | None = decoder_option("dtype")
    prefix: str | None = decoder_option("prefix")
    to: str | None = decoder_option("to")
    from_: str | None = decoder_option("from_")
    max_source_length: int | None = decoder_option("max_source_length")
    truncate: bool = decoder_option("truncate")
    draft_vocab: int | None = decoder_option("draft_vocab")

    @property
    def draft(self) -> str | None:
        """The draft that is meant, which the target may name."""
        return draft_of(self.model, self.draft_model)

    def load(self) -> SpeculativeDecoder:
        """Load the models and make a decoder."""
        return SpeculativeDecoder.from_pretrained(
            self.model,
            self.draft,
            dtype=self.dtype,
            prefix=self.prefix,
            to=self.to,
            from_=self.from_,
            max_source_length=self.max_source_length,
            truncate=self.truncate,
        )


@with_options
def bench(*, models: BenchModels, wanted: BenchOptions) -> None:
    """Measure greedy decoding: plain, speculative, lookup, auto.

    One prompt at a time, or with --batch-size the throughput of batches. Everything runs
    interleaved in one process, so that ratios hold even if the machine's speed drifts.
    """
    try_all_on_metal()
    lengths, sizes = wanted.lengths, wanted.sizes
    shapes = wanted.random_weights
    draft: str | None
    # Shown before anything is loaded, and gone before an error or the table.
    with tqdm(
        total=wanted.turns + 2, desc="loading", unit="turn", leave=False, disable=None
    ) as bar:
        if shapes:
            target, draft = _two_shapes(shapes)
            first, prompts = _random_pair(target, draft, models.dtype, wanted)
        else:
            target, draft, first = models.model, models.draft, models.load()
            prompts = _prompts_for(first, wanted.prompts)
        decoders = _decoders(first, lengths, models.draft_vocab, wanted)
        variants = variants_of(decoders, wanted.max_tokens)
        if shapes:
            variants = _replaying(variants, prompts, wanted)
        bar.set_description("measuring")
        reports: Sequence[VariantReport | BatchReport]
        if sizes:
            reports = report_on_batches(variants, prompts, sizes, wanted.turns, bar.update)
        else:
            reports = report_on(variants, prompts, wanted.turns, bar.update)
    result: dict[str, Any] = {
        "machine": _machine_facts(),
        "target": target,
        "draft": draft,
        "prompts": len(prompts),
        "max_tokens": wanted.max_tokens,
        "draft_vocab": models.draft_vocab,
        "turns": wanted.turns,
        "rows": [_json_row(report) for report in reports],
    }
    if shapes:
        result |= {"acceptance": wanted.acceptance, "source": wanted.source}
    table = _batch_table if sizes else _bench_table
    print(json.dumps(result) if wanted.as_json else "\n".join(table(result, reports)))
    give_tips()


def _decoders(
    first: SpeculativeDecoder, lengths: Sequence[int], draft_vocab: int | None, wanted: BenchOptions
) -> dict[str, SpeculativeDecoder]:
    """Return a decoder for each way to draft, by its name in the table."""
    make = partial(
        SpeculativeDecoder, first.model, tokenizer=first.tokenizer, draft_vocab=draft_vocab
    )
    decoders = {}
    if first.draft:
        for mode in ("", "steady ") if wanted.steady else ("",):
            for k in lengths:
                decoder = make(first.draft, num_draft=k, steady=bool(mode))
                decoders[f"{mode}K = {k}"] = decoder
    if first.draft and (wanted.sizes or not wanted.random_weights):
        decoders["auto"] = make(first.draft, num_draft="auto")
    if not wanted.random_weights:
        decoders["lookup"] = make("lookup", num_draft=lengths[-1] if lengths else "auto")
    return decoders


def _machine_facts() -> dict[str, Any]:
    """Return what figures depend on besides the models."""
    return {
        "device": str(mx.default_device()),
        "processor": device.chip(),
        "cores": os.cpu_count(),
        "threads": {n: v for n, v in sorted(os.environ.items()) if n.endswith("NUM_THREADS")},
        "versions": {"speculative_t5": __version__, "mlx": version("mlx")},
    }


def _json_row(report: VariantReport | BatchReport) -> dict[str, Any]:
    # In JSON plain decoding has always been called regular.
    return asdict(report) | ({"name": "regular"} if report.name == PLAIN_DECODING else {})


def _prompts_for(decoder: SpeculativeDecoder, path: Path | None) -> list[list[int]]:
    """Return the ids of the prompts in a file, or of those that come with this command."""
    lines = decoded(path.read_bytes(), str(path)).splitlines() if path else SENTENCES_TO_CORRECT
    sources = [decoder.fit(line).ids for line in lines if line.strip()]
    if not sources:
        raise ValueError(f"{path} has no prompts: write one per line")
    return sources


def _two_shapes(text: str) -> tuple[str, str]:
    """Parse the value of --random: the names of a target's shape and a draft's."""
    names = text.split(":")
    if len(names) != 2:
        raise ValueError(f"--random must be TARGET:DRAFT, such as t5-base:t5-small, got {text!r}")
    target, draft = names
    check_pair_of_shapes(target, draft)
    return target, draft


def _random_pair(
    target: str, draft: str, dtype: str | None, wanted: BenchOptions
) -> tuple[SpeculativeDecoder, list[list[int]]]:
    """Make random models of two shapes, and prompts for them."""
    kind = as_dtype(dtype) or device.default_type().dtype
    model, small = (random_model(name, dtype=kind) for name in (target, draft))
    prompts = random_prompts(model, wanted.source, wanted.count)
    return SpeculativeDecoder(model, small, max_source_length=max(wanted.source, 2)), prompts


def _replaying(
    variants: Sequence[Variant], prompts: Sequence[list[int]], wanted: BenchOptions
) -> list[Variant]:
    """Let all but the first, plain decoding, have drafts of a given acceptance."""
    plain, *drafting = variants
    alone = partial(plain.decoder.generate, max_tokens=wanted.max_tokens, speculative=False)
    outputs = {tuple(prompt): alone(prompt).tokens for prompt in prompts}
    plans = [replaying_plan(v.decoder, outputs, wanted.acceptance) for v in drafting]
    return [plain, *(replace(v, plan=plan) for v, plan in zip(drafting, plans, strict=True))]


def _title(result: dict[str, Any]) -> str:
    draft = f", {model_name(result['draft'])} drafts" if result["draft"] else ""
    prompts, turns = count(result["prompts"], "prompt"), count(result["turns"], "turn")
    machine = result["machine"]["device"]
    return f"{model_name(result['target'])}{draft}; {prompts}, greedy, {turns}, {machine}"


def _batch_table(result: dict[str, Any], reports: Sequence[Any]) -> list[str]:
    heads = "batch", "", "tokens/s", "over plain", "drafted", "same output"
    rows = [
        (
            str(report.batch_size),
            report.name,
            f"{report.tokens_per_second:.0f}",
            f"{report.speedup:.2f}",
            f"{report.drafted:.1f}",
            f"{report.same}/{report.outputs}",
        )
        for report in sorted(reports, key=lambda report: report.batch_size)
    ]
    return [
        _title(result),
        *columns([heads, *rows], right=(0, 2, 3, 4, 5)),
        "drafted: tokens for each row of a pass; 0.0 is plain decoding",
    ]


def _bench_table(result: dict[str, Any], reports: Sequence[Any]) -> list[str]:
    heads = (
        "",
        "tokens/s",
        "ms/round",
        "draft",
        "verify",
        "other",
        "waits",
        "accepted",
        "forwards",
        "speed-up",
        "same output",
    )
    rows = [
        (
            report.name,
            f"{report.tokens_per_second:.0f}",
            f"{report.round_ms:.2f}",
            f"{report.draft_ms:.2f}",
            f"{report.verify_ms:.2f}",
            f"{report.other_ms:.2f}",
            f"{report.waits:.2f}",
            f"{report.acceptance:.2f}" if report.acceptance else "-",
            f"{report.forwards:.2f}",
            f"{report.speedup:.2f}",
            f"{report.same}/{report.outputs}",
        )
        for report in reports
    ]
    return [
        _title(result),
        *columns([heads, *rows], right=range(1, len(heads))),
        "forwards: how many times fewer forward passes of the target, per token, than plain\n"
        "speed-up: per token over plain, of rounds without the first ones, which read prompts\n"
        "draft, verify, other: parts of a round, measured apart with a second wait",
    ]


def _counts(text: str, option_name: str, example: str) -> list[int]:
    """Parse numbers and ranges, of 1 and more."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not found:
            raise ValueError(
                f"{option_name} must be numbers and ranges, such as {example}, got {text!r}"
            )
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option_name} must be at least 1, and ranges must rise, got {text!r}")
    return sorted(numbers)
