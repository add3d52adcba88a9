"""A whole run: label, train, judge; each stage resumes where a killed one has stopped."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ..checkpoints import dtype_name, load_draft, read_json, save_draft
from ..errors import shown
from ..files import PARTIAL, lock, write_whole
from ..models import T5, SharingConfig, SharingDraft, copy_layers, sample_weights
from .data import Data, Example
from .judgement import Judgement, Task, judge
from .labels import Label, label
from .training import AGAIN, Agreement, DistillOptions, Training, agreement

SUFFIX = ".distill"
SETTINGS, STEPS, SPENT = "settings.json", "steps.json", "spent.json"
LABELLED = "labelled.json"  # how many prompts have labels, by split
INPUTS = {"data": "other data", "target": "another target"}  # settings that are digests
LABEL_CHUNK = 256  # prompts that are labelled between two syncs with the disk, at most
HELD_OUT_SHARE, LABEL_SHARE = 0.15, 0.4  # of the minutes, after which labels are enough
JUDGE_SHARE = 0.1  # of the minutes, left for judging
MAX_JUDGING = 900.0  # seconds
SAVE_EVERY, SAVE_SECONDS = 100, 60.0  # steps or seconds between saved states
CHECKS = 20  # times that tokens per pass are measured, at most
CHECK_DRAFT = 5  # the number of drafted tokens they are measured at
DIGITS = 12  # of digests
TRIAL = 4  # steps that are timed, after one that is not, to turn minutes into steps


@dataclass(frozen=True)
class Progress:
    """How far a run is in one of its stages."""

    stage: str  # "labelling held-out prompts", "labelling prompts", "training" or "judging"
    done: int  # prompts, steps or outputs
    total: int  # in the end, as far as is known
    tokens: int = 0  # in the labels
    loss: float = 0.0  # of the step, per token
    tokens_per_pass: float | None = None  # on held-out prompts, if measured after this step


Report = Callable[[Progress], None]


def distill(
    task: Task,
    data: Data,
    output: Path,
    options: DistillOptions,
    report: Report,
    *,
    read_by: Mapping[str, Any],
) -> Judgement:
    """Train a draft for a target, and write its folder.

    A run that was stopped resumes when it is called again; with `steps` rather than `minutes`, the
    weights are then the same, byte for byte, as without the stop, on the same machine.

    Meanwhile the run works in OUTPUT.distill beside the output. `report` is called after each
    prompt, step and output. `read_by` are the options that the data were read by; a run resumes
    with the same ones only.

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
        run = _Run(task, data, folder, options, report)
        valid, train = run.label()
        draft, history = run.train(train, valid)
        return run.judge(draft, train, valid, history, output)


def check_output(output: Path) -> None:
    """Refuse an output that exists."""
    if output.exists():
        raise ValueError(f"{output} exists: choose another --output, or delete it")


