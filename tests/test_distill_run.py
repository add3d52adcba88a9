"""Whole runs of `distill` on a tiny target: what they learn, write and take; runs that resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.distill import (
    DistillOptions,
    DistillTask,
    Judgement,
    Label,
    distill,
    judge,
    new_draft,
)
from speculative_t5.distill import run as stages
from speculative_t5.distill.labels import group, make_batch
from speculative_t5.distill.training import Training, logits_of

import mlx.core as mx
import pytest
from checkpoints import refused
from conftest import EOS, REPOSITORY, tiny_gemma, tiny_model
from distilling import DATA, SHORT, Stop, Watch, examples, go, labels_of, target
from messages import check_message
from test_sharing import TARGETS, make_target

# Weights are compared byte for byte.
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("kind", "block", "width"),
    [
        ("t5", 1, None), ("t5", 3, 12), ("t5gemma", 1, None), ("t5gemma2", 1, None),
        ("t5gemma2", 2, 12),
    ],
)  # fmt: skip
def test_a_draft_learns_and_loads_beside_its_target_alone(
    kind: str, block: int, width: int | None, tmp_path: Path
) -> None:
    output, watch, model = tmp_path / "draft", Watch(), target()
    if kind != "t5":
        model = tiny_gemma(kind, vocab_size=20, seed={"t5gemma": 10, "t5gemma2": 5}[kind], layers=2)
    options = replace(
        SHORT, steps=80, batch_tokens=300, learning_rate=1e-2, block=block, layers=1, d_model=width
    )
    data = replace(DATA, train=examples(300, 3), valid=examples(100, 2))
    go(output, watch, options, data, model)
    losses = [now.loss for now in watch.of("trained")]
    share = 0.7 if block == 1 else 0.8  # later tokens are harder to tell
    assert len(losses) == 80 and sum(losses[-20:]) < share * sum(losses[:20])
    checks = [now.tokens_per_pass for now in watch.of("trained") if now.tokens_per_pass]
    records = json.loads((output / "history.json").read_text())
    assert [r["step"] for r in records] == [16, 32, 48, 64, 80]
    assert [r["tokens_per_pass"] for r in records] == checks
    first, last = records[0]["agreement"], records[-1]["agreement"]
    assert last > 0.9 or last > max(first, 0.5)
    assert records[1]["loss"] == pytest.approx(sum(losses[16:32]) / 16)

    draft, tokenizer = load(output, target=model)
    assert tokenizer is None and draft.info.block == block
    prompts = [example.prompt for example in data.valid]
    plain = [SpeculativeDecoder(model).generate(each, max_tokens=8) for each in prompts]
    fast = SpeculativeDecoder(model, draft, num_draft=5)
    drafted = [fast.generate(each, max_tokens=8) for each in prompts]
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    rounds = sum(each.stats.rounds for each in drafted)
    emitted = sum(each.stats.emitted for each in drafted)
    assert emitted / rounds == pytest.approx(checks[-1], rel=0.02), "it was counted right"
    with refused("is a draft for tiny, and the target is another model"):
        load(output, target=target(seed=19))


@pytest.mark.parametrize("kind", [*TARGETS, "float16"])
def test_a_copy_of_all_layers_has_nothing_to_learn(kind: str) -> None:
    model = make_target("plain" if kind == "float16" else kind)
    if kind == "float16":
        model.set_dtype(mx.float16)
    labels = [Label(e.line, e.prompt, [*e.prompt[:-1], 5, EOS]) for e in DATA.train]
    options = DistillOptions(layers=3, d_model=model.config.d_model, batch_tokens=200, loss="kl")
    training = Training(new_draft(model, options), labels, options)
    rounded = {"bfloat16": 0.05, "float16": 1e-2, "quantized": 1e-2}  # of the target's passes
    assert abs(training.step(0.0)) < rounded.get(kind, 1e-4)


def test_a_block_learns_what_the_target_says_of_each_of_its_tokens() -> None:
    model = target()
    prompts = [example.prompt for example in DATA.train[:9]]
    outputs = SpeculativeDecoder(model).generate_batch(prompts, max_tokens=8)
    labels = [
        Label(i, prompt, [*out.tokens, *([EOS] if out.finish_reason == "eos" else [])])
        for i, (prompt, out) in enumerate(zip(prompts, outputs, strict=True))
    ]
    batch = make_batch(labels, model, 3)
    count = sum(max(0, len(each.tokens) - part) for each in labels for part in range(3))
    assert batch.labels.shape == (count,)
    logits = logits_of(model, batch)(0, count)
    assert mx.array_equal(mx.argmax(logits, axis=-1), batch.labels)


def test_prompts_are_encoded_once_as_far_as_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses depend on the batches, so those show that none is taken for another one."""
    labels = [Label(e.line, e.prompt, e.prompt) for e in DATA.train]
    model, encoded, losses = target(), list[int](), list[list[float]]()

    def counted(*args: Any) -> Any:
        encoded[-1] += 1
        return make_batch(*args)

    monkeypatch.setattr("speculative_t5.distill.training.make_batch", counted)
    sizes = [make_batch(each, model).memory.nbytes for each in group(labels, SHORT.batch_tokens)]
    for room in (sum(sizes), sum(sizes) // 2, 0):
        monkeypatch.setattr("speculative_t5.distill.training.KEPT_BYTES", room)
        training = Training(new_draft(model, SHORT), labels, SHORT)
        encoded.append(0)
        losses.append([training.step(0.5) for _ in range(3 * len(sizes))])
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == len(losses[0])
    assert len(sizes) == encoded[0] < encoded[1] < encoded[2] == 3 * len(sizes)


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


def test_a_draft_of_a_smaller_vocabulary_proposes_nothing_else(tmp_path: Path) -> None:
    model, output = target(), tmp_path / "draft"
    go(output, options=replace(SHORT, draft_vocab=6), model=model)
    draft, _ = load(output, target=model)
    assert draft.own.draft_vocab == 6
    done = SpeculativeDecoder(model, draft, num_draft=3).generate(DATA.valid[0].prompt)
    assert done.tokens == SpeculativeDecoder(model).generate(DATA.valid[0].prompt).tokens


def test_a_run_that_diverges_ends(tmp_path: Path) -> None:
    with refused("the loss is nan at step 2"):
        go(tmp_path / "draft", options=replace(SHORT, learning_rate=1e30))
    assert not (tmp_path / "draft").exists()


def stored(draft: Path) -> dict[str, mx.array]:
    weights: Any = mx.load(str(draft / "weights.npz"))
    return weights


def test_a_draft_is_rounded_once_whatever_the_targets_type(tmp_path: Path) -> None:
    model = target()
    model.set_dtype(mx.bfloat16)
    go(tmp_path / "draft", model=model)
    weights = [*stored(tmp_path / "draft").values()]
    assert all(weight.dtype == mx.float16 for weight in weights)
    coarser = [weight.astype(mx.bfloat16).astype(mx.float16) for weight in weights]
    assert not any(mx.array_equal(*pair) for pair in zip(weights, coarser, strict=True))


def test_a_draft_is_trained_further(whole: Path, tmp_path: Path) -> None:
    model = target()
    start: Any = load(whole, target=model)[0]
    with refused("layers must be 1, as the first draft has, got 2"):
        go(tmp_path / "second", options=replace(SHORT, layers=2), model=model, start=start)
    with refused("d_model must be 16, as the first draft has, got 8"):
        go(tmp_path / "second", options=replace(SHORT, d_model=8), model=model, start=start)
    options = replace(SHORT, steps=1, learning_rate=1e-9)  # changes nothing that float16 shows
    go(tmp_path / "second", options=options, model=model, start=start)
    weights = [(folder / "weights.npz").read_bytes() for folder in (whole, tmp_path / "second")]
    assert weights[0] == weights[1]
    go(tmp_path / "blocks", options=replace(options, block=3), model=model, start=start)
    blocks = stored(tmp_path / "blocks")
    assert all(mx.array_equal(blocks[name], weight) for name, weight in stored(whole).items())
    start = load(tmp_path / "blocks", target=model)[0]
    with refused("block must be 3, as the first draft has, got 2"):
        go(tmp_path / "third", options=replace(SHORT, block=2), model=model, start=start)


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
        return judge(*args, max_seconds=0.0, **options)

    monkeypatch.setattr(stages, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(stages, "judge", judged)
    slow(Training, "step", 3.0)
    slow(Training, "save", 6.0)
    slow(stages, "agreement", 9.0)
    for name, value in {
        "run.SAVE_EVERY": 10,
        "run.MAX_CHECKS": 5,
        "judgement.MEASURED_TURNS": 1,
        "judgement.MAX_DRAFTED": 2,
    }.items():
        monkeypatch.setattr(f"speculative_t5.distill.{name}", value)
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
    task, watch = DistillTask(target(), None, "tiny"), Watch(act)
    while stops:
        with pytest.raises(Stop):
            distill(task, data, output, options, Watch(act), read_by={})
    distill(task, data, output, options, watch, read_by={})
    assert 0.8 * 600 < clock.now < 1.1 * 600
    assert 40 < clock.judging < 90
    done = {split: watch.of(split)[-1] for split in ("valid", "train")}
    assert done["valid"].done < 150 and done["train"].done < 400
    last = watch.of("trained")[-1]
    assert last.done == last.total > 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "draft"
    go(output)
    return output


# Moments at which a run is killed, one after the other: those before a call of the system, by the
# file that it would write, and those at a report. With the first step that the run had trained.
KILLS = [
    ("replace run.json", 1, None),
    ("replace run.json", 2, None),  # between the stages
    ("train", 50, None),
    ("replace state.safetensors", 2, 1),  # between the history and the state of step 8
    ("judging", 3, 5),
    ("rename draft", 2, None),
]
# Forks before MLX has computed anything.
KILLED = """
import os, signal, sys
from pathlib import Path
import speculative_t5
from distilling import Watch, go
output, *kills = sys.argv[1:]
counts = {}
def act(found, value):
    if found == "trained" and counts.setdefault(found, value) == value:
        print(value, flush=True)
    if f"{found} {value}" == kill:
        os.kill(os.getpid(), signal.SIGKILL)
def fatal(call):
    whole = getattr(os, call)
    def replaced(old, new):
        name = f"{call} {Path(new).name}"
        counts[name] = counts.get(name, 0) + 1
        act(name, counts[name])
        whole(old, new)
    return replaced
os.replace, os.rename = fatal("replace"), fatal("rename")
for kill in kills:
    if (child := os.fork()) == 0:
        go(Path(output), Watch(act))
        os._exit(0)
    print(kill, os.waitpid(child, 0)[1], Path(output).exists(), flush=True)
"""


@pytest.mark.forks
def test_a_run_killed_many_times_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    places = os.pathsep.join(str(REPOSITORY / each) for each in (".", "tests", "scripts"))
    kills = [f"{kind} {at}" for kind, at, _ in KILLS]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(output), *kills],
        env=os.environ | {"PYTHONPATH": places}, capture_output=True, check=False, text=True,
    )  # fmt: skip
    begun = [f"{first}\n" if first else "" for *_, first in KILLS]
    ends = [f"{kill} {int(signal.SIGKILL)} False\n" for kill in kills]
    assert done.stdout == "".join(map("".join, zip(begun, ends, strict=True))), done.stderr
    watch = Watch()
    judgement = go(output, watch)
    stored = json.loads((output / "judgement.json").read_text())
    assert stored == json.loads(json.dumps(judgement.to_json()))
    labelled = [judgement.made_by[name] for name in ("held_out", "labels")]
    assert labelled == [len(DATA.valid), len(DATA.train)]
    assert watch.of("trained") == []
    for name in ("weights.npz", "history.json", "config.json"):
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_resumed_run_must_be_the_same(tmp_path: Path) -> None:
    labels_of(tmp_path)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"options": replace(SHORT, learning_rate=0.01)},
         "with --learning-rate 0.003, and this one has --learning-rate 0.01"),
        ({"options": replace(SHORT, steps=None, minutes=1.0)},
         "with --steps 14, and this one has no --steps"),
        ({"data": replace(DATA, digest="f" * 64)}, "started with other data"),
        ({"model": target(seed=19)}, "started with another target"),
        ({"prefix": "correct: "}, "no --prefix, and this one has --prefix 'correct: '"),
    ]  # fmt: skip
    for change, found in changes:
        with refused(found):
            go(tmp_path / "draft", **change)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder around a run that was stopped after it had saved its state."""
    folder = tmp_path_factory.mktemp("stopped")

    def act(kind: str, at: object) -> None:
        if (kind, at) == ("trained", 9):
            raise Stop

    with pytest.raises(Stop):
        go(folder / "draft", Watch(act))
    return folder


def test_a_draft_is_narrower_than_its_target() -> None:
    target = tiny_model(layers=3)
    made = [new_draft(target, DistillOptions(layers=layers)).config for layers in (None, 2)]
    assert [(own.num_decoder_layers, own.d_model) for own in made] == [(1, 16), (2, 16)]
    assert new_draft(target, DistillOptions(d_model=8)).config.d_model == 8
    for wide, width in ((96, None), (256, 96), (512, 128)):
        assert new_draft(tiny_model(d_model=wide), DistillOptions()).own.d_model == width


def test_a_run_of_a_version_without_widths_is_not_resumed(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "draft.distill" / "run.json"
    state = json.loads(path.read_text())
    del state["settings"]["d_model"]
    path.write_text(json.dumps(state))
    with refused("was started with no --d-model, and this one has --d-model 16"):
        go(tmp_path / "draft")


def test_a_run_of_another_version_may_have_kept_more(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "draft.distill" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    go(tmp_path / "draft")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("run.json", b"", "run.json is not JSON: Expecting value"),
        ("run.json", None, "run.json is not JSON: Expecting ',' delimiter"),
        ("run.json", b'{"settings": "8"}', "run.json has '8' as settings"),
        ("state.safetensors", None, "state.safetensors is truncated or damaged"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_and_can_be_deleted(
    name: str, content: bytes | None, found: str, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    """None is for the file without its last bytes."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "draft.distill" / name
    path.write_bytes(path.read_bytes()[:-3] if content is None else content)
    with pytest.raises(ValueError) as caught:
        go(tmp_path / "draft")
    assert f"{tmp_path / 'draft.distill'}{os.sep}{found}" in str(caught.value)
    check_message(str(caught.value))
    if "delete the folder to start over" in str(caught.value):
        shutil.rmtree(path.parent)
    else:
        assert "delete the file, and run the same command again" in str(caught.value)
        path.unlink()
    go(tmp_path / "draft")
    for file in ("weights.npz", "history.json"):
        assert (tmp_path / "draft" / file).read_bytes() == (whole / file).read_bytes(), file


def test_one_process_at_a_time_works_on_a_draft(tmp_path: Path) -> None:
    def act(kind: str, _: object) -> None:
        if kind == "trained":
            with refused("another process is at work in"):
                go(tmp_path / "draft")
            raise Stop

    with pytest.raises(Stop):
        go(tmp_path / "draft", Watch(act))


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "draft.distill"
    folder.mkdir()
    files = {"thesis.txt": "all of it", "lock": "a key", "settings.json.new": "{"}
    for name, text in files.items():
        (folder / name).write_text(text)
    with refused("exists and is not the working folder of a run"):
        go(tmp_path / "draft")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_an_output_that_appears_during_the_run_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "draft"

    def act(kind: str, at: object) -> None:
        if (kind, at) == ("judging", 1):
            output.mkdir()
            (output / "weights.npz").write_text("another model")

    with refused(f"{output} exists"):
        go(output, Watch(act))
    assert [path.read_text() for path in output.iterdir()] == ["another model"]
