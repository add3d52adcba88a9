"""The comparison of speed with mlx-lm: what it counts, and that its variants agree."""

from __future__ import annotations

import compare_mlx_lm as compare
import pytest
from conftest import VARIED, tiny_causal, tiny_draft


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_all_variants_give_the_same_outputs(kind: str) -> None:
    target = tiny_causal(kind, vocab_size=20, layers=2, seed=VARIED[kind])
    variants = compare.variants_of(target, tiny_draft(target), 3)
    assert len(variants) == 4
    for prompt in ([2, 3, 4], [5] * 9, [7, 9]):
        first, *others = (variant(prompt, 25) for variant in variants.values())
        assert others == [first] * 3
        assert len(first) == 25 or (1 <= len(first) < 25 and first[-1] == target.eos_token_id)


def test_rates_are_tokens_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(compare.time, "perf_counter", lambda: clock[0])

    def variant(seconds: float) -> compare.Variant:
        def run(prompt: list[int], max_tokens: int) -> list[int]:
            clock[0] += seconds
            return [0] * max_tokens

        return run

    rates = compare.measure({"slow": variant(2.0), "fast": variant(0.5)}, [[1], [2]], 10, turns=3)
    assert rates == {"slow": [5.0] * 3, "fast": [20.0] * 3}


def test_encoder_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="correct-small is an encoder-decoder, expected"):
        compare.open_model("correct-small")
