"""Training correct-base further: what it starts from, its rate, and how it resumes."""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import convert

import further_training
import mlx.core as mx
import numpy as np
import pytest
import torch
import train_correct
from conftest import edit_json, write_checkpoint
from families import TEXT
from further_training import Run, mix, start, train_further, with_bytes
from train_correct import Example

SHAPE = {
    "vocab_size": 128, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 2, "feed_forward_proj": "relu", "tie_word_embeddings": True,
    "dropout_rate": 0.0,
}  # fmt: skip
EXAMPLE = ([5, 9, 7, 1], [6, 8, 1])


@pytest.fixture
def converted(tmp_path: Path, spiece: bytes) -> Path:
    write_checkpoint(tmp_path / "source", SHAPE, spiece)
    return convert(str(tmp_path / "source"), tmp_path / "converted")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second at each look."""
    seconds = itertools.count(0.0)
    monkeypatch.setattr(further_training.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(train_correct, "POOL", 64)


def examples() -> Iterator[Example]:
    return itertools.repeat(EXAMPLE)


def write_pairs(folder: Path) -> Path:
    data = folder / "deu.txt.xz"
    with lzma.open(data, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\tGuten Tag.\n" for line in [*TEXT, *map(str, range(200))])
    return data


def make_run(model: Any, minutes: float = 0.02, state: dict[str, Any] | None = None) -> Run:
    return Run(model, rate=1e-2, minutes=minutes, autocast=False, state=state)


def test_a_converted_folder_goes_on_with_the_same_logits(converted: Path) -> None:
    ours, _ = load(converted, dtype=mx.float32)
    model = start(converted, 120).eval()
    source, target = [5, 9, 7, 1], [0, 6, 8]
    with torch.no_grad():
        output = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]))
    expected = np.array(ours(mx.array([source]), mx.array([target])))
    np.testing.assert_allclose(
        output.logits.numpy(), expected[..., : len(expected[0, 0])], atol=1e-4
    )


def test_rows_of_new_pieces_follow_the_present_ones(converted: Path) -> None:
    before = start(converted, 120).get_input_embeddings().weight
    after = start(converted, 120 + 258).get_input_embeddings().weight
    assert after.shape == (512, 16)  # 378 pieces and 100 sentinels, in 64s
    assert torch.equal(after[:120], before[:120])
    assert len({tuple(row) for row in after[120:378].tolist()}) == 258
    assert after[120:].std() < before[3:120].std()


def test_bytes_are_added_once(spiece: bytes) -> None:
    assert with_bytes(with_bytes(spiece)) == with_bytes(spiece) != spiece


def test_rate_is_constant_then_falls_to_zero(converted: Path) -> None:
    run = make_run(start(converted, 120), minutes=10)
    run.step = 1000
    seconds = [0, 300, 450, 525, 600, 700]
    assert [run.rate_at(s) for s in seconds] == pytest.approx([0.01, 0.01, 0.01, 0.005, 0, 0])
    run.step = 9
    assert run.rate_at(0) == pytest.approx(0.001)


def test_a_run_ends_by_the_clock_and_resumes(
    converted: Path, tmp_path: Path, clock: None, capsys: Any
) -> None:
    checkpoint, model = tmp_path / "model.pt", start(converted, 120)
    run = make_run(model, minutes=0.5)
    run.train(examples, {"kind": [EXAMPLE]}, checkpoint, every=0.1, batch=64)
    state = torch.load(checkpoint)
    assert state["step"] == run.step == 28
    assert capsys.readouterr().out.count("held-out loss: kind ") == 5
    longer = make_run(start(converted, 120), minutes=0.6, state=state)
    assert longer.step == 28
    longer.train(examples, {}, checkpoint, every=0.1, batch=64)
    assert torch.load(checkpoint)["step"] == 28 + 5


def test_the_result_is_converted_and_trained_further(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary grows once, and the prefix stays."""
    monkeypatch.setattr(further_training, "HELD_OUT", 2)
    monkeypatch.setattr(train_correct, "POOL", 64)
    edit_json(converted / "config.json", prefix="correct: ", draft="small", min_probability=0.5)
    data, text, source = write_pairs(tmp_path), "Ünïcode ☃", converted
    for name in ("first", "second"):
        train_further(
            data, tmp_path / name, source,
            minutes=1e-4, rate=1e-3, every=1, tokens=200, autocast=False, caution=0.5, keep=0.5,
        )  # fmt: skip
        source = convert(str(tmp_path / name / source.name), tmp_path / f"{name}-converted")
        model, tokenizer = load(source)
        assert model.config.vocab_size == 640
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.prefix == "correct: "
        config = json.loads((source / "config.json").read_text())
        assert (config["draft"], config["min_probability"]) == ("small", 0.5)


