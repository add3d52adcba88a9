"""A whole run: label, train, judge; each stage goes on where a killed one has stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, Protocol

from ..checkpoints import load_draft, save_draft
from ..decoding import LanguageModel
from ..models import T5, SharingConfig, SharingDraft, copy_layers, sample_weights
from ..tokenizers import Tokenizer
from .data import Data, Example
from .folder import RunFolder
from .judgement import Judgement
from .judging import judge
from .labels import Label, label
from .options import DistillOptions
from .training import Training, TrainingOptions, agreement

LABEL_CHUNK = 256  # prompts that are labelled between two syncs with the disk
LABEL_SHARE = 0.4  # of the minutes, at most
JUDGE_SHARE = 0.1  # left for judging
MAX_JUDGING = 900.0  # seconds, where there is no limit to the whole run
SAVE_EVERY, SAVE_SECONDS = 100, 60.0  # steps or seconds between saved states
CHECKS = 20  # how often tokens per pass are measured, in all
CHECK_DRAFT = 5  # the number of drafted tokens they are measured at
NOTHING: Mapping[str, Any] = MappingProxyType({})
DIGITS = 12  # of digests, which messages show
TRIAL = 4  # steps that are timed, after one that is not, to turn minutes into steps


class Observer(Protocol):
    """Watches a run."""

    def labelled(self, split: str, done: int, total: int, tokens: int) -> None:
        """`done` of at most `total` prompts to train on or hold out have labels."""

    def trained(self, step: int, steps: int, loss: float) -> None:
        """A step was done; `loss` is its loss per token."""

    def checked(self, step: int, tokens_per_pass: float, agreement: float) -> None:
        """The draft was compared with the target on the held-out prompts."""

    def judging(self, done: int, total: int) -> None:
        """Part of the judgement is done."""


@dataclass(frozen=True)
class Subject:
    """What a draft is made for.

    Attributes:
        name: The target's, which is written into the draft's folder.
        previous: The draft in use so far, to compare with: a model or "lookup"; None if there is
            none.
        previous_name: Its name.
    """

    target: T5
    tokenizer: Tokenizer | None
    name: str
    previous: LanguageModel | Literal["lookup"] | None = None
    previous_name: str = ""


def distill(
    subject: Subject,
    data: Data,
    output: Path,
    options: DistillOptions,
    observer: Observer,
    *,
    read_by: Mapping[str, Any] = NOTHING,
) -> Judgement:
    """Train a draft for a target, and write its folder.

    A run that was stopped goes on when it is called again; with `steps` rather than `minutes`, the
    weights are then the same, byte for byte, as without the stop, on the same machine.

    Args:
        subject: What the draft is for.
        data: The prompts.
        output: The folder to write. Meanwhile the run works in OUTPUT.distill beside it.
        options: How to train.
        observer: Watches.
        read_by: Options that the data were read by, as values of JSON. A run goes on with the same
            alone.

    Raises:
        ValueError: If the output exists, the options do not fit the target, or the run that was
            stopped was another one.
        OSError: If something cannot be written.
    """
    check_output(output)
    check_options(subject.target, options)
    folder = RunFolder(output)
    settings = {
        **asdict(replace(options, steps=options.num_steps)),
        **read_by,
        "dtype": str(subject.target.dtype).removeprefix("mlx.core."),
        "data": data.digest[:DIGITS],
        "target": sha256(sample_weights(subject.target).encode()).hexdigest()[:DIGITS],
    }
    with folder.begun(settings):
        run = _Run(subject, data, folder, options, observer)
        valid, train = run.label()
        draft, history = run.train(train, valid)
        return run.judge(draft, valid, history, output)


def check_output(output: Path) -> None:
    """Refuse an output that exists."""
    if output.exists():
        raise ValueError(f"{output} exists: choose another --output, or delete it")


def check_options(target: T5, options: DistillOptions) -> None:
    """Refuse options that do not fit the target."""
    depth, size = target.config.num_decoder_layers, target.vocab_size
    if options.layers > depth:
        raise ValueError(
            f"layers must be at most {depth}, the target's own decoder layers, got {options.layers}"
        )
    vocab, least = options.draft_vocab, target.eos_token_id + 1
    if vocab is not None and not least <= vocab <= size:
        raise ValueError(f"draft_vocab must be from {least} to {size}, got {vocab}")


def new_draft(target: T5, options: DistillOptions) -> SharingDraft:
    """Return a draft with copies of the target's layers."""
    config = SharingConfig(options.layers, target.config.d_ff, options.draft_vocab)
    draft = SharingDraft(target, config)
    copy_layers(draft)
    return draft


