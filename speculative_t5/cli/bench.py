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
from ..checkpoints import as_dtype
from ..errors import count, decoded
from ..generation import SpeculativeDecoder
from ..measure import (
    PLAIN_DECODING,
    Variant,
    VariantReport,
    check_pair_of_shapes,
    random_model,
    random_prompts,
    replaying_plan,
    report_on,
    variants_of,
)
from ..options import check_options, option
from .examples import SENTENCES_TO_CORRECT
from .options import OF_DECODERS, draft_of, model_name, with_options
from .terminal import columns, give_tips


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how."""

    prompts: Path | None = option(
        None, "Text file with one prompt per line.", shown="six sentences to correct"
    )
    num_draft: str = option("1-8", "Tokens to draft: numbers and ranges, such as 1-8 or 2,4,8.")
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


@with_options
def bench(
    *,
    model: str = OF_DECODERS["model"],
    draft_model: str | None = OF_DECODERS["draft_model"],
    wanted: BenchOptions,
    prefix: str | None = OF_DECODERS["prefix"],
    to: str | None = OF_DECODERS["to"],
    from_: str | None = OF_DECODERS["from_"],
    max_source_length: int | None = OF_DECODERS["max_source_length"],
    truncate: bool = OF_DECODERS["truncate"],
    dtype: str | None = OF_DECODERS["dtype"],
    draft_vocab: int | None = OF_DECODERS["draft_vocab"],
) -> None:
    """Measure greedy decoding, one prompt at a time: plain, speculative, lookup, auto.

    Everything runs interleaved in one process, so that ratios hold even if the machine's speed
    drifts.
    """
    lengths, max_tokens = _lengths(wanted.num_draft), wanted.max_tokens
    modes = ("", "steady ") if wanted.steady else ("",)
    draft, shapes, turns = draft_of(model, draft_model), wanted.random_weights, wanted.turns
    # Shown before anything is loaded, and gone before an error or the table.
    with tqdm(total=turns + 2, desc="loading", unit="turn", leave=False, disable=None) as bar:
        if shapes:
            model, draft, *_ = (*shapes.split(":"), None)
            first, sources = _random(shapes, dtype, wanted)
        else:
            first = SpeculativeDecoder.from_pretrained(
                model, draft, dtype=dtype, prefix=prefix, to=to, from_=from_,
                max_source_length=max_source_length, truncate=truncate,
            )  # fmt: skip
            sources = _sources(first, wanted.prompts)
        make = partial(
            SpeculativeDecoder, first.model, tokenizer=first.tokenizer, draft_vocab=draft_vocab
        )
        decoders = {
            f"{mode}K = {k}": make(first.draft, num_draft=k, steady=bool(mode))
            for mode in modes for k in lengths if first.draft
        }  # fmt: skip
        if first.draft and not shapes:
            decoders["auto"] = make(first.draft, num_draft="auto")
        if not shapes:
            decoders["lookup"] = make("lookup", num_draft=lengths[-1])
        variants = variants_of(decoders, max_tokens)
        if shapes:
            variants = _replaying(variants, sources, wanted)
        bar.set_description("measuring")
        reports = report_on(variants, sources, turns, bar.update)
    result: dict[str, Any] = {
        "machine": {
            "device": str(mx.default_device()),
            "processor": device.chip(),
            "cores": os.cpu_count(),
            "threads": {n: v for n, v in sorted(os.environ.items()) if n.endswith("NUM_THREADS")},
            "versions": {"speculative_t5": __version__, "mlx": version("mlx")},
        },
        "target": model,
        "draft": draft,
        "prompts": len(sources),
        "max_tokens": max_tokens,
        "draft_vocab": draft_vocab,
        "turns": turns,
        # In JSON plain decoding has always been called regular.
        "rows": [
            asdict(r) | ({"name": "regular"} if r.name == PLAIN_DECODING else {}) for r in reports
        ],
    }
    if shapes:
        result |= {"acceptance": wanted.acceptance, "source": wanted.source}
    print(json.dumps(result) if wanted.as_json else "\n".join(_table(result, reports)))
    give_tips()


def _sources(decoder: SpeculativeDecoder, path: Path | None) -> list[list[int]]:
    """Return the ids of the prompts in a file, or of those that come with this command."""
    lines = decoded(path.read_bytes(), str(path)).splitlines() if path else SENTENCES_TO_CORRECT
    sources = [decoder.fit(line).ids for line in lines if line.strip()]
    if not sources:
        raise ValueError(f"{path} has no prompts: write one per line")
    return sources


def _random(
    shapes: str, dtype: str | None, wanted: BenchOptions
) -> tuple[SpeculativeDecoder, list[list[int]]]:
    source = wanted.source
    names = shapes.split(":")
    if len(names) != 2:
        raise ValueError(f"--random must be TARGET:DRAFT, such as t5-base:t5-small, got {shapes!r}")
    check_pair_of_shapes(*names)
    kind = as_dtype(dtype) or device.default_type().dtype
    target, small = (random_model(name, dtype=kind) for name in names)
    prompts = random_prompts(target, source, wanted.count)
    return SpeculativeDecoder(target, small, max_source_length=max(source, 2)), prompts


def _replaying(
    variants: Sequence[Variant], prompts: Sequence[list[int]], wanted: BenchOptions
) -> list[Variant]:
    """Let all but the first, plain decoding, have drafts of a given acceptance."""
    plain, *drafting = variants
    alone = partial(plain.decoder.generate, max_tokens=wanted.max_tokens, speculative=False)
    outputs = {tuple(prompt): alone(prompt).tokens for prompt in prompts}
    plans = [replaying_plan(v.decoder, outputs, wanted.acceptance) for v in drafting]
    return [plain, *(replace(v, plan=plan) for v, plan in zip(drafting, plans, strict=True))]


def _table(result: dict[str, Any], reports: Sequence[VariantReport]) -> list[str]:
    draft = f", {model_name(result['draft'])} drafts" if result["draft"] else ""
    names = ("", "tokens/s", "ms/round", "draft", "verify", "other", "waits", "accepted",
               "forwards", "speed-up", "same output")  # fmt: skip
    rows = [
        (
            r.name, f"{r.tokens_per_second:.0f}", f"{r.round_ms:.2f}", f"{r.draft_ms:.2f}",
            f"{r.verify_ms:.2f}", f"{r.other_ms:.2f}", f"{r.waits:.2f}",
            f"{r.acceptance:.2f}" if r.acceptance else "-", f"{r.forwards:.2f}",
            f"{r.speedup:.2f}", f"{r.same}/{r.outputs}",
        )
        for r in reports
    ]  # fmt: skip
    prompts, turns = count(result["prompts"], "prompt"), count(result["turns"], "turn")
    lines = [f"{model_name(result['target'])}{draft}; {prompts}, greedy, {turns}, "
             f"{result['machine']['device']}"]  # fmt: skip
    lines += columns([names, *rows], right=range(1, len(names)))
    return [
        *lines,
        "forwards: how many times fewer forward passes of the target, per token, than plain\n"
        "speed-up: per token over plain, of rounds without the first ones, which read prompts\n"
        "draft, verify, other: parts of a round, measured apart with a second wait",
    ]


def _lengths(text: str) -> list[int]:
    lengths: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not found:
            raise ValueError(
                f"--num-draft must be numbers and ranges, such as 1-8 or 2,4,8, got {text!r}"
            )
        lengths.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--num-draft must be at least 1, and ranges must rise, got {text!r}")
    return sorted(lengths)
