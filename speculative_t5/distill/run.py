"""A whole run: label, train, judge; each stage resumes where a killed one has stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol

from ..checkpoints import dtype_name, load_draft, save_draft
from ..models import T5, SharingConfig, SharingDraft, copy_layers, sample_weights
from .data import Data, Example, Label
from .folder import JUDGEMENT, SETTINGS, STEPS, RunFolder, TimeBudget
from .judgement import Judgement, Task, judge
from .labels import LabelBudget, label
from .training import Agreement, DistillOptions, Training, agreement

LABEL_CHUNK = 256  # prompts that are labelled between two syncs with the disk, at most
HELD_OUT_SHARE, LABEL_SHARE = 0.15, 0.4  # of the minutes, after which labels are enough
JUDGE_SHARE = 0.1  # of the minutes, left for judging
MAX_JUDGING = 900.0  # seconds
SAVE_EVERY, SAVE_SECONDS = 100, 60.0  # steps or seconds between saved states
CHECKS = 20  # times that tokens per pass are measured, at most
CHECK_DRAFT = 5  # the number of drafted tokens they are measured at
LABELLED = "labelled.json"  # how many prompts have labels, by split
NOTHING: Mapping[str, Any] = MappingProxyType({})
DIGITS = 12  # of digests
TRIAL = 4  # steps that are timed, after one that is not, to turn minutes into steps


class Observer(Protocol):
    """Watches a run."""

    def labelled(self, split: str, done: int, total: int, tokens: int) -> None:
        """`done` prompts to train on or hold out have labels; in the end about `total` will."""

    def trained(self, step: int, steps: int, loss: float) -> None:
        """A step was done; `loss` is its loss per token."""

    def checked(self, step: int, tokens_per_pass: float, agreement: float) -> None:
        """The draft was compared with the target on the held-out prompts."""

    def judging(self, done: int, total: int) -> None:
        """`done` of at most `total` outputs are decoded; the total may become smaller."""


def distill(
    task: Task,
    data: Data,
    output: Path,
    options: DistillOptions,
    observer: Observer,
    *,
    read_by: Mapping[str, Any] = NOTHING,
) -> Judgement:
    """Train a draft for a target, and write its folder.

    A run that was stopped resumes when it is called again; with `steps` rather than `minutes`, the
    weights are then the same, byte for byte, as without the stop, on the same machine.

    Args:
        task: What the draft is for.
        data: The prompts.
        output: The folder to write. Meanwhile the run works in OUTPUT.distill beside it.
        options: How to train.
        observer: Watches.
        read_by: Options that the data were read by, as values of JSON. A run resumes only with the
            same options.

    Raises:
        ValueError: If the output exists, the options do not fit the target, the run that was
            stopped was another one, or the training diverges.
        OSError: If something cannot be written.
    """
    check_output(output)
    check_options(task.target, options, task.start)
    folder = RunFolder(output)
    settings = {
        **asdict(replace(options, steps=options.num_steps)),
        **read_by,
        "dtype": dtype_name(task.target.dtype),
        "data": data.digest[:DIGITS],
        "target": sha256(sample_weights(task.target).encode()).hexdigest()[:DIGITS],
        "start_from": task.start.fingerprint[:DIGITS] if task.start else None,
    }
    with folder.begun(settings):
        if folder.is_done(output):  # it was killed before it could remove its folder
            judgement = Judgement.from_json(folder.read(JUDGEMENT) or {})
            folder.remove()
            return judgement
        run = _Run(task, data, folder, options, observer)
        valid, train = run.label()
        draft, history = run.train(train, valid)
        return run.judge(draft, train, valid, history, output)


def check_output(output: Path) -> None:
    """Refuse an output that exists, unless its run has only to be ended."""
    if output.exists() and not RunFolder(output).is_done(output):
        raise ValueError(f"{output} exists: choose another --output, or delete it")


def check_options(target: T5, options: DistillOptions, start: SharingDraft | None = None) -> None:
    """Refuse options that do not fit the target, or the draft to train further."""
    depth, size = target.config.num_decoder_layers, target.info.vocab_size
    if options.layers > depth:
        raise ValueError(
            f"layers must be at most {depth}, the target's own decoder layers, got {options.layers}"
        )
    if options.d_ff is not None and options.d_ff > target.config.d_ff:
        raise ValueError(
            f"d_ff must be at most {target.config.d_ff}, the target's own, got {options.d_ff}"
        )
    vocab, least = options.draft_vocab, target.info.eos_token_id + 1
    if vocab is not None and not least <= vocab <= size:
        raise ValueError(f"draft_vocab must be from {least} to {size}, got {vocab}")
    if start is not None:
        own, depth = start.own.d_ff, start.own.num_decoder_layers
        pairs = {"layers": (options.layers, depth), "d_ff": (options.d_ff or own, own)}
        for name, (asked, has) in pairs.items():
            if asked != has:
                raise ValueError(f"{name} must be {has}, as the first draft has, got {asked}")


def new_draft(
    target: T5, options: DistillOptions, start: SharingDraft | None = None
) -> SharingDraft:
    """Return a draft with copies of the target's layers, or of the draft to start from."""
    d_ff = start.own.d_ff if start else options.d_ff or target.config.d_ff
    draft = SharingDraft(target, SharingConfig(options.layers, d_ff, options.draft_vocab))
    if start is None:
        copy_layers(draft)
    else:
        draft.update(start.parameters())
    return draft


