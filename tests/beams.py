"""Beam search by transformers, to compare with, and by enumeration."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints.loading import load
from speculative_t5.decoding import (
    BeamOptions,
    BeamResult,
    Hypothesis,
    Request,
    RowOptions,
    Sampler,
    beam_search,
)

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import write_causal
from families import write_family


def load_both(folder: Path, name: str) -> tuple[Any, Any]:
    """Make a family's random model, in transformers and here, float32.

    EOS is an id that is often among an output's first ones, but not the first.
    """
    is_decoder_only = name == "gpt2"
    if is_decoder_only:
        pytest.importorskip("mlx_lm")
        reference: Any = write_causal(folder, name)
        model: Any = load(folder)[0]
    else:
        reference = write_family(folder, name)
        model, _ = load(folder, dtype=mx.float32)
        # Or its cache has too few layers.
        reference.config.num_layers = reference.config.num_decoder_layers
    seen: Counter[int] = Counter()
    for found in search(model, random_prompts(model, 3), BeamOptions(8, num_return_sequences=8), 9):
        outputs = [hypothesis.tokens for hypothesis in found.hypotheses]
        seen.update(token for tokens in outputs for token in {*tokens[2:]})
        seen.subtract(2 * [token for tokens in outputs for token in tokens[:2]])
    ids = [token for token, _ in seen.most_common(2 if is_decoder_only else 1)]
    reference.generation_config.eos_token_id = ids
    reference.generation_config.pad_token_id = ids[0]
    ends = {"eos_token_id": ids[0], "eos_token_ids": frozenset(ids)}
    model.info = dataclasses.replace(model.info, **ends)
    return reference, model


def random_prompts(model: Any, count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    size = min(model.info.vocab_size, 200)
    return [rng.integers(3, size, rng.integers(3, 15)).tolist() for _ in range(count)]


def search(
    model: Any,
    prompts: Sequence[list[int]],
    options: BeamOptions,
    max_tokens: int,
    *,
    transform: Any = None,
    batch_size: int = 64,
) -> list[BeamResult]:
    """Return the results of a beam search here, in the order of the prompts."""
    own = RowOptions(Sampler(transform=transform), max_tokens)
    requests = [Request(i, prompt, own) for i, prompt in enumerate(prompts)]
    found = beam_search(model, requests, options, batch_size=batch_size)
    return sorted(found, key=lambda result: result.index)


def reference_search(
    reference: Any,
    prompts: Sequence[list[int]],
    options: BeamOptions,
    max_tokens: int,
    processors: Sequence[Any] = (),
) -> list[list[Hypothesis]]:
    """Return the hypotheses of transformers."""
    import torch

    is_decoder_only = not reference.config.is_encoder_decoder
    longest = max(map(len, prompts))

    def padded(row: list[int]) -> list[int]:
        padding = [0] * (longest - len(row))
        return padding + row if is_decoder_only else row + padding

    rows, mask = [padded(p) for p in prompts], [padded([1] * len(p)) for p in prompts]
    ends = set(reference.generation_config.eos_token_id)
    with torch.inference_mode():
        found = reference.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            logits_processor=list(processors),
            **dataclasses.asdict(options),
        )
    start = longest if is_decoder_only else 1
    hypotheses, sequences = [], found.sequences[:, start:].tolist()
    for row, score in zip(sequences, found.sequences_scores.tolist(), strict=True):
        end = next((i for i, token in enumerate(row) if token in ends), None)
        reason = "length" if end is None else "eos"
        hypotheses.append(Hypothesis(row[:end], reason, score))
    count = options.num_return_sequences
    return [hypotheses[i : i + count] for i in range(0, len(hypotheses), count)]


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    """Check tokens, ends and, to 1e-4, scores."""
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.finish_reason for h in found] == [h.finish_reason for h in expected]
    scores = [[h.score for h in each] for each in (found, expected)]
    np.testing.assert_allclose(*scores, atol=1e-4, rtol=1e-4)
