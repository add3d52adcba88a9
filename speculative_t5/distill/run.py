"""A whole run: label, train, judge; each stage resumes where a killed one has stopped."""

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any, get_origin, get_type_hints

from ..checkpoints import dtype_name, load_draft, save_draft
from ..errors import read_json, shown
from ..files import PARTIAL_PREFIX, lock, write_whole
from ..models import EncoderDecoder, SharingConfig, SharingDraft, copy_layers, sample_weights
from ..options import option_error
from .data import Data, Example
from .judgement import DistillTask, Judgement, judge
from .labels import Label, label
from .training import MIN_WIDTH, DistillOptions, Training, agreement

RUN_SUFFIX = ".distill"
STATE_FILE = "run.json"  # its `_State`
DIGESTED = {"data": "other data", "target": "another target"}  # settings that are digests
LABEL_CHUNK = 256  # prompts that are labelled between two syncs with the disk, at most
HELD_OUT_SHARE, LABEL_SHARE = 0.15, 0.4  # of the minutes, after which labels are enough
JUDGE_SHARE = 0.1  # of the minutes, left for judging
CHECK_SHARE = 0.2  # of the training, that measuring tokens per pass meanwhile may take
MAX_JUDGING = 900.0  # seconds
SAVE_EVERY, SAVE_SECONDS = 100, 60.0  # steps or seconds between saved states
MAX_CHECKS = 20  # times that tokens per pass are measured, at most
CHECK_DRAFT = 5  # the number of drafted tokens they are measured at
DIGEST_DIGITS = 12  # of digests


@dataclass(frozen=True)
class StageProgress:
    """How far a run is in one of its stages."""

    stage: str  # "labelling held-out prompts", "labelling prompts", "training" or "judging"
    done: int  # prompts, steps or outputs
    total: int  # in the end, as far as is known
    tokens: int = 0  # in the labels
    loss: float = 0.0  # of the step, per token
    tokens_per_pass: float | None = None  # on held-out prompts, if measured after this step


ReportProgress = Callable[[StageProgress], None]


def distill(
    task: DistillTask,
    data: Data,
    output: Path,
    options: DistillOptions,
    report: ReportProgress,
    *,
    read_by: Mapping[str, Any],
) -> Judgement:
    """Train a draft for a target, and write its folder.

    A run that was stopped resumes when it is called again; with `steps` rather than `minutes`, the
    weights are then the same, byte for byte, as without the stop, on the same machine. Meanwhile
    it works in OUTPUT.distill. `report` is called after each prompt, step and output. `read_by` are
    the options that the data were read by; a run resumes with the same ones only.

    Raises:
        ValueError: If the output exists, the options do not fit the target, the run that was
            stopped was another one, or the training diverges.
    """
    refuse_existing(output)
    check_fit(task.target, options, task.start)
    folder, draft = RunFolder(output), new_draft(task.target, options, task.start)
    settings = {
        **asdict(replace(options, steps=options.num_steps)),
        **read_by,
        "d_model": draft.config.d_model,
        "dtype": dtype_name(task.target.dtype),
        "data": data.digest[:DIGEST_DIGITS],
        "target": sha256(sample_weights(task.target).encode()).hexdigest()[:DIGEST_DIGITS],
        "start_from": task.start.fingerprint[:DIGEST_DIGITS] if task.start else None,
    }
    with folder.begun(settings) as state:
        run = _DistillRun(task, data, folder, state, options, report)
        valid, train = run.label()
        run.train(draft, train, valid)
        return run.judge(draft, valid, output)


def refuse_existing(output: Path) -> None:
    """Refuse an output that exists."""
    if output.exists():
        raise ValueError(f"{output} exists: choose another --output, or delete it")


def check_fit(
    target: EncoderDecoder, options: DistillOptions, start: SharingDraft | None = None
) -> None:
    """Refuse options that do not fit the target, or the draft to train further."""
    config, size, vocab = target.config, target.info.vocab_size, options.draft_vocab
    if options.layers is not None and options.layers > (most := config.num_decoder_layers):
        expected = f"at most {most}, the target's own decoder layers"
        raise option_error("layers", expected, options.layers)
    if options.d_model is not None and options.d_model > (most := config.d_model):
        raise option_error("d_model", f"at most {most}, the target's own", options.d_model)
    if vocab is not None and not (least := target.info.eos_token_id + 1) <= vocab <= size:
        raise option_error("draft_vocab", f"from {least} to {size}", vocab)
    if start is not None:
        sizes = start.config
        own = {"layers": sizes.num_decoder_layers, "d_model": sizes.d_model}
        for name, has in own.items():
            if (asked := getattr(options, name)) not in (None, has):
                raise option_error(name, f"{has}, as the first draft has", asked)
        if (has := start.own.block) not in (1, options.block):
            raise option_error("block", f"{has}, as the first draft has", options.block)


