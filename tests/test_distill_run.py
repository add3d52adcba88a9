"""Whole runs of `distill` on a tiny target: they train, and go on after a kill."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.decoding import calibration
from speculative_t5.distill import (
    Data,
    DistillOptions,
    Example,
    Judgement,
    Subject,
    budget,
    distill,
    judge,
    new_draft,
)
from speculative_t5.distill import run as stages
from speculative_t5.distill.labels import Label
from speculative_t5.distill.training import Training, TrainingOptions
from speculative_t5.models.t5.model import T5

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS, REPOSITORY, tiny_model
from messages import check_message
from test_sharing import TARGETS, make_target

pytestmark = pytest.mark.cpu  # weights are compared byte for byte

STEPS = 14
SHORT = DistillOptions(steps=STEPS, batch_tokens=100, learning_rate=3e-3, max_tokens=8)


def target(**changes: Any) -> T5:
    """A target whose outputs vary, some ending and some cut."""
    return tiny_model(**{"vocab_size": 20, "seed": 18, "layers": 2} | changes)


def examples(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, 20) for _ in range(rng.randrange(1, 7))] for _ in range(count)]
    return [Example(line, [*ids, EOS], None) for line, ids in enumerate(prompts, 1)]


DATA = Data(examples(60, 1), examples(8, 2), 70, {"empty": 2}, "0123456789abcdef" * 4)


class Watch:
    """Keeps all that a run reports, and calls `act` at each report."""

    def __init__(self, act: Callable[[str, Any], None] = lambda kind, at: None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._act = act

    def labelled(self, split: str, done: int, total: int, tokens: int) -> None:
        self._report(split, done, total, tokens)

    def trained(self, step: int, steps: int, loss: float) -> None:
        self._report("trained", step, steps, loss)

    def checked(self, step: int, tokens_per_pass: float, agreement: float) -> None:
        self._report("checked", step, tokens_per_pass, agreement)

    def judging(self, done: int, total: int) -> None:
        self._report("judging", done, total)

    def _report(self, kind: str, *values: Any) -> None:
        self.seen.append((kind, *values))
        self._act(kind, values[0])

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [values for found, *values in self.seen if found == kind]  # type: ignore[misc]


def go(
    output: Path,
    watch: Watch | None = None,
    options: DistillOptions = SHORT,
    data: Data = DATA,
    model: T5 | None = None,
    **more: Any,
) -> Judgement:
    subject = Subject(model or target(), None, "tiny")
    short = {"LABEL_CHUNK": 16, "SAVE_EVERY": 4, "CHECKS": 5, "SAVE_SECONDS": 1e9}
    with mock.patch.multiple(stages, judge=partial(judge, turns=1, max_prompts=2), **short):
        return distill(subject, data, output, options, watch or Watch(), **more)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations are not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    for name in ("BUDGET", "WARMUP"):
        monkeypatch.setattr(calibration, name, 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "draft"
    go(output)
    return output


# A call of the system may be the moment, too: before it, what it would write is not there.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import speculative_t5
from test_distill_run import Watch, go
kind, at = sys.argv[2], sys.argv[3]
def act(found, value):
    if (found, str(value)) == (kind, at):
        os.kill(os.getpid(), signal.SIGKILL)
counts = {}
def fatal(call):
    whole = getattr(os, call)
    def replaced(old, new):
        name = f"{call} {Path(new).name}"
        counts[name] = counts.get(name, 0) + 1
        act(name, counts[name])
        whole(old, new)
    return replaced
os.replace, os.rename = fatal("replace"), fatal("rename")
rmtree = shutil.rmtree
def removed(path, **options):
    act("rmtree", Path(path).name)
    rmtree(path, **options)
shutil.rmtree = removed
go(Path(sys.argv[1]), Watch(act))
"""


@pytest.mark.parametrize(
    ("kills", "first"),
    [
        # Before there are settings, in the first chunk, in the last one of the prompts to train on,
        # and between the stages.
        (
            [
                ("replace settings.json", 1),
                ("valid", 5),
                ("train", 50),
                ("replace labelled.json", 1),
            ],
            1,
        ),
        # Before any state, between the history and the state of step 8, and after that of step 8.
        ([("trained", 3), ("replace state.safetensors", 2), ("checked", 9)], 9),
        ([("judging", 1), ("judging", 3), ("rename draft", 2)], None),
        ([("rmtree", "draft.distill")], None),
    ],
    ids=["label", "train", "judge", "end"],
)
def test_a_killed_run_gives_the_same_bytes(
    kills: list[tuple[str, int | str]], first: int | None, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "draft"
    places = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    for kind, at in kills:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(output), kind, str(at)],
            env=os.environ | {"PYTHONPATH": places}, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert output.exists() == (kind == "rmtree")
    watch = Watch()
    judgement = go(output, watch)
    stored = json.loads((output / "judgement.json").read_text())
    assert Judgement.from_json(stored) == judgement
    labelled = [watch.of(split)[-1][0] for split in ("valid", "train")]
    assert labelled == [len(DATA.valid), len(DATA.train)]
    steps = [step for step, *_ in watch.of("trained")]
    assert steps == ([] if first is None else list(range(first, STEPS + 1))), "it went on"
    for name in ("weights.npz", "history.json", "config.json"):
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["draft"], "nothing else is left"


