"""`LogitsTransform` against its definition in plain Python; test_shaping.py has transformers."""

from itertools import product
from typing import Any

from speculative_t5.decoding import LogitsTransform, TokenHistory

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refused
from reference import TRANSFORMS, transformed

SIZE = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": ((0, 2.5), (3, -np.inf), (0, -1.0))},
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    **{f"{n}-grams": {"no_repeat_ngram_size": n} for n in (1, 2, 3, 5)},
    "bad words": {"bad_words": ((4,), (2, 0), (2, 2, 3), (5, 4, 3, 2, 1, 0))},
    "many bad words": {"bad_words": (*product(range(1, 4), repeat=3), (5,) * 40, (2, 0), (3, 0))},
    "min_tokens": {"min_tokens": 3, "end_ids": (1, 4)},
    "suppress": {"suppress_tokens": (0, 5)},
    "forced": {"forced_tokens": (2, 5, 3)},
}
OPTIONS["together"] = {
    name: value for options in OPTIONS.values() for name, value in options.items()
} | {"forced_tokens": (2, 3), "no_repeat_ngram_size": 3}
# Not together, since what follows the ids that end an output is not asked of a processor.
OPTIONS["processor"] = {"processors": TRANSFORMS["processor"].processors}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_and_places_are_transformed_as_sequences_are(options: dict[str, Any]) -> None:
    """Rows of different lengths, L places after drafted tokens, and fewer places than those."""
    transform, rng = LogitsTransform(**options), np.random.default_rng(0)
    for case in range(30):
        starts = rng.integers(1, 4, size=3).tolist()
        contexts = [rng.integers(SIZE, size=start + rng.integers(6)).tolist() for start in starts]
        count = case % 5
        drafted = rng.integers(SIZE, size=(3, count))
        length = int(rng.integers(1, count + 2))
        logits = rng.normal(size=(3, length, SIZE)).astype(np.float32) * 3
        history = TokenHistory(contexts, starts, mx.array(drafted, dtype=mx.int32))
        found = np.array(transform(mx.array(logits), history))
        for row, (context, start) in enumerate(zip(contexts, starts, strict=True)):
            for place in range(length):
                before = [*context, *drafted[row, : count - length + 1 + place].tolist()]
                expected = transformed(transform, logits[row, place].tolist(), before, start)
                np.testing.assert_allclose(found[row, place], expected, rtol=1e-5)


@pytest.mark.parametrize("found", [None, mx.zeros((1, 3)), mx.zeros(SIZE)])
def test_a_processor_with_another_result_is_refused(found: Any) -> None:
    transform = LogitsTransform(processors=(lambda tokens, logits: found,))
    history = TokenHistory([[0]], [1], mx.zeros((1, 0), dtype=mx.int32))
    with refused(r"must be \(1, 6\) logits"):
        transform(mx.zeros((1, 1, SIZE)), history)
