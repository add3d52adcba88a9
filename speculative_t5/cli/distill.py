"""The command `distill`: a draft for a target of one's own."""

import math
import os
import shlex
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import cast

import typer
from tqdm import tqdm

from .. import distill as distilling
from ..checkpoints import find_folder, load, name_of_folder, new_folder
from ..errors import check_utf8, count, escaped
from ..models import SharingDraft
from ..options import option
from ..tokenizers import PROMPT_FIELD, Format, PromptEncoder
from .options import decoder_option, output_option, with_options
from .terminal import note, visible

SECONDS_BETWEEN_LINES = 30  # seconds between lines where there is no terminal
RECENT_STEPS = 20  # steps whose mean loss is shown
BAR_UNITS = {"training": " steps", "judging": " outputs"}  # of bars, otherwise prompts


@dataclass(frozen=True)
class DataOptions:
    """How the prompts are read, and what is put before them."""

    prefix: str | None = decoder_option("prefix")
    to: str | None = decoder_option("to")
    from_: str | None = decoder_option("from_")
    prompt_field: str = option(PROMPT_FIELD, "Field of each JSON object that holds the prompt.")
    format: str | None = option(
        None,
        "Format of the data: text or jsonl.",
        shown="jsonl for names that end in .jsonl, .ndjson, .json",
    )
    max_source_length: int | None = decoder_option("max_source_length")

    def __post_init__(self) -> None:
        check_utf8("--prefix", self.prefix or "")
        if self.format not in (None, "text", "jsonl"):
            raise ValueError(f"--format must be text or jsonl, got {self.format!r}")

    def encoder(self, task: distilling.DistillTask) -> PromptEncoder:
        """Return what makes source ids of the prompts for a task's target."""
        return PromptEncoder(
            task.target,
            task.tokenizer,
            prefix=self.prefix,
            to=self.to,
            from_=self.from_,
            max_source_length=self.max_source_length,
        )

    def recorded(self, encoder: PromptEncoder) -> dict[str, object]:
        """Return what a run records of these options, with the prefix that was used."""
        return {
            "prefix": encoder.prefix,
            "field": self.prompt_field,
            "format": self.format,
            "max_source_length": self.max_source_length,
        }