class _Run:
    def __init__(
        self,
        subject: Subject,
        data: Data,
        folder: RunFolder,
        options: DistillOptions,
        observer: Observer,
    ) -> None:
        self._subject = subject
        self._data = data
        self._folder = folder
        self._options = options
        self._observer = observer
        self._began = time.perf_counter()

    def label(self) -> tuple[list[Label], list[Label]]:
        """Label the prompts, those held out first; return held-out labels and others."""
        # The draft will be judged by what the target says, whatever the file gives.
        held_out = [replace(example, completion=None) for example in self._data.valid]
        valid = self._label("valid", held_out, None)
        known = self._folder.read("labelled.json")
        examples = self._data.train[: known["train"]] if known else self._data.train
        train = self._label("train", examples, self._budget())
        if known is None:
            self._folder.write("labelled.json", {"train": len(train)})
        return valid, train

    def _budget(self) -> float | None:
        """Return the seconds for labelling, if the whole run has a limit."""
        minutes = self._options.minutes
        return None if minutes is None else 60 * minutes * LABEL_SHARE

    def _judging_seconds(self) -> float:
        minutes = self._options.minutes
        return MAX_JUDGING if minutes is None else 60 * minutes * JUDGE_SHARE

    def _label(self, split: str, examples: Sequence[Example], budget: float | None) -> list[Label]:
        options, began = self._options, time.perf_counter()
        wanted = (options.num_steps or 0) * options.batch_tokens

        def enough(labels: Sequence[Label]) -> bool:
            if split == "valid":
                return False
            if budget is not None:
                return time.perf_counter() - began > budget
            return sum(len(each.prompt) + len(each.tokens) for each in labels) >= wanted

        temperature = 0.0 if split == "valid" else options.temperature

        def progress(done: int, tokens: int) -> None:
            self._observer.labelled(split, done, len(examples), tokens)

        return label(
            self._subject.target, examples, self._folder.path / f"{split}.jsonl",
            max_tokens=options.max_tokens, temperature=temperature, seed=options.seed,
            batch_size=options.label_batch, chunk=LABEL_CHUNK, enough=enough, progress=progress,
        )  # fmt: skip

    def train(
        self, labels: Sequence[Label], valid: Sequence[Label]
    ) -> tuple[SharingDraft, list[dict[str, Any]]]:
        """Train, and return the draft and the history of its loss and its tokens per pass."""
        folder = self._folder
        steps = self._steps(labels)
        training = self._training(labels, steps)
        state = folder.path / "state.safetensors"
        if state.exists():
            training.restore(state)
        known = folder.read("progress.json") or {"losses": [], "history": []}
        losses: list[float] = known["losses"][: training.step_number]
        history = [each for each in known["history"] if each["step"] <= training.step_number]
        every, saved = max(1, steps // CHECKS), time.perf_counter()
        while (step := training.step_number + 1) <= steps:
            losses.append(training.step())
            self._observer.trained(step, steps, losses[-1])
            if step % every == 0 or step == steps:
                since = losses[history[-1]["step"] if history else 0 :]
                history.append(self._check(training.draft, valid, step, since))
            late = time.perf_counter() - saved > SAVE_SECONDS
            if step % SAVE_EVERY == 0 or step == steps or late:
                folder.write("progress.json", {"losses": losses, "history": history})
                training.save(state)
                saved = time.perf_counter()
        return training.draft, history

    def _check(
        self, draft: SharingDraft, valid: Sequence[Label], step: int, losses: Sequence[float]
    ) -> dict[str, Any]:
        """Compare the draft with held-out labels; return a record of the history."""
        found = agreement(draft, valid, self._options.batch_tokens)
        tokens = found.tokens_per_pass(CHECK_DRAFT)
        self._observer.checked(step, tokens, found.rate)
        loss = sum(losses) / len(losses)
        return {"step": step, "loss": loss, "tokens_per_pass": tokens, "agreement": found.rate}

    def _training(self, labels: Sequence[Label], steps: int) -> Training:
        options = self._options
        chosen = TrainingOptions(
            steps, options.batch_tokens, options.learning_rate, options.loss, options.seed
        )
        return Training(new_draft(self._subject.target, options), labels, chosen)

    def _steps(self, labels: Sequence[Label]) -> int:
        """Return the number of steps; where minutes are given, from the time of a few of them."""
        options, folder = self._options, self._folder
        if options.num_steps is not None:
            return options.num_steps
        assert options.minutes is not None
        if (known := folder.read("steps.json")) is not None:
            return int(known["steps"])
        trial = self._training(labels, 10**6)
        seconds = []
        for _ in range(TRIAL + 1):
            began = time.perf_counter()
            trial.step()
            seconds.append(time.perf_counter() - began)
        left = 60 * options.minutes * (1 - JUDGE_SHARE) - (time.perf_counter() - self._began)
        steps = max(1, int(left / median(seconds[1:])))
        folder.write("steps.json", {"steps": steps})
        return steps

    def judge(
        self,
        trained: SharingDraft,
        valid: Sequence[Label],
        history: Sequence[Mapping[str, Any]],
        output: Path,
    ) -> Judgement:
        """Judge the draft as it will be loaded, and write its folder."""
        subject, options, folder = self._subject, self._options, self._folder
        target = subject.target
        draft_folder = folder.path / "draft"
        save_draft(draft_folder, trained, subject.name)
        draft = load_draft(draft_folder, target)
        found = agreement(draft, valid, options.batch_tokens)
        made_by = {name: value for name, value in asdict(options).items() if value is not None}
        judgement = judge(
            target, draft, subject.tokenizer, [each.prompt for each in valid], found,
            previous=subject.previous, target_name=subject.name, draft_name=output.name,
            previous_name=subject.previous_name, made_by=made_by, max_tokens=options.max_tokens,
            max_seconds=self._judging_seconds(), progress=self._observer.judging,
        )  # fmt: skip
        folder.write("judgement.json", judgement.to_json())
        folder.write("history.json", history)
        readme = folder.path / "README.md"
        readme.write_text(judgement.as_markdown(), encoding="utf-8")
        files = [readme, folder.path / "judgement.json", folder.path / "history.json"]
        save_draft(output, draft, subject.name, files=files)
        folder.remove()
        return judgement
