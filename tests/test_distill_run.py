"""Whole runs of `distill` on a tiny target: what they learn and write, and what they take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.distill import (
    DistillOptions,
    Judgement,
    Label,
    Task,
    distill,
    judge,
    new_draft,
)
from speculative_t5.distill import run as stages
from speculative_t5.distill.training import Training

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS
from distilling import DATA, SHORT, Stop, Watch, examples, go, labels_of, target
from messages import check_message
from test_sharing import TARGETS, make_target

# Weights are compared byte for byte.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("quick")]


def test_a_draft_learns_and_loads_beside_its_target_alone(tmp_path: Path) -> None:
    output, watch, model = tmp_path / "draft", Watch(), target()
    options = replace(SHORT, steps=120, batch_tokens=300, learning_rate=1e-2)
    go(output, watch, options, replace(DATA, train=examples(300, 3)), model)
    losses = [now.loss for now in watch.of("trained")]
    assert len(losses) == 120 and sum(losses[-20:]) < 0.7 * sum(losses[:20])
    checks = [now.tokens_per_pass for now in watch.of("trained") if now.tokens_per_pass]
    records = json.loads((output / "history.json").read_text())
    assert [r["step"] for r in records] == [24, 48, 72, 96, 120]
    assert [r["tokens_per_pass"] for r in records] == checks
    assert records[-1]["agreement"] > max(records[0]["agreement"], 0.5)
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
    assert emitted / rounds == pytest.approx(checks[-1], rel=0.02), "it was counted right"
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
    options = DistillOptions(layers=3, batch_tokens=200, loss=loss)
    training = Training(new_draft(model, options), labels, options, steps=1)
    rounded = {"bfloat16": 0.05, "float16": 1e-2, "quantized": 1e-2}  # of the target's passes
    assert abs(training.step()) < rounded.get(kind, 1e-4)


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


def test_a_draft_of_a_smaller_vocabulary_proposes_nothing_else(tmp_path: Path) -> None:
    model, output = target(), tmp_path / "draft"
    go(output, options=replace(SHORT, draft_vocab=6), model=model)
    draft, _ = load(output, target=model)
    assert draft.draft_vocab == 6
    done = SpeculativeDecoder(model, draft, num_draft=3).generate(DATA.valid[0].prompt)
    assert done.tokens == SpeculativeDecoder(model).generate(DATA.valid[0].prompt).tokens


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


def test_a_draft_is_trained_further(tmp_path: Path) -> None:
    model = target()
    go(tmp_path / "first", model=model)
    start: Any = load(tmp_path / "first", target=model)[0]
    with pytest.raises(ValueError, match="layers must be 1, as the first draft has, got 2"):
        go(tmp_path / "second", options=replace(SHORT, layers=2), model=model, start=start)
    with pytest.raises(ValueError, match="d_ff must be 16, as the first draft has, got 8"):
        go(tmp_path / "second", options=replace(SHORT, d_ff=8), model=model, start=start)
    options = replace(SHORT, steps=1, learning_rate=1e-9)  # changes nothing that float16 shows
    go(tmp_path / "second", options=options, model=model, start=start)
    go(tmp_path / "copies", options=options, model=model)
    first, second, copies = (
        (tmp_path / name / "weights.npz").read_bytes() for name in ("first", "second", "copies")
    )
    assert first == second != copies


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that goes on only as a run's work is done, each piece by its own seconds."""
    clock = SimpleNamespace(now=0.0, judging=0.0)

    def slow(owner: Any, name: str, seconds: float) -> None:
        whole = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            clock.now += seconds
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, call)

    def judged(*args: Any, max_seconds: float, **options: Any) -> Judgement:
        clock.judging = max_seconds
        clock.now += max_seconds
        return judge(*args, max_seconds=0.0, turns=1, **options)

    monkeypatch.setattr(stages, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(stages, "judge", judged)
    slow(Training, "step", 3.0)
    slow(Training, "save", 6.0)
    slow(stages, "agreement", 9.0)
    for name, value in (("SAVE_EVERY", 10), ("CHECKS", 5)):
        monkeypatch.setattr(stages, name, value)
    return clock


def test_a_run_takes_the_minutes_it_was_given(tmp_path: Path, clock: Any) -> None:
    """The seconds of processes that were stopped count, too."""
    output, stops = tmp_path / "draft", [("train", 3), ("trained", 40)]
    options = replace(SHORT, steps=None, minutes=10.0, label_batch=4)

    def act(kind: str, value: Any) -> None:
        clock.now += kind in ("valid", "train")
        if (kind, value) in stops:
            stops.remove((kind, value))
            raise Stop

    data = replace(DATA, train=examples(400, 3), valid=examples(150, 4))
    task, watch = Task(target(), None, "tiny"), Watch(act)
    while stops:
        with pytest.raises(Stop):
            distill(task, data, output, options, Watch(act), read_by={})
    distill(task, data, output, options, watch, read_by={})
    assert 0.8 * 600 < clock.now < 1.1 * 600
    assert 40 < clock.judging < 90
    done = {split: watch.of(split)[-1] for split in ("valid", "train")}
    assert done["valid"].done < 150 and done["train"].done < 400
    totals = {now.total for now in watch.of("trained")}
    assert len(totals) == 1 and totals.pop() > 50