def test_a_draft_learns_and_loads_beside_its_target_alone(tmp_path: Path) -> None:
    output, watch, model = tmp_path / "draft", Watch(), target()
    options = replace(SHORT, steps=120, batch_tokens=300, learning_rate=1e-2)
    go(output, watch, options, replace(DATA, train=examples(300, 3)), model)
    losses = [loss for _, _, loss in watch.of("trained")]
    assert len(losses) == 120 and sum(losses[-20:]) < 0.7 * sum(losses[:20])
    checks = watch.of("checked")
    assert checks[-1][2] > checks[0][2] and checks[-1][2] > 0.5
    records = json.loads((output / "history.json").read_text())
    assert [r["step"] for r in records] == [24, 48, 72, 96, 120]
    assert [r["tokens_per_pass"] for r in records] == [tokens for _, tokens, _ in checks]
    assert records[1]["loss"] == pytest.approx(sum(losses[24:48]) / 24)

    draft, tokenizer = load(output, target=model)
    assert tokenizer is None
    prompts = [example.prompt for example in DATA.valid]
    plain = [SpeculativeDecoder(model).generate(each, max_tokens=8) for each in prompts]
    fast = SpeculativeDecoder(model, draft, num_draft=5)
    drafted = [fast.generate(each, max_tokens=8) for each in prompts]
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    rounds = sum(each.stats.rounds for each in drafted)
    emitted = sum(each.stats.emitted for each in drafted)
    assert emitted / rounds == pytest.approx(checks[-1][1], rel=0.02), "it was counted right"
    with pytest.raises(ValueError) as caught:
        load(output, target=target(seed=19))
    check_message(str(caught.value), "is a draft for tiny, and the target is another model")


@pytest.mark.parametrize("kind", [*TARGETS, "float16"])
@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
def test_a_copy_of_all_layers_has_nothing_to_learn(loss: Any, kind: str) -> None:
    model = make_target("plain" if kind == "float16" else kind)
    if kind == "float16":
        model.set_dtype(mx.float16)
    labels = [Label(e.line, e.prompt, [*e.prompt[:-1], 5, EOS]) for e in DATA.train]
    draft = new_draft(model, DistillOptions(layers=3))
    training = Training(draft, labels, TrainingOptions(1, 200, 1e-3, loss, 0))
    rounded = {"bfloat16": 0.05, "float16": 1e-2, "quantized": 1e-2}  # of the target's passes
    assert abs(training.step()) < rounded.get(kind, 1e-4)


class Stop(Exception):
    """Ends a run at a report."""