def test_a_model_learns_what_its_teacher_says(converted: Path, tmp_path: Path, clock: None) -> None:
    """The loss is the divergence from the teacher: 0 for itself, and it falls for another."""
    run = make_run(start(converted, 120), minutes=2)
    batch = torch.tensor([EXAMPLE[0]]), torch.ones(1, 4), torch.tensor([[*EXAMPLE[1], -100]])
    right = run._loss(*batch).item()
    run.teacher = start(converted, 120).eval()
    assert run._loss(*batch).item() == pytest.approx(0, abs=1e-5) != right
    torch.manual_seed(1)
    for weight in run.teacher.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    before = run._loss(*batch).item()
    run.train(examples, {}, tmp_path / "model.pt", every=1, batch=64)
    assert 0 < run._loss(*batch).item() < before / 2


@pytest.mark.parametrize("taught", [False, True])
def test_caution_asks_the_teacher_or_the_weights_before(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taught: bool
) -> None:
    asked: list[Any] = []

    def caution(model: Any, *_: Any, **__: Any) -> Any:
        asked.append(model.get_input_embeddings().weight[5, 0].item())
        return lambda ids, mask, labels: labels

    monkeypatch.setattr(further_training, "HELD_OUT", 2)
    monkeypatch.setattr(train_correct, "POOL", 64)
    monkeypatch.setattr(further_training, "Caution", caution)
    teacher = start(converted, 500)  # of the size that the vocabulary grows to
    own = teacher.get_input_embeddings().weight[5, 0].item()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[5, 0] = own + 1
    teacher.save_pretrained(tmp_path / "teacher")
    train_further(
        write_pairs(tmp_path), tmp_path / "work", converted,
        minutes=1e-4, rate=1e-3, every=1, tokens=200, autocast=False, caution=0.5,
        teacher=tmp_path / "teacher" if taught else None,
    )  # fmt: skip
    assert asked == pytest.approx([own + taught])


def test_a_cautious_run_learns_other_targets(converted: Path, tmp_path: Path, clock: None) -> None:
    run = make_run(start(converted, 120), minutes=2)
    ids, mask, other = torch.tensor([EXAMPLE[0]]), torch.ones(1, 4), torch.tensor([[11, 12, 1]])
    run.caution = lambda ids, *_: other.repeat(len(ids), 1)  # type: ignore[assignment]
    before = run._loss(ids, mask, other).item()
    run.train(examples, {}, tmp_path / "model.pt", every=1, batch=64)
    assert run._loss(ids, mask, other).item() < before / 2


def test_a_result_may_keep_a_share_of_the_weights_before(converted: Path) -> None:
    model, before = start(converted, 120), start(converted, 120)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1.0
    trained = [weight.detach().clone() for weight in model.parameters()]
    mix(model, before, 0.3)
    for weight, first, last in zip(model.parameters(), before.parameters(), trained, strict=True):
        assert torch.allclose(weight, 0.3 * first + 0.7 * last, atol=1e-5)
