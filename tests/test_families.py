"""Every family, in every format of its checkpoints, gives transformers' logits."""

import itertools
import json
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.inspection import inspect

import mlx.core as mx
import pytest
from families import FAMILIES, FORMATS, assert_close, reference_logits, write_family

SOURCE = [[5, 17, 100, 3, 150, 9, 40, 6], [77, 12, 8, 2, 0, 0, 0, 0]]  # padded by 0
TARGET = [[0, 9, 4, 33, 200, 7, 12], [0, 55, 4, 118, 5, 3, 90]]


CASES = [("t5", form) for form in FORMATS]
CASES += zip([*FAMILIES][1:], itertools.cycle(FORMATS), strict=False)


def assert_parity(folder: Path, expected: Any) -> None:
    model, _ = load(folder, dtype=mx.float32)
    source = mx.array(SOURCE)
    source = mx.where(source == 0, model.config.pad_token_id, source)
    assert_close(model(source, mx.array(TARGET)), expected)


GATED = "T5 v1.1 (as flan-t5, coedit)"
SHOWN = {  # mt5's vocabulary is too small here to tell it by
    "t5": "T5 v1.0", "t5_v1_1": GATED, "flan_t5": GATED, "flan_ul2": GATED, "coedit": GATED,
    "mt5": GATED,
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), CASES)
def test_checkpoints_match_transformers(name: str, form: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    reference = write_family(source, name, form)
    expected = reference_logits(reference, SOURCE, TARGET)
    assert len(list(source.glob("*-of-*"))) > 1 or "shards" not in form
    found = inspect(str(source))
    assert found.family == SHOWN.get(name, name)
    assert found.num_parameters == sum(p.numel() for p in reference.parameters())
    assert found.stored == ("float32",)
    assert_parity(source, expected)
    folder = convert(str(source), tmp_path / "out")
    assert_parity(folder, expected)
    decoder = SpeculativeDecoder.from_pretrained(folder, folder, num_draft=3, dtype=mx.float32)
    prompts = ["The old man sat on the bench.", "A dog."]
    plain = decoder.generate_batch(prompts, max_tokens=9, speculative=False)
    for out, alone in zip(decoder.generate_batch(prompts, max_tokens=9), plain, strict=True):
        assert out.tokens == alone.tokens and out.text == alone.text


def test_an_old_umt5_is_not_scaled(tmp_path: Path) -> None:
    """transformers 4 obeys a false tie_word_embeddings, as 5.24 does; between, it was ignored."""
    model = write_family(tmp_path / "source", "umt5")
    path = tmp_path / "source" / "config.json"
    raw = json.loads(path.read_text())
    scaled = raw.pop("scale_decoder_outputs", True)
    path.write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    expected = reference_logits(model, SOURCE, TARGET) * (
        model.config.d_model**0.5 if scaled else 1
    )
    assert_parity(convert(str(tmp_path / "source"), tmp_path / "out"), expected)
