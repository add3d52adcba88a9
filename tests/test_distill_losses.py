"""Losses in chunks, with their gradients, against the plain formulas."""

from __future__ import annotations

from typing import Any

from speculative_t5.distill import LOSSES, training

import mlx.core as mx
import pytest

SIZE, WIDTH, PLACES = 12, 4, 11


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