@dataclass
class _Run:
    """The stages of a run, in its folder."""

    task: Task
    data: Data
    folder: RunFolder
    options: DistillOptions
    observer: Observer

    def __post_init__(self) -> None:
        self.time = TimeBudget(self.folder, self.options.minutes)

    def label(self) -> tuple[list[Label], list[Label]]:
        """Label the prompts, those held out first; return held-out labels and others."""
        options = self.options
        # How many prompts have labels, of the splits that are done.
        known = self.folder.read(LABELLED, valid=int | None, train=int | None) or {}
        # The draft will be judged by what the target says, whatever the file gives.
        held_out = [replace(example, completion=None) for example in self.data.valid]
        tokens = None if options.num_steps is None else options.num_steps * options.batch_tokens
        found = []
        for split, examples, most, share in (
            ("valid", held_out, None, HELD_OUT_SHARE),
            ("train", self.data.train, tokens, LABEL_SHARE),
        ):
            found.append(self._label(split, examples[: known.get(split)], most, share))
            if split not in known:
                known[split] = len(found[-1])
                self.folder.write(LABELLED, known)
        return found[0], found[1]

    def _label(
        self, split: str, examples: Sequence[Example], most: int | None, share: float
    ) -> list[Label]:
        options, chunk = self.options, LABEL_CHUNK
        if options.minutes is not None:  # the time is looked at after each chunk
            chunk = min(chunk, 8 * options.label_batch)
        budget = LabelBudget(examples, chunk, most, self.time, share)

        def progress(done: int, tokens: int) -> None:
            self.observer.labelled(split, done, budget.total(done, tokens), tokens)

        labels = label(
            self.task.target, examples, self.folder.path / f"{split}.jsonl",
            max_tokens=options.max_tokens, seed=options.seed, batch_size=options.label_batch,
            temperature=0.0 if split == "valid" else options.temperature,
            chunk=chunk, enough=budget.is_spent, progress=progress,
        )  # fmt: skip
        tokens = sum(len(each.tokens) for each in labels)
        self.observer.labelled(split, len(labels), len(labels), tokens)
        return labels

    def train(
        self, labels: Sequence[Label], valid: Sequence[Label]
    ) -> tuple[SharingDraft, list[dict[str, Any]]]:
        """Train, and return the draft and the history of its loss and its tokens per pass."""
        folder = self.folder
        steps, checks = self._steps(labels, valid)
        training = self._training(labels, steps)
        state = folder.path / "state.safetensors"
        known = folder.read("progress.json", losses=list, history=list)
        if known and state.exists():
            training.restore(state)
        known = known or {"losses": [], "history": []}
        losses: list[float] = known["losses"][: training.step_number]
        history = [each for each in known["history"] if each["step"] <= training.step_number]
        every, saved = -(-steps // checks), perf_counter()
        while (step := training.step_number + 1) <= steps:
            losses.append(training.step())
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"the loss is {losses[-1]} at step {step}: delete {folder.path} and use a "
                    "smaller --learning-rate"
                )
            self.observer.trained(step, steps, losses[-1])
            if step % every == 0 or step == steps:
                since = losses[history[-1]["step"] if history else 0 :]
                history.append(self._check(training, valid, step, since))
            late = perf_counter() - saved > SAVE_SECONDS
            if step % SAVE_EVERY == 0 or step == steps or late:
                folder.write("progress.json", {"losses": losses, "history": history})
                training.save(state)
                self.time.save()
                saved = perf_counter()
        return training.draft, history

    def _check(
        self, training: Training, valid: Sequence[Label], step: int, losses: Sequence[float]
    ) -> dict[str, Any]:
        """Compare the draft with held-out labels; return a record of the history."""
        found = self._agreement(training, valid)
        tokens = found.tokens_per_pass(CHECK_DRAFT)
        self.observer.checked(step, tokens, found.rate)
        loss = sum(losses) / len(losses)
        return {"step": step, "loss": loss, "tokens_per_pass": tokens, "agreement": found.rate}

    def _agreement(self, training: Training, valid: Sequence[Label]) -> Agreement:
        return agreement(training.draft, valid, self.options.batch_tokens, training.output_weight)

    def _training(self, labels: Sequence[Label], steps: int) -> Training:
        draft = new_draft(self.task.target, self.options, self.task.start)
        return Training(draft, labels, self.options, steps)

    def _steps(self, labels: Sequence[Label], valid: Sequence[Label]) -> tuple[int, int]:
        """Return the numbers of steps and of checks; where minutes are given, by a trial.

        Checks get at most a fifth of the time.
        """
        folder = self.folder
        if self.options.num_steps is not None:
            return self.options.num_steps, CHECKS
        if known := folder.read(STEPS, steps=int, checks=int):
            return known["steps"], known["checks"]
        trial = self._training(labels, 10**6)
        times = [_seconds(trial.step) for _ in range(TRIAL + 1)]
        check = _seconds(lambda: self._agreement(trial, valid))
        state = folder.path / "trial.safetensors"
        step, save = median(times[1:]), _seconds(lambda: trial.save(state))
        state.unlink()
        step += save * max(1 / SAVE_EVERY, step / SAVE_SECONDS)
        # The draft is compared once more before it is judged.
        left = self.time.left(JUDGE_SHARE) - check
        checks = max(1, min(CHECKS, int(0.2 * left / max(check, 1e-9))))
        steps = max(1, int((left - checks * check) / step))
        folder.write(STEPS, {"steps": steps, "checks": checks})
        return steps, checks

    def judge(
        self,
        trained: SharingDraft,
        labels: Sequence[Label],
        valid: Sequence[Label],
        history: Sequence[Mapping[str, Any]],
        output: Path,
    ) -> Judgement:
        """Judge the draft as it will be loaded, and write its folder."""
        task, options, folder = self.task, self.options, self.folder
        target = task.target
        draft_folder = folder.path / "draft"
        save_draft(draft_folder, trained, task.name)
        draft = load_draft(draft_folder, target)
        found = agreement(draft, valid, options.batch_tokens)
        made = {"steps": history[-1]["step"], "labels": len(labels), "held_out": len(valid)}
        made_by = {k: v for k, v in ((folder.read(SETTINGS) or {}) | made).items() if v is not None}
        judgement = judge(
            task, draft, output.name, [each.prompt for each in valid], found,
            made_by=made_by, max_tokens=options.max_tokens,
            max_seconds=MAX_JUDGING if options.minutes is None else self.time.left(),
            progress=self.observer.judging,
        )  # fmt: skip
        folder.write(JUDGEMENT, judgement.to_json())
        folder.write("history.json", history)
        readme = folder.path / "README.md"
        readme.write_text(judgement.as_markdown(), encoding="utf-8")
        files = [readme, folder.path / JUDGEMENT, folder.path / "history.json"]
        check_output(output)  # the name may have been taken meanwhile
        # Not the loaded one, which was rounded to the target's type.
        save_draft(output, trained, task.name, files=files)
        folder.remove()
        return judgement


def _seconds(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = perf_counter()
    action()
    return perf_counter() - began