def labels_of(folder: Path, **changes: Any) -> tuple[list[Any], list[Any]]:
    """The held-out labels and the others of a run with some options."""

    def act(kind: str, _: object) -> None:
        if kind == "trained":
            raise Stop

    output = folder / "draft"
    with pytest.raises(Stop):
        go(output, Watch(act), replace(SHORT, **changes.pop("options", {})), **changes)
    found = [
        [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
        for name in ("valid", "train")
        if (path := folder / "draft.distill" / f"{name}.jsonl")
    ]
    return found[0], found[1]


def test_labels_are_greedy_sampled_or_given(tmp_path: Path) -> None:
    greedy = labels_of(tmp_path / "greedy")
    decoder = SpeculativeDecoder(target())
    for data, labels in zip((DATA.valid, DATA.train), greedy, strict=True):
        for example, tokens in zip(data, labels, strict=True):
            done = decoder.generate(example.prompt, max_tokens=8)
            assert tokens == done.tokens + [EOS] * (done.finish_reason == "eos")
    sampled = labels_of(tmp_path / "sampled", options={"temperature": 1.0})
    assert sampled[0] == greedy[0], "the judgement is about greedy outputs"
    assert sampled[1] != greedy[1]
    given = replace(
        DATA,
        valid=[replace(each, completion=[9, EOS]) for each in DATA.valid],
        train=[replace(each, completion=[7, 7, EOS]) for each in DATA.train],
    )
    valid, train = labels_of(tmp_path / "given", data=given)
    assert train == [[7, 7, EOS]] * len(DATA.train)
    assert valid == greedy[0], "what the target says is what is judged by"


def test_no_more_is_labelled_than_the_steps_use(tmp_path: Path) -> None:
    _, train = labels_of(tmp_path, options={"steps": 2, "batch_tokens": 50})
    assert len(train) == 16, "one chunk"


class Clock:
    """A clock that goes on only as a run's work is done, each piece by its own seconds."""

    COSTS: ClassVar = {"valid": 0.5, "train": 0.5, "step": 3.0, "check": 9.0, "save": 6.0}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.max_seconds = 0.0
        for module in (budget, stages):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        for name, method in (("step", "step"), ("save", "save")):
            self._slow(monkeypatch, Training, method, self.COSTS[name])
        self._slow(monkeypatch, stages, "agreement", self.COSTS["check"])
        monkeypatch.setattr(stages, "judge", self._judge)

    def _slow(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, cost: float) -> None:
        whole = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.now += cost
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    def _judge(self, *args: Any, max_seconds: float, **options: Any) -> Judgement:
        self.now += max_seconds
        self.max_seconds = max_seconds
        return judge(*args, max_seconds=0.0, turns=1, **options)

    def label(self, kind: str, _: object) -> None:
        self.now += self.COSTS.get(kind, 0.0) if kind in ("valid", "train") else 0.0


@pytest.mark.parametrize("stop", [None, ("train", 3), ("trained", 40)], ids=str)
def test_a_run_takes_the_minutes_it_was_given(
    stop: tuple[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of a process that was stopped count, too."""
    output, clock = tmp_path / "draft", Clock(monkeypatch)
    options = replace(SHORT, steps=None, minutes=10.0, label_batch=4)

    def act(kind: str, value: Any) -> None:
        clock.label(kind, value)
        if (kind, value) == stop:
            raise Stop

    data = replace(DATA, train=examples(900, 3), valid=examples(300, 4))
    with mock.patch.multiple(stages, judge=clock._judge, SAVE_EVERY=10, CHECKS=5):
        subject = Subject(target(), None, "tiny")
        if stop is not None:
            with pytest.raises(Stop):
                distill(subject, data, output, options, Watch(act))
        watch = Watch(clock.label)
        distill(subject, data, output, options, watch)
    assert 0.8 * 600 < clock.now < 1.1 * 600
    assert 40 < clock.max_seconds < 90
    done = {split: watch.of(split)[-1] for split in ("valid", "train")}
    assert done["valid"][0] < 300 and done["train"][0] < 900
    totals = {total for _, total, _ in watch.of("trained")}
    assert len(totals) == 1 and totals.pop() > 50


def test_a_draft_of_a_smaller_vocabulary_proposes_nothing_else(tmp_path: Path) -> None:
    model, output = target(), tmp_path / "draft"
    go(output, options=replace(SHORT, draft_vocab=6), model=model)
    draft, _ = load(output, target=model)
    assert draft.draft_vocab == 6
    done = SpeculativeDecoder(model, draft, num_draft=3).generate(DATA.valid[0].prompt)
    assert done.tokens == SpeculativeDecoder(model).generate(DATA.valid[0].prompt).tokens


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"options": replace(SHORT, learning_rate=0.01)},
            "with --learning-rate 0.003, and this one has --learn",
        ),
        ({"options": replace(SHORT, steps=9)}, "with --steps 14, and this one has --steps 9"),
        (
            {"options": replace(SHORT, steps=None, minutes=1.0)},
            "with --steps 14, and this one has no --steps",
        ),
        ({"data": replace(DATA, digest="f" * 64)}, "begun with other data"),
        ({"model": target(seed=19)}, "begun with another target"),
        (
            {"read_by": {"prefix": "correct: "}},
            "no --prefix, and this one has --prefix 'correct: '",
        ),
    ],
    ids=["learning_rate", "steps", "minutes", "data", "target", "prefix"],
)
def test_a_resumed_run_must_be_the_same(
    changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    labels_of(tmp_path)
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft", **changes)
    check_message(str(caught.value), found)
    go(tmp_path / "draft", options=replace(SHORT))


def test_one_process_at_a_time_works_on_a_draft(tmp_path: Path) -> None:
    def act(kind: str, _: object) -> None:
        if kind == "trained":
            with pytest.raises(ValueError) as caught:
                go(tmp_path / "draft")
            check_message(str(caught.value), "another process is at work in")
            raise Stop

    with pytest.raises(Stop):
        go(tmp_path / "draft", Watch(act))


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "draft.distill"
    folder.mkdir()
    files = {"thesis.txt": "all of it", "lock": "a key", "settings.json.new": "{"}
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft")
    check_message(str(caught.value), "exists and is not the working folder of a run")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_an_output_that_appears_during_the_run_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "draft"

    def act(kind: str, at: object) -> None:
        if (kind, at) == ("judging", 1):
            output.mkdir()
            (output / "weights.npz").write_text("another model")

    with pytest.raises(ValueError) as caught:
        go(output, Watch(act))
    check_message(str(caught.value), f"{output} exists")
    assert [path.read_text() for path in output.iterdir()] == ["another model"]
    shutil.rmtree(output)
    assert go(output).draft == "draft"


def test_a_run_that_diverges_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft", options=replace(SHORT, learning_rate=1e30))
    check_message(str(caught.value), "the loss is nan at step 2")
    assert not (tmp_path / "draft").exists()


def test_a_draft_is_rounded_once_whatever_the_targets_type(tmp_path: Path) -> None:
    model = target()
    model.set_dtype(mx.bfloat16)
    go(tmp_path / "draft", model=model)
    weights = [mx.array(each) for each in np.load(tmp_path / "draft" / "weights.npz").values()]
    assert all(weight.dtype == mx.float16 for weight in weights)
    coarser = [weight.astype(mx.bfloat16).astype(mx.float16) for weight in weights]
    assert not any(mx.array_equal(*pair) for pair in zip(weights, coarser, strict=True))
