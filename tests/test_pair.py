"""The pair that ships: exactness in float32, size, and the README's snippet."""

from __future__ import annotations

import random
import re

from speculative_t5 import Generation, SpeculativeDecoder

import mlx.core as mx
import pytest
from conftest import REPOSITORY
from corruption import PREFIX, Corruptor
from families import TEXT

WEIGHTS = REPOSITORY / "weights"


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        WEIGHTS / "correct-base", WEIGHTS / "correct-small", num_draft=5, dtype=mx.float32
    )


@pytest.fixture(scope="module")
def regular(decoder: SpeculativeDecoder) -> dict[str, Generation]:
    """Regular outputs for 200 damaged sentences, none of them from the training text."""
    corruptor, rng = Corruptor(TEXT), random.Random(0)
    sources = {PREFIX + corruptor.sentence(text, rng) for _ in range(5) for text in TEXT}
    chosen = sorted(sources)[:200]
    assert len(chosen) == 200
    return {source: decoder.generate(source, speculative=False) for source in chosen}


@pytest.mark.parametrize("num_draft", [1, 3, 5, 8])
def test_greedy_speculative_is_greedy_regular(
    decoder: SpeculativeDecoder, regular: dict[str, Generation], num_draft: int
) -> None:
    engine = SpeculativeDecoder(
        decoder.model, decoder.draft, decoder.tokenizer, num_draft=num_draft
    )
    accepted = drafted = 0
    for source, expected in regular.items():
        out = engine.generate(source)
        assert (out.tokens, out.finish_reason) == (expected.tokens, expected.finish_reason), source
        accepted += out.stats.accepted
        drafted += out.stats.drafted
    assert accepted > drafted / 2


def test_sentences_are_corrected(regular: dict[str, Generation]) -> None:
    right = sum(out.text in TEXT for out in regular.values())
    assert right > len(regular) / 2


def test_sampled_outputs_are_reproducible_and_streamed_alike(decoder: SpeculativeDecoder) -> None:
    source = "correct: she dont no where there keys is"
    out = decoder.generate(source, temperature=1.0, seed=4)
    chunks = list(decoder.stream(source, temperature=1.0, seed=4))
    assert "".join(chunk.text for chunk in chunks) == out.text
    assert [t for chunk in chunks for t in chunk.tokens] == out.tokens


def test_the_pair_is_small_and_remembers_no_paths() -> None:
    folders = [WEIGHTS / "correct-base", WEIGHTS / "correct-small"]
    files = [path for folder in folders for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) < 60e6
    for folder in folders:
        stored = (folder / "spiece.model").read_bytes()
        assert not re.search(rb"/(home|root|tmp|Users)/|deu\.txt", stored)
