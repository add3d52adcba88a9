from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.estimate import PASSES, regular_seconds
from speculative_t5.results import Chunk, Stats

import pytest
from conftest import tiny_model


def streaming(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> list[dict[str, Any]]:
    """A decoder whose passes end at these times; what it was asked for."""
    asked: list[dict[str, Any]] = []

    def stream(self: Any, prompt: Any, **options: Any) -> Iterator[Chunk]:
        asked.append(options)
        for time in times[: options["max_tokens"]]:
            asked[-1]["passes"] = asked[-1].get("passes", 0) + 1
            yield Chunk("", [5], 0, Stats(seconds=time))

    monkeypatch.setattr(SpeculativeDecoder, "stream", stream)
    return asked


def test_a_few_passes_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first has the encoder in it, the third was disturbed.
    times = [0.05, 0.06, 0.09, *(0.1 + 0.01 * i for i in range(100))]
    asked = streaming(monkeypatch, times)
    seconds = regular_seconds(SpeculativeDecoder(tiny_model()), [3, 1], 101)
    assert seconds == pytest.approx(0.05 + 100 * 0.01)
    assert asked[0]["passes"] == PASSES and asked[0]["speculative"] is False


def test_slow_models_are_timed_for_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = streaming(monkeypatch, [float(i) for i in range(1, 100)])
    assert regular_seconds(SpeculativeDecoder(tiny_model()), [3, 1], 11) == pytest.approx(11)
    assert asked[0]["passes"] == 2


def test_one_pass_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streaming(monkeypatch, [0.1])
    assert regular_seconds(SpeculativeDecoder(tiny_model()), [3, 1], 9) is None


def test_a_real_decoder_can_be_asked() -> None:
    decoder = SpeculativeDecoder(tiny_model(layers=3))
    done = decoder.generate([3, 4, 1], max_tokens=60, temperature=1.0)
    assert done.stats.emitted > 2
    seconds = regular_seconds(decoder, [3, 4, 1], done.stats.emitted, temperature=1.0)
    assert seconds is not None and seconds > 0
