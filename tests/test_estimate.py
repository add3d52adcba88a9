from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.bench.benchmark import PASSES, speedup
from speculative_t5.decoding.results import Stats
from speculative_t5.generation import Chunk, Generation, GenerationOptions

import pytest
from conftest import tiny_draft, tiny_model

WARM = Stats((5,), (5,), (5,), emitted=101, seconds=0.1)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    model = tiny_model(layers=3)
    return SpeculativeDecoder(model, tiny_draft(model), num_draft=3)


def timed(monkeypatch: pytest.MonkeyPatch, *runs: list[float]) -> list[int]:
    """Make plain runs whose passes end at these times; return how many passes each one took."""
    passes: list[int] = []

    def stream(self: Any, prompt: Any, **options: Any) -> Iterator[Chunk]:
        assert options["speculative"] is False and options["top_k"] == 3
        passes.append(0)
        for time in runs[len(passes) - 1][: options["max_tokens"]]:
            passes[-1] += 1
            yield Chunk("", [5], 0, Stats(seconds=time))

    def generate(self: Any, prompt: Any, **options: Any) -> Generation:
        assert options["speculative"] is True and options["top_k"] == 3
        return Generation("", [], "eos", WARM)

    monkeypatch.setattr(SpeculativeDecoder, "stream", stream)
    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    return passes


# The first pass includes the encoder, the third is disturbed, and the first run is cold.
RUN = [0.05, 0.06, 0.09, *(0.1 + 0.01 * i for i in range(100))]
SLOW = [float(i) for i in range(1, 100)]


@pytest.mark.parametrize(
    ("runs", "stats", "expected", "passes"),
    [
        ([[2 * t for t in RUN[:5]], RUN], (101, 0.25), (0.05 + 100 * 0.01) / 0.1, [5, PASSES]),
        ([SLOW], (11, 5.5), 2, [2]),
        ([[0.1], [0.1]], (101, 0.1), None, [1, 1]),
    ],
    ids=["a few passes stand for all", "slow models run two passes once", "one pass is too few"],
)
def test_estimates_from_a_few_passes(
    monkeypatch: pytest.MonkeyPatch, decoder: Any, runs: Any, stats: Any, expected: Any, passes: Any
) -> None:
    seen = timed(monkeypatch, *runs)
    emitted, seconds = stats
    done = Stats((5,), (5,), (5,), emitted=emitted, seconds=seconds)
    found = speedup(decoder, [3, 1], done, GenerationOptions(top_k=3))
    assert found == (expected and pytest.approx(expected))
    assert seen == passes


def test_a_real_decoder_gives_an_estimate(decoder: SpeculativeDecoder) -> None:
    options = GenerationOptions(max_tokens=60, temperature=1.0)
    done = decoder.generate([3, 4, 1], max_tokens=60, temperature=1.0)
    found = speedup(decoder, [3, 4, 1], done.stats, options)
    assert done.stats.emitted > 2 and found is not None and found > 0
