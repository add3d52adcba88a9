"""Decoder-only models by their folders: the same logits as transformers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speculative_t5 import load

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import SHAPES, write_causal

TOKENS = [[5, 17, 260, 3, 99, 1, 42, 8, 8, 310], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def assert_parity(model: Any, reference: Any) -> None:
    """Whole sequences, and steps of a session, against transformers in float32."""
    import torch

    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), expected, atol=1e-4, rtol=1e-4)
    session, _ = model.start([row[:4] for row in TOKENS])
    steps = [session.step(mx.array([row[3:6] for row in TOKENS]))]
    steps.append(session.step(mx.array([row[6:] for row in TOKENS])))
    found = np.concatenate([np.array(step) for step in steps], axis=1)
    np.testing.assert_allclose(found, expected[:, 3:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = write_causal(tmp_path, kind)
    model, tokenizer = load(tmp_path, dtype=mx.float32)
    assert_parity(model, reference)
    assert model.max_context == 64
    assert model.end_tokens == {0}
    assert model.vocabulary == tokenizer.vocabulary
