from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.bench.estimate import PASSES, speedup
from speculative_t5.decoding.results import Stats
from speculative_t5.generation.outputs import Chunk, Generation

import pytest
from conftest import tiny_draft, tiny_model

ONCE_WARM = Stats((5,), (5,), (5,), emitted=101, seconds=0.1)


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    model = tiny_model(layers=3)
    return SpeculativeDecoder(model, tiny_draft(model), num_draft=3)


def timed(monkeypatch: pytest.MonkeyPatch, *runs: list[float]) -> list[int]:
    """Regular runs whose passes end at these times, one after another; how far each was read."""
    read: list[int] = []

    def stream(self: Any, prompt: Any, **options: Any) -> Iterator[Chunk]:
        assert options["speculative"] is False
        read.append(0)
        for time in runs[len(read) - 1][: options["max_tokens"]]:
            read[-1] += 1
            yield Chunk("", [5], 0, Stats(seconds=time))

    monkeypatch.setattr(SpeculativeDecoder, "stream", stream)
    monkeypatch.setattr(
        SpeculativeDecoder,
        "generate",
        lambda self, prompt, **options: Generation("", [], "eos", ONCE_WARM),
    )
    return read


def test_a_few_passes_stand_for_all(
    monkeypatch: pytest.MonkeyPatch, decoder: SpeculativeDecoder
) -> None:
    # The first pass has the encoder in it, the third was disturbed, and the first run was cold.
    warm = [0.05, 0.06, 0.09, *(0.1 + 0.01 * i for i in range(100))]
    read = timed(monkeypatch, [2 * time for time in warm[:5]], warm)
    cold = Stats((5,), (5,), (5,), emitted=101, seconds=0.25)
    found = speedup(decoder, [3, 1], cold)
    assert found == pytest.approx((0.05 + 100 * 0.01) / ONCE_WARM.seconds)
    assert read == [5, PASSES]


def test_slow_models_are_timed_once_for_two_passes(
    monkeypatch: pytest.MonkeyPatch, decoder: SpeculativeDecoder
) -> None:
    read = timed(monkeypatch, [float(i) for i in range(1, 100)])
    slow = Stats((5,), (5,), (5,), emitted=11, seconds=5.5)
    assert speedup(decoder, [3, 1], slow) == pytest.approx(2)
    assert read == [2]


def test_one_pass_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, decoder: SpeculativeDecoder
) -> None:
    timed(monkeypatch, [0.1], [0.1])
    assert speedup(decoder, [3, 1], ONCE_WARM) is None


def test_a_real_decoder_can_be_asked(decoder: SpeculativeDecoder) -> None:
    done = decoder.generate([3, 4, 1], max_tokens=60, temperature=1.0)
    assert done.stats.emitted > 2
    found = speedup(decoder, [3, 4, 1], done.stats, max_tokens=60, temperature=1.0)
    assert found is not None and found > 0
