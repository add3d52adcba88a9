"""Every family, in every format of its checkpoints, gives transformers' logits."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.inspection import inspect

import mlx.core as mx
import numpy as np
import pytest
from conftest import REPOSITORY
from families import FAMILIES, FORMATS, assert_close, write_family

SOURCE = [[5, 17, 100, 3, 150, 9, 40, 6], [77, 12, 8, 2, 7, 60, 31, 4]]
TARGET = [[0, 9, 4, 33, 200, 7, 12], [0, 55, 4, 118, 5, 3, 90]]


WHOLE = ("t5", "madlad400")  # seen in all formats; madlad400 has an embedding for each stack
OTHERS = [name for name in FAMILIES if name not in WHOLE]
CASES = [(name, form) for name in WHOLE for form in FORMATS]
CASES += zip(OTHERS, itertools.cycle(FORMATS), strict=False)


def reference_logits(model: Any) -> np.ndarray:
    import torch

    source, target = torch.tensor(SOURCE), torch.tensor(TARGET)
    with torch.inference_mode():
        output = model(input_ids=source, attention_mask=torch.ones(2, 8), decoder_input_ids=target)
    return output.logits.numpy()


def assert_parity(folder: Path, expected: np.ndarray) -> None:
    model, _ = load(folder, dtype=mx.float32)
    mask = mx.ones((2, 8), dtype=mx.bool_)
    assert_close(model(mx.array(SOURCE), mx.array(TARGET), encoder_mask=mask), expected)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_checkpoints_match_transformers(name: str, form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    expected = reference_logits(write_family(source, name, form))
    assert len(list(source.glob("*-of-*"))) > 1 or "shards" not in form
    assert_parity(source, expected)
    assert_parity(convert(str(source), tmp_path / "out"), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_speculation_gives_the_plain_output(name: str, tmp_path: Path) -> None:
    write_family(tmp_path, name)
    decoder = SpeculativeDecoder.from_pretrained(tmp_path, tmp_path, num_draft=3, dtype=mx.float32)
    prompts = ["The old man sat on the bench.", "A dog."]
    found = decoder.generate_batch(prompts, max_tokens=20)
    for prompt, out in zip(prompts, found, strict=True):
        alone = decoder.generate(prompt, max_tokens=20, speculative=False)
        assert out.tokens == alone.tokens and out.text == alone.text


def test_convert_py_converts_a_checkpoint(tmp_path: Path) -> None:
    expected = reference_logits(write_family(tmp_path / "source", "umt5", "bin"))
    command = [sys.executable, REPOSITORY / "convert.py", "--model", "source", "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("out (") and not done.stderr
    assert_parity(tmp_path / "out", expected)


def test_an_old_umt5_is_not_scaled(tmp_path: Path) -> None:
    """transformers 4 obeys a false tie_word_embeddings, as 5.24 does; between, it was ignored."""
    model = write_family(tmp_path / "source", "umt5")
    path = tmp_path / "source" / "config.json"
    raw = json.loads(path.read_text())
    scaled = raw.pop("scale_decoder_outputs", True)
    path.write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    expected = reference_logits(model) * (model.config.d_model**0.5 if scaled else 1)
    assert_parity(convert(str(tmp_path / "source"), tmp_path / "out"), expected)


@pytest.mark.parametrize("name", ["t5", "flan_t5", "madlad400", "umt5", "byt5", "codet5"])
def test_families_are_recognized(name: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, name)
    found = inspect(str(tmp_path))
    others = {"t5": "T5 v1.0", "flan_t5": "T5 v1.1 (as flan-t5, coedit)"}
    assert found.family == others.get(name, name)
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.stored == ("float32",)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] in ("t5", "umt5")