def new_draft(
    target: EncoderDecoder, options: DistillOptions, start: SharingDraft | None = None
) -> SharingDraft:
    """Return a draft with copies of the target's layers, or of the draft to start from."""
    ids, block = options.draft_vocab, options.block
    if start is not None:
        draft = SharingDraft(target, replace(start.own, draft_vocab=ids, block=block))
        draft.update(start.parameters())
        return draft
    whole, d_ff = target.config.d_model, target.config.d_ff
    width = options.d_model or min(whole, max(whole // 4, MIN_WIDTH))
    own = None if width == whole else width
    draft = SharingDraft(target, SharingConfig(options.layers or 1, d_ff, ids, block, own))
    copy_layers(draft)
    return draft


@dataclass
class _State:
    """What a run keeps in run.json, with which it resumes."""

    settings: dict[str, Any]
    seconds: float = 0.0  # in all its processes
    labelled: dict[str, int] = field(default_factory=dict)  # prompts, by split, where it is done
    training_began: float = 0.0  # after so many seconds
    losses: list[float] = field(default_factory=list)  # by step
    history: list[dict[str, Any]] = field(default_factory=list)  # by check


class RunFolder:
    """OUTPUT.distill, beside the output; removed when the output is complete."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + RUN_SUFFIX)

    @contextmanager
    def begun(self, settings: dict[str, Any]) -> Iterator[_State]:
        """Make the folder, or resume its run if the settings are the same; lock it meanwhile."""
        path = self.path / STATE_FILE
        if self.path.exists() and not path.exists():
            # A run killed at its very start leaves these.
            first = ("lock", PARTIAL_PREFIX)
            if any(not path.name.startswith(first) for path in self.path.iterdir()):
                raise ValueError(
                    f"{self.path} exists and is not the working folder of a run: "
                    "choose another --output"
                )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what prompts say
        with (self.path / "lock").open("a") as file:
            lock(file.fileno(), f"another process is at work in {self.path}: wait for it to end")
            if not path.exists():
                self.write(STATE_FILE, asdict(_State(settings)))
            state = _read_state(path)
            self._check_settings(state.settings, settings)
            yield state

    def _check_settings(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Refuse settings other than those that the run was started with."""
        for name, value in new.items():
            if old.get(name) == value:
                continue
            before, now = DIGESTED.get(name), ""
            if before is None:
                before = _as_option(name, old.get(name))
                now = f", and this one has {_as_option(name, value)}"
            raise ValueError(
                f"the run in {self.path} was started with {before}{now}: "
                "use the same to resume it, or delete the folder to start over"
            )

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, (json.dumps(value, indent=2) + "\n").encode())


def _read_state(path: Path) -> _State:
    again = "delete the folder to start over"
    found = read_json(path, again=again)
    for entry, kind in get_type_hints(_State).items():
        if not isinstance(value := found.get(entry), get_origin(kind) or kind):
            raise ValueError(f"{path} has {shown(value)} as {entry}: {again}")
    return _State(**{entry: found[entry] for entry in get_type_hints(_State)})


def _as_option(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return f"no {option}" if value is None else f"{option} {shlex.quote(str(value))}"


@dataclass
class _DistillRun:
    """The stages of a run, in its folder."""

    task: DistillTask
    data: Data
    folder: RunFolder
    state: _State
    options: DistillOptions
    report: ReportProgress

    def __post_init__(self) -> None:
        self._began = perf_counter() - self.state.seconds  # if nothing had stopped it
        minutes = self.options.minutes
        self._limit = math.inf if minutes is None else 60 * minutes
        self._check_took = 0.0  # seconds

    @property
    def spent(self) -> float:
        """Seconds that the run has taken, those between its processes left out."""
        return perf_counter() - self._began

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the minutes is spent, if there are minutes."""
        return max(0.0, self._limit * share - self.spent)

    def save(self) -> None:
        self.state.seconds = self.spent
        self.folder.write(STATE_FILE, asdict(self.state))

    def label(self) -> tuple[list[Label], list[Label]]:
        """Label the prompts, those held out first; return held-out labels and others."""
        options, train = self.options, self.data.train
        # The draft will be judged by what the target says, whatever the file gives.
        valid = [replace(example, completion=None) for example in self.data.valid]
        wanted = (options.num_steps or math.inf) * options.batch_tokens
        return (
            self._label("valid", valid, "labelling held-out prompts", HELD_OUT_SHARE, 0.0),
            self._label(
                "train", train, "labelling prompts", LABEL_SHARE, options.temperature, wanted
            ),
        )

    def _label(
        self,
        split: str,
        examples: Sequence[Example],
        stage: str,
        share: float,
        temperature: float,
        wanted: float = math.inf,
    ) -> list[Label]:
        """Label until there are `wanted` tokens, or a share of the minutes is spent."""
        options, labelled = self.options, self.state.labelled
        examples = examples[: labelled.get(split)]
        chunk = LABEL_CHUNK
        if options.minutes is not None:  # the time is looked at after each chunk
            chunk = min(chunk, 8 * options.label_batch)
        first: tuple[int, float] | None = None  # labels and time at the first report
        sources = sum(len(each.prompt) for each in examples) / len(examples)

        def enough(labels: Sequence[Label]) -> bool:
            self.save()
            tokens = sum(len(each.prompt) + len(each.tokens) for each in labels)
            return not self.left(share) or tokens >= wanted

        def progress(done: int, tokens: int) -> None:
            nonlocal first
            first = first or (done, self.spent)
            total: float = len(examples)
            if new := done - first[0]:
                seconds = max(self.spent - first[1], 1e-9)
                by_time = done + new * self.left(share) / seconds
                total = min(total, by_time, max(done, wanted / (sources + tokens / done)))
            self.report(StageProgress(stage, done, round(total), tokens))

        labels = label(
            self.task.target,
            examples,
            self.folder.path / f"{split}.jsonl",
            max_tokens=options.max_tokens,
            temperature=temperature,
            seed=options.seed,
            batch_size=options.label_batch,
            chunk=chunk,
            enough=enough,
            progress=progress,
        )
        tokens = sum(len(each.tokens) for each in labels)
        self.report(StageProgress(stage, len(labels), len(labels), tokens))
        labelled[split] = len(labels)
        self.save()
        return labels

    def train(self, draft: SharingDraft, labels: Sequence[Label], valid: Sequence[Label]) -> None:
        """Train the draft, and keep the losses and the history of tokens per pass in the state."""
        options, state, path = self.options, self.state, self.folder.path / "state.safetensors"
        state.training_began = state.training_began or self.spent
        training = Training(draft, labels, options)
        if path.exists():
            training.restore(path)
        # Steps after the saved one are taken again.
        losses = state.losses = state.losses[: training.step_number]
        state.history = [each for each in state.history if each["step"] <= training.step_number]
        saved, checked = perf_counter(), -math.inf
        while (done := self._trained(training.step_number)) < 1:
            losses.append(training.step(done))
            step = training.step_number
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"the loss is {losses[-1]} at step {step}: delete {self.folder.path} and use a "
                    "smaller --learning-rate"
                )
            tokens, before, done = None, done, self._trained(step)
            is_time = int(MAX_CHECKS * before) < int(MAX_CHECKS * done)
            if options.minutes is not None:
                is_time &= perf_counter() - checked > self._check_took / CHECK_SHARE
            if done >= 1 or is_time:
                checked = perf_counter()
                tokens = self._check(draft, valid, step)
            total = round(step / min(done, 1.0))
            self.report(
                StageProgress("training", step, total, loss=losses[-1], tokens_per_pass=tokens)
            )
            late = perf_counter() - saved > SAVE_SECONDS
            if step % SAVE_EVERY == 0 or done >= 1 or late:
                self.save()
                training.save(path)
                saved = perf_counter()

    def _check(self, draft: SharingDraft, valid: Sequence[Label], step: int) -> float:
        """Note in the history how good the draft is after a step; return its tokens per pass."""
        began, state = perf_counter(), self.state
        found = agreement(draft, valid, self.options.batch_tokens)
        self._check_took = perf_counter() - began
        tokens = found.tokens_per_pass(CHECK_DRAFT)
        since = state.losses[state.history[-1]["step"] if state.history else 0 :]
        state.history.append(
            {
                "step": step,
                "loss": sum(since) / len(since),
                "tokens_per_pass": tokens,
                "agreement": found.rate,
            }
        )
        return tokens

    def _trained(self, steps: int) -> float:
        """Return the share of the training that is done after some steps; 1 ends it."""
        if self.options.num_steps is not None:
            return steps / self.options.num_steps
        if steps == 0:
            return 0.0
        # The draft is compared twice more: at the end, and as it will be loaded.
        until = self._limit * (1 - JUDGE_SHARE) - 2 * self._check_took
        began = self.state.training_began
        return 1.0 if until <= began else (self.spent - began) / (until - began)

    def judge(self, trained: SharingDraft, valid: Sequence[Label], output: Path) -> Judgement:
        """Judge the draft as it will be loaded, and write its folder."""
        task, options, folder, state = self.task, self.options, self.folder, self.state
        save_draft(folder.path / "draft", trained, task.name)
        draft = load_draft(folder.path / "draft", task.target)
        found = agreement(draft, valid, options.batch_tokens)
        done = state.labelled
        made = {"steps": len(state.losses), "labels": done["train"], "held_out": done["valid"]}
        made_by = {k: v for k, v in (state.settings | made).items() if v is not None}
        judgement = judge(
            task,
            draft,
            output.name,
            [each.prompt for each in valid],
            found,
            max_tokens=options.max_tokens,
            max_seconds=MAX_JUDGING if options.minutes is None else self.left(),
            made_by=made_by,
            progress=lambda done, total: self.report(StageProgress("judging", done, total)),
        )
        folder.write("judgement.json", judgement.to_json())
        folder.write("history.json", state.history)
        (folder.path / "README.md").write_text(judgement.as_markdown(), encoding="utf-8")
        files = [folder.path / name for name in ("README.md", "judgement.json", "history.json")]
        refuse_existing(output)  # the name may have been taken meanwhile
        # Not the loaded one, which was rounded to the target's type.
        save_draft(output, trained, task.name, files=files)
        shutil.rmtree(folder.path, ignore_errors=True)
        return judgement