@with_options
def distill(
    ctx: typer.Context,
    *,
    model: str = option(
        MISSING,
        "Target, a T5 or T5Gemma: a folder, or the name of one on this machine or on the Hub.",
    ),
    data: Path = option(
        MISSING,
        "Prompts: text, one per line; JSON Lines, each with a prompt and optionally a completion; "
        "or a folder with a train and optionally a valid file.",
    ),
    output: Path | None = option(None, "Folder to write.", shown="<name of the target>-draft"),
    options: distilling.DistillOptions,
    reading: DataOptions,
    dtype: str | None = decoder_option("dtype"),
    start_from: str | None = option(
        None,
        "Draft of this target to train further: a folder or a name.",
        shown="copies of the target's layers",
    ),
    dry_run: bool = output_option(False, "Read the data and describe the run; write nothing."),
) -> None:
    """Train a draft for a T5 or T5Gemma from prompts alone.

    The draft learns the target's own outputs. A run that was stopped resumes when the same command
    is run again.
    """
    os.stat(data)
    name = _name_of_target(model)
    output = output or new_folder(f"{Path(name).name}-draft")
    distilling.refuse_existing(output)
    task = _load_task(model, name, dtype, start_from)
    assert task.tokenizer is not None
    distilling.check_fit(task.target, options, task.start)
    encoder = reading.encoder(task)
    prompts = distilling.read_data(
        data,
        encoder,
        task.tokenizer,
        field=reading.prompt_field,
        form=cast(Format | None, reading.format),
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    if dry_run:
        print("\n".join(map(escaped, _plan(task, options, prompts, output))))
        return
    judgement = _train(task, prompts, output, options, reading.recorded(encoder))
    program = ctx.find_root().info_name or "speculative-t5"
    print(_account(prompts, judgement))
    print("\n".join(map(visible, judgement.summary())))
    print(_result(output, judgement, [*program.split(), "--model", model]))


def _name_of_target(model: str) -> str:
    """Return the name of a target, which is written into the draft's folder."""
    folder = find_folder(model)
    return name_of_folder(Path(os.path.abspath(folder))) if folder else model


def _load_task(
    model: str, name: str, dtype: str | None, start_from: str | None
) -> distilling.DistillTask:
    """Load the target, and the draft to train further if there is one."""
    target, tokenizer = load(model, dtype=dtype)
    if target.info.is_decoder_only:
        raise ValueError(
            f"{model} is a decoder-only model, and distill makes drafts that share a target's "
            "encoder: give a smaller model with its tokenizer as --draft-model, or lookup"
        )
    start = load(start_from, dtype=target.dtype, target=target)[0] if start_from else None
    if not isinstance(start, SharingDraft | None):
        raise ValueError(f"{start_from} is a whole model, expected a draft that `distill` has made")
    return distilling.DistillTask(target, tokenizer, name, start)


def _train(
    task: distilling.DistillTask,
    prompts: distilling.Data,
    output: Path,
    options: distilling.DistillOptions,
    read_by: dict[str, object],
) -> distilling.Judgement:
    """Run all stages, and show them; say where the work is kept if they are stopped."""
    stages = Stages()
    try:
        return distilling.distill(task, prompts, output, options, stages.show, read_by=read_by)
    except (KeyboardInterrupt, SystemExit, OSError, RuntimeError, MemoryError):
        if (place := distilling.RunFolder(output).path).exists():
            note(f"progress is kept in {place}; run the same command again to resume")
        raise
    finally:
        stages.bar.close()


class Stages:
    """Shows a run of `distill`: a bar for each stage on a terminal, otherwise a line at times."""

    def __init__(self) -> None:
        self.bar = tqdm(disable=True)
        self._first: distilling.StageProgress | None = None  # of the stage
        self._began = self._last_line = 0.0
        self._losses: deque[float] = deque(maxlen=RECENT_STEPS)
        self._tokens_per_pass = ""

    def show(self, now: distilling.StageProgress) -> None:
        if self._first is None or now.stage != self._first.stage:
            self.bar.close()
            self._first, self._began, self._last_line = now, time.perf_counter(), -math.inf
            # What an earlier run has done does not count for the rate.
            self.bar = tqdm(
                total=now.total,
                initial=now.done,
                desc=now.stage,
                unit=BAR_UNITS.get(now.stage, " prompts"),
                disable=None,
            )
        more, seconds = "", time.perf_counter() - self._began
        if now.stage == "training":
            self._losses.append(now.loss)
            if now.tokens_per_pass is not None:
                self._tokens_per_pass = f", {now.tokens_per_pass:.2f} tokens per pass"
            more = f"loss {sum(self._losses) / len(self._losses):.3f}{self._tokens_per_pass}"
        elif now.tokens > self._first.tokens:
            more = f"{(now.tokens - self._first.tokens) / seconds:,.0f} tokens/s"
        if not self.bar.disable:
            self.bar.total = now.total
            self.bar.set_postfix_str(more, refresh=False)
            self.bar.update(now.done - self.bar.n)
        elif now.tokens_per_pass is not None or seconds - self._last_line > SECONDS_BETWEEN_LINES:
            step = f"step {now.done:,}" if now.tokens_per_pass else f"{now.done:,} of {now.total:,}"
            note(f"{now.stage}: {step}{', ' if more else ''}{more}")
            self._last_line = seconds


def _account(data: distilling.Data, judgement: distilling.Judgement) -> str:
    """Return a line that says what became of each line of the data."""
    held_out = judgement.made_by["held_out"]
    used = judgement.made_by["labels"] + held_out
    rest = len(data.train) + len(data.valid) - used
    unused = f"{rest:,} not needed, " if rest else ""
    labelled = f"{used:,} labelled ({held_out:,} of them held out)"
    return f"read {count(data.read, 'line')}: {labelled}, {unused}{_skipped(data)}"


def _skipped(data: distilling.Data) -> str:
    return f"{sum(data.skipped.values()):,} skipped{distilling.reasons(data.skipped)}"


def _result(folder: Path, judgement: distilling.Judgement, command: list[str]) -> str:
    """Return lines that name the folder and, if the draft pays, the command that uses it."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    line = f"{escaped(str(folder))}: {size / 1e6:.1f} MB"
    best = distilling.fastest(judgement.speeds)
    if best is None or not judgement.pays:
        return line
    found = find_folder(folder.name)  # a name is shorter than a path
    draft = folder.name if found and found.samefile(folder) else str(folder)
    command = [*command, "--draft-model", draft, *best.option.split()]
    return f"{line}; to use it:\n  {escaped(shlex.join(command))}"


def _plan(
    task: distilling.DistillTask,
    options: distilling.DistillOptions,
    data: distilling.Data,
    output: Path,
) -> Iterator[str]:
    """Yield lines that say what a run would do."""
    usable = len(data.train) + len(data.valid)
    yield (
        f"read {count(data.read, 'line')}: {usable:,} usable ({len(data.valid):,} of them held "
        f"out), {_skipped(data)}"
    )
    given = sum(each.completion is not None for each in data.train)
    if given:
        yield f"{given:,} have completions, and outputs are generated for {usable - given:,}"
    draft = distilling.new_draft(task.target, options, task.start)
    own, sizes = distilling.own_parameters(draft), draft.config
    yield (
        f"the draft: {count(sizes.num_decoder_layers, 'layer')} of width {sizes.d_model}, "
        f"{own / 1e6:,.1f} M parameters of its own, {2 * own / 1e6:,.1f} MB"
    )
    steps = f"{options.num_steps:,} steps" if options.num_steps else f"{options.minutes:g} minutes"
    yield f"training: {steps} of {options.batch_tokens:,} tokens, loss {options.loss}"
    begun = distilling.RunFolder(output).path
    yield f"output: {output}" + (f", resuming the run in {begun}" if begun.exists() else "")
