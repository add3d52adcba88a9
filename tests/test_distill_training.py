"""Agreement against real decoding with drafts of any quality, and losses against formulas."""

from __future__ import annotations

import random
from functools import cache
from itertools import takewhile
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.distill import LOSSES, Agreement, training

import mlx.core as mx
import numpy as np
import pytest
from conftest import tiny_draft, tiny_model

SIZE, WIDTH, PLACES = 12, 4, 11
MODEL = tiny_model(vocab_size=20, seed=18, layers=2, eos_token_id=19)
RNG = random.Random(5)
PROMPTS = [[*RNG.choices(range(2, 19), k=RNG.randrange(1, 7)), 19] for _ in range(30)]
DRAFTS = [tiny_draft(MODEL, noise=noise) for noise in (0.0, 0.1, 0.3, 3.0)]


@cache
def outputs_of(number: int) -> list[tuple[list[int], int, list[bool]]]:
    """Return prompts, a token of each output to end it at, and where a draft is right till there.

    The draft is given the true tokens before each.
    """
    draft = DRAFTS[number]
    rng, found = random.Random(0), []
    for prompt in PROMPTS:
        tokens = SpeculativeDecoder(MODEL).generate(prompt, max_tokens=20).tokens
        logits = draft(mx.array([prompt]), mx.array([[0, *tokens[:-1]]]))[0]
        end = rng.choice(tokens)
        right = mx.argmax(logits, axis=-1) == mx.array(tokens)
        found.append((prompt, end, right[: tokens.index(end) + 1].tolist()))
    return found


@pytest.mark.parametrize("num_draft", [1, 2, 3, 5, 8])
def test_decoding_takes_as_many_passes_and_accepts_as_often(num_draft: int) -> None:
    for number, draft in enumerate(DRAFTS):
        rows = []
        decoder = SpeculativeDecoder(MODEL, draft, num_draft=num_draft)
        reached, passed = np.zeros(num_draft), np.zeros(num_draft)
        for prompt, end, row in outputs_of(number):
            stats = decoder.generate(prompt, stop_token_ids=[end]).stats
            assert Agreement([row]).tokens_per_pass(num_draft) == len(row) / stats.rounds
            rows.append(row)
            left, places = len(row), np.arange(num_draft)
            for accepted in stats.num_accepted:
                reached += (places <= accepted) & (places < left)
                passed += places < accepted
                left -= accepted + 1
        expected = passed[reached > 0] / reached[reached > 0]
        np.testing.assert_array_equal(Agreement(rows).by_place(num_draft), expected)
    assert len(set(map(tuple, rows))) > 5


def test_figures_of_a_row_worked_by_hand() -> None:
    found = Agreement([[True, True, False, True, False, False]])
    assert found.rate == 3 / 6 and found.num_tokens == 6
    assert [found.tokens_per_pass(k) for k in (1, 2, 8)] == [6 / 4, 6 / 3, 6 / 3]
    # Rounds of 3, 2 and 1 tokens: right right wrong, right wrong, wrong.
    assert found.by_place(3) == [2 / 3, 1 / 2, 0.0]


def test_places_that_no_draft_came_to_are_left_out() -> None:
    assert Agreement([[False, False]]).by_place(4) == [0.0]
    assert Agreement([[True, True]]).by_place(4) == [1.0, 1.0]


@pytest.mark.parametrize("bug", ["next token right", "one more"])
def test_planted_bugs_show(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(right: type[bool], row: list[bool]) -> list[bool]:
        found = [*takewhile(right, row)]
        if bug == "one more":
            return [*found, True]
        return found or [True] * any(row)  # the target's own token need not be right

    monkeypatch.setattr(training, "takewhile", wrong)
    with pytest.raises(AssertionError):
        test_decoding_takes_as_many_passes_and_accepts_as_often(3)


def formula(loss: str, logits: mx.array, labels: mx.array, target: mx.array) -> mx.array:
    """The sum of a loss over all places, as `loss_sum` describes it."""
    size = logits.shape[-1]
    log_q = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    log_p = (target - mx.logsumexp(target, axis=-1, keepdims=True))[:, :size]
    p, q = mx.exp(log_p), mx.exp(log_q)
    overlap = mx.minimum(p, q).sum(-1)
    known = labels < size
    chosen = mx.take_along_axis(log_q, mx.minimum(labels, size - 1)[:, None], axis=-1)[:, 0]
    ce, kl = -(chosen * known).sum(), (p * (log_p - log_q)).sum()
    return {
        "ce": ce, "kl": kl, "ce+kl": 0.8 * ce + kl, "tv": (1 - overlap).sum(),
        "lk": -mx.log(overlap).sum(),
    }[loss]  # fmt: skip


@pytest.mark.parametrize("size", [SIZE, 7])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(
    loss: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LOGITS", 2 * SIZE)  # two places at a time
    mx.random.seed(1)
    hidden, target = mx.random.normal((PLACES, WIDTH)), 2 * mx.random.normal((PLACES, SIZE))
    weight, labels = mx.random.normal((size, WIDTH)), mx.arange(PLACES) % SIZE
    asked: list[int] = []

    def target_logits(first: int, last: int) -> mx.array:
        asked.append((last - first) * SIZE)
        return target[first:last]

    widest, logits = (size, None) if loss == "ce" else (SIZE, target_logits)
    found = training.head_loss(loss, hidden, weight, labels, logits, widest)
    expected = mx.value_and_grad(lambda x: formula(loss, x @ weight.T, labels, target))(hidden)
    assert found[0] == pytest.approx(expected[0].item(), rel=1e-4)
    assert mx.allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)
    assert max(asked, default=0) <= training.LOGITS, "no more of them exist at a time"
