"""The comparison of programs, on tiny models: one checkpoint and the same outputs for all."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cpu import accelerate
from speculative_t5.models.t5.model import T5

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_draft, tiny_model
from programs import (
    ASSISTED,
    PLAIN,
    SPECULATIVE,
    checkpoints,
    measuring,
    naive,
    serving,
    workers,
)

PROMPTS = [[*random.Random(i).choices(range(2, 40), k=3 + 2 * i), 1] for i in range(6)]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> T5:
    return tiny_model(vocab_size=40, seed=4)


@pytest.fixture(scope="module")
def place(model: T5, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("compare")
    checkpoints.as_hugging_face(model, place / "target")
    checkpoints.as_hugging_face(tiny_draft(model), place / "draft")
    return place


def regular_outputs(model: T5) -> list[list[int]]:
    outputs = SpeculativeDecoder(model).generate_batch(PROMPTS, max_tokens=MAX_TOKENS)
    return [o.tokens + [1] * (o.finish_reason == "eos") for o in outputs]


def test_checkpoint_has_the_same_logits_in_transformers(
    pair: tuple[Any, T5], tmp_path: Path
) -> None:
    import torch
    from transformers import T5ForConditionalGeneration

    model = pair[1]
    checkpoints.as_hugging_face(model, tmp_path)
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert theirs.dtype == torch.float32
    source, target = [[5, 17, 100, 3, 250, 9, 40, 1]], [[0, 9, 4, 33, 200]]
    with torch.inference_mode():
        logits = theirs(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)
        ).logits.numpy()
    ours = np.array(model(mx.array(source), mx.array(target)))
    assert np.abs(ours - logits).max() < 1e-4 * np.abs(logits).max()
    again = checkpoints.read_back(tmp_path)
    accelerate(again)
    assert again.config == model.config
    assert np.array_equal(np.array(again(mx.array(source), mx.array(target))), ours)
    again.config = dataclasses.replace(model.config, bias_per_layer=True)
    with pytest.raises(ValueError, match="umt5"):
        checkpoints.as_hugging_face(again, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 2, "bias_per_layer": True, "gated": True},
        {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 6},
    ],
)
def test_naive_loop_gives_the_same_tokens(options: dict[str, Any]) -> None:
    for seed in range(2):
        model = tiny_model(vocab_size=40, seed=seed, **options)
        # A small bias would not change any output.
        model.decoder.position_bias.weight = model.decoder.position_bias.weight * 30
        found = [naive.generate(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
        assert found == regular_outputs(model)
    with pytest.raises(ValueError, match="max_tokens"):
        naive.generate(model, PROMPTS[0], 0)


@pytest.mark.parametrize(
    ("name", "note"),
    [("transformers", ""), (ASSISTED, "schedule"), ("ctranslate2 float32", "float32")],
)
def test_other_programs_give_the_same_tokens(model: T5, place: Path, name: str, note: str) -> None:
    if name.startswith("ctranslate2"):
        checkpoints.as_ctranslate2(place / "target", place / "ctranslate2")
    generate, about = serving.load_program(name, {"place": str(place), "threads": 1})
    expected = regular_outputs(model)
    assert len({*map(tuple, expected)}) > 3  # or the test could not tell programs apart
    assert {output[-1] == 1 for output in expected} == {True, False}
    assert [generate(ids, MAX_TOKENS) for ids in PROMPTS] == expected
    assert about["versions"] and note in about.get("note", "")


def test_workers_take_turns_and_are_reported(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [PLAIN, SPECULATIVE]
    with contextlib.ExitStack() as stack:
        started = workers.start(names, {"num_draft": 3}, place, PROMPTS[:1], MAX_TOKENS, stack)
        figures = measuring.compare("a title", started, PROMPTS[:3], MAX_TOKENS, 2)
    shown = capfd.readouterr().out
    assert "a title" in shown and "ours speculative: 3 of 3 outputs agree" in shown
    assert list(figures) == names
    assert all(program.agree == 3 for program in figures.values())
    speeds = [speed for program in figures.values() for speed in program.speeds]
    assert len(speeds) == 2 * 2 and min(speeds) > 1  # tokens over seconds, not the reverse


@pytest.mark.parametrize(
    ("name", "wrong", "passes"),
    [("naive", 1, True), ("naive", 2, False), ("ctranslate2 int8", 20, True)],
)
def test_other_outputs_are_tolerated_by_program(
    name: str, wrong: int, passes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = {PLAIN: [[i, 3] for i in range(20)]}
    outputs[name] = [[7]] * wrong + outputs[PLAIN][wrong:]
    figures = {program: measuring.Figures({}) for program in outputs}
    with contextlib.nullcontext() if passes else pytest.raises(SystemExit, match="naive"):
        measuring.count_agreement(figures, outputs, None)
    assert f"{name}: {20 - wrong} of 20 outputs agree" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other than 5 tokens"):
        measuring.count_agreement(figures, outputs, 5)
