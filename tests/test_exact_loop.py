"""Proof by enumeration that outputs of the loop follow the distribution of whole passes.

Each row of a batch is scripted to have one possible history: the tokens drafted in each round, how
many of them are accepted, and the next token. See `scripted.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from speculative_t5.decoding.logits import TokenHistory
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.models import decoder_only
from speculative_t5.models.cache import KVCache

import mlx.core as mx
import numpy as np
import pytest
from conftest import PAIRS, VARIED, next_logits, unrelated_pair
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPT, ROUNDING, SAMPLED, SIZE, WRONG, gap, normal, walk


def gap_to_whole_passes(kind: str, num_draft: int) -> float:
    """Return the gap between probabilities in rounds and those of passes over whole sequences."""
    models = unrelated_pair(kind, vocab_size=SIZE)
    gaps = []
    for model, seen in zip(models, walk(*models, num_draft), strict=True):
        for depth in range(2 * num_draft + 2):
            paths = list(product(range(SIZE), repeat=depth))
            whole = normal(SAMPLED.probs(next_logits(model, PROMPT, paths)))
            gaps += [
                np.abs(given - expected).max()
                for path, expected in zip(paths, whole, strict=True)
                for given in seen[path]
            ]
    return float(max(gaps))


@pytest.mark.parametrize("num_draft", [1, 2])
@pytest.mark.parametrize("kind", VARIED)
def test_rounds_have_the_probabilities_of_whole_passes(kind: str, num_draft: int) -> None:
    assert gap_to_whole_passes(kind, num_draft) < ROUNDING


@pytest.mark.parametrize(
    ("num_draft", "batch_size", "rule"), [(1, 400, "token"), (2, 40, "token"), (2, 40, "block")]
)
@pytest.mark.parametrize("kind", VARIED)
def test_loop_outputs_follow_the_targets_distribution(
    kind: str, num_draft: int, batch_size: int, rule: str
) -> None:
    """400 histories at once, or 1,254 that take the rows of others that have ended."""
    assert gap(kind, rule, num_draft, batch_size=batch_size) < ROUNDING


@pytest.mark.parametrize("sampler", [Sampler(0.7, top_k=2), Sampler(2.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("kind", PAIRS)
def test_filtered_loop_outputs_follow_the_filtered_distribution(
    kind: str, sampler: Sampler
) -> None:
    assert gap(kind, sampled=[sampler]) < ROUNDING


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", VARIED)
def test_several_outputs_follow_the_targets_distribution(kind: str, rule: str) -> None:
    assert gap(kind, rule, several=True) < ROUNDING


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("kind", "rule"), [("t5", "token"), ("qwen3", "block"), ("sharing", "block")]
)
def test_transformed_loop_outputs_follow_the_transformed_distribution(
    kind: str, name: str, rule: str
) -> None:
    """The reference transforms whole sequences; the loop has drafted tokens at each place."""
    assert gap(kind, rule, sampled=[Sampler(1.0, transform=TRANSFORMS[name])]) < ROUNDING


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize(("kind", "rule"), [("t5", "token"), ("t5", "block"), ("sharing", "block")])
def test_what_cannot_follow_an_end_does_not_matter(kind: str, name: str, rule: str) -> None:
    assert gap(kind, rule, sampled=[Sampler(1.0, transform=ENDINGS[name])]) < ROUNDING


# Planted bugs.

truncate, select, make_layer = KVCache.truncate, KVCache.select, decoder_only._Layer.__init__


def without_truncation(self: KVCache, lengths: Sequence[int]) -> None:
    """Leave rejected tokens in the cache."""


def with_one_length(self: KVCache, lengths: Sequence[int]) -> None:
    """Rewind all rows to one length, as mlx-lm's own caches do."""
    truncate(self, [min(lengths)] * len(lengths))


def with_the_first_positions(
    self: Any, buffers: Any, at: Any, lengths: Any, *a: Any, **b: Any
) -> None:
    """Give new tokens of all rows the positions of the first row's."""
    make_layer(self, buffers, at, lengths, *a, **b)
    self.offset = lengths[0]


def with_a_view_of_all(self: Any, count: int, **_: Any) -> str:
    """Let rows attend beyond their own length."""
    return "causal"


OF_CACHES = [(KVCache, "truncate", bug) for bug in (without_truncation, with_one_length)]
OF_LAYERS = [
    (decoder_only._Layer, "__init__", with_the_first_positions),
    (decoder_only._Layer, "make_mask", with_a_view_of_all),
]
PLANTED = [(kind, *bug) for kind in ("t5", "sharing") for bug in OF_CACHES]
PLANTED += [(kind, *bug) for kind in ("gpt2", "qwen3") for bug in OF_CACHES + OF_LAYERS]


@pytest.mark.parametrize(("kind", "owner", "method", "bug"), PLANTED)
def test_planted_bugs_of_caches_leave_a_gap(
    kind: str, owner: Any, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, bug)
    assert gap_to_whole_passes(kind, 1) > WRONG
    assert gap(kind, num_draft=1) > WRONG


def with_the_first_rows(self: KVCache, rows: Sequence[int]) -> None:
    """Keep the wrong rows when some are dropped."""
    lengths = [self.lengths[row] for row in rows]
    select(self, range(len(rows)))
    self.lengths = lengths


def with_the_last_prompt(
    self: KVCache, rows: Sequence[int], new: KVCache, new_rows: Sequence[int]
) -> None:
    """Keep the old contents of rows that are given to another prompt."""
    for row, new_row in zip(rows, new_rows, strict=True):
        self.lengths[row] = new.lengths[new_row]
    self.reserve(0)


MIXED = [(kind, "select", with_the_first_rows) for kind in PAIRS]


@pytest.mark.parametrize(
    ("kind", "method", "bug"), [*MIXED, ("qwen3", "replace", with_the_last_prompt)]
)
def test_planted_bugs_that_mix_rows_up_leave_a_gap(
    kind: str, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, method, bug)
    assert gap(kind, num_draft=1, batch_size=200) > WRONG


@pytest.mark.parametrize("name", [n for n in TRANSFORMS if n not in ("bias", "suppress")])
def test_planted_transform_that_forgets_drafted_tokens_leaves_a_gap(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Sampler, logits: mx.array, history: TokenHistory) -> mx.array:
        assert self.transform
        before = replace(history, drafted=history.drafted[:, :0])
        each = [self.transform(logits[:, i : i + 1], before) for i in range(logits.shape[1])]
        return mx.concatenate(each, axis=1)

    monkeypatch.setattr(Sampler, "transformed", forgetful)
    assert gap("t5", sampled=[Sampler(1.0, transform=TRANSFORMS[name])]) > WRONG


@pytest.mark.parametrize("kind", PAIRS)
def test_planted_delta_leaves_a_gap(kind: str) -> None:
    assert gap(kind, "token", delta=0.1) > WRONG