def check_options(target: T5, options: DistillOptions, start: SharingDraft | None = None) -> None:
    """Refuse options that do not fit the target, or the draft to train further."""
    config, size = target.config, target.info.vocab_size
    if options.layers > (depth := config.num_decoder_layers):
        raise ValueError(
            f"layers must be at most {depth}, the target's own decoder layers, got {options.layers}"
        )
    if options.d_ff is not None and options.d_ff > config.d_ff:
        raise ValueError(
            f"d_ff must be at most {config.d_ff}, the target's own, got {options.d_ff}"
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


class RunFolder:
    """OUTPUT.distill, beside the output; removed when the output is complete."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + SUFFIX)

    @contextmanager
    def begun(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Make the folder, or resume its run if the settings are the same; lock it meanwhile."""
        if self.path.exists() and self.read(SETTINGS) is None:
            # A run killed at its very start leaves these.
            first = ("lock", PARTIAL)
            if any(not path.name.startswith(first) for path in self.path.iterdir()):
                raise ValueError(
                    f"{self.path} exists and is not the working folder of a run: "
                    "choose another --output"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as file:
            lock(file.fileno(), f"another process is at work in {self.path}: wait for it to end")
            known = self.read(SETTINGS)
            if known is None:
                known = dict(settings)
                self.write(SETTINGS, known)
            for name, value in settings.items():
                if known.get(name) != value:
                    before = INPUTS.get(name) or _as_option(name, known.get(name))
                    now = "" if name in INPUTS else f", and this one has {_as_option(name, value)}"
                    raise ValueError(
                        f"the run in {self.path} was started with {before}{now}: "
                        "use the same to resume it, or delete the folder to start over"
                    )
            yield

    def read(self, name: str, **kinds: Any) -> dict[str, Any] | None:
        """Return the object in a JSON file, its entries of these kinds; None if there is none."""
        path = self.path / name
        if not path.exists():
            return None
        again = "delete the folder to start over" if name in (SETTINGS, STEPS) else AGAIN
        found = read_json(path, again=again)
        for entry, kind in kinds.items():
            if not isinstance(value := found.get(entry), kind):
                raise ValueError(f"{path} has {shown(value)} as {entry}: {again}")
        return found

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, (json.dumps(value, indent=2) + "\n").encode())


def _as_option(name: str, value: Any) -> str:
    """Return an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    return f"no {option}" if value is None else f"{option} {shlex.quote(str(value))}"


class _Time:
    """The seconds that a run has taken, in all its processes, and those it may take."""

    def __init__(self, folder: RunFolder, minutes: float | None) -> None:
        self.limit = None if minutes is None else 60 * minutes
        self._folder = folder
        self._before = float((folder.read(SPENT, seconds=float) or {"seconds": 0.0})["seconds"])
        self._began = perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the run began, those between its processes left out."""
        return self._before + perf_counter() - self._began

    def save(self) -> None:
        """Keep the seconds for a process that resumes the run."""
        self._folder.write(SPENT, {"seconds": self.spent})

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the limit is spent."""
        assert self.limit is not None
        return max(0.0, self.limit * share - self.spent)


@dataclass
class _Run:
    """The stages of a run, in its folder."""

    task: Task
    data: Data
    folder: RunFolder
    options: DistillOptions
    report: Report

    def __post_init__(self) -> None:
        self.time = _Time(self.folder, self.options.minutes)

    def label(self) -> tuple[list[Label], list[Label]]:
        """Label the prompts, those held out first; return held-out labels and others."""
        # How many prompts have labels, of the splits that are done.
        known = self.folder.read(LABELLED, valid=int | None, train=int | None) or {}
        # The draft will be judged by what the target says, whatever the file gives.
        held_out = [replace(example, completion=None) for example in self.data.valid]
        found = []
        for split, examples in (("valid", held_out), ("train", self.data.train)):
            found.append(self._label(split, examples[: known.get(split)]))
            if split not in known:
                known[split] = len(found[-1])
                self.folder.write(LABELLED, known)
        return found[0], found[1]

    def _label(self, split: str, examples: Sequence[Example]) -> list[Label]:
        """Label prompts while they are wanted, for the steps or in their share of the minutes."""
        options, time, chunk = self.options, self.time, LABEL_CHUNK
        stage, share = "labelling held-out prompts", HELD_OUT_SHARE
        temperature, wanted = 0.0, math.inf
        if split == "train":
            stage, share, temperature = "labelling prompts", LABEL_SHARE, options.temperature
            wanted = (options.num_steps or math.inf) * options.batch_tokens
        if time.limit is not None:  # which is looked at after each chunk
            chunk = min(chunk, 8 * options.label_batch)
        first: tuple[int, float] | None = None  # labels and time at the first report
        sources = sum(len(each.prompt) for each in examples) / len(examples)

        def enough(labels: Sequence[Label]) -> bool:
            time.save()
            if time.limit is not None:
                return not time.left(share)
            return sum(len(each.prompt) + len(each.tokens) for each in labels) >= wanted

        def progress(done: int, tokens: int) -> None:
            nonlocal first
            first = first or (done, time.spent)
            new, total = done - first[0], math.inf
            if new and time.limit is not None:
                seconds = max(time.spent - first[1], 1e-9)
                total = done + new * time.left(share) / seconds
            elif new:
                total = max(done, wanted / (sources + tokens / done))
            total = min(total, len(examples))
            self.report(Progress(stage, done, round(total), tokens))

        labels = label(
            self.task.target, examples, self.folder.path / f"{split}.jsonl",
            max_tokens=options.max_tokens, seed=options.seed, batch_size=options.label_batch,
            temperature=temperature, chunk=chunk, enough=enough, progress=progress,
        )  # fmt: skip
        tokens = sum(len(each.tokens) for each in labels)
        self.report(Progress(stage, len(labels), len(labels), tokens))
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
            tokens = None
            if step % every == 0 or step == steps:
                found = self._agreement(training, valid)
                tokens = found.tokens_per_pass(CHECK_DRAFT)
                since = losses[history[-1]["step"] if history else 0 :]
                history.append({
                    "step": step, "loss": sum(since) / len(since), "tokens_per_pass": tokens,
                    "agreement": found.rate,
                })  # fmt: skip
            self.report(Progress("training", step, steps, loss=losses[-1], tokens_per_pass=tokens))
            late = perf_counter() - saved > SAVE_SECONDS
            if step % SAVE_EVERY == 0 or step == steps or late:
                folder.write("progress.json", {"losses": losses, "history": history})
                training.save(state)
                self.time.save()
                saved = perf_counter()
        return training.draft, history

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
        left = self.time.left(1 - JUDGE_SHARE) - check
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
        draft_folder = folder.path / "draft"
        save_draft(draft_folder, trained, task.name)
        draft = load_draft(draft_folder, task.target)
        found = agreement(draft, valid, options.batch_tokens)
        made = {"steps": history[-1]["step"], "labels": len(labels), "held_out": len(valid)}
        made_by = {k: v for k, v in ((folder.read(SETTINGS) or {}) | made).items() if v is not None}
        judgement = judge(
            task, draft, output.name, [each.prompt for each in valid], found,
            made_by=made_by, max_tokens=options.max_tokens,
            max_seconds=MAX_JUDGING if options.minutes is None else self.time.left(),
            progress=lambda done, total: self.report(Progress("judging", done, total)),
        )  # fmt: skip
        folder.write("judgement.json", judgement.to_json())
        folder.write("history.json", history)
        (folder.path / "README.md").write_text(judgement.as_markdown(), encoding="utf-8")
        files = [folder.path / name for name in ("README.md", "judgement.json", "history.json")]
        check_output(output)  # the name may have been taken meanwhile
        # Not the loaded one, which was rounded to the target's type.
        save_draft(output, trained, task.name, files=files)
        shutil.rmtree(folder.path, ignore_errors=True)
        return judgement


def _seconds(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    began = perf_counter()
    action()
    return perf_counter() - began
